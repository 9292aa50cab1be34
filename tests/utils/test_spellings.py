"""What people who come from mini-sglang and SGLang type does what they mean, or says why not."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl import SamplingParams, cli, envs
from minisgl.cli import aliases, bench, chat, generate
from minisgl.cli import serve as serve_command
from minisgl.config import ConfigError, ServerConfig
from minisgl.llm import LLM, Completion, RequestOutput
from minisgl.supervisor import start as supervisor
from minisgl.utils import spellings
from minisgl.utils.installed import own_version
from tests.helpers.seconds import WAIT_S

Serve = Callable[..., ServerConfig]
PAGE = Path(__file__).parents[2] / "docs" / "from-mini-sglang.md"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*envs.NO_EFFECT, envs.CPU_BACKEND, envs.FRONTEND, *(name for name in envs.ALL if "SHELL" in name)):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """The configuration that a server with these flags would get; its warnings on standard error."""
    taken: list[ServerConfig] = []

    def run_server(config: ServerConfig, *warnings: str) -> int:
        taken.append(config)
        print(*(f"minisgl: {line}" for line in warnings), sep="\n", end="", file=sys.stderr)
        return 0

    monkeypatch.setattr(supervisor, "run_server", run_server)

    def run(*flags: str) -> ServerConfig:
        assert cli.main(["serve", *flags]) == 0
        return taken.pop()

    return run


# --- flags: accepted ---


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--attn", "fi"], "attention_backend", "flashinfer"),
        (["--attn", "fa"], "attention_backend", "flash_attention"),
        (["--attention-backend", "fa,fi"], "attention_backend", "flash_attention,flashinfer"),
        (["--attention-backend", "fi,torch_sdpa"], "attention_backend", "flashinfer,torch_sdpa"),
        (["--attention-backend", "fa,fa"], "attention_backend", "flash_attention"),
        (["--attention-backend", "flashinfer:fa3"], "attention_backend", "flashinfer:fa3"),
        (["--attn", "auto"], "attention_backend", "auto"),
        (["--attn-impl", "sdpa"], "attention_backend", "torch_sdpa"),
        (["--attn-impl", "eager"], "attention_backend", "eager"),
        (["--attn-impl", "flash_attention_2"], "attention_backend", "flash_attention"),
        (["--graph", "8"], "cuda_graph_max_bs", 8),
        (["--cuda-graph-max-bs", "8"], "cuda_graph_max_bs", 8),
        (["--eager"], "cuda_graph_max_bs", 0),
        (["--enforce-eager"], "cuda_graph_max_bs", 0),
        (["--disable-cuda-graph"], "cuda_graph_max_bs", 0),
        (["--tp", "auto"], "tp", "auto"),
        (["--tensor-parallel-size", "2"], "tp", 2),
        (["--max-extend-length", "77"], "max_prefill_length", 77),
        (["--max-prefill-length", "77"], "max_prefill_length", 77),
        (["--max-seq-len-override", "99"], "max_seq_len", 99),
        (["--dummy-weight"], "load_format", "dummy"),
        (["--dtype", "fp16"], "dtype", "float16"),
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype", "bf16"], "dtype", "bfloat16"),
        (["--dtype", "fp32"], "dtype", "float32"),
        (["--dtype", "float"], "dtype", "float32"),
        (["--cache-type", "radix"], "cache", "lru"),
    ],
)
def test_a_flag_means_what_it_means_there(serve: Serve, flags: list[str], field: str, value: object) -> None:
    assert getattr(serve(*flags).engine, field) == value


@pytest.mark.parametrize("flag", ["--shell", "--shell-mode"])
def test_a_shell_by_any_name(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    taken: list[list[str]] = []
    monkeypatch.setattr(chat, "run_shell", lambda flags, api_key: taken.append(list(flags)) or 0)
    assert cli.main([flag, "--engine", "echo"]) == 0
    assert taken == [[flag, "--engine", "echo"]]


def test_the_shell_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl.shell", "--engine", "echo", "--num-tokenizer", "7"],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=WAIT_S,
    )
    assert done.returncode == 2 and "--num-tokenizer 7" in done.stderr  # its server says so


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
def test_max_new_tokens(command: list[str]) -> None:
    assert cli._parse([*command, "--max-new-tokens", "7"]).max_tokens == 7


@pytest.mark.parametrize("flag", ["--max-new-tokens", "--max-tokens"])
@pytest.mark.parametrize(("name", "length"), [("serve", [7, 7]), ("offline", [7, 7]), ("compare", 7)])
def test_max_new_tokens_of_a_benchmark(monkeypatch: pytest.MonkeyPatch, name: str, length: object, flag: str) -> None:
    taken: list[Any] = []
    module = importlib.import_module(bench.COMMANDS[name])
    monkeypatch.setattr(module, "run", lambda args: taken.append(args.output_len) or 0)
    assert cli.main(["bench", name, flag, "7"]) == 0
    assert taken == [length]


def test_a_config_file_has_them_too(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("attn: fa,fi\ngraph: 8\ndummy-weight: true\neager: false\ndtype: bf16\ndisable-pynccl: true\n")
    engine = serve("--config", str(file)).engine
    assert (engine.attention_backend, engine.cuda_graph_max_bs) == ("flash_attention,flashinfer", 8)
    assert (engine.load_format, engine.dtype) == ("dummy", "bfloat16")
    assert capsys.readouterr().err.count("--disable-pynccl") == 1


@pytest.mark.parametrize("spelling", ["attention_backend: auto", "cuda_graph_max_bs: 4"])
def test_both_spellings_in_a_file_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spelling: str
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"{spelling}\nattn: fi\ngraph: 8\n")
    assert cli.main(["--config", str(file)]) == 2
    assert "set already by" in capsys.readouterr().err


def test_the_whole_help_has_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert all(word in shown for word in ("serve", "chat", "generate", "doctor", "serve --config"))
    assert not any(alias.typed in shown.replace("--max-tokens", "") for alias in aliases.ALIASES)


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([flag])
    assert end.value.code == 0 and capsys.readouterr().out == f"minisgl {own_version()}\n"


# --- flags: said, or refused ---


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--disable-pynccl"], "minisgl: --disable-pynccl: has no effect"),
        (["--moe-backend", "auto"], "minisgl: --moe-backend auto: has no effect"),
        (["--moe-backend", "fused"], "minisgl: --moe-backend fused: has no effect"),
        (["--num-tokenizer", "0"], "minisgl: --num-tokenizer 0: has no effect"),
        (["--tokenizer-count", "1"], "minisgl: --num-tokenizer 1: has no effect"),
    ],
)
def test_flags_without_effect_print_a_notice(
    serve: Serve, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert serve(*flags) == serve()
    err = capsys.readouterr().err
    assert err.startswith(said) and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-tokenizer", "2"], "--num-tokenizer 2: must be 0 or 1"),
        (["--tokenizer-count", "-1"], "--tokenizer-count -1: must be 0 or 1"),
        (["--attention-backend", "trtllm"], "trtllm is not supported"),
        (["--attn", "trtllm,fi"], "trtllm is not supported"),
        (["--attn", "fa,fi,fa"], "as PREFILL,DECODE"),
        (["--attn", "auto,fi"], "as PREFILL,DECODE"),
        (["--attn", "fast"], "'fast' is none of auto, torch_sdpa, flashinfer"),
        (["--attn", "fa,"], "'' is none of auto"),
        (["--moe-backend", "triton"], "--moe-backend triton: must be one of auto, fused"),
        (["--dtype", "fp8"], "--dtype fp8: must be one of auto, float32"),
    ],
)
def test_unsupported_values_are_rejected_with_a_reason(
    capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert cli.main(["serve", *flags]) == 2
    assert said in capsys.readouterr().err


# --- Python ---


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"max_seq_len_override": 128}, "max_seq_len", 128),
        ({"max_extend_tokens": 32}, "max_prefill_length", 32),
        ({"max_running_req": 3}, "max_running_requests", 3),
        ({"cache_type": "radix"}, "cache", "lru"),
        ({"cache_type": "naive"}, "cache", "naive"),
        ({"num_page_override": 40}, "num_pages", 40),
        ({"enforce_eager": True}, "cuda_graph_max_bs", 0),
        ({"enforce_eager": False}, "cuda_graph_max_bs", None),
        ({"use_dummy_weight": True}, "load_format", "dummy"),
        ({"use_dummy_weight": False}, "load_format", "auto"),
        ({"dtype": "bf16"}, "dtype", "bfloat16"),
        ({"attention_backend": "fa,fi"}, "attention_backend", "flash_attention,flashinfer"),
    ],
)
def test_settings_of_llm(given: dict[str, Any], field: str, value: object) -> None:
    with LLM(model_path="none", engine="echo", **given) as llm:
        assert getattr(llm.config, field) == value and llm.config.model == "none"


def test_a_type_of_torch() -> None:
    import torch

    for name in ("bfloat16", "float16", "float32"):
        with LLM("none", engine="echo", dtype=getattr(torch, name)) as llm:
            assert llm.config.dtype == name


@pytest.mark.parametrize(
    "given",
    [
        {"model": "a", "model_path": "a"},
        {"model": "a", "max_seq_len": 9, "max_seq_len_override": 9},
        {"model": "a", "load_format": "auto", "use_dummy_weight": False},
        {},
    ],
)
def test_a_setting_in_both_spellings_is_an_error(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"LLM: .*(give one of them|missing)"):
        LLM(engine="echo", **given)


def test_a_backend_that_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match="attention_backend: trtllm: trtllm is not supported"):
        LLM("none", engine="echo", attention_backend="trtllm")


def test_outputs_can_be_indexed_as_in_mini_sglang() -> None:
    with LLM("none", engine="echo", num_pages=16) as llm:
        (out,) = llm.generate(["hello"], SamplingParams(max_tokens=5, ignore_eos=True), progress=False)
    assert isinstance(out, RequestOutput) and isinstance(out.outputs[0], Completion)
    assert out["text"] == out.text == out.outputs[0]["text"] == out.outputs[0].text
    assert out["token_ids"] == out.token_ids == out.outputs[0]["token_ids"] and len(out["token_ids"]) == 5
    with pytest.raises(KeyError, match="texts"):
        out["texts"]


def test_the_module_of_sampling_params() -> None:
    from minisgl.core import SamplingParams as there

    assert there is SamplingParams and SamplingParams().temperature == 1.0


# --- variables ---


def test_variables_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"MAX_TOKENS": "64", "TOP_K": "-1", "TOP_P": "0.5", "TEMPERATURE": "0.6"}
    for name, value in values.items():
        monkeypatch.setenv(f"MINISGL_SHELL_{name}", value)
    by_variables = {"max_tokens": 64, "top_k": -1, "top_p": 0.5, "temperature": 0.6}
    assert chat.settings_of(cli._parse(["chat"])) == by_variables
    args = cli._parse(["chat", "--temperature", "0", "--max-tokens", "3"])
    assert chat.settings_of(args) == by_variables | {"temperature": 0.0, "max_tokens": 3}
    assert envs.notices() == []


def test_rust_gateway_is_the_scheduler_and_the_front_end(
    monkeypatch: pytest.MonkeyPatch, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve().frontend == "auto"
    monkeypatch.setenv("MINISGL_CPU_BACKEND", "rust_gateway")
    assert (serve().engine.cpu_backend, serve().frontend) == ("rust_hotpath", "rust")
    assert serve("--cpu-backend", "python").engine.cpu_backend == "python"
    assert serve("--frontend", "python").frontend == "python"
    monkeypatch.setenv("MINISGL_FRONTEND", "python")
    assert (serve().engine.cpu_backend, serve().frontend) == ("rust_hotpath", "python")
    assert serve("--frontend", "rust").frontend == "rust"
    assert capsys.readouterr().err == ""


def test_unknown_front_end_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MINISGL_FRONTEND", "go")
    assert cli.main(["serve"]) == 2
    assert capsys.readouterr().err == "minisgl serve: MINISGL_FRONTEND: 'go': must be rust or python\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MINISGL_FLASHINFER_USE_TENSOR_CORES", "does nothing here"),
        ("MINISGL_PYNCCL_MAX_BUFFER_SIZE", "does nothing here"),
        ("MINISGL_CPU_BACKENDS", "unknown variable, ignored: did you mean MINISGL_CPU_BACKEND?"),
        ("MINISGL_XYZZY_OF_SOMETHING_ELSE", "unknown variable, ignored"),
    ],
)
def test_a_variable_without_an_effect_is_named(
    monkeypatch: pytest.MonkeyPatch, serve: Serve, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    monkeypatch.setenv(name, "1")
    serve()
    assert capsys.readouterr().err == f"minisgl: {name}: {said}{_why(name)}"
    with LLM("none", engine="echo"):
        assert capsys.readouterr().err.startswith(f"minisgl: {name}: {said}")
    assert cli.main(["generate", "hi", "--engine", "echo", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().err.count(name) == 1
    assert cli.main(["chat", "--base-url", "http://127.0.0.1:1"]) == 1
    assert f"minisgl chat: {name}: {said}" in capsys.readouterr().err
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: _NoBenchmark)
    assert cli.main(["bench", "compare"]) == 0
    assert f"minisgl bench compare: {name}: {said}" in capsys.readouterr().err
    assert cli.main(["replay", "/no/such/trace"]) == 2
    assert f"minisgl replay: {name}: {said}" in capsys.readouterr().err


def _why(name: str) -> str:
    return f": {envs.NO_EFFECT[name]}" if name in envs.NO_EFFECT else ""


class _NoBenchmark:
    @staticmethod
    def add_parser(commands: Any) -> None:
        commands.add_parser("compare").set_defaults(run=lambda args: 0)


def test_known_variables_are_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*envs.ALL, *envs.OF_TESTS):
        monkeypatch.setenv(name, "1")
    assert envs.notices() == []


# --- the page ---


def rows(heading: str) -> list[list[str]]:
    """Cells of the tables under a heading, without the tables' own headings."""
    text = PAGE.read_text(encoding="utf-8")
    part = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("| ") and not line.startswith("|--")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if "`" in row[0]]


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_the_page_has_every_flag() -> None:
    on_page = {name: row[1] for row in rows("Flags") for name in quoted(row[0]) if name.startswith("--")}
    for alias in aliases.ALIASES:
        meant = alias.flag if alias.value is None else f"{alias.flag} {alias.value}"
        assert meant in on_page.get(alias.typed, "") or alias.typed == "--max-tokens", alias
    for flag in aliases.NO_EFFECT:
        names = flag.typed if flag.choices is None else [f"{flag.typed[0]} {flag.choices[0]}"]
        assert set(names) <= set(on_page), flag
    typed = {alias.typed for alias in aliases.ALIASES} | {name for flag in aliases.NO_EFFECT for name in flag.typed}
    for name in on_page:
        assert name in typed or " " in name, f"{name}: no such alias"


