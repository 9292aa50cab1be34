"""What an extra brings, and what is said where it is missing; and that the extras of pyproject.toml are those."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

from minisgl.config import ConfigError
from minisgl.utils import installed
from minisgl.utils.installed import EXTRA_OF, TORCH_ENGINE, missing, need, own_version
from tests.test_layering import imports_of, module_name, sources

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# what is imported -> what brings it, where that has another name
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "zmq": "pyzmq",
    "flashinfer": "flashinfer-python",
    "pydantic_core": "pydantic",
    "triton": "torch",
    "PIL": "pillow",
}
ASKED_FOR = {"flash_attn", "xllamacpp"}  # by whoever has installed them
BY_NAME = {"httptools"}  # uvicorn imports it


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[ <>=!~;\[]", one, maxsplit=1)[0].replace("_", "-") for one in requirements}


def brought_by(extra: str) -> set[str]:
    """With the extras that it names."""
    found = names(listed := PROJECT["optional-dependencies"][extra])
    for one in listed:
        if one.startswith("minisgl["):
            for other in one.removeprefix("minisgl[").removesuffix("]").split(","):
                found |= brought_by(other)
    return found - {"minisgl"}


def test_an_extra_brings_what_the_error_says() -> None:
    for imported, extra in EXTRA_OF.items():
        assert DISTRIBUTIONS.get(imported, imported) in names(PROJECT["optional-dependencies"][extra]), imported
    assert brought_by("torch") < brought_by("cuda")
    assert set(TORCH_ENGINE) <= brought_by("torch") <= brought_by("dev")


def test_the_package_alone_brings_none_of_it() -> None:
    assert names(PROJECT["dependencies"]).isdisjoint(brought_by("cuda") | brought_by("gbnf"))


def test_imported_packages_are_declared() -> None:
    """As what the package needs, or in an extra; and nothing is needed that no file imports."""
    extras = set[str]().union(*(brought_by(extra) for extra in ("cuda", "gbnf", "images", "ray", "receipts")))
    own = names(PROJECT["dependencies"])
    imported = {
        target.split(".")[0] for file in sources() for target in imports_of(file.read_text(), module_name(file))
    } - {"minisgl", *sys.stdlib_module_names}
    needed = {DISTRIBUTIONS.get(name, name).replace("_", "-") for name in imported - ASKED_FOR}
    assert needed - own - extras == set()
    assert own - needed - BY_NAME == set()


def test_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    need("--engine torch", "json", "re")
    for name in TORCH_ENGINE:
        monkeypatch.setitem(sys.modules, name, None)
    assert missing("json", *TORCH_ENGINE) == list(TORCH_ENGINE)
    with pytest.raises(ConfigError) as raised:
        need("--engine torch", "json", *TORCH_ENGINE)
    assert str(raised.value) == ("--engine torch needs torch and safetensors, which are not installed: make install")
    with pytest.raises(ConfigError, match=r"--device cuda needs torch, which is not .*pip install '\.\[cuda\]'"):
        need("--device cuda", "torch", extra="cuda")


def test_extra_without_a_checkout_comes_from_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "CHECKOUT", Path("/nowhere"))
    assert installed.how_to_get("torch") == "pip install 'minisgl[torch]'"


def test_the_lock_is_of_these_dependencies() -> None:
    """uv would say the same, and is not everywhere."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    own = next(one for one in lock["package"] if one["name"] == "minisgl")
    locked = {(one["name"], one.get("specifier", "")) for one in own["metadata"]["requires-dist"]}
    listed = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    wanted = set()
    for one in listed:
        parts = re.fullmatch(r"([\w-]+)(?:\[[^]]*\])?([^;]*)(?:;.*)?", one.replace("_", "-").lower())
        assert parts, one
        wanted.add((parts[1], parts[2].strip()))
    assert locked == wanted, "run uv lock"
    assert own["version"] == PROJECT["version"]
    assert set(own["metadata"]["provides-extras"]) == set(PROJECT["optional-dependencies"])


def test_each_dependency_says_what_it_is_for() -> None:
    """In half a line behind it, or in the line before it."""
    silent = []
    for file in (ROOT / "pyproject.toml", *ROOT.glob("rust/*/Cargo.toml")):
        before, section = "", ""
        for line in file.read_text(encoding="utf-8").splitlines():
            section = line if line.startswith("[") else section
            named = r'  "(?!minisgl\[)' if file.name == "pyproject.toml" else r'[\w-]+ = (?!\{ path = "\.\./)'
            wanted = section.startswith("[project") if file.name == "pyproject.toml" else "dependencies]" in section
            if wanted and re.match(named, line) and "  # " not in line and not before.startswith("#"):
                silent.append(f"{file.parent.name}: {line}")
            before = line
    assert silent == []


def test_of_the_installed_package() -> None:
    assert own_version.__wrapped__() == importlib.metadata.version("minisgl") == own_version()


def test_without_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert own_version.__wrapped__() == "0+sources"
