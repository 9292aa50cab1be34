"""`minisgl cache`: what it says of a folder, what it does to it, and what goes from one to another."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl._rust import PageStore
from minisgl.cli import main
from minisgl.config import ConfigError
from minisgl.tokenizer.echo import echo_json
from tests.helpers.models import save, tiny_model
from tests.helpers.stores import counts

SIZE = 8


def filled(folder: Path) -> list[Path]:
    """Three files that look like pages; none is whole."""
    PageStore(str(folder), 2**30, b"model", SIZE, 100)
    made = []
    for number in range(3):
        name = f"{number:064x}"
        (folder / name[:2]).mkdir(exist_ok=True)
        made.append(folder / name[:2] / name)
        made[-1].write_bytes(bytes(172))
    (folder / "README").write_text("of somebody else")
    return made


def test_info_counts_and_clear_removes_pages_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = filled(tmp_path)
    assert main(["cache", "info", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 3 pages, 516 B\n"
    assert main(["cache", "clear", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: removed 3 pages, 516 B\n"
    assert not any(file.exists() for file in made) and (tmp_path / "README").exists()


def test_verify_removes_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = filled(tmp_path)
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}: whole: 0 pages, 0 B\n{tmp_path}: damaged, and removed: 3 files\n"
    assert not any(file.exists() for file in made)
    assert main(["cache", "verify", str(tmp_path)]) == 0


def test_a_folder_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for order in ("info", "clear", "verify"):
        assert main(["cache", order, str(tmp_path / "none")]) == 2
        assert capsys.readouterr().err == (
            f"minisgl cache: {tmp_path / 'none'}: no such folder: name that of --cache-dir\n"
        )
    assert not (tmp_path / "none").exists()


def test_a_damaged_page_is_nothing_that_is_at_hand(tmp_path: Path) -> None:
    filled(tmp_path)
    store = PageStore(str(tmp_path), 2**30, b"model", SIZE, 100)
    assert store.stage(np.zeros(20, np.int32), 0, 2).columns == (0, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose template says `<role>content` and the names of the tools."""
    folder = save(tiny_model("qwen3-tied", vocab_size=258), tmp_path_factory.mktemp("checkpoint"))
    (folder / "tokenizer.json").write_text(echo_json(), encoding="utf-8")
    template = "{{ tools|length if tools }}{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


TEXT = "You are a helpful assistant, and say so when you do not know."
PART = {"type": "text", "text": TEXT}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FLAGS = ("--engine", "cpu", "--page-size", str(SIZE), "--num-pages", "40", "--log-level", "error")


def export(model: Path, prefix: str, file: Path, *more: str) -> int:
    return main(["cache", "export", prefix, str(file), "--model", str(model), *FLAGS, *more])


def opened(model: Path, folder: Path, **settings: Any) -> LLM:
    config = {"engine": "cpu", "page_size": SIZE, "num_pages": 40, "log_level": "error", "cache_dir": str(folder)}
    return LLM(str(model), **config | settings)


def cached(llm: LLM, prompt: str | list[int]) -> int:
    (found,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), progress=False)
    return found.num_cached_tokens


