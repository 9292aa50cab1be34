"""Dependencies point one way: who may import whom in the package, read out of the sources and out of a running process.

Invariants: every folder and top-level module of the package is in `MAY_IMPORT`; a new one must be put there on purpose.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "minisgl"

# A name of the package -> what it may import from the package beside itself. A dotted name allows that module alone.
MAY_IMPORT: dict[str, set[str]] = {
    # data and settings
    "step": set(),
    "sampling_params": set(),
    "prompt_image": {"step"},
    "envs": set(),
    "_rust": set(),
    "extension": {"envs", "_rust"},
    "config": {"scheduler.policies"},  # for the names of the cache policies
    "utils": {"config", "envs", "extension", "scheduler.policies"},
    "message": {"prompt_image", "sampling_params", "step"},
    # several engines
    "routing": {"step", "extension"},
    # the scheduler
    "scheduler": {"step", "extension"},
    "hotpath": {"_rust", "extension"},
    # tensors, from the bottom
    "distributed": set(),
    "kernels": set(),
    "attention": {"kernels"},
    "layers": {"attention", "config", "distributed", "envs", "kernels", "extension"},
    "models": {
        "layers",
        "attention",
        "kernels.ops",
        "config",
        "distributed",
        "weights.names",
        "weights.quantization",
        "weights.gguf_config",
    },
    "weights": {"config", "envs", "utils", "distributed", "extension"},
    # text and tokens of one answer
    "grammar": {"config", "utils.installed", "utils.memory", "sampling_params", "step", "tokenizer", "extension"},
    "parsers": {"extension", "_rust"},
    "images": {"config", "prompt_image", "step", "utils.installed"},
    "engine": {
        "images",
        "prompt_image",
        "grammar.slots",
        "utils",
        "models",
        "weights",
        "attention",
        "kernels",
        "distributed",
        "config",
        "sampling_params",
        "step",
        "envs",
        "extension",
        "tokenizer",  # the words of the simulated engine; that of `--tokenizer`
    },
    "receipt": {"config", "engine.page_store", "envs", "sampling_params", "utils", "weights", "extension"},
    # where scheduler and engine meet
    "runner": {
        "prompt_image",
        "envs",
        "utils",
        "extension",
        "_rust",  # the pool
        "distributed",
        "scheduler",
        "engine",
        "grammar",
        "message",
        "config",
        "sampling_params",
        "step",
        "metrics",
        "weights.sources",
        "tokenizer",  # whether two models have one vocabulary
    },
    # text and HTTP
    "tokenizer": {"config", "metrics", "step", "envs", "utils", "weights.sources", "extension", "_rust"},
    "metrics": {"extension", "message"},
    "frontend": {"config", "message", "tokenizer", "metrics", "prompt_image", "sampling_params", "step"},
    "server": {
        "images",
        "prompt_image",
        "frontend",
        "receipt",
        "utils",
        "grammar",
        "parsers",
        "message",
        "tokenizer",
        "metrics",
        "sampling_params",
        "step",
        "config",
        "extension",
        "_rust",  # the gateway
    },
    # servers on many machines
    "ray": {
        "chat.own_server",
        "config",
        "utils",
        "routing",
        "server.core.errors",
        "server.core.glance",
        "server.core.passing",
        "server.core.resume",
        "server.core.streams",
        "step",
    },
    # programs
    "bench": {
        "utils",
        "weights.sources",  # the same model for others
        "runner",
        "scheduler",
        "engine",
        "message",
        "metrics",
        "config",
        "sampling_params",
        "step",
        "envs",
        "extension",
        "_rust",
    },
    "llm_prompts": {"config", "engine.api", "images", "prompt_image", "sampling_params", "step", "tokenizer"},
    "llm": {
        "llm_prompts",
        "engine.api",  # what gives pages away
        "utils",
        "grammar",
        "frontend",
        "runner",
        "metrics",
        "config",
        "envs",
        "sampling_params",
        "step",
        "tokenizer",
    },
    "chat": set(),  # a client like any other
    "supervisor": {
        "utils",
        "receipt",  # its key, before anything is loaded
        "frontend",
        "server",
        "runner.launch",
        "runner.several",
        "runner.process",  # that it forks
        "message",
        "tokenizer",
        "config",
        "envs",
        "extension",
        "_rust",  # types
    },
    "registry": {
        "supervisor",
        "server",
        "config",
        "envs",
        "utils",
        "weights.hub_cache",
        "weights.sources",
        "metrics.families",
        "metrics.keys",
    },
    "cli.doctor": {
        "scheduler",
        "engine",
        "weights",
        "attention",
        "server",
        "config",
        "envs",
        "utils",
        "extension",
        "tokenizer",
    },  # tries everything
    "cli.model": {"engine.cpu_loading"},
    "cli.batch": {"chat", "server.batches.store"},  # its server's folder
    "cli.batch_run": {"config", "server.batches.lines", "server.batches.store", "utils"},
    "cli.request_body": {"config", "llm", "server", "tokenizer"},  # a body becomes the same prompt
    "cli.verify_run": {"config", "llm", "receipt", "tokenizer"},
    "cli.verify_prompt": {"config", "llm", "server"},
    "cli.verify_answer": {"config", "llm", "receipt", "sampling_params"},
    "cli": {
        "scheduler",
        "supervisor",
        "registry",
        "chat",
        "llm",
        "tokenizer",  # what it refuses
        "bench",
        "parsers",  # names
        "routing.api",  # names
        "weights.sources",
        "weights.hub_cache",
        "weights.hub_names",
        "extension",  # pages on a disk
        "config",
        "sampling_params",
        "utils",
        "envs",
    },
    "__init__": {"grammar.offline", "llm", "sampling_params"},
    "__main__": {"cli"},
    "core": {"sampling_params"},
    "shell": {"cli"},
}
NO_TORCH = (
    "grammar",
    "parsers",
    "scheduler",
    "routing",
    "frontend",
    "server",
    "tokenizer",
    "message",
    "metrics",
    "config",
    "utils",
    "step",
    "sampling_params",
    "prompt_image",
    "images",
    "envs",
)
NO_TORCH_PROCESS = (  # and whatever leads to it
    "cli",
    "chat.terminal",
    "supervisor.serving",
    "supervisor.start",
    "cli.doctor",
    "runner.launch",
    "runner.process",
    "engine.sim",
    "engine.choice",
    "engine.cpu_engine",
    "models",
    "models.config",
    "weights.gguf_import",
    "weights.sources",
)
HEAVY = {"torch", "transformers"}


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """All nodes of a source, which several tests look at."""
    return [*ast.walk(ast.parse(source))]


def imports_of(source: str, module: str) -> Iterator[str]:
    """Dotted names that `source`, the text of `module`, imports anywhere, by `import_module` of a constant too."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join([*parent, *base.split(".")] if base else parent)
            # `from package import name`: the name may be a module
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            yield from (
                arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def module_name(file: Path) -> str:
    """`minisgl.a.b`; a package's own file is `minisgl.a.__init__`, so that relative imports resolve alike."""
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)


