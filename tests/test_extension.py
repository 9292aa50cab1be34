"""The compiled extension: who may import it, and what is said where it is missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl import envs
from minisgl.cli import main
from minisgl.extension import HOW_TO_BUILD, ExtensionMissing, _rust, why_missing
from minisgl.grammar.offline import structured_outputs
from minisgl.parsers.choice import reasoning_parsers, thinking, tool_call_parsers
from minisgl.sampling_params import ParamError
from minisgl.utils.installed import need_extension
from tests.test_layering import PACKAGE, imports_of, module_name, sources


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.NO_EXTENSION, "1")


def run_time_only(source: str) -> str:
    """The text of a module without what stands under `if TYPE_CHECKING`."""

    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST:
            return ast.Pass() if ast.unparse(node.test) == "TYPE_CHECKING" else node

    return ast.unparse(Drop().visit(ast.parse(source)))


def test_no_module_imports_it_at_run_time() -> None:
    found = [
        file.relative_to(PACKAGE).as_posix()
        for file in sources()
        if "_rust" in (source := file.read_text(encoding="utf-8"))
        for target in imports_of(run_time_only(source), module_name(file))
        if target.startswith("minisgl._rust")
    ]
    assert found == []


def test_a_package_without_the_file_serves_texts_and_says_what_is_missing(tmp_path: Path) -> None:
    """What a platform without a wheel has: the files in Python and no others."""
    package = tmp_path / "minisgl"
    package.mkdir()
    for one in PACKAGE.iterdir():
        if one.suffix not in (".so", ".dylib", ".pyd"):
            (package / one.name).symlink_to(one)
    program = (
        "from minisgl.extension import why_missing; from minisgl.tokenizer import Tokenizer; "
        "print(Tokenizer.echo().decode(Tokenizer.echo().encode('Paris').tolist()), why_missing())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Paris No module named 'minisgl._rust'") and HOW_TO_BUILD in done.stdout


def test_the_error_names_what_needs_it_the_reason_and_the_way_out(hidden: None) -> None:
    assert why_missing() == f"{envs.NO_EXTENSION} hides it: unset that; where it is not built, {HOW_TO_BUILD}"
    with pytest.raises(ExtensionMissing, match=r"^CpuEngine needs the extension minisgl\._rust, which is missing: "):
        _ = _rust.CpuEngine
    with pytest.raises(ValueError, match=rf"^--x y: z needs the extension .*{envs.NO_EXTENSION} hides it: unset that"):
        need_extension("--x y: z")


def test_a_name_that_an_older_extension_lacks_is_an_attribute_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(envs.NO_EXTENSION, raising=False)
    with pytest.raises(AttributeError, match="of_tomorrow"):
        _ = _rust.of_tomorrow  # type: ignore[attr-defined]


def test_a_value_of_the_variable_that_means_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.NO_EXTENSION, "perhaps")
    with pytest.raises(envs.EnvError, match="MINISGL_NO_EXTENSION: 'perhaps': must be 0 or 1"):
        why_missing()


def test_no_parser_and_no_grammar_is_there(hidden: None) -> None:
    assert (tool_call_parsers(), reasoning_parsers()) == (["auto"], ["auto", "none"])
    assert thinking("auto", "<think>") is None
    with pytest.raises(ParamError, match="needs the extension"):
        structured_outputs(json={"type": "object"})


@pytest.mark.parametrize("command", [["cache", "info", "."], ["bench", "scheduler"]])
def test_a_command_that_needs_it_ends_with_a_line(
    command: list[str], hidden: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and HOW_TO_BUILD in said
