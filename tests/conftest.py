"""Fixtures of all tests, and what a run says at its end of the tests that it left out.

Invariants: whatever drives a scheduler takes it from `control_plane`, and runs under every one; a server that the tests
of a file share takes its front end from `front_end`, and they run under both; a test that did not run is counted with
its reason, in one process or in several.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import inspect
import logging
import os
import shutil
import subprocess
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil
import pytest
import uvloop
from hypothesis import HealthCheck, settings

from minisgl import envs
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from tests.helpers import forking, parts
from tests.helpers.gateway import has_gateway
from tests.helpers.processor import without_amx
from tests.helpers.seconds import WAIT_S, Meter, Tally, file_of, longest_first, patiently, recorded

os.environ.setdefault(envs.HEAD_WAIT, str(int(WAIT_S)))  # of streams: a slow machine changes no status and no event
for _limit in ("connect", "read", "write", "pool"):  # 5 s of whoever names no limit: a verdict on a busy machine
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _limit, WAIT_S)
CONTROL_PLANES = ("python", "rust_hotpath")
FRONT_ENDS = ("rust", "python")
TIMEOUT_S, SLOW_TIMEOUT_S = 180, 1800  # on a quick, quiet machine; a failure, not a measurement
WHOLE_SERVERS = {"clients", "e2e"}  # folders
MAX_EXAMPLES = 40  # of a property, where it is not a long run
# A slow machine, or what is drawn by chance, is no failure.
settings.register_profile(
    "minisgl",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("minisgl")
_DESELECTED: Counter[str] = Counter()  # by reason
MARKED = {
    "slow": "slow (make slow-test)",
    "wide": "wide (make wide-test)",
    "browser": "in a browser (make browser-test)",
}
BOTH_FRONT_ENDS = ("test_http", "test_middleware", "test_request", "test_resume", "test_errors", "test_gateway")
"""Files of tests/server that `make test` runs with both front ends."""
COMPARED = {"gateway", "frontend"}
"""Folders whose subject is that front ends are alike."""
_LEFT_OUT = "left_out"  # its key in what a worker process hands over
_METER, _TALLY = Meter(), Tally()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--frontend", choices=FRONT_ENDS, help="of all servers that tests start (default: see front_end)")
    parser.addoption("--times", type=int, default=1, help="of the long random tests (-m slow) so many times the cases")
    parser.addoption("--part", action="append", choices=(parts.CORE, *parts.PARTS), help="of the suite")
    parser.addoption("--slice", type=slice_of, help="I/N: of the tests that are chosen the I-th of N shares, from 0")
    parser.addoption("--record-seconds", action="store_true", help="keep what each file took: tests/seconds.json")


def slice_of(text: str) -> tuple[int, int]:
    """Parse "I/N": a share's index, from 0, and the number of shares."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: must be I/N with 0 <= I < N")
    return int(index), int(count)