def violations(source: str, module: str) -> list[str]:
    """The imports within the package that `MAY_IMPORT` does not allow."""
    own = module.split(".")[1]
    allowed = MAY_IMPORT.get(module.removeprefix("minisgl."), MAY_IMPORT[own])  # a file may have a row of its own
    found = []
    for target in imports_of(source, module):
        parts = target.split(".")
        if parts[0] != "minisgl" or len(parts) < 2 or parts[1] == own:
            continue
        if own != "__init__" and parts[1] not in MAY_IMPORT:
            parts = ["minisgl", "__init__"]  # `from minisgl import LLM`
        if not any(parts[1:][: len(rule)] == rule for rule in (name.split(".") for name in allowed)):
            found.append(f"{module} imports {target}")
    return found


def environment_reads(source: str) -> list[int]:
    """Lines that touch the environment."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    lines = []
    for node in nodes_of(source):
        from_os = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        of_os = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
        if from_os or of_os:
            lines.append(getattr(node, "lineno", 0))
    return lines


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def top_names() -> set[str]:
    return {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in sources()}


def test_every_part_has_an_import_rule() -> None:
    assert top_names() <= set(MAY_IMPORT)


def test_rules_have_no_circle() -> None:
    TopologicalSorter({name: {t.split(".")[0] for t in targets} for name, targets in MAY_IMPORT.items()}).prepare()


# Folders of the server -> the folders of it that they may import. What stands beside them, `app.py` and `routes.py`,
# may import all, and none of them imports that.
WALLS: dict[str, set[str]] = {
    "core": set(),
    "apis.openai": {"core"},
    "apis.responses": {"core"},
    "apis.anthropic": {"core"},
    "apis.ollama": {"core"},
    "apis.llama_cpp": {"core"},
    "apis.sglang": {"core"},
    "admin": {"core"},
    "batches": {"core"},
}


def walled(module: str) -> str | None:
    """Return the walled folder of the server in which a module stands, None outside of all: `"core"`."""
    return next((wall for wall in WALLS if f"{module}.".startswith(f"minisgl.server.{wall}.")), None)


def climbs(source: str, module: str) -> list[str]:
    """Return the imports of the server's own modules that `WALLS` does not allow."""
    here = walled(module)
    targets = [] if here is None else [one for one in imports_of(source, module) if one.startswith("minisgl.server.")]
    return [f"{module} imports {one}" for one in targets if walled(one) not in {here, *WALLS[str(here)]}]