def test_names_on_the_page_exist() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    known = {"--help", "--output-len"}
    for add in (serve_command.add_parser, chat.add_parser, generate.add_parser):
        known |= {option for action in add(commands)._actions for option in action.option_strings}
    for heading in ("Flags", "Variables", "Python", "Defaults that differ"):
        named = {name for row in rows(heading) for cell in row for name in re.findall(r"(?<![\w-])--[a-z-]+", cell)}
        assert named <= known, heading


def test_the_page_has_every_value() -> None:
    text = " ".join(cell for row in rows("Flags") for cell in row)
    for word, meant in {**spellings.DTYPES, **spellings.ATTENTION, **spellings.CACHES}.items():
        assert re.search(rf"[ `]{word}`", text), word
        assert f"`{meant}`" in text, meant
    assert all(name in text for name in spellings.NO_ATTENTION)


def test_the_page_has_every_setting_and_variable() -> None:
    python = {re.sub(r"LLM\((\w+)=.*", r"\1", name): row[1] for row in rows("Python") for name in quoted(row[0])}
    assert set(spellings.SETTINGS) <= set(python)
    assert all(field in python[name] for name, field in spellings.SETTINGS.items())
    variables = {name.split("=")[0] for row in rows("Variables") for name in quoted(row[0])}
    assert set(envs.NO_EFFECT) <= variables <= set(envs.ALL) | set(envs.NO_EFFECT)
    assert {name for name in envs.ALL if "SHELL" in name} <= variables
