"""`--dtype auto`: a type that the CPU would emulate is not chosen, and the reason is said."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine import dtypes
from minisgl.engine.loading import load_engine
from tests.helpers.models import CPU, save, tiny_model
from tests.helpers.seconds import WAIT_S


class Cpu:
    """What torch says of a processor."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        patch.setattr(platform, "machine", lambda: "x86_64")
        self.has()

    def has(
        self,
        capability: str = "AVX512",
        *,
        bf16: bool = True,
        amx: bool = True,
        one_dnn: tuple[bool, bool] = (True, True),
    ) -> None:
        patch = self._patch.setattr
        patch(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        patch(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
        patch(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        patch(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: one_dnn[0], raising=False)
        patch(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: one_dnn[1], raising=False)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Cpu:
    return Cpu(monkeypatch)


def auto(checkpoint: str) -> str:
    return dtypes.choose("auto", checkpoint, CPU)[0]


def test_auto_is_the_checkpoint_dtype_if_native(cpu: Cpu) -> None:
    for name in dtypes.DTYPES:
        assert dtypes.choose("auto", name, CPU) == (name, "as in the checkpoint")
    cpu.has(amx=False)
    assert auto("bfloat16") == "bfloat16"
    cpu.has(bf16=False)
    assert auto("bfloat16") == "bfloat16"


def test_auto_is_float32_without_native_instructions(cpu: Cpu) -> None:
    cpu.has("AVX2", bf16=False, amx=False, one_dnn=(False, False))
    name, why = dtypes.choose("auto", "bfloat16", CPU)
    assert name == "float32" and "bfloat16 would be emulated" in why and "no avx512_bf16 or amx_bf16" in why
    assert auto("float16") == auto("float32") == "float32"


def test_onednns_emulation_on_older_processors_does_not_count(cpu: Cpu) -> None:
    """It calls bfloat16 supported wherever there is AVX-512."""
    cpu.has(bf16=False, amx=False, one_dnn=(True, False))
    assert auto("bfloat16") == "float32" and auto("float16") == "float32"


def test_instructions_disabled_by_variables_count_as_missing(cpu: Cpu) -> None:
    cpu.has("AVX2")
    assert auto("bfloat16") == "float32" and auto("float16") == "float32"
    cpu.has(one_dnn=(False, False))
    assert auto("bfloat16") == "float32" and auto("float16") == "float32"
    cpu.has(one_dnn=(True, False))
    assert auto("bfloat16") == "bfloat16" and auto("float16") == "float32"


def test_torch_without_cpu_queries_counts_as_without_instructions(cpu: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name)
    assert auto("bfloat16") == "float32"


def test_requested_dtype_is_used_and_reported_if_slow(cpu: Cpu) -> None:
    assert dtypes.choose("bfloat16", "float32", CPU) == ("bfloat16", "by --dtype")
    cpu.has("AVX2")
    name, why = dtypes.choose("bfloat16", "float32", CPU)
    assert name == "bfloat16" and "slow" in why
    assert dtypes.choose("auto", "bfloat16", torch.device("cuda")) == ("bfloat16", "as in the checkpoint")


def test_other_processors_are_asked_through_onednn_alone(cpu: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    cpu.has("DEFAULT", bf16=False, amx=False, one_dnn=(True, False))
    assert auto("bfloat16") == "bfloat16" and auto("float16") == "float32"


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: dtype: 'float8' is not supported"):
        dtypes.choose("auto", "float8", CPU)


@pytest.mark.parametrize("native", [True, False])
def test_engine_reports_dtype_and_reason(native: bool, cpu: Cpu, tmp_path: Path) -> None:
    folder = save(tiny_model("qwen3-tied").bfloat16(), tmp_path)
    if not native:
        cpu.has("AVX2")
    lines: list[str] = []
    config = EngineConfig(model=str(folder), num_pages=8)
    engine = load_engine(config, lambda text, done=0, total=0: lines.append(text))
    engine.close()
    expected = "bfloat16 (as in the checkpoint)" if native else "float32 (the checkpoint's bfloat16 would be emulated"
    assert engine.info.dtype == expected.split(maxsplit=1)[0]
    assert any(line.startswith("loaded ") and expected in line for line in lines)


def test_a_process_that_is_held_down_by_variables_computes_in_float32() -> None:
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-m", "minisgl", "doctor"]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout
    if platform.machine() == "x86_64":
        assert "bfloat16: served as float32 (the checkpoint's bfloat16 would be emulated: " in said