def test_walls_of_the_server_hold() -> None:
    files = [file for file in sources() if file.is_relative_to(PACKAGE / "server")]
    folders = {".".join(file.parent.relative_to(PACKAGE / "server").parts) for file in files} - {"", "apis"}
    assert folders == WALLS.keys()
    assert [found for file in files for found in climbs(file.read_text(), module_name(file))] == []


def test_what_climbs_a_wall_is_found() -> None:
    bad = (
        "from minisgl.server.apis.openai.chat import a",
        "from minisgl.server import app",
        "from ..admin import live",
    )
    assert all(climbs(one, "minisgl.server.core.http") for one in bad)
    assert climbs("import minisgl.server.apis.ollama.body", "minisgl.server.apis.openai.chat")
    assert climbs("from minisgl.server.core import http", "minisgl.server.apis.openai.chat") == []
    assert climbs("from minisgl.server.core import http", "minisgl.server.app") == []


def test_a_folder_of_the_server_says_what_it_is_for() -> None:
    for folder in ("", *WALLS):
        text = (PACKAGE / "server" / folder.replace(".", "/") / "__init__.py").read_text()
        found = ast.get_docstring(ast.parse(text))
        assert found is not None and len(found.splitlines()) <= 10, folder


def test_scheduler_and_engine_meet_only_where_they_may() -> None:
    sees_both = {name for name, targets in MAY_IMPORT.items() if {"scheduler", "engine"} <= targets}
    assert sees_both == {"runner", "bench", "cli.doctor"}


@pytest.mark.parametrize("name", sorted(top_names()))
def test_imports_follow_the_rules(name: str) -> None:
    files = [file for file in sources() if file.relative_to(PACKAGE).parts[0].removesuffix(".py") == name]
    assert [v for file in files for v in violations(file.read_text(), module_name(file))] == []


@pytest.mark.parametrize("name", NO_TORCH)
def test_sources_without_tensors_name_no_torch(name: str) -> None:
    files = [PACKAGE / f"{name}.py"] if (PACKAGE / f"{name}.py").exists() else sorted((PACKAGE / name).rglob("*.py"))
    assert files
    for file in files:
        assert HEAVY.isdisjoint(t.split(".")[0] for t in imports_of(file.read_text(), module_name(file))), file


