"""The models of a server of several: what a file, a folder and flags say, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl import cli
from minisgl.config import ServerConfig
from minisgl.registry import start
from minisgl.registry.entries import Entry


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, list[Entry]]]:
    """What would have been served."""
    found: list[tuple[ServerConfig, list[Entry]]] = []
    monkeypatch.setattr(start, "run_several", lambda config, entries, *_: found.append((config, entries)) or 0)
    return found


def test_a_file_with_everything(tmp_path: Path, served: list[tuple[ServerConfig, list[Entry]]]) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "models:\n"
        "  - {name: chat, model: smollm2, aliases: [gpt-4o], flags: --kv-dtype q8 --max-seq-len 512, pin: true}\n"
        "  - model: some/where.gguf\n"
        "    memory: 2GiB\n"
        "    ttl: 90\n"
        "    preload: true\n"
        f"    adapters: {{kind: {tmp_path}}}\n"
    )
    arguments = ["--models", str(file), "--memory", "6GB", "--num-threads", "1", "--port", "7", "--api-key", "k"]
    assert cli.main(["serve", *arguments]) == 0
    config, (chat, other) = served[0]
    assert (config.port, config.engine.memory, config.engine.model) == (7, 6 * 10**9, "smollm2")
    assert (chat.name, chat.aliases, chat.pin, chat.preload, chat.ttl_s) == ("chat", ("gpt-4o",), True, False, None)
    engine = chat.config.engine
    assert (engine.kv_dtype, engine.max_seq_len, engine.num_threads, engine.memory) == ("q8", 512, 1, None)
    assert (chat.config.port, chat.config.host, chat.config.api_key, chat.config.managed) == (0, "127.0.0.1", "k", True)
    assert chat.config.any_model_name and chat.config.served_model_name == "chat"
    assert (other.name, other.memory, other.ttl_s, other.preload) == ("some/where", 2 * 2**30, 90.0, True)
    assert other.adapters == ("kind",) and not other.config.any_model_name


def test_a_folder_of_models(tmp_path: Path, served: list[tuple[ServerConfig, list[Entry]]]) -> None:
    (tmp_path / "b.gguf").write_bytes(b"GGUF....")
    for part in ("00001", "00002"):
        (tmp_path / f"large-{part}-of-00002.gguf").write_bytes(b"GGUF....")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    assert cli.main(["serve", "--models-dir", str(tmp_path)]) == 0
    entries = served[0][1]
    assert [one.name for one in entries] == ["a", "b", "large"]
    assert entries[2].config.engine.model == str(tmp_path / "large-00001-of-00002.gguf")
    assert entries[2].size() == 16


def test_several_flags(served: list[tuple[ServerConfig, list[Entry]]]) -> None:
    assert cli.main(["serve", "--model", "a", "--engine", "echo", "--model", "b"]) == 0
    assert [(one.name, one.config.engine.engine) for one in served[0][1]] == [("a", "echo"), ("b", "echo")]


def test_a_config_file_may_name_the_models(tmp_path: Path, served: list[tuple[ServerConfig, list[Entry]]]) -> None:
    (tmp_path / "models.yaml").write_text("models:\n  - model: a\n")
    (tmp_path / "server.yaml").write_text(f"models: {tmp_path}/models.yaml\nkv_dtype: q8\nport: 9\n")
    assert cli.main(["serve", "--config", str(tmp_path / "server.yaml")]) == 0
    config, entries = served[0]
    assert config.port == 9 and entries[0].config.engine.kv_dtype == "q8" and entries[0].config.port == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "FILE:1: must be one list, `models:`"),
        ("models: {}", "FILE:1: must be one list, `models:`"),
        ("models: []", "FILE:1: models: is empty"),
        ("models:\n  - smollm2", "FILE:2: models.0: must be fields"),
        ("models:\n  - name: a", "FILE:2: models.0: model: missing"),
        ("models:\n  - model: a\n    modell: b", "FILE:3: models.0: modell: unknown field: there are name, model,"),
        ("models:\n  - model: a\n    model: b", "FILE:3: models.0: model: given twice"),
        ("models:\n  - {model: a, pin: maybe}", "models.0: pin: 'maybe': must be true or false"),
        ("models:\n  - {model: a, ttl: 0}", "models.0: ttl: 0: must be a number of seconds above 0"),
        ("models:\n  - {model: a, memory: much}", "models.0: memory: much: must be a size such as 6GB"),
        ("models:\n  - {model: a, pin: true, ttl: 5}", "models.0: pin and ttl: a pinned model is never unloaded"),
        ("models:\n  - {model: a, flags: --port 5}", "models.0: flags: '--port 5': --port: applies to all models"),
        ("models:\n  - {model: a, flags: --kv-dtype q9}", "models.0: flags: --kv-dtype q9: must be one of f16"),
        ("models:\n  - {model: a, flags: --no-such}", "models.0: flags: --no-such: unknown flag"),
        ("models:\n  - {model: a, flags: --num-pages 0}", "models.0: flags: --num-pages 0: must be at least 1"),
        ("models:\n  - model: [", "FILE:2: not valid YAML"),
    ],
)
def test_invalid_models_files_are_rejected_with_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    assert cli.main(["serve", "--models", str(file)]) == 2
    assert complaint.replace("FILE", str(file)) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "a.yaml", "--models-dir", "b"], "--models and --models-dir: each names the models"),
        (["--models", "a.yaml", "--model", "b"], "--models and --model: each names the models"),
        (["a", "--models-dir", "b"], "--models-dir and --model: each names the models"),
        (["--models", "no-such.yaml"], "--models no-such.yaml: No such file"),
        (["--models-dir", "no-such"], "--models-dir no-such: No such file"),
    ],
)
def test_ways_that_do_not_go_together(capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    assert cli.main(["serve", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ("{name: a, model: x}, {name: a, model: y}", "a: the name a is that of a already"),
        ("{name: a, model: x}, {name: b, model: y, aliases: [a]}", "b: the name a is that of a already"),
        ("{name: a, model: x, memory: 2GB, pin: true}", "--memory: 954 MiB: the models that are pinned need 1907 MiB"),
    ],
)
def test_conflicting_models_end_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], entries: str, complaint: str
) -> None:
    (tmp_path / "models.yaml").write_text(f"models: [{entries}]")
    assert cli.main(["serve", "--memory", "1GB", "--models", str(tmp_path / "models.yaml")]) == 2
    assert complaint in capsys.readouterr().err
