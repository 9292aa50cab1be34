"""Reports: written from a fixture, readable again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from minisgl.bench.report import Report, number, plain, print_result, public_command, table, write_json


def test_a_report_from_results(tmp_path: Path) -> None:
    report = Report(tmp_path, "Two variants", command="minisgl bench something")
    report.section("Throughput", table(("variant", "tok/s"), [("python", 1234.5), ("rust", 2.0)]))
    path = report.write({"samples": np.arange(5), "nested": {"rows": [[1, 2], [3, 4]]}})
    text = path.read_text()
    assert "| python | 1,234 |" in text and "## Environment" in text and "minisgl bench something" in text
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert raw["samples"] == [0, 1, 2, 3, 4] and raw["nested"] == {"rows": [[1, 2], [3, 4]]}
    assert raw["environment"]["cores"] >= 1


def test_a_program_that_is_killed_while_it_writes_leaves_the_report_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(tmp_path, "One")
    report.section("A", "first")
    report.write({"n": 1})
    before = {name: (tmp_path / name).read_text() for name in ("README.md", "raw.json")}

    def killed(path: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    report.section("B", "second")
    with pytest.raises(KeyboardInterrupt):
        report.write({"n": 2})
    assert {name: (tmp_path / name).read_text() for name in before} == before


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3, "3"), (123456, "123,456"), (0.01234, "0.0123"), (12.34, "12.3"), (999.4, "999"), (1e6, "1,000,000"),
     (float("nan"), "-"), (-0.5, "-0.500")],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_rows_must_fit_the_head() -> None:
    with pytest.raises(ValueError, match="2 columns"):
        table(("a", "b"), [("only one",)])


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    assert "a\\|b" in table(("x",), [("a|b",)])


def test_json_holds_no_nan_and_nothing_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plain({"x": float("nan"), "y": np.float32(1.5), 3: (1, None)}) == {"x": None, "y": 1.5, "3": [1, None]}
    with pytest.raises(TypeError, match="PosixPath"):
        plain({"path": tmp_path})
    print_result({"a": [1, 2]})
    assert capsys.readouterr().out == '{"a":[1,2]}\n'


def test_lists_stay_on_one_line_and_texts_as_they_are(tmp_path: Path) -> None:
    data = {
        "samples": list(range(100)),
        "text": "a [\n  b \n] c",
        "empty": [],
        "texts": ["x]", "[y"],
        "words": ["two  words", "more"],
    }
    write_json(tmp_path / "x.json", data)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == data
    assert len(text.splitlines()) < 12


def test_a_command_shows_no_folders_of_the_machine() -> None:
    given = ["offline", "--out", "/somewhere/else/run", "--model=/deep/er/model", "--size", "small", "a/b", "~/c/d"]
    assert public_command(given) == "minisgl bench offline --out run --model=model --size small a/b d"
    assert public_command(["--base-url", "http://127.0.0.1:80/v1"]) == "minisgl bench --base-url http://127.0.0.1:80/v1"
    assert public_command(["--python", "llama.cpp=/a/bin/python"]) == "minisgl bench --python llama.cpp=python"