def test_importing_them_brings_no_torch_and_needs_no_extension() -> None:
    modules = [f"minisgl.{name}" for name in NO_TORCH_PROCESS]
    for file in sources():
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in NO_TORCH:
            modules.append(".".join(["minisgl", *parts]).removesuffix(".__init__"))
    program = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    command = [sys.executable, "-c", program]
    hidden = os.environ | {"MINISGL_NO_EXTENSION": "1"}
    loaded = set(json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=hidden).stdout))
    assert "minisgl" in loaded
    assert HEAVY.isdisjoint(loaded)


PACKAGES = {
    "import minisgl": {"msgspec"},
    "from minisgl import cli; cli._parse(['serve'])": {"msgspec"},
    "import minisgl.supervisor.start": {"msgspec", "psutil"},
    "import minisgl.runner.process": {"jinja2", "markupsafe", "msgspec", "numpy", "psutil"},
    "import minisgl.llm": {"jinja2", "markupsafe", "msgspec", "numpy", "prometheus_client", "psutil"},
    "import minisgl.supervisor.serving": {
        *("annotated_types", "anyio", "click", "httptools", "jinja2", "markupsafe", "msgspec", "numpy"),
        *("prometheus_client", "psutil", "pydantic", "pydantic_core", "sniffio", "starlette", "typing_inspection"),
        *("uvicorn", "uvloop"),
    },
}
"""Packages that a program imports before it has anything to do. People wait for each: these sets only shrink."""
OF_PYTHON = {"_distutils_hack", "typing_extensions"}  # brought by some versions of Python and of packages


@pytest.mark.parametrize("program", PACKAGES)
def test_starts_import_few_packages(program: str) -> None:
    names = "*(name for name, one in sys.modules.items() if 'site-packages' in (getattr(one, '__file__', None) or ''))"
    command = [sys.executable, "-c", f"{program}; import sys; print({names})"]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert {name.partition(".")[0] for name in loaded} - OF_PYTHON == PACKAGES[program]


def test_the_environment_is_read_in_one_file() -> None:
    readers = {file.relative_to(PACKAGE).as_posix() for file in sources() if environment_reads(file.read_text())}
    assert readers == {"envs.py"}


DECODES = {"json.decode", "json.Decoder", "json.loads", "pydantic_core.from_json", "from_json"}
MAY_DECODE = {
    "batches/runner.py": "the answers of our own endpoints",
    "batches/store.py": "what the store wrote",
    "apis/openai/classify.py": "a model's files",
    "core/glance.py": "it builds nothing, or a value of 200 bytes",
    "apis/ollama/described.py": "a model's files",
    "apis/ollama/models.py": "a model's files",
    "core/request.py": "a body whose shape was checked",
    "apis/responses/store.py": "what the store wrote",
    "apis/responses/tools.py": "the arguments of an answer",
    "core/resume.py": "text of known types, of a router",
    "core/sections.py": "the arguments of an answer",
    "../ray/ingress.py": "what a replica answers",
    "../ray/relay.py": "what a replica marks",
    "../ray/replica.py": "what its server answers",
    "../registry/front.py": "an error of a server of ours",
    "../registry/needs.py": "a file of ours",
    "../registry/server.py": "what a server of ours says",
}
"""The files of the rooms that clients reach which read JSON, with what it is. A value of a client's is read by
`server/core/glance.py`, or by `request.parse` once its shape is checked: else 8 MB of brackets stop the interpreter."""


def test_what_a_client_sent_is_decoded_in_few_places() -> None:
    server = PACKAGE / "server"
    found = {
        os.path.relpath(file, server)
        for room in ("server", "registry", "ray")
        for file in (PACKAGE / room).rglob("*.py")
        for node in nodes_of(file.read_text(encoding="utf-8"))
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("msgspec.") in DECODES
    }
    assert found == MAY_DECODE.keys()


