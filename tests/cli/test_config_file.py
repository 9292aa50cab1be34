"""`--config FILE`: its values become flags, flags win, and every mistake is told with file, line, key and value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl import cli
from minisgl.config import ServerConfig
from tests.helpers.deploy import served

Serve = Callable[..., ServerConfig]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Serve:
    """Run `minisgl serve --config` over this text; the configuration that the server would get."""

    def run(text: str, *flags: str) -> ServerConfig:
        file = tmp_path / "server.yaml"
        file.write_text(text)
        return served(monkeypatch, ["serve", "--config", str(file), *flags])

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[[str], str]:
    """What is said about this text, without the folder of the file; the exit code must be 2."""

    def run(text: str) -> str:
        file = tmp_path / "bad.yaml"
        file.write_text(text)
        assert cli.main(["serve", "--config", str(file)]) == 2
        return capsys.readouterr().err.replace(f"{tmp_path}/", "").strip()

    return run


def test_values_become_settings_under_any_spelling(serve: Serve) -> None:
    config = serve(
        "# a comment\nengine: echo\nport: 8000\npage_size: 4\nnum-pages: 96\nmemory_ratio: 1\n"
        "max-model-len: 100\ndisable-overlap-schedule: true\ncache: radix\nhost: '::1'\n"
    )
    assert (config.engine.engine, config.port, config.host) == ("echo", 8000, "::1")
    assert (config.engine.page_size, config.engine.num_pages, config.engine.max_seq_len) == (4, 96, 100)
    assert config.engine.memory_ratio == 1.0 and isinstance(config.engine.memory_ratio, float)
    assert config.engine.overlap is False and config.engine.cache == "lru"


def test_flags_win_and_defaults_stay(serve: Serve) -> None:
    text = "port: 8000\ncache: lfu\nengine: echo\n"
    config = serve(text, "--port", "9", "--cache", "naive")
    assert (config.port, config.engine.cache, config.engine.engine) == (9, "naive", "echo")
    assert config.engine.page_size == 16 and config.host == "127.0.0.1"
    torch = "engine: torch\nattention_backend: fa\n"
    assert serve(torch).engine.page_size == 256 and serve(torch, "--page-size", "16").engine.page_size == 16


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_changes_nothing(serve: Serve, text: str) -> None:
    assert serve(text) == serve("port: 1919\n")


def test_false_is_the_flag_not_given(serve: Serve) -> None:
    assert serve("disable-overlap-schedule: false\n").engine.overlap is True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engine: echo\nprot: 1\n", "bad.yaml:2: prot: unknown key: did you mean port?"),
        ("xyzzy: 1\n", "bad.yaml:1: xyzzy: unknown key: the keys are the flags of `minisgl serve --help`"),
        ("config: other.yaml\n", "bad.yaml:1: config: unknown key"),
        ("7: 1\n", "bad.yaml:1: 7: unknown key"),
        ("port: '80'\n", "bad.yaml:1: port: '80': must be a whole number"),
        ("port: 8e3\n", "bad.yaml:1: port: '8e3': must be a whole number"),
        ("port: true\n", "bad.yaml:1: port: True: must be a whole number"),
        ("memory-ratio: half\n", "bad.yaml:1: memory-ratio: 'half': must be a number"),
        ("disable-overlap-schedule: 1\n", "bad.yaml:1: disable-overlap-schedule: 1: must be true or false"),
        ("revision: 123\n", 'bad.yaml:1: revision: 123: must be text: write it in quotes ("...")'),
        ("model: [a, b]\n", "bad.yaml:1: model: ['a', 'b']: must be text"),
        ("engine: fast\n", "bad.yaml:1: engine: 'fast': must be one of auto, cpu, torch"),
        ("port:\n", "bad.yaml:1: port: None: has no value: give one or remove the line"),
        ("port: 1\nport: 2\n", "bad.yaml:2: port: set already by port in line 1"),
        ("model: a\n\nmodel_path: b\n", "bad.yaml:3: model_path: set already by model in line 1"),
        ("- port\n", "bad.yaml:1: must be lines of `flag: value`"),
        ("port: [1\n", "bad.yaml:2: not valid YAML"),
        ("port: !!python/name:os.system ''\n", "bad.yaml:1: not valid YAML"),
    ],
)
def test_a_mistake_is_told_with_its_place(refused: Callable[[str], str], text: str, said: str) -> None:
    assert refused(text).startswith(f"minisgl serve: {said}")


def test_a_value_out_of_range_is_told_as_for_flags(refused: Callable[[str], str]) -> None:
    assert "yaml:1: port: 70000: must be at most 65535" in refused("port: 70000\n")
