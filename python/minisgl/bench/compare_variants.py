"""The variants of `minisgl bench compare`: servers, driven by a load generator, and programs that answer by lines.

    with start(name, settings) as variant:      # raises `Missing` with the reason
        times = variant.ask(prompts, num_out)

Invariants: all that a variant started ends with it; one that cannot start, or fails, says why and ends no other.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import httpx
import msgspec
import numpy as np

from minisgl import envs
from minisgl.bench.load import HTTP_TIMEOUT_S, Server, first_model, generator
from minisgl.bench.serve_metrics import tokens_of
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess
from minisgl.config import MODEL_SMOLLM2, ConfigError
from minisgl.weights.sources import find_smollm2, resolve_model

START_TIMEOUT_S = 600.0
ASK_TIMEOUT_S = 3600.0
POLL_S = 0.5
TORCH_DTYPES = ("float32", "bfloat16", "float16")
HERE = Path(__file__).parent
LLAMA_SERVER = "llama-server"
BODY = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


class Missing(Exception):
    """A variant that cannot be measured here. The text says why."""


@dataclass(frozen=True, slots=True)
class Times:
    """Times in seconds of prompts that were sent together. `first_s` is the time to each one's first text, or None
    without a stream. `gaps_s` are the times between pieces of text, of all answers."""

    total_s: float
    first_s: tuple[float, ...] | None
    num_in: int
    num_out: int
    gaps_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer, up to where the model ends it."""

    text: str
    num_in: int  # tokens of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings with which every variant starts. `pythons`: interpreters by variant; `llama_bin`: a folder with
    llama.cpp's programs, in place of the package; `urls`: running servers by name; `flags`: of `minisgl serve`;
    `max_len`: tokens of a prompt and its answer."""

    model: str
    dtype: str
    gguf: Path | None
    threads: int
    max_sequences: int
    max_len: int
    pythons: Mapping[str, str]
    llama_bin: Path | None
    urls: Mapping[str, str]
    flags: tuple[str, ...]

    def python(self, variant: str) -> str:
        return self.pythons.get(variant, sys.executable)

    def folder(self) -> str:
        return str(resolve_model(self.model, lambda *_: None))

    def gguf_file(self) -> Path:
        if self.gguf is not None:
            return self.gguf
        if self.model == MODEL_SMOLLM2:
            return find_smollm2()
        if self.model.endswith(".gguf"):
            return Path(self.model).expanduser()
        raise Missing("needs a GGUF file of the model: --gguf FILE")


class Variant(Protocol):
    """An engine or server to compare. Its methods raise `Missing` if it fails."""

    version: str
    max_sequences: int | None  # sequences at once; None: no limit
    pid: int | None  # its first process; None: not started here

    def ask(self, prompts: Sequence[str], num_out: int) -> Times:
        """Send all prompts at once and return their times. Each gets exactly `num_out` tokens."""

    def answer(self, prompt: str, max_out: int) -> Answer: ...


class HttpVariant:
    def __init__(self, server: Server, version: str, pid: int | None = None) -> None:
        self._server = server
        self.url = server.url
        self.version = version
        self.max_sequences: int | None = None
        self.pid = pid

    def dtype(self) -> str:
        """Return the dtype in which a minisgl server computes. Raises `Missing`."""
        try:
            answer = httpx.get(self.url + "/health", headers=dict(self._server.headers()), timeout=HTTP_TIMEOUT_S)
            name = str(answer.raise_for_status().json()["dtype"])
            return name if name in TORCH_DTYPES else "float32"  # the CPU engine multiplies blocks with float32
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise Missing(f"{self.url}/health does not name the server's dtype: {error!r}: give --dtype") from error

    def ask(self, prompts: Sequence[str], num_out: int) -> Times:
        fixed = {**BODY, "model": self._server.model, "max_tokens": num_out}
        result = generator()(
            self._server.url + "/v1/completions",
            [msgspec.json.encode({**fixed, "prompt": prompt}) for prompt in prompts],
            chains=[1] * len(prompts),
            concurrency=len(prompts),
            headers=self._server.headers(),
            timeout_s=ASK_TIMEOUT_S,
        )
        if result["failure"].any():
            names = {result["failures"][code] for code in result["failure"].tolist() if code}
            said = next((text for text in result["errors"] if text), "")
            raise Missing(f"a request failed: {', '.join(sorted(names))} {said[:200]}".rstrip())
        texts = result["text_events"] > 0  # half a character is a token without text
        first = np.where(texts, result["first"], result["end"]) - result["sent"]
        total = float(np.where(texts, result["last"], result["end"]).max() - result["sent"].min())
        num_in, num_out = int(np.maximum(result["prompt_tokens"], 0).sum()), int(tokens_of(result).sum())
        return Times(total, tuple(first.tolist()), num_in, num_out, tuple(result["gaps"].tolist()))

    def answer(self, prompt: str, max_out: int) -> Answer:
        body = {"temperature": 0, "seed": 0, "model": self._server.model, "max_tokens": max_out, "prompt": prompt}
        headers = dict(self._server.headers())
        try:
            answer = httpx.post(self.url + "/v1/completions", json=body, headers=headers, timeout=ASK_TIMEOUT_S)
            result = answer.raise_for_status().json()
            return Answer(str(result["choices"][0]["text"]), int(result["usage"]["prompt_tokens"]))
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise Missing(f"an answer failed: {error!r}"[:300]) from error


class LineVariant:
    """A variant that is a program: it gets lines of JSON and answers each with one."""

    def __init__(self, child: Child, version: str, max_sequences: int | None) -> None:
        self._child = child
        self.version = version
        self.max_sequences = max_sequences
        self.pid: int | None = child.process.pid

    def ask(self, prompts: Sequence[str], num_out: int) -> Times:
        times = self._child.ask({"prompts": list(prompts), "num_out": num_out})
        first = None if times["first_s"] is None else (float(times["first_s"]),)
        return Times(times["total_s"], first, times["num_in"], times["num_out"], tuple(times["gaps_s"]))

    def answer(self, prompt: str, max_out: int) -> Answer:
        result = self._child.ask({"answer": prompt, "num_out": max_out})
        return Answer(str(result["text"]), int(result["num_in"]))


class Child:
    """A process that is stopped with the variant, together with its own children. With `talks` it answers by lines of
    JSON; otherwise its output is a log."""

    def __init__(self, command: Sequence[str], *, talks: bool = True) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        pipe = subprocess.PIPE
        out = pipe if talks else self._log
        try:
            self.process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=out,
                stderr=self._log,
                start_new_session=True,
                env=envs.child_environment({}),
            )
        except OSError as error:
            raise Missing(f"{command[0]}: {error.strerror}") from error

    def line(self, timeout_s: float) -> dict[str, Any]:
        """Return the process's next output line as JSON. Raises `Missing` if it ended or is silent for `timeout_s`."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            raise Missing(f"ended: {self.last_line()}" if ready else f"said nothing for {timeout_s:g} s")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise Missing(f"ended: {self.last_line()}") from error
        return self.line(ASK_TIMEOUT_S)

    def last_line(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "without a word"

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: only zombies are left
            os.killpg(self.process.pid, signal.SIGKILL)  # the whole session, as a server's children may outlive it
        for pipe in (self.process.stdin, self.process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


# ------------------------------------------------------------------------------------------------------------ starting


@contextlib.contextmanager
def start(name: str, setup: Setup) -> Iterator[Variant]:
    """Start the variant `name`, or use the server at its URL, during the `with`. Raises `Missing`."""
    make = VARIANTS.get(name, _given)
    try:
        with make(name, setup) as variant:
            yield variant
    except (ServerFailed, ConfigError) as error:
        raise Missing(str(error).splitlines()[-1][:300]) from error


@contextlib.contextmanager
def _minisgl(name: str, setup: Setup) -> Iterator[Variant]:
    flags = ("--model", setup.model, "--dtype", setup.dtype, "--num-threads", str(setup.threads))
    rows = ("--max-running-requests", str(setup.max_sequences))
    with ServerProcess(Launch(flags=(*flags, *rows, *setup.flags))) as own:
        yield HttpVariant(
            Server(own.url, own.model, envs.api_key(), own), importlib.metadata.version("minisgl"), own.pid
        )


@contextlib.contextmanager
def _transformers(name: str, setup: Setup) -> Iterator[Variant]:
    python, streams = setup.python(name), name.endswith("stream")
    _require(python, "transformers")
    dtype = "float32" if setup.dtype == "auto" else setup.dtype
    program = (python, "-P", str(HERE / "compare_transformers.py"), setup.folder(), dtype, str(setup.threads))
    with Child((*program, "stream" if streams else "whole")) as child:
        version = str(child.line(START_TIMEOUT_S)["version"])
        yield LineVariant(child, version, 1 if streams else None)


@contextlib.contextmanager
def _llama_cpp(name: str, setup: Setup) -> Iterator[Variant]:
    python, file = setup.python(name), setup.gguf_file()
    length = -(-setup.max_len // 256) * 256
    if setup.llama_bin is not None:
        with llama_server(setup.llama_bin, file, setup.threads, setup.max_sequences, length) as (child, url):
            yield HttpVariant(Server(url, first_model(url, None)), "llama-server", child.process.pid)
        return
    _require(python, "xllamacpp")
    sizes = map(str, (setup.threads, setup.max_sequences, length))
    with Child((python, "-P", str(HERE / "compare_llama_cpp.py"), str(file), *sizes)) as child:
        ready = child.line(START_TIMEOUT_S)
        yield HttpVariant(Server(ready["url"], file.stem), f"xllamacpp {ready['version']}", child.process.pid)


@contextlib.contextmanager
def llama_server(folder: Path, file: Path, threads: int, parallel: int, length: int) -> Iterator[tuple[Child, str]]:
    """Start llama.cpp's own server and yield its process and URL: `parallel` sequences of `length` tokens, without a
    prefix cache. Raises `Missing`."""
    program = folder / LLAMA_SERVER
    if not program.is_file():
        raise Missing(f"no {LLAMA_SERVER} in {folder.name}")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(program), "-m", str(file), "--host", "127.0.0.1", "--port", str(port), "-np", str(parallel)]
    command += ["-c", str(parallel * length), "-t", str(threads), "-tb", str(threads)]
    with Child((*command, "--no-cache-prompt", "--cache-ram", "0"), talks=False) as child:
        wait_until_healthy(url := f"http://127.0.0.1:{port}", child)
        yield child, url


def _launched(package: str, module: str, model_flag: str) -> Callable[[str, Setup], Any]:
    """Return the variant of another project's server, started by its own command."""

    @contextlib.contextmanager
    def make(name: str, setup: Setup) -> Iterator[Variant]:
        python = setup.python(name)
        version = _require(python, package)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        flags = (model_flag, setup.folder(), "--dtype", setup.dtype, "--host", "127.0.0.1", "--port", str(port))
        with Child((python, "-m", module, *flags), talks=False) as child:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, child)
            yield HttpVariant(Server(url, first_model(url, None)), version, child.process.pid)

    return make


@contextlib.contextmanager
def _given(name: str, setup: Setup) -> Iterator[Variant]:
    url = setup.urls[name].rstrip("/").removesuffix("/v1")
    yield HttpVariant(Server(url, first_model(url, envs.api_key()), envs.api_key()), "given")


def _require(python: str, package: str) -> str:
    """Return the version of a package in another interpreter, without importing it. Raises `Missing`."""
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    try:
        done = subprocess.run((python, "-P", "-c", program), capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise Missing(f"{python}: {error.strerror}") from error
    if done.returncode:
        raise Missing(
            f"the package {package} is not installed (--python VARIANT=INTERPRETER names another environment)"
        )
    return f"{package} {done.stdout.strip()}"


def wait_until_healthy(url: str, child: Child) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if child.process.poll() is not None:
            raise Missing(f"ended: {child.last_line()}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url + "/health", timeout=POLL_S).status_code == 200:
                return
        time.sleep(POLL_S)
    raise Missing(f"was not ready after {START_TIMEOUT_S:g} s")


VARIANTS: dict[str, Callable[[str, Setup], Any]] = {
    "minisgl": _minisgl,
    "transformers": _transformers,
    "transformers-stream": _transformers,
    "llama.cpp": _llama_cpp,
    "vllm": _launched("vllm", "vllm.entrypoints.openai.api_server", "--model"),
    "sglang": _launched("sglang", "sglang.launch_server", "--model-path"),
}