def in_slice(item: pytest.Item, index: int, count: int) -> bool:
    """Whether a test is in a share: by the hash of its file's name, so that the shares are the same everywhere and a
    test finds what tests before it in the file left in their server. Tests that want the extension built once more are
    in one share."""
    is_built = "panicking" in getattr(item, "fixturenames", ())
    return zlib.crc32(b"panicking" if is_built else file_of(item.nodeid).encode()) % count == index


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the parts that have commands of their own, where no path was given."""
    if collection_path.suffix != ".py" or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return None
    part = parts.part_of(collection_path)
    if part in (config.getoption("--part") or [parts.CORE]):
        return None
    if collection_path.name.startswith("test_"):
        _DESELECTED[f"files of the part {part} ({parts.command_of(part)})"] += 1
    return True


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout asks
def pytest_configure(config: pytest.Config) -> None:
    if config.option.timeout is None:
        config.option.timeout = patiently(TIMEOUT_S)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every server that a test starts compiles our modules
    sys.dont_write_bytecode = False
    if (chosen := config.getoption("--frontend")) is not None:
        os.environ[envs.FRONTEND] = chosen  # for servers that are processes


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.pluginmanager.hasplugin("dsession"):
        _TALLY.show_progress(session.config.get_terminal_writer().line)
    else:
        gc.disable()  # what is imported and collected stays


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # no later collection goes through a million objects again
    gc.enable()
    _METER.reset()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "front_end" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--frontend")
        names: tuple[Any, ...] = FRONT_ENDS if chosen is None else (chosen,)
        path = metafunc.definition.path
        if chosen is None and path.parent.name in WHOLE_SERVERS:
            names = (FRONT_ENDS[0], pytest.param(FRONT_ENDS[1], marks=pytest.mark.slow))
        elif chosen is None and path.parent.name not in COMPARED and not path.name.startswith(BOTH_FRONT_ENDS):
            names = (FRONT_ENDS[0], pytest.param(FRONT_ENDS[1], marks=pytest.mark.wide))
        if metafunc.definition.get_closest_marker("python_front_end"):
            names = ("python",)
        metafunc.parametrize("front_end", names, scope="module", indirect=True)


@pytest.fixture(scope="module")
def front_end(request: pytest.FixtureRequest) -> str:
    """Both, one after the other, unless `--frontend` chooses one; of whole servers the other one only in slow tests."""
    name: str = request.param
    if name == "rust" and not has_gateway():
        pytest.skip("the extension has no gateway")
    return name


@pytest.fixture(scope="session")
def panicking(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The extension with the feature `test-panics`, which panics on order, beside the one that is served. In the debug
    profile: overflows and debug assertions panic too."""
    if shutil.which("cargo") is None:
        pytest.skip("cargo is missing: the extension with test-panics cannot be built")
    root = Path(__file__).parents[1]
    target = root / "target"  # what clippy and cargo's tests have built there is not built again
    subprocess.run(
        ["cargo", "build", "--quiet", "--locked", "-p", "minisgl-py", "--features", "extension-module,test-panics"],
        cwd=root,
        env=os.environ | {"CARGO_TARGET_DIR": str(target)},
        check=True,  # without a limit of time: a machine may be slow
    )
    built = next(target.glob("debug/*_rust.so"), None) or next(target.glob("debug/*_rust.dylib"))
    copy = tmp_path_factory.mktemp("panicking") / "_rust.abi3.so"
    shutil.copy(built, copy)
    spec = importlib.util.spec_from_file_location("panicking._rust", copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_amx() -> Iterator[None]:
    """For a test that compares a text with one of which a part was computed again: after a retraction, elsewhere."""
    with without_amx():
        yield


@pytest.fixture(scope="session")
def times(request: pytest.FixtureRequest) -> int:
    found: int = request.config.getoption("--times")
    return found


def few_examples(item: pytest.Item, is_long_run: bool) -> bool:
    """Bound the examples of a property; a long run has all that it asks for. True where that makes it a slow one."""
    given = getattr(item, "obj", None)
    asked: settings | None = getattr(given, "_hypothesis_internal_use_settings", None)
    if asked is None or asked.max_examples <= MAX_EXAMPLES:
        return False
    if not is_long_run:
        given._hypothesis_internal_use_settings = settings(asked, max_examples=MAX_EXAMPLES)  # type: ignore[union-attr]
    return is_long_run


@pytest.hookimpl(tryfirst=True)  # marks are given before -m chooses by them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def suits(item: pytest.Item) -> bool:
        name = getattr(item, "callspec", None) and item.callspec.params.get("each_control_plane")  # type: ignore[attr-defined]
        return item.get_closest_marker("reference_only") is None or name in (None, "python")

    items[:] = [item for item in items if suits(item)]
    for item in items:
        if few_examples(item, config.option.markexpr == "slow"):
            item.add_marker("slow")
        if parts.part_of(item.path) in ("torch", "bench"):
            item.add_marker("wide")
        if "panicking" in getattr(item, "fixturenames", ()):  # a build of the extension
            item.add_marker("slow")
        if (limit := item.get_closest_marker("timeout")) is not None:
            item.add_marker(pytest.mark.timeout(patiently(limit.args[0])), append=False)
        elif item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(patiently(SLOW_TIMEOUT_S)))
    if (share := config.getoption("--slice")) is not None:
        others = [item for item in items if not in_slice(item, *share)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if in_slice(item, *share)]
    if hasattr(config, "workerinput"):
        items[:] = [items[at] for at in longest_first([item.nodeid for item in items], recorded())]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.function).parameters}
    uvloop.run(asyncio.wait_for(pyfuncitem.function(**given), WAIT_S))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _METER.stamp(report)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _TALLY.add(report)


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """Lines of progress stand for dots where several processes test."""
    if config.pluginmanager.hasplugin("dsession") and report.passed:
        return ("passed", "", "") if report.when == "call" else ("", "", "")
    return None


