"""The work of `minisgl batch`: uploads the input file to its server, waits for the batch and writes the output file.

Invariants: the output file is complete or missing, with each input line once and in order; answered lines are not
computed again as long as the input file is the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from minisgl.config import ConfigError
from minisgl.server.batches.lines import MAX_FILE_BYTES, BadLine, check_file
from minisgl.server.batches.store import DATABASE, remove
from minisgl.utils.progress import Display

PARTS = ("output.jsonl", "error.jsonl", "whole.jsonl")
"""Files of a batch next to the store: responses, errors, and both merged."""
POLL_S = 0.25
_OPEN = frozenset({"in_progress", "finalizing", "cancelling"})


class Failed(Exception):
    """A batch that produced no output. The text says why."""


class Job:
    """A run of `minisgl batch`. The folder `state` stores answers until the output file is written."""

    def __init__(self, given: Path, output: Path) -> None:
        self._input = given
        self._output = output
        self.state = output.with_name(f"{output.name}.state")
        if not given.is_file():
            raise ConfigError(f"{given}: no such file")
        if given.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{given}: more than {MAX_FILE_BYTES} bytes: split it")
        try:
            with given.open("rb") as file:
                check_file(file, MAX_FILE_BYTES)  # before a model is loaded for it
        except BadLine as error:
            raise ConfigError(f"{given}: {error}") from error

    def is_done(self) -> bool:
        """Return True, after cleaning up, if the output is complete. Raises `ConfigError` if it is another run's."""
        if not self._output.exists():
            return False
        if not (self.state / DATABASE).is_file():
            raise ConfigError(f"-o {self._output}: exists already: name another file, or remove it")
        self.clean_up()
        _say(f"{self._output}: is complete")
        return True

    def clean_up(self) -> None:
        if not remove(self.state, PARTS):
            _say(f"{self.state}: is not removed: it has other files than a batch's")

    async def run(self, url: str, key: str | None, gone: asyncio.Future[int]) -> int:
        """Run the batch and return the exit code. `gone` is done when the server has ended. Raises `Failed`."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600.0) as http:
            work = asyncio.ensure_future(self._run(http))
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                raise Failed("its server has ended: run the same command again to continue")
            return await work

    async def _run(self, http: httpx.AsyncClient) -> int:
        digest = await asyncio.to_thread(_digest, self._input)
        batch = await self._batch(http, digest)
        display = Display(_say, sys.stderr if sys.stderr.isatty() else None)
        while batch["status"] in _OPEN:
            counts = batch["request_counts"]
            display("answering the lines of the file", counts["completed"] + counts["failed"], counts["total"])
            await asyncio.sleep(POLL_S)
            batch = _checked(await http.get(f"/v1/batches/{batch['id']}"))
        counts = batch["request_counts"]
        display("answering the lines of the file", counts["completed"] + counts["failed"], counts["total"])
        if batch["status"] != "completed":
            reasons = [one["message"] for one in (batch["errors"] or {"data": []})["data"]]
            raise Failed(f"the batch is {batch['status']}: {', '.join(reasons) or 'see ' + str(self.state)}")
        parts = [self.state / name for name in PARTS[:2]]
        for path, file_id in zip(parts, (batch["output_file_id"], batch["error_file_id"]), strict=True):
            await _fetch(http, file_id, path)
        await asyncio.to_thread(self._write, *parts)
        _say(f"{self._output}: {counts['completed']} answers, {counts['failed']} errors")
        return 0

    async def _batch(self, http: httpx.AsyncClient, digest: str) -> dict[str, Any]:
        """Return the unfinished batch of an earlier run, or create one. Raises `Failed` if that has another input."""
        batches = _checked(await http.get("/v1/batches"))["data"]
        if batches and batches[0]["status"] in (*_OPEN, "completed"):
            if batches[0]["metadata"] != {"sha256": digest}:
                raise Failed(f"{self.state}: has answers to another input: remove it, or name another output")
            before: dict[str, Any] = batches[0]
            return before
        with self._input.open("rb") as file:
            named = {"file": (self._input.name, file)}
            uploaded = _checked(await http.post("/v1/files", files=named, data={"purpose": "batch"}))
        url = next(iter_lines(self._input))["url"]
        fields = {"input_file_id": uploaded["id"], "endpoint": url, "completion_window": "14d"}
        return _checked(await http.post("/v1/batches", json={**fields, "metadata": {"sha256": digest}}))

    def _write(self, output: Path, errors: Path) -> None:
        """Merge answers and errors into the output file, in the order of the input."""
        part = self.state / PARTS[2]
        with part.open("wb") as file, output.open("rb") as answers, errors.open("rb") as failures:
            answer, failure = answers.readline(), failures.readline()
            for line in iter_lines(self._input):
                if answer and json.loads(answer)["custom_id"] == line["custom_id"]:
                    file.write(answer)
                    answer = answers.readline()
                else:
                    file.write(failure)
                    failure = failures.readline()
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._output)


def iter_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of an input file, which must have been checked, as JSON objects."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


async def _fetch(http: httpx.AsyncClient, file_id: str | None, path: Path) -> None:
    with path.open("wb") as file:
        if file_id is not None:
            async with http.stream("GET", f"/v1/files/{file_id}/content") as answer:
                async for piece in answer.aiter_bytes():
                    file.write(piece)


def _checked(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON body of a response. Raises `Failed` unless its status is 200."""
    body: dict[str, Any] = answer.json()
    if answer.status_code != 200:
        raise Failed(body["error"]["message"])
    return body


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
