"""`tests/` mirrors the package: whoever looks for the test of a module finds it by name.

Invariants: a test stands in the folder of its module and begins with its name (`test_MODULE.py` or
`test_MODULE_TOPIC.py`); a folder of tests that belong to no one module is named in `ACROSS`; a module without a test of
its name is one of a folder whose others are tested in the places that `TOGETHER` names.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGE = ROOT / "python" / "minisgl"
ACROSS = {
    "clients": "what others have written to talk to such a server",
    "deploy": "what starts and watches servers elsewhere: deploy/",
    "e2e": "whole servers and commands",
    "gateway": "both front ends under the same requests, and what breaks between them",
    "gpu": "what needs a GPU",
    "parity": "both schedulers under the same events",
    "property": "random load, and the scheduler broken on purpose",
    "web": "the page in a browser",
    "replay": "the corpus of recorded decisions",
}
OF_THE_REPOSITORY = {
    "test_circles.py",
    "test_docstrings.py",
    "test_functions.py",
    "test_layering.py",
    "test_layering_rust.py",
    "test_lines.py",
    "test_mirror.py",
    "test_namesakes.py",
    "test_pages.py",
    "test_suite.py",
}
# Modules without a test of their name are tested with their callers; by the folder, or the file, where that is.
TOGETHER = {
    "": "cli/test_flags.py cli/test_doctor.py test_llm.py scheduler engine/test_api.py",
    "attention": "attention engine/test_torch_engine.py",
    "bench": "bench e2e/test_bench_serve.py cli",
    "chat": "chat e2e/test_chat.py",
    "cli": "cli e2e/test_chat.py bench replay",
    "engine": "engine runner e2e/test_serve_echo.py e2e/test_dead_engine.py",
    "kernels": "kernels",
    "layers": "layers models kernels/test_experts.py engine/test_torch_adapters.py",
    "metrics": "metrics server/admin/test_health_metrics.py",
    "models": "models engine/test_transformers_loading.py engine/test_torch_adapters.py",
    "parsers": "parsers server/core/test_tools.py",
    "ray": "ray",
    "registry": "registry",
    "runner": "runner e2e/test_startup.py e2e/test_front_ends.py",
    "scheduler": "scheduler parity property",
    "scheduler/reference": "scheduler parity property",
    "server": "server e2e/test_adapters.py e2e/test_sampling_fields.py",
    "server/apis": "server/apis clients/test_anthropic_messages.py clients/test_openai_responses.py",
    "supervisor": "supervisor e2e/test_startup.py",
    "tokenizer": "tokenizer gateway",
    "utils": "runner server",
    "weights": "weights engine/test_adapters.py",
}
ELSEWHERE = {"benchmark": ROOT / "benchmark", "tools": ROOT / "tools"}  # mirrored too, but flat


def modules(folder: Path) -> set[str]:
    """Names of modules and folders below `folder`, and its own."""
    if not folder.is_dir():
        return set()
    below = [path for path in folder.rglob("*") if path.suffix == ".py" or path.is_dir()]
    return {folder.name, *(path.stem for path in below)}


def rust_modules() -> set[str]:
    """What the extension has without a Python namesake is tested where its Python callers are."""
    return {
        path.stem for crate in ("minisgl-core", "minisgl-py") for path in (ROOT / "rust" / crate / "src").rglob("*.rs")
    }


def is_named_after(stem: str, names: set[str]) -> bool:
    topic = stem.removeprefix("test_")
    return any(topic == name or topic.startswith(f"{name}_") for name in names)


def test_every_test_is_found_by_the_name_of_its_module() -> None:
    strays = []
    for file in TESTS.rglob("test_*.py"):
        place = file.relative_to(TESTS)
        if place.parts[0] in ACROSS or place.name in OF_THE_REPOSITORY:
            continue
        folder = ELSEWHERE.get(place.parts[0], PACKAGE / place.parent)
        if not is_named_after(file.stem, modules(folder) | rust_modules()):
            strays.append(place.as_posix())
    assert strays == []


def untested_by_name(folder: Path) -> list[str]:
    """Modules of this folder of the package; a folder of tests may be flatter than its folder of modules."""
    place = TESTS / folder.relative_to(PACKAGE)
    while not place.is_dir():
        place = place.parent
    stems = [file.stem for file in place.glob("test_*.py")]
    found = [file.stem for file in folder.glob("*.py") if not file.stem.startswith("__")]
    return [module for module in found if not any(is_named_after(stem, {module}) for stem in stems)]


def test_every_module_is_tested_by_its_name_or_where_the_table_says() -> None:
    named = dict(TOGETHER)
    for folder in sorted({file.parent for file in PACKAGE.rglob("*.py")}):
        name, modules_left = folder.relative_to(PACKAGE).as_posix().removeprefix("."), untested_by_name(folder)
        row = next((part for part in (name, name.rpartition("/")[0]) if part in TOGETHER), None)
        assert not modules_left or row is not None, f"{name}: where are {modules_left} tested?"
        if modules_left:
            named.pop(str(row), None)
    assert named == {}, "rows of folders whose modules all have tests of their own"
    places = {place for row in TOGETHER.values() for place in row.split()}
    assert {place for place in places if not (TESTS / place).exists()} == set()


def test_no_folder_of_tests_is_without_a_reason() -> None:
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("**/test_*.py"))}
    assert {name for name in folders - ACROSS.keys() - ELSEWHERE.keys() if not (PACKAGE / name).is_dir()} == set()


def test_files_that_pages_name_are_there() -> None:
    """Notes, finished cards and records of runs are of their day; every other page speaks of today."""
    named = re.compile(r"`((?:tests|benchmark|docs|worklog|tools|rust|python)/[\w./*-]+)`")
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *(card for card in ROOT.glob("kanban/**/*.md") if card.parent.name != "done"),
        ROOT / "benchmark" / "README.md",
    ]
    gone = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for name in named.findall(page.read_text(encoding="utf-8"))
        if not any(ROOT.glob(name.rstrip("/"))) and "DATE" not in name and "test_b" not in name
    }
    assert gone == set()