@pytest.fixture(scope="session", autouse=True)
def _one_tls_context() -> Iterator[None]:
    """Of all HTTP clients. They speak no TLS, and reading the authorities takes 25 ms, a thousand times in a run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in {"httpx", "httpx2"} & sys.modules.keys():  # the second is what openai and anthropic use
            patch.setattr(f"{name}._transports.default.create_ssl_context", cache(sys.modules[name].create_ssl_context))
        yield


@pytest.fixture(scope="module", autouse=True)
def _leaves_no_process() -> Iterator[None]:
    """A file leaves no process behind. One that has ended, but that nobody waited for, is a warning that names the
    file."""
    parent = psutil.Process()
    before = parent.children()
    yield
    templates = [psutil.Process(pid) for pid in forking.template_processes()]
    started = [child for one in (parent, *templates) for child in one.children()]
    left = [child for child in started if child not in (*before, *templates)]
    gone, alive = psutil.wait_procs(left, timeout=WAIT_S)
    assert not alive, f"left behind: {alive}"
    if gone:
        warnings.warn(f"nobody had waited for {gone}", stacklevel=1)


@pytest.fixture(autouse=True)
def _leaves_the_log_as_it_was() -> Iterator[None]:
    """A server that starts within a test sends its lines to the stderr of that test, which is closed afterwards."""
    loggers = [logging.getLogger(name) for name in ("minisgl", "minisgl.access", "uvicorn")]
    before = [(one.level, list(one.handlers), one.propagate) for one in loggers]
    yield
    for one, (level, handlers, propagate) in zip(loggers, before, strict=True):
        one.setLevel(level)
        one.handlers[:], one.propagate = handlers, propagate


@pytest.fixture(params=CONTROL_PLANES)
def control_plane(request: pytest.FixtureRequest) -> Callable[[ControlPlaneConfig], ControlPlane]:
    name: str = request.param
    return lambda config: make_control_plane(name, config)


@pytest.fixture(params=CONTROL_PLANES)
def each_control_plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every `Driver` of the test drives this one; its name."""
    name: str = request.param
    monkeypatch.setattr("tests.helpers.scheduler.PLANE", name)
    return name


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        marks = (reason for mark, reason in MARKED.items() if item.get_closest_marker(mark))
        _DESELECTED[next(marks, "not chosen by -m or -k")] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    _TALLY.stop()
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--slice") is not None:
        session.exitstatus = pytest.ExitCode.OK  # few files in ten shares: one may be empty
    if session.config.getoption("--record-seconds") and not hasattr(session.config, "workerinput"):
        _TALLY.record()
    handed_over: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if handed_over is not None:
        handed_over[_LEFT_OUT] = dict(_DESELECTED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Each worker process of pytest-xdist collects all tests, and leaves out the same. One that a test ended ends the
    run: pytest-xdist starts another, gives it nothing to do, and waits for ever."""
    if error:
        node.config.pluginmanager.getplugin("dsession").shouldstop = "a test ended its process"
    for reason, count in getattr(node, "workeroutput", {}).get(_LEFT_OUT, {}).items():
        _DESELECTED[reason] = max(_DESELECTED[reason], count)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = Counter[str]()
    for report in terminalreporter.stats.get("skipped", []):
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[said.removeprefix("Skipped: ")] += 1
    if reasons or _DESELECTED:
        terminalreporter.section("not run")
    for title, counts in (("skipped", reasons), ("deselected", _DESELECTED)):
        for reason, count in counts.most_common():
            terminalreporter.line(f"{count:5} {title}: {reason.splitlines()[0]}")
    if len(lines := _TALLY.lines()) > 3:  # of more than one file
        terminalreporter.section("seconds")
        for line in lines:
            terminalreporter.line(line)
