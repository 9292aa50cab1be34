"""The command `minisgl doctor`: shows which packages, devices, engines and schedulers work here, and why others do not.
For a model it names the variable that makes its chat template keep earlier reasoning.

Invariants: nothing that is missing makes it fail, since finding that is its purpose. Exit code 1 if no engine works.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from minisgl import envs
from minisgl.cli.parser import Parser
from minisgl.config import ConfigError, EngineConfig
from minisgl.extension import NAME, NEEDS, WITHOUT, ExtensionMissing, _rust, why_missing
from minisgl.utils import older_variables
from minisgl.utils.installed import EXTRA_OF, TORCH_ENGINE, how_to_get, missing, version_of

PACKAGES = (
    "tokenizers",
    "starlette",
    "uvicorn",
    "httpx",
    "numpy",
    "prompt_toolkit",
    "pyyaml",
)
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 32,
}
# package -> name of its module
OF_EXTRAS = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "pyzmq": "zmq",
    "flashinfer-python": "flashinfer",
    "llguidance": "llguidance",
    "pillow": "PIL",
}
OPTIONAL_PACKAGES = ("flash-attn", "triton")


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report. `ok` is True if it works, False if it fails, and None for plain information."""

    section: str
    name: str
    ok: bool | None
    detail: str


def _packages() -> list[Finding]:
    findings = [Finding("packages", "python", None, f"{platform.python_version()} on {platform.machine()}")]
    for name in PACKAGES:
        version = version_of(name)
        findings.append(Finding("packages", name, version is not None, version or f"missing: pip install {name}"))
    optional = {name: f": {how_to_get(EXTRA_OF[imported])}" for name, imported in OF_EXTRAS.items()}
    for name, how in (optional | dict.fromkeys(OPTIONAL_PACKAGES, "")).items():
        findings.append(Finding("packages", name, None, version_of(name) or f"not installed (optional){how}"))
    return findings


def _extension() -> list[Finding]:
    if why := why_missing():
        return [Finding("extension", NAME, False, f"missing: {why}: {WITHOUT}")]
    info = _rust.build_info()
    features = ", ".join(info["features"]) or "none"
    detail = f"version {info['version']}, {info['profile']} build, features: {features}"
    return [Finding("extension", NAME, info["profile"] == "release", detail)]


def _devices() -> list[Finding]:
    findings = [Finding("devices", "cpu", True, f"{os.cpu_count()} logical cores")]
    if missing("torch"):
        return [*findings, Finding("devices", "cuda", None, f"torch is not installed: {how_to_get('cuda')}")]
    try:
        import torch
    except ImportError as error:  # installed, but broken
        return [*findings, Finding("devices", "torch", False, str(error))]
    findings[0] = Finding("devices", "cpu", True, f"{os.cpu_count()} logical cores, {torch.get_num_threads()} threads")
    findings.append(_try("devices", "cpu types", _cpu_types))
    if torch.cuda.is_available():
        findings += [_cuda_device(i) for i in range(torch.cuda.device_count())]
    else:
        built = torch.version.cuda or "no CUDA"
        findings.append(Finding("devices", "cuda", None, f"no usable GPU (torch was built with {built})"))
    return findings


def _cpu_types() -> str:
    """Return which dtype `--dtype auto` chooses on this CPU for bfloat16 and float16 weights."""
    import torch

    from minisgl.engine import dtypes

    lines = []
    for name in ("bfloat16", "float16"):
        chosen, why = dtypes.choose("auto", name, torch.device("cpu"))
        lines.append(f"{name}: native" if chosen == name else f"{name}: served as {chosen} ({why})")
    return "; ".join(lines)


def _cuda_device(index: int) -> Finding:
    import torch

    from minisgl.attention.backend import Shape, choose, machine

    try:
        target = torch.device("cuda", index)
        free, total = torch.cuda.mem_get_info(target)
        device = machine(target)
    except RuntimeError as error:
        return Finding("devices", f"cuda:{index}", False, str(error).splitlines()[0])
    usual = Shape(torch.bfloat16, head_dim=128, page_size=EngineConfig().page_size)
    choice = choose("auto", device, usual)
    capability = ".".join(map(str, device.capability))
    detail = (
        f"{torch.cuda.get_device_name(index)}, capability {capability}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB "
        f"free; attention: {choice.name} ({choice.reason})"
    )
    return Finding("devices", f"cuda:{index}", True, detail)


class _NotHere(Exception):
    """Something optional that this machine does not have. The text says what."""


def _need_torch(extra: str) -> None:
    if absent := missing(*TORCH_ENGINE):
        raise _NotHere(f"{absent[0]} is not installed: {how_to_get(extra)}")


def _try(section: str, name: str, probe: Callable[[], str]) -> Finding:
    try:
        return Finding(section, name, True, probe())
    except _NotHere as reason:
        return Finding(section, name, None, str(reason))
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        return Finding(section, name, False, f"{type(error).__name__}: {error}")


def _backends() -> list[Finding]:
    return [
        _try("engines", "cpu", _cpu_engine),
        _try("engines", "torch", _torch_engine),
        _try("engines", "cuda", _cuda_engine),
        _try("engines", "echo", _echo_engine),
        _try("control planes", "python", partial(_control_plane, "python")),
        _try("control planes", "rust_hotpath", partial(_control_plane, "rust_hotpath")),
        _try("front ends", "rust", _gateway),
        _try("models", "smollm2", _embedded),
    ]


