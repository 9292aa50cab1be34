"""/v1/files and /v1/batches of whole servers, by OpenAI's own client; servers that are killed in the middle.

The engine is the echo engine, so that every text is known beforehand.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from minisgl.server.batches.runner import MAX_DEATHS
from tests.helpers import batches
from tests.helpers.e2e import Brake, ServerProcess, refused, serving, slow_device, until
from tests.helpers.meaning import embedded_model
from tests.helpers.seconds import WAIT_S

KEYS = """keys:
- {name: ann, key: sk-ann}
- {name: bob, key: sk-bob}
- {name: small, key: sk-small}
"""
QUOTA = 400_000


@pytest.fixture(scope="module")
def brake(tmp_path_factory: pytest.TempPathFactory) -> Brake:
    return Brake(tmp_path_factory.mktemp("brake"), 0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, brake: Brake) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("batches")
    (folder / "keys.yaml").write_text(KEYS)
    state = ("--state-dir", str(folder / "state"), "--state-quota", str(QUOTA))
    with serving(*batches.FLAGS, *state, "--api-key-file", str(folder / "keys.yaml"), env=brake.env) as running:
        yield running


@pytest.fixture
def ann(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with batches.client(server, "sk-ann") as api:
        yield api
        for file in api.files.list(limit=100):
            api.files.delete(file.id)


def test_a_batch_returns_one_response_for_each_line(server: ServerProcess, ann: openai.OpenAI) -> None:
    before = lines_of(server)
    given = batches.prompts(150)
    lines = batches.requests(given)
    lines[7]["body"]["temperature"] = 9
    file = ann.files.create(file=("night.jsonl", batches.jsonl(lines)), purpose="batch")
    assert (file.filename, file.purpose, file.bytes) == ("night.jsonl", "batch", len(batches.jsonl(lines)))
    assert ann.files.content(file.id).read() == batches.jsonl(lines)
    assert [one.id for one in ann.files.list(purpose="batch")] == [file.id]
    made = ann.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"for": "test"}
    )
    assert (made.status, made.metadata, made.input_file_id) == ("in_progress", {"for": "test"}, file.id)
    found = batches.ended(ann, made.id)
    assert found.status == "completed" and found.completed_at is not None and found.errors is None
    until(lambda: lines_of(server)["waiting"] == lines_of(server)["running"] == 0, "what has ended is counted")
    after = lines_of(server)
    assert after["answered_total"] - before["answered_total"] == 149
    assert after["failed_total"] - before["failed_total"] == 1
    counts = found.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (150, 149, 1)
    texts = batches.texts(batches.content(ann, found.output_file_id))
    want = batches.wanted(given)
    del want["line 7"]
    assert texts == want and list(texts) == list(want)
    said = [line["response"]["body"]["usage"] for line in batches.content(ann, found.output_file_id)]
    assert found.usage is not None and found.usage.input_tokens == sum(one["prompt_tokens"] for one in said) > 1000
    assert found.usage.output_tokens == sum(one["completion_tokens"] for one in said) > 100
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in said)
    assert found.usage.input_tokens_details.cached_tokens == cached > 0
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    [error] = batches.content(ann, found.error_file_id)
    assert error["custom_id"] == "line 7" and error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert next(iter(ann.batches.list(limit=1))).id == made.id
    assert ann.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        ann.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("url", "body", "text"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, ("choices", 0, "message")),
        ("/v1/responses", {"input": "hello"}, ("output", 0)),
    ],
)
def test_batch_responses_equal_those_of_the_endpoint(
    ann: openai.OpenAI, server: ServerProcess, url: str, body: dict[str, Any], text: tuple[str | int, ...]
) -> None:
    same = {**body, "seed": 3, "temperature": 0, "model": "echo", "ignore_eos": True}
    same["max_output_tokens" if url == "/v1/responses" else "max_tokens"] = 20
    lines = [{"custom_id": "only", "method": "POST", "url": url, "body": same}]
    [line] = batches.content(ann, batches.ended(ann, batches.begin(ann, lines, url)).output_file_id)
    head = {"authorization": "Bearer sk-ann"}
    asked = httpx.post(f"{server.url}{url}", json=same, headers=head, timeout=WAIT_S).json()
    told = line["response"]["body"]
    assert told.keys() == asked.keys()
    for at in text:
        told, asked = told[at], asked[at]
    assert told.keys() == asked.keys()
    assert url == "/v1/responses" or told == asked


def test_files_and_batches_of_another_key_are_not_found(ann: openai.OpenAI, server: ServerProcess) -> None:
    batch = batches.ended(ann, batches.begin(ann, batches.requests(["a"])))
    names = [batch.input_file_id, batch.output_file_id]
    with batches.client(server, "sk-bob") as bob:
        assert list(bob.files.list()) == [] and list(bob.batches.list()) == []
        for name in names:
            assert name is not None
            for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
                with pytest.raises(openai.NotFoundError):
                    ask(name)
        for look in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                look(batch.id)
        with pytest.raises(openai.BadRequestError, match=r"input_file_id: there is no such file"):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")


def test_a_key_has_its_quota(server: ServerProcess) -> None:
    with batches.client(server, "sk-small") as small:
        lines = batches.requests(["x" * 1000] * 250)
        small.files.create(file=batches.jsonl(lines), purpose="batch")
        with pytest.raises(openai.APIStatusError, match=r"--state-quota") as caught:
            small.files.create(file=batches.jsonl(lines), purpose="batch")
        assert caught.value.status_code == 413
        # answers count too: those of this one are larger than what is left of it
        more = [batches.request(i, "y", n=64) for i in range(60)]
        batch = batches.ended(small, batches.begin(small, more))
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        assert "--state-quota" in str(batch.errors.data[0].message)
        output, errors = (batches.content(small, name) for name in (batch.output_file_id, batch.error_file_id))
        assert len(output) + len(errors) == 60 and {one["error"]["code"] for one in errors} == {"batch_failed"}


def test_invalid_batches_are_refused(ann: openai.OpenAI) -> None:
    file = ann.files.create(file=batches.jsonl(batches.requests(["a"])), purpose="batch")
    make = ann.batches.create
    with pytest.raises(openai.BadRequestError, match="as in the lines of"):
        make(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="completion_window: must be hours or days"):
        window: Any = "soon"
        make(input_file_id=file.id, endpoint="/v1/completions", completion_window=window)
    with pytest.raises(openai.BadRequestError, match=r"file: line 2: body.stream: batches do not stream") as caught:
        lines = [batches.request(0, "a"), batches.request(1, "b", stream=True)]
        ann.files.create(file=batches.jsonl(lines), purpose="batch")
    assert caught.value.body == {
        "message": "file: line 2: body.stream: batches do not stream: leave it out (got true)",
        "type": "invalid_request_error",
        "param": "body.stream",
        "code": "invalid_jsonl",
        "line": 2,
    }


def test_a_cancelled_batch_has_each_line_once(ann: openai.OpenAI, brake: Brake) -> None:
    given = batches.prompts(600)
    brake.hold(200)
    batch_id = batches.begin(ann, batches.requests(given))
    until(lambda: counts(ann, batch_id)[0] > 0, "it does not begin")
    assert ann.batches.cancel(batch_id).status == "cancelling"
    brake.release()
    batch = batches.ended(ann, batch_id)
    assert batch.status == "cancelled" and batch.cancelled_at is not None
    texts = batches.texts(batches.content(ann, batch.output_file_id))
    left = {line["custom_id"]: line for line in batches.content(ann, batch.error_file_id)}
    assert {line["error"]["code"] for line in left.values()} == {"batch_cancelled"}
    want = batches.wanted(given)
    assert left.keys() | texts.keys() == want.keys() and not left.keys() & texts.keys()
    assert texts == {name: want[name] for name in texts} and texts
    with pytest.raises(openai.ConflictError, match="it is cancelled"):
        ann.batches.cancel(batch_id)


def runs_one(server: ServerProcess) -> bool:
    """Whether its engine has one request."""
    return bool(httpx.get(f"{server.url}/stats", timeout=WAIT_S).json()["engine"]["num_running"] == 1)


def lines_of(server: ServerProcess) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer sk-ann"}, timeout=WAIT_S).text
    found = re.findall(r"^minisgl:batch_lines_(\w+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def counts(api: openai.OpenAI, batch_id: str) -> tuple[int, int]:
    """Answered, and all."""
    found = api.batches.retrieve(batch_id).request_counts
    assert found is not None
    return found.completed + found.failed, found.total


# ------------------------------------------------------------------------------------------------- kills and restarts


def goes_on(tmp_path: Path, ends: Sequence[int], num_lines: int, chance: random.Random, step_ms: int) -> None:
    """A batch of a server that is ended by these signals, at moments of chance, and each time started again. Few of its
    lines run at once, in slow steps, so that they last until the last signal."""
    given, batch_id, brake, folder = batches.prompts(num_lines), "", Brake(tmp_path, step_ms), tmp_path / "state"
    flags = (*batches.FLAGS, "--state-dir", str(folder), "--max-running-requests", "5")
    for at, end in enumerate(ends):
        with ServerProcess(flags, brake.env) as server:
            with batches.client(server) as api:
                batch_id = batch_id or batches.begin(api, batches.requests(given))
                now, left = counts(api, batch_id)[0], len(ends) - at
                enough = now + chance.randrange(1 + (num_lines - now) // (4 * left))
                until(partial(has, api, batch_id, enough), "it stands still")
                found = api.batches.retrieve(batch_id)
                assert found.status == "in_progress", f"end {at} comes when all is answered"
            if end == signal.SIGKILL:
                server.kill()
            else:
                assert f"--state-dir {folder}: another server uses it" in refused(*flags)
                assert server.stop(end) == 0
    with serving(*flags) as server, batches.client(server) as api:
        batch = batches.ended(api, batch_id)
        assert batch.status == "completed" and batch.error_file_id is None and batch.output_file_id is not None
        assert batches.texts(batches.content(api, batch.output_file_id)) == batches.wanted(given)
        assert {one.id for one in api.files.list()} == {batch.input_file_id, batch.output_file_id}
        assert {path.name for path in (folder / "files").iterdir()} == {batch.input_file_id, batch.output_file_id}
        on_disk = (folder / "files" / batch.output_file_id).read_bytes()
        assert on_disk == api.files.content(batch.output_file_id).read() and on_disk.count(b"\n") == num_lines


def has(api: openai.OpenAI, batch_id: str, num_answers: int) -> bool:
    return counts(api, batch_id)[0] >= num_answers


def test_a_batch_goes_on_when_its_server_is_killed(tmp_path: Path) -> None:
    goes_on(tmp_path, [signal.SIGKILL], 400, random.Random(1), step_ms=20)


@pytest.mark.slow
@pytest.mark.timeout(20 * WAIT_S)
def test_a_batch_survives_a_hundred_kills(tmp_path: Path) -> None:
    """All its processes, each time, after one end in order."""
    goes_on(tmp_path, [signal.SIGTERM, *[signal.SIGKILL] * 100], 16_000, random.Random(3), step_ms=2)


@pytest.mark.slow
def test_a_line_that_kills_three_engines_becomes_an_error(tmp_path: Path) -> None:
    """Each ends its server; the fourth server says so in place of an answer."""
    sim = (*slow_device(tmp_path, 1), "--max-seq-len", "4000000")
    flags = (*sim, "--num-pages", "260000", "--state-dir", str(tmp_path / "state"))
    batch_id = ""
    for _ in range(MAX_DEATHS):
        with ServerProcess(flags) as server:
            with batches.client(server) as api:
                if not batch_id:
                    batch_id = batches.begin(api, [batches.request(0, "a", max_tokens=3_000_000, ignore_eos=True)])
                until(partial(runs_one, server), "the line does not run")
            for child in server.children():
                child.kill()
            assert server.process.wait(WAIT_S) == 1
    with serving(*flags) as server, batches.client(server) as api:
        until(lambda: api.batches.retrieve(batch_id).status == "completed", "the line is asked again")
        file_id = api.batches.retrieve(batch_id).error_file_id
        assert file_id is not None and '"engine_died"' in api.files.content(file_id).text


def test_an_interactive_request_preempts_batch_lines(tmp_path: Path) -> None:
    """A line of a batch has the only row, and thousands of steps before it."""
    sim = (*slow_device(tmp_path, 1), "--max-seq-len", "40000")
    rows = ("--num-pages", "5000", "--max-running-requests", "1", "--state-dir", str(tmp_path / "state"))
    with serving(*sim, *rows) as server, batches.client(server) as api:
        long = {"max_tokens": 20_000, "ignore_eos": True}
        batch_id = batches.begin(api, [batches.request(i, "a", **long) for i in range(3)])
        until(partial(runs_one, server), "no line runs")
        api.completions.create(model="smollm2", prompt="b", max_tokens=20, extra_body={"ignore_eos": True})
        assert counts(api, batch_id) == (0, 3)
        metrics = partial(httpx.get, f"{server.url}/metrics", timeout=WAIT_S)
        until(lambda: "minisgl:ttft_seconds_count 1" in metrics().text, "the answer is not counted")
        api.batches.cancel(batch_id)
        assert batches.ended(api, batch_id).status == "cancelled"


# ------------------------------------------------------------------------------------------------- what it is good for


@pytest.mark.slow
def test_batch_lines_are_ordered_by_common_prefix(tmp_path: Path) -> None:
    """The cache has room for a few of the prefixes, which the file has in no order."""
    given = [f"{group:03d} " + "long " * 40 + str(i) for i in range(4) for group in range(50)]
    random.Random(1).shuffle(given)
    flags = ("--engine", "echo", "--model", "echo", "--num-pages", "300", "--page-size", "4")

    def share(usages: Sequence[Any]) -> float:
        cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
        return float(cached / sum(one["prompt_tokens"] for one in usages))

    with serving(*flags, "--state-dir", str(tmp_path)) as server, batches.client(server) as api:
        batch = batches.ended(api, batches.begin(api, batches.requests(given)))
        lines = batches.content(api, batch.output_file_id)
        assert len(lines) == len(given)
        ordered = share([line["response"]["body"]["usage"] for line in lines])
    with serving(*flags) as server, ThreadPoolExecutor(4) as pool:
        bodies = [one["body"] for one in batches.requests(given)]
        ask = partial(httpx.post, f"{server.url}/v1/completions", timeout=WAIT_S)
        as_they_come = share([one.json()["usage"] for one in pool.map(lambda body: ask(json=body), bodies)])
    print(f"of the prompts' tokens were cached: {ordered:.3f}, as they come {as_they_come:.3f}")
    assert ordered > 0.6 and as_they_come < 0.3


@pytest.mark.slow
def test_embeddings_of_a_batch_are_those_of_requests(tmp_path: Path) -> None:
    embedded_model()
    texts = [f"text {i}" for i in range(20)]
    lines = [{"custom_id": text, "method": "POST", "url": "/v1/embeddings", "body": {"input": text}} for text in texts]
    flags = ("--model", "smollm2", "--num-pages", "256", "--state-dir", str(tmp_path))
    with serving(*flags) as server, batches.client(server) as api:
        batch = batches.ended(api, batches.begin(api, lines, "/v1/embeddings"))
        found = {one["custom_id"]: one["response"]["body"] for one in batches.content(api, batch.output_file_id)}
        for text in texts:
            one = httpx.post(f"{server.url}/v1/embeddings", json={"input": text}, timeout=WAIT_S).json()
            assert found[text] == one