def test_a_prefix_goes_from_one_folder_to_another(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "prefix", tmp_path / "far" / "cache"
    assert export(model, TEXT, file) == 0
    whole = len(TEXT) // SIZE * SIZE
    assert capsys.readouterr().out.startswith(f"{file}: a prefix of {whole} tokens, ")
    assert main(["cache", "import", str(file), str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: {whole // SIZE} pages of a prefix of {whole} tokens\n"
    with opened(model, folder) as llm, opened(model, tmp_path / "other") as other:
        assert (cached(llm, TEXT + " Who?"), cached(other, TEXT + " Who?")) == (whole, 0)
    assert folder.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "said", "text"),
    [
        ("a.txt", TEXT, TEXT),
        ("a.json", {"model": "m", "prompt": TEXT, "max_tokens": 3}, TEXT),
        ("a.json", {"text": TEXT}, TEXT),
        ("a.json", [*TEXT.encode()], [*TEXT.encode()]),
        ("a.json", {"token_ids": [*TEXT.encode()]}, [*TEXT.encode()]),
        ("a.json", {"messages": [{"role": "system", "content": TEXT}], "tools": [TOOL] * 2}, f"2<system>{TEXT}"),
        ("a.json", {"messages": [{"role": "user", "content": [PART]}], "max_tokens": 3}, f"<user>{TEXT}"),
    ],
    ids=str,
)
def test_a_prefix_is_a_file_a_body_or_ids(
    model: Path, tmp_path: Path, name: str, said: Any, text: str | list[int]
) -> None:
    (tmp_path / name).write_text(said if isinstance(said, str) else json.dumps(said))
    assert export(model, f"@{tmp_path / name}", tmp_path / "prefix", "--cache-dir", str(tmp_path / "cache")) == 0
    whole = len(text) // SIZE * SIZE
    with opened(model, tmp_path / "new", warm_prefixes=[f"@{tmp_path / 'prefix'}"]) as llm:
        assert counts(llm).num_loaded == whole // SIZE - 1, "and the last of its tokens is computed"
        more = f"{text} Who?" if isinstance(text, str) else [*text, 9, 9]
        assert cached(llm, more) == whole


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("{", "is not JSON"),
        ("{}", "must have one of text, prompt, messages, token_ids"),
        ('{"text": "a", "prompt": "b"}', "must have one of"),
        ('{"token_ids": ["a"]}', "token_ids.0: "),
        ('{"prompt": ["a", "b"]}', "prompt: must be one prompt, not several"),
        ('{"messages": "a"}', "messages: "),
        ('{"messages": [{"role": "user", "content": [{"type": 5}]}]}', "messages.0.content"),
        ('{"text": "short"}', "must be at least 8: only whole pages are cached"),
        ('{"token_ids": [257, 258]}', "token ids must be between 0 and 257"),
    ],
)
def test_invalid_prefix_is_rejected(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str, reason: str
) -> None:
    (tmp_path / "a.json").write_text(said)
    assert export(model, f"@{tmp_path / 'a.json'}", tmp_path / "prefix") == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "prefix").exists()


def test_a_prefix_of_a_model_with_states_goes_with_the_last_state_it_can_begin_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save(tiny_model("lfm2", vocab_size=258), tmp_path / "model")
    (model / "tokenizer.json").write_text(echo_json(), encoding="utf-8")
    file, folder = tmp_path / "prefix", tmp_path / "cache"
    assert export(model, TEXT, file) == 0
    whole = len(TEXT) // SIZE * SIZE
    assert main(["cache", "import", str(file), str(folder)]) == 0
    capsys.readouterr()
    assert main(["cache", "info", str(folder)]) == 0
    assert f": {whole // SIZE} pages, 1 state, " in capsys.readouterr().out
    assert main(["cache", "verify", str(folder)]) == 0
    assert f": whole: {whole // SIZE} pages, 1 state, " in capsys.readouterr().out
    with opened(model, tmp_path / "new", warm_prefixes=[f"@{file}"]) as llm:
        found = counts(llm)
        assert (found.num_loaded, found.num_loaded_states) == (whole // SIZE - 1, 1)
        assert cached(llm, TEXT + " Who?") == whole - SIZE, "its last page has no state"
    assert export(model, TEXT[:SIZE], tmp_path / "short") == 2
    assert "no state of the prefix is stored in the folder" in capsys.readouterr().err
    data = next(folder.glob("??/*.state"))
    data.write_bytes(data.read_bytes()[:-1])
    assert main(["cache", "verify", str(folder)]) == 1
    assert "damaged, and removed: 1 file\n" in capsys.readouterr().out
    assert main(["cache", "clear", str(folder)]) == 0


def test_damaged_and_foreign_files_are_refused_by_name(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "prefix", tmp_path / "cache"
    assert export(model, TEXT, file, "--kv-dtype", "q8") == 0
    assert export(model, f"@{file}", tmp_path / "again") == 2
    assert f"{file}: is an exported prefix already" in capsys.readouterr().err
    for settings in ({}, {"warm_prefixes": [TEXT, f"@{file}"]}):
        with pytest.raises(ConfigError, match=r"kv_dtype$") if settings else contextlib.nullcontext():
            opened(model, folder, **settings).close()
    with pytest.raises(ConfigError, match=r"--warm-prefix @.*prefix: needs --cache-dir, the folder for its pages"):
        LLM(str(model), warm_prefixes=[f"@{file}"])
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert main(["cache", "import", str(file), str(folder)]) == 2
    assert capsys.readouterr().err == f"minisgl cache: {file}: it is damaged: its digest does not match\n"
    (tmp_path / "file").touch()
    assert main(["cache", "import", str(tmp_path / "file"), str(folder)]) == 2
    assert "file: is not a file that minisgl cache export wrote" in capsys.readouterr().err
    assert PageStore.totals(str(folder))[0] == 0
