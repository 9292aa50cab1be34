"""Batches of requests to an echo engine, whose outputs are known in advance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import openai

from tests.helpers.e2e import ServerProcess, until
from tests.helpers.several import expected

ENDED = ("completed", "failed", "expired", "cancelled")
FLAGS = ("--engine", "echo", "--model", "echo", "--num-pages", "2000", "--page-size", "4")
MAX_TOKENS = 8


def request(number: int, prompt: str, **more: Any) -> dict[str, Any]:
    """Return a batch line whose output is `answer(number, prompt)`."""
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "seed": number, "temperature": 0, **more}
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": body}


def answer(number: int, prompt: str) -> str:
    return expected(prompt, MAX_TOKENS, number)


def prompts(count: int) -> list[str]:
    return [f"text number {i}" for i in range(count)]


def requests(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [request(i, text) for i, text in enumerate(texts)]


def jsonl(lines: Iterable[object]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def client(server: ServerProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def begin(api: openai.OpenAI, lines: Iterable[object], endpoint: Any = "/v1/completions", **more: Any) -> str:
    """Upload the lines, create a batch, and return its id."""
    file = api.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    made = api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)
    return made.id


def ended(api: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    """Wait until a batch has ended, and return it."""
    batch: list[openai.types.Batch] = []

    def is_over() -> bool:
        batch[:] = [api.batches.retrieve(batch_id)]
        return batch[0].status in ENDED

    until(is_over, f"{batch_id} does not end")
    return batch[0]


def content(api: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the JSON lines of a file; an empty list if `file_id` is `None`."""
    return [] if file_id is None else [json.loads(line) for line in api.files.content(file_id).text.splitlines()]


def texts(lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the output texts by custom id. Asserts that each line succeeded and occurs once."""
    by_id: dict[str, str] = {}
    for line in lines:
        assert line["custom_id"] not in by_id, "twice"
        assert line["error"] is None and line["response"]["status_code"] == 200, line
        by_id[line["custom_id"]] = line["response"]["body"]["choices"][0]["text"]
    return by_id


def wanted(given: Sequence[str]) -> dict[str, str]:
    return {f"line {i}": answer(i, text) for i, text in enumerate(given)}
