"""`--engine auto`: which engine serves, why, and what is refused; with a CPU engine that is only pretended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minisgl.cli import main
from minisgl.config import ConfigError, EngineConfig, Unsupported
from minisgl.engine import choice
from minisgl.engine.api import Engine, EngineInfo
from minisgl.engine.choice import choose_engine, cuda_is_available
from minisgl.engine.echo import EchoEngine
from minisgl.llm import LLM
from minisgl.runner import build
from minisgl.runner.build import build_engine, choose_control_plane, control_plane_config
from minisgl.utils.installed import how_to_get


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "cuda_is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "cuda_is_available", lambda: True)


def pretend(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Engine]) -> list[str]:
    """Both engines, without models; returns the list of those that are loaded."""
    loaded: list[str] = []

    def load_cpu(config: EngineConfig, say: Any) -> Engine:
        loaded.append(f"cpu by {config.engine}")
        return load(config)

    def load_torch(config: EngineConfig, group: Any, say: Any) -> Engine:
        loaded.append(f"torch by {config.engine}")
        return echo()

    module = ModuleType("minisgl.engine.cpu_loading")
    module.load_cpu_engine = load_cpu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(build, "build_rank", load_torch)
    return loaded


def echo(config: object = None) -> Engine:
    return EchoEngine(num_pages=4, page_size=4, max_rows=2, max_seq_len=16, context_len=16)


def refuse(config: object) -> Engine:
    raise Unsupported("general.architecture: mamba is not supported")


@pytest.mark.parametrize(
    "settings", [{}, {"device": "cpu"}, {"dtype": "float32"}, {"activations": "int8"}, {"load_format": "dummy"}]
)
def test_without_a_gpu_it_is_the_cpu_engine(settings: dict[str, Any]) -> None:
    assert choose_engine(EngineConfig(**settings)) == ("cpu", "")


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"tp": 2}, "--tp 2"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
        ({"dtype": "float16"}, "--dtype float16"),
        ({"device": "cuda:1"}, "--device cuda:1"),
        ({"device": "inline"}, "--device inline"),
        ({"attention_backend": "torch_sdpa"}, "--attention-backend torch_sdpa"),
    ],
)
def test_flags_of_torch_only_choose_torch(settings: dict[str, Any], flag: str) -> None:
    name, reason = choose_engine(EngineConfig(**settings))
    assert (name, reason) == ("torch", f"the CPU engine has no {flag}")
    with pytest.raises(ConfigError, match=f"^{flag}: cannot be used with --engine cpu"):
        EngineConfig(engine="cpu", **settings).check()
    with pytest.raises(ConfigError, match=f"--activations int8: only the CPU engine has it, which has no {flag}"):
        choose_engine(EngineConfig(activations="int8", **settings))


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"activations": "int8"}, "--activations int8"),
        ({"kv_dtype": "q8"}, "--kv-dtype q8"),
        ({"quantization": "q4"}, "--quantization q4"),
    ],
)
def test_flags_of_the_cpu_engine_only_choose_it(gpu: None, settings: dict[str, Any], flag: str) -> None:
    assert choose_engine(EngineConfig(**settings)) == ("cpu", "")
    for engine in ("torch", "echo", "sim"):
        with pytest.raises(ConfigError, match=f"^{flag}: cannot be used with --engine {engine}"):
            EngineConfig(engine=engine, **settings).check()


def test_auto_uses_a_gpu(gpu: None) -> None:
    assert choose_engine(EngineConfig()) == ("torch", "there is a CUDA device")
    assert choose_engine(EngineConfig(device="cpu")) == ("cpu", "")
    assert choose_engine(EngineConfig(engine="cpu")) == ("cpu", "")


@pytest.mark.parametrize(
    ("device", "sizes"),
    [("cuda:1", (256, 8192)), ("cpu", (64, 2048)), ("simulated h200", (64, 2048))],
)
def test_sizes_of_a_step_follow_the_device_unless_they_are_given(device: str, sizes: tuple[int, int]) -> None:
    info = EngineInfo("torch", None, 9, 99, (), 9, 16, device, "none")
    plane = control_plane_config(EngineConfig(), info)
    assert (plane.max_running_requests, plane.max_prefill_length) == sizes
    given = control_plane_config(EngineConfig(max_running_requests=3, max_prefill_length=5), info)
    assert (given.max_running_requests, given.max_prefill_length) == (3, 5)


def test_auto_loads_the_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, said = pretend(monkeypatch, echo), list[str]()
    build_engine(EngineConfig(), lambda text, *_: said.append(text)).close()
    assert loaded == ["cpu by cpu"] and said == []


def test_auto_says_why_it_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, said = pretend(monkeypatch, refuse), list[str]()
    build_engine(EngineConfig(), lambda text, *_: said.append(text)).close()
    assert loaded == ["cpu by cpu", "torch by torch"]
    assert said == ["engine: torch: general.architecture: mamba is not supported"]
    build_engine(EngineConfig(dtype="bfloat16"), lambda text, *_: said.append(text)).close()
    assert said[1:] == ["engine: torch: the CPU engine has no --dtype bfloat16"]


@pytest.mark.parametrize("settings", [{"engine": "cpu"}, {"activations": "int8"}])
def test_explicit_cpu_engine_never_falls_back(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    loaded = pretend(monkeypatch, refuse)
    with pytest.raises(Unsupported, match="mamba"):
        build_engine(EngineConfig(**settings), lambda *_: None)
    assert loaded == ["cpu by cpu"]


def test_a_broken_file_is_no_reason_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: object) -> Engine:
        raise ConfigError("model.gguf: blk.0.attn_q.weight: beyond the end of the file")

    loaded = pretend(monkeypatch, broken)
    with pytest.raises(ConfigError, match="beyond the end"):
        build_engine(EngineConfig(), lambda *_: None)
    assert loaded == ["cpu by cpu"]


def test_commands_refuse_by_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--engine", "cpu", "--tp", "2", "hi"]) == 2
    assert "--tp 2: cannot be used with --engine cpu" in capsys.readouterr().err
    assert main(["generate", "--engine", "torch", "--kv-dtype", "float32", "hi"]) == 2
    assert "--kv-dtype f32: cannot be used with --engine torch" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="quantization=q8: cannot be used with --engine echo"):
        LLM("none", engine="echo", quantization="q8_0")


class TestWithoutTorch:
    @pytest.fixture(autouse=True)
    def no_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
        monkeypatch.setattr(choice, "looks_like_cuda", lambda: False)

    def test_auto_is_the_cpu_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert choose_engine(EngineConfig()) == ("cpu", "")
        monkeypatch.setattr(choice, "looks_like_cuda", lambda: True)
        name, hint = choose_engine(EngineConfig())
        assert name == "cpu"
        assert f"torch is not installed: {how_to_get('cuda')}" in hint

    @pytest.mark.parametrize(
        ("settings", "asked", "extra"),
        [
            ({"engine": "torch"}, "--engine torch", "torch"),
            ({"engine": "torch", "device": "cuda:1"}, "--engine torch", "cuda"),
            ({"device": "cuda"}, "--device cuda", "cuda"),
            ({"dtype": "bfloat16"}, "--dtype bfloat16", "torch"),
            ({"engine": "echo", "tp": 2}, "--tp 2", "torch"),
        ],
    )
    def test_what_needs_it_says_how_to_get_it(self, settings: dict[str, Any], asked: str, extra: str) -> None:
        with pytest.raises(ConfigError) as raised:
            LLM("smollm2", log_level="error", **settings)
        text = str(raised.value)
        assert text.startswith(f"{asked}: ")
        assert text.endswith(f"needs torch, which is not installed: {how_to_get(extra)}")

    def test_a_model_that_only_torch_may_know(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert pretend(monkeypatch, refuse) == []
        with pytest.raises(
            ConfigError, match=r"mamba is not supported; the torch engine.* needs torch, .*: make install"
        ):
            build_engine(EngineConfig(), lambda *_: None)

    def test_the_command_says_it_in_a_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["generate", "--engine", "torch", "hi"]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert said[0].startswith("minisgl generate: --engine torch: ")


class TestCudaIsThere:
    @pytest.fixture(autouse=True)
    def nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(choice, "DRIVER", tmp_path / "driver")
        monkeypatch.setattr(choice, "DEV", tmp_path)
        monkeypatch.setattr(choice, "TOOL", str(tmp_path / "tool"))

    @pytest.fixture
    def torch_says_yes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def test_nothing_that_looks_like_one(self, torch_says_yes: None) -> None:
        assert not cuda_is_available()

    @pytest.mark.parametrize("sign", ["driver", "nvidia0", "dxg", "tool"])
    def test_torch_is_asked_where_something_does(self, torch_says_yes: None, tmp_path: Path, sign: str) -> None:
        (tmp_path / sign).touch(mode=0o755)
        assert cuda_is_available()

    @pytest.mark.parametrize("value", ["", "-1"])
    def test_hidden_ones_do_not_count(
        self, torch_says_yes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
    ) -> None:
        (tmp_path / "driver").touch()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert not cuda_is_available()

    def test_without_torch_there_is_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "driver").touch()
        monkeypatch.setitem(sys.modules, "torch", None)
        assert not cuda_is_available()


def test_finding_no_gpu_brings_no_torch(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from minisgl.engine import choice
choice.DRIVER = choice.DEV = Path({str(tmp_path / "none")!r})
choice.TOOL = "no-such-tool"
assert choice.choose_engine(choice.EngineConfig()) == ("cpu", "")
print(*sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert {"torch", "transformers"}.isdisjoint(found.split())


@pytest.mark.parametrize(
    ("checkpoints", "settings", "says"),
    [
        (None, {"checkpoint_interval": 64}, "^--checkpoint-interval 64: the model has no recurrent states"),
        (None, {"state_memory": 10**9}, "^--state-memory 1000000000: the model has no recurrent states"),
        (3, {"speculative": "ngram:2"}, "^--speculative ngram:2: cannot be used with recurrent states"),
    ],
)
def test_flags_that_need_or_forbid_states_are_refused(
    checkpoints: int | None, settings: dict[str, Any], says: str
) -> None:
    made = EchoEngine(num_pages=4, page_size=4, max_rows=2, max_seq_len=16, context_len=16, checkpoints=checkpoints)
    with pytest.raises(ConfigError, match=says):
        choose_control_plane(EngineConfig(engine="echo", **settings), made.info)


def test_the_interval_of_checkpoints_is_whole_pages() -> None:
    made = EchoEngine(num_pages=4, page_size=6, max_rows=2, max_seq_len=16, context_len=16, checkpoints=3)
    for asked, interval in ((None, 258), (1, 6), (12, 12)):
        settings = control_plane_config(EngineConfig(engine="echo", checkpoint_interval=asked), made.info)
        assert (settings.checkpoint_interval, settings.num_checkpoints) == (interval, 3)