def test_every_room_says_what_it_is_for() -> None:
    """In three to ten lines: what a folder or a crate is for, what does not belong there, and where to start."""
    said = {file.parent.name: ast.get_docstring(ast.parse(file.read_text())) for file in PACKAGE.glob("*/__init__.py")}
    for file in (ROOT / "rust").glob("*/src/lib.rs"):
        said[file.parts[-3]] = "".join(re.findall(r"^//!.*\n", file.read_text(), re.MULTILINE)).rstrip()
    said.pop("server")
    lines = {room: 0 if text is None else text.count("\n") + 1 for room, text in said.items()}
    assert {room: number for room, number in lines.items() if not 3 <= number <= 10} == {}


def begins_with_of(source: str) -> list[int]:
    """Lines of docstrings, those of names among them, that say whose something is and not what it is."""
    texts = (node.value for node in nodes_of(source) if isinstance(node, ast.Expr))
    constants = (text for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str))
    return [text.lineno for text in constants if str(text.value).startswith("Of ")]


def test_docstrings_say_what_a_thing_is() -> None:
    files = sorted(PACKAGE.rglob("*.py*"))
    found = {
        f"{file.relative_to(PACKAGE).as_posix()}:{line}"
        for file in files
        if file.suffix in (".py", ".pyi")
        for line in begins_with_of(file.read_text())
    }
    assert found == set()


TESTS = ROOT / "tests"
MAX_PRIVATE = 100
# names of the language, and our module
PUBLIC_BY_CONTRACT = {"_asdict", "_exit", "_fields", "_getframe", "_replace", "_rust"}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name[:1] == "_" and name[:2] != "__" and name not in PUBLIC_BY_CONTRACT


OWN = ("self", "cls", "super()")
MAYBE_PRIVATE = re.compile(  # most files have nothing of the kind, and need no parsing
    r"""(?<!\bself)(?<!\bcls)\._[a-z]|["']([\w.]*\.)?_[a-z]\w*["']|import\b.*\W_[a-z]|^ +_\w+,$""",
    re.IGNORECASE | re.MULTILINE,
)


def private_uses(source: str) -> list[int]:
    """Lines that read, set or import a private name of something else: `one._name`, `setattr(one, "_name", ...)`,
    `setattr("module._name", ...)`, `from module import _name`."""
    lines = list[int]()
    for node in ast.walk(ast.parse(source)) if MAYBE_PRIVATE.search(source) else ():
        names: list[object] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr] if is_private(node.attr) and ast.unparse(node.value) not in OWN else []
        elif isinstance(node, ast.ImportFrom):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")).endswith("attr"):
            names = [str(one.value).rpartition(".")[2] for one in node.args[:2] if isinstance(one, ast.Constant)]
        lines += [getattr(node, "lineno", 0) for name in names if is_private(name)]
    return lines


def test_private_uses_are_found() -> None:
    found = ("a._b", "a.b._c = 1", "setattr(a, '_b', 1)", "patch.setattr('a._b', 1)", "from a import _b")
    assert [private_uses(one) for one in (*found, "getattr(a, '_b')", "from a import (\n    _b,\n)")] == [[1]] * 7
    others = ("self._a", "super()._a()", "a.__init__", "os._exit(0)", "from minisgl import _rust")
    assert [private_uses(one) for one in (*others, "setattr(a, 'b', '_c')")] == [[]] * 6


def test_tests_reach_into_few_objects() -> None:
    """A test of an implementation breaks with it. The ceiling only falls."""
    found = [
        f"{file.relative_to(TESTS).as_posix()}:{line}"
        for file in sorted(TESTS.rglob("*.py"))
        for line in private_uses(file.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MAX_PRIVATE, "\n".join(found)