def _torch_engine() -> str:
    _need_torch("torch")
    importlib.import_module("minisgl.engine.torch_engine")
    return "CPU; attention by torch SDPA"


def _cpu_engine() -> str:
    """Load the CPU engine with a tiny dummy model and return its details."""
    from minisgl.engine.cpu_loading import load_cpu_engine

    with tempfile.TemporaryDirectory(prefix="minisgl-doctor-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_MODEL))
        settings = EngineConfig(model=folder, load_format="dummy", num_pages=1, max_running_requests=1)
        with contextlib.closing(load_cpu_engine(settings, lambda *_: None)) as engine:
            return f"{engine.info.details}; --activations int8 is faster and rounds"


def _cuda_engine() -> str:
    """Import the CUDA engine. Raises `_NotHere` without a device."""
    _need_torch("cuda")
    import torch

    importlib.import_module("minisgl.engine.building")
    if not torch.cuda.is_available():
        raise _NotHere("can be imported, but there is no device to run on")
    return "see devices"


def _echo_engine() -> str:
    importlib.import_module("minisgl.engine.echo")
    return "no model: text that checks the scheduler"


def _control_plane(name: str) -> str:
    from minisgl.scheduler.api import ControlPlaneConfig
    from minisgl.scheduler.backend import make_control_plane

    config = ControlPlaneConfig(
        num_pages=8, page_size=16, max_running_requests=2, max_prefill_length=16, context_len=64
    )
    make_control_plane(name, config).check()
    return "works"


def _embedded() -> str:
    from minisgl.weights.sources import find_smollm2

    if why_missing():
        raise ExtensionMissing(f"a GGUF file {NEEDS}")
    return f"{find_smollm2().name} ({find_smollm2().stat().st_size / 1e6:.0f} MB)"


def _gateway() -> str:
    from minisgl.server.gateway import gateway_class

    gateway_class()
    return "the gateway: --frontend rust"


def _environment() -> list[Finding]:
    data = envs.data_dir()
    where = (
        "not set: tests that need real data skip" if data is None else ("found" if data.is_dir() else "no such folder")
    )
    return [
        Finding("environment", envs.DATA, None, where),
        Finding("environment", envs.CPU_BACKEND, None, envs.cpu_backend() or "not set"),
        Finding("environment", envs.FRONTEND, None, envs.frontend() or "not set"),
        Finding("environment", envs.NO_EXTENSION, None, "1" if envs.no_extension() else "not set"),
        Finding("environment", envs.CPU_ISA, None, envs.cpu_isa() or "not set"),
        Finding("environment", "import cache", None, "exists" if envs.cache_dir().is_dir() else "empty"),
        *(Finding("environment", "notice", None, line) for line in [*envs.notices(), *older_variables.notices()]),
    ]


def _silent(text: str, done: int = 0, total: int = 0) -> None:
    """Report no progress."""


def _chat_template(model: str) -> str:
    """Return whether the model's chat template keeps earlier reasoning, so that the prefix cache serves an agent's
    whole session. Raises `_NotHere` if the model has no reasoning."""
    from minisgl.tokenizer import Tokenizer
    from minisgl.weights.sources import find_tokenizer

    kept = Tokenizer.load(find_tokenizer(model, _silent)).kept_thoughts()
    if kept is None:
        raise _NotHere("none")
    if kept.shown == kept.of:
        return "keeps the reasoning of earlier turns"
    before = f"shows {kept.shown} of {kept.of} earlier thoughts of a session with tools"
    if kept.kwarg is None:
        return f"{before}, and no variable of its makes it show more: the prefix cache ends where they are left out"
    name, value = kept.kwarg
    return f'{before}; {kept.most} with "chat_template_kwargs": {json.dumps({name: value})} in requests'


def _images(model: str) -> str:
    """Return whether the CPU engine sees with the model. Raises `_NotHere` if it does not. The weights of a hub's model
    are not downloaded, so it counts as complete."""
    from minisgl.engine.sight import sight_at
    from minisgl.weights.sources import find_model

    source = find_model(model, _silent, load_format="dummy", mmproj=True)
    try:
        sight = sight_at(source, dummy=not Path(model).is_dir())
    except ConfigError as error:
        raise _NotHere(f"text only with --engine cpu: {error}") from error
    line = sight.line()
    if not line.startswith("images: "):
        raise _NotHere(line or "a model of text")
    return line.removeprefix("images: ")


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="minisgl doctor", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument(
        "--model", help="also check this model's chat template and whether it sees: folder, GGUF file or hub name"
    )
    args = parser.parse_args(argv)
    findings = [*_packages(), *_extension(), *_devices(), *_backends(), *_environment()]
    if args.model is not None:
        findings.append(_try("model", "chat template", lambda: _chat_template(args.model)))
        findings.append(_try("model", "images", lambda: _images(args.model)))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        section = ""
        for finding in findings:
            if finding.section != section:
                section = finding.section
                print(section)
            mark = {True: "ok  ", False: "FAIL", None: "    "}[finding.ok]
            print(f"  {mark} {finding.name:<20} {finding.detail}")
    can_serve = any(f.section == "engines" and f.ok for f in findings)
    return 0 if can_serve else 1
