"""What `make wheel-test` takes for a server that serves; the installation itself needs a wheel and a registry."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools.try_wheel import TOOLS, Installed, NotAsItShouldBe, check_answers

PAGE = '<title>minisgl</title><script src="web/js/main.js"></script>'


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/": PAGE, "/web/js/main.js": "main()"}
        self.answer = "It is Paris."

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send("text/html", self.server.files[self.path])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send("application/json", json.dumps({"choices": [{"message": {"content": self.server.answer}}]}))

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_right_answer_and_a_whole_page(server: Server) -> None:
    assert check_answers(server.url) == "It is Paris."


def test_what_is_not_as_it_should_be(server: Server) -> None:
    server.answer = "It is London."
    with pytest.raises(NotAsItShouldBe, match="London"):
        check_answers(server.url)
    server.files["/web/js/main.js"] = ""
    with pytest.raises(NotAsItShouldBe, match=r"web/js/main\.js is empty"):
        check_answers(server.url)
    server.files["/"] = "<title>no scripts</title>"
    with pytest.raises(NotAsItShouldBe, match="links nothing"):
        check_answers(server.url)
    server.files["/"] = '{"error": 404}'
    with pytest.raises(NotAsItShouldBe, match="404"):
        check_answers(server.url)


def test_an_environment_without_tools(tmp_path: Path) -> None:
    there = Installed(tmp_path, with_pip=False)
    assert [name for name in TOOLS if shutil.which(name, path=there.env["PATH"])] == []
    assert "PYTHONPATH" not in there.env
    done = there.run("python", "-c", "import sys; print(sys.prefix)")
    assert done.stdout.strip() == str(there.folder)
    assert there.run("python", "-c", "import minisgl").returncode != 0
    before = there.megabytes()
    (there.folder / "file").write_bytes(bytes(3_000_000))
    assert there.megabytes() - before == pytest.approx(3)
