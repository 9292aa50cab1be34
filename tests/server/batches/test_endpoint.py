"""The routes over a scripted engine: lines are in the background and in nobody's way; without a folder it says so."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.config import ApiKey, ConfigError, EngineConfig, ServerConfig
from minisgl.server.batches import endpoint
from minisgl.server.batches import upload as uploads
from minisgl.server.batches.endpoint import num_in_flight
from minisgl.server.batches.store import FileInfo
from minisgl.server.core.request import SMALL_BYTES
from tests.helpers import batches
from tests.helpers.seconds import WAIT_S
from tests.helpers.server import CONFIG, Frontend, check_error, frontend


@pytest.fixture(scope="module")
def server(front_end: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    limits = msgspec.structs.replace(CONFIG.limits, max_queued_requests=2, max_body_bytes=10_000, request_timeout=60.0)
    state = str(tmp_path_factory.mktemp("state"))
    config = msgspec.structs.replace(CONFIG, limits=limits, state_dir=state, state_quota=1 << 20)
    with frontend(front_end=front_end, config=config) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


PURPOSE = {"purpose": "batch"}


def upload(http: httpx.Client, data: bytes) -> httpx.Response:
    return http.post("/v1/files", files={"file": ("in.jsonl", data)}, data=PURPOSE)


def begin(http: httpx.Client, *prompts: str, **more: Any) -> str:
    """A batch's id."""
    lines = [batches.request(i, prompt, **more) for i, prompt in enumerate(prompts)]
    file = upload(http, batches.jsonl(lines)).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = http.post("/v1/batches", json=asked)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["id"]
    return found


def ended(server: Frontend, http: httpx.Client, batch: str) -> dict[str, Any]:
    assert server.app.batches is not None
    store = server.app.batches.state.store
    server.wait_until(lambda: not any(one.id == batch for one in store.open_batches()))
    found: dict[str, Any] = http.get(f"/v1/batches/{batch}").json()
    return found


def test_a_line_is_in_the_background_and_keeps_nobody_waiting(server: Frontend, http: httpx.Client) -> None:
    batch = begin(http, *(f"hang:{i}" for i in range(5)))
    for i in range(5):
        sent = server.engine.wait_for_request(f"hang:{i}")
        assert sent.background and sent.priority == 0
    assert server.waiting == (0, 0)
    for _ in range(3):  # more than may wait
        assert http.post("/v1/completions", json={"prompt": "say:a"}).json()["choices"][0]["text"] == "a"
    assert not server.engine.wait_for_request("say:a").background
    assert http.post(f"/v1/batches/{batch}/cancel").json()["status"] == "cancelling"
    assert ended(server, http, batch)["status"] == "cancelled"


def test_failed_line_is_a_result(server: Frontend, http: httpx.Client) -> None:
    found = ended(server, http, begin(http, "fail:a", "say:b", "x" * 600))
    assert found["status"] == "completed" and found["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    lines = http.get(f"/v1/files/{found['error_file_id']}/content").text.splitlines()
    errors = [msgspec.json.decode(line)["response"] for line in lines]
    assert [one["status_code"] for one in errors] == [500, 400]
    assert errors[1]["body"]["error"]["param"] == "prompt"


def test_batch_lines_do_not_count_as_latency(server: Frontend, http: httpx.Client) -> None:
    def count(name: str) -> float:
        [line] = [one for one in http.get("/metrics").text.splitlines() if one.startswith(f"minisgl:{name} ")]
        return float(line.split()[1])

    names = ("ttft_seconds_count", "e2e_seconds_count", "queue_seconds_count")
    before = [count(name) for name in names]
    tokens = count("generated_tokens_total")
    ended(server, http, begin(http, "say:abc", "say:def"))
    assert [count(name) for name in names] == before and count("generated_tokens_total") == tokens + 8


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"input_file_id": "file-none"}, "input_file_id", "there is no such file"),
        ({"endpoint": "/v1/nowhere"}, "endpoint", "the lines of"),
        ({"completion_window": "15d"}, "completion_window", "at most 14d"),
        ({"completion_window": None}, "completion_window", "must be text"),
        ({"metadata": {"a": 1}}, "metadata.a", "must be text"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds", "3600"),
    ],
)
def test_invalid_batch_names_the_field(http: httpx.Client, asked: dict[str, Any], param: str, said: str) -> None:
    file = upload(http, batches.jsonl([batches.request(0, "say:a")])).json()["id"]
    good = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    error = check_error(http.post("/v1/batches", json={**good, **asked}), 400)
    assert error["param"] == param and said in error["message"]


def test_invalid_upload_names_the_field_and_leaves_no_file(server: Frontend, http: httpx.Client) -> None:
    line = batches.jsonl([batches.request(0, "a")])
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"files": {"file": line}}, 400, "purpose: required"),
        ({"data": {"purpose": "batch"}, "files": {"other": line}}, 400, "file: required"),
        ({"data": {"purpose": "vision"}, "files": {"file": line}}, 400, "purpose: must be batch"),
        ({"data": {"purpose": "batch"}, "files": [("file", line), ("file", line)]}, 400, "it has two files"),
        ({"data": {"purpose": "b" * 5000}, "files": {"file": line}}, 400, "more than 4096 bytes"),
        ({"data": {"purpose": "batch", "expires_after[seconds]": "1"}, "files": {"file": line}}, 400, "3600"),
        ({"data": {"purpose": "batch", "expires_after[seconds]": "00000360099"}, "files": {"file": line}}, 400, "3600"),
        ({"json": {}}, 415, "multipart/form-data"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400, "last boundary"),
        ({"data": {"purpose": "batch"}, "files": {"file": line * (1 + (1 << 20) // len(line))}}, 413, "--state-quota"),
    ]
    before = {one["id"] for one in http.get("/v1/files").json()["data"]}
    for asked, status, said in wrong:
        assert said in check_error(http.post("/v1/files", **asked), status)["message"]
    assert {one["id"] for one in http.get("/v1/files").json()["data"]} == before
    assert server.app.batches is not None
    folder = server.app.batches.state.store.path("").parent / "files"
    server.wait_until(lambda: {path.name for path in folder.iterdir()} == before)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.booleans())
def test_a_hostile_upload_is_a_400(http: httpx.Client, data: bytes, is_form: bool) -> None:
    if is_form:
        answer = upload(http, data)
    else:
        head = {"content-type": "multipart/form-data; boundary=x"}
        answer = http.post("/v1/files", content=b"--x\r\nContent-Disposition: form-data" + data, headers=head)
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text


FILE_HEAD = (
    b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=x\r\n"
    b"content-length: 1000000\r\n%b\r\n"
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)
ALICE, BOB = (ApiKey(name=name, key=name) for name in ("alice", "bob"))


SLOW = FILE_HEAD % b"authorization: Bearer alice\r\n" + b"x" * (2 * SMALL_BYTES)


@pytest.fixture
def keyed(front_end: str, tmp_path: Path, timeout_s: float) -> Iterator[Frontend]:
    limits = msgspec.structs.replace(CONFIG.limits, slow_client_timeout=timeout_s)
    config = msgspec.structs.replace(CONFIG, limits=limits, state_dir=str(tmp_path / "state"), api_keys=(ALICE, BOB))
    with frontend(front_end=front_end, config=config) as running:
        yield running


@pytest.mark.parametrize("timeout_s", [WAIT_S])
def test_uploads_that_trickle_keep_no_place_from_another_key(keyed: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen were 429 for everybody, for ever. Small files need no place."""
    monkeypatch.setattr(endpoint, "MAX_UPLOADS", 4)
    data = batches.jsonl([batches.request(i, "say:a" + "x" * 2000) for i in range(50)])
    state = keyed.app.batches
    assert len(data) > SMALL_BYTES and state is not None
    with keyed.connect(SLOW), keyed.connect(SLOW):
        keyed.wait_until(lambda: state.num_uploads == 2)
        with keyed.http() as http:
            http.headers["authorization"] = "Bearer alice"
            assert check_error(upload(http, data), 429)["code"] == "queue_full"
            assert upload(http, batches.jsonl([batches.request(0, "say:a")])).status_code == 200
            http.headers["authorization"] = "Bearer bob"
            assert upload(http, data).status_code == 200


@pytest.mark.parametrize("timeout_s", [0.5])
def test_uploads_that_trickle_end_where_others_find_no_place(keyed: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_UPLOADS", 4)  # of one key: two
    state, most, slow = keyed.app.batches, 0, list[socket.socket]()
    assert state is not None
    with keyed.http() as http, contextlib.ExitStack() as stack:
        http.headers["authorization"] = "Bearer bob"
        while most < 2 or state.num_uploads == 2:  # one of them ends, and there is a place again
            if most < 2:  # not begun yet, or a pause has ended one
                slow.append(stack.enter_context(keyed.connect(SLOW)))
            for one in slow:
                with contextlib.suppress(OSError):
                    one.sendall(b"x")
            assert upload(http, b"{}").status_code == 400  # and another turn of the loop
            if (most := max(most, state.num_uploads)) == 2:
                monkeypatch.setattr(endpoint, "MAX_UPLOADS", 2)


def test_file_over_the_limit_is_413(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused while it comes, whatever was announced."""
    monkeypatch.setattr(uploads, "MAX_FILE_BYTES", 1000)
    head = {"content-type": "multipart/form-data; boundary=x"}
    begin = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    answer = http.post("/v1/files", content=iter([begin, b"\n" * 2000]), headers=head)  # and no end
    assert "the limit is 1000" in check_error(answer, 413)["message"]


def test_lone_surrogate_in_a_file_name_is_replaced(http: httpx.Client) -> None:
    head = {"content-type": "multipart/form-data; boundary=x"}
    fields = [b'name="purpose"\r\n\r\nbatch', b"name=file; filename*=unicode_escape''%5Cud800.jsonl\r\n\r\n"]
    fields[1] += batches.jsonl([batches.request(0, "say:a")])
    body = b"".join(b"--x\r\nContent-Disposition: form-data; " + one + b"\r\n" for one in fields) + b"--x--\r\n"
    answer = http.post("/v1/files", content=body, headers=head)
    assert answer.status_code == 200 and answer.json()["filename"] == "?.jsonl", answer.text


def test_disconnect_while_file_is_added_leaves_no_file(server: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is listed is there."""
    assert server.app.batches is not None
    store, found, may = server.app.batches.state.store, threading.Event(), threading.Event()
    add = store.add_file

    def slowly(info: FileInfo) -> None:
        found.set()
        assert may.wait(WAIT_S)
        add(info)

    monkeypatch.setattr(store, "add_file", slowly)
    line = batches.jsonl([batches.request(0, "say:a")])
    request = httpx.Request("POST", server.url + "/v1/files", files={"file": ("in.jsonl", line)}, data=PURPOSE)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with server.connect(f"POST /v1/files HTTP/1.1\r\n{head}\r\n".encode() + request.read()):
        assert found.wait(WAIT_S)
    server.wait_until(lambda: server.app.batches is not None and not server.app.batches.num_arriving)
    may.set()
    with server.http() as http:
        for file in http.get("/v1/files").json()["data"]:
            assert http.get(f"/v1/files/{file['id']}/content").status_code == 200


def test_key_over_quota_cannot_create_batches(server: Frontend, http: httpx.Client) -> None:
    assert server.app.batches is not None
    file = upload(http, batches.jsonl([batches.request(0, "say:a")])).json()["id"]
    runner = server.app.batches.runner
    quota, runner.quota = runner.quota, 10
    try:
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        error = check_error(http.post("/v1/batches", json=asked), 413)
    finally:
        runner.quota = quota
    assert error["code"] == "quota_exceeded" and "--state-quota" in error["message"]


def test_lists_come_in_pages(http: httpx.Client) -> None:
    names = [upload(http, batches.jsonl([batches.request(0, "say:a")])).json()["id"] for _ in range(3)]
    page = http.get("/v1/files", params={"limit": 2}).json()
    assert [one["id"] for one in page["data"]] == names[:0:-1] and page["has_more"]
    after = http.get("/v1/files", params={"limit": 1, "after": page["last_id"]}).json()
    assert [one["id"] for one in after["data"]] == names[:1]
    for limit in ("0", "00000110001"):
        check_error(http.get("/v1/files", params={"limit": limit}), 400)
    check_error(http.get("/v1/files", params={"purpose": "vision"}), 400)
    check_error(http.get("/v1/batches", params={"limit": 101}), 400)
    for path in ("/v1/files/none", "/v1/files/none/content", "/v1/batches/none", "/v1/files/..%2flock/content"):
        check_error(http.get(path), 404)


def test_a_file_in_use_is_not_deleted(server: Frontend, http: httpx.Client) -> None:
    batch = begin(http, "hang:x")
    file = http.get(f"/v1/batches/{batch}").json()["input_file_id"]
    assert batch in check_error(http.delete(f"/v1/files/{file}"), 409)["message"]
    http.post(f"/v1/batches/{batch}/cancel")
    ended(server, http, batch)
    assert http.delete(f"/v1/files/{file}").json() == {"id": file, "object": "file", "deleted": True}


def test_without_state_dir_every_route_is_501(front_end: str) -> None:
    with frontend(front_end=front_end) as running, running.http() as http:
        answers = [
            upload(http, b"{}"),
            http.get("/v1/files"),
            http.get("/v1/files/a"),
            http.get("/v1/files/a/content"),
            http.delete("/v1/files/a"),
            http.post("/v1/batches", json={}),
            http.get("/v1/batches"),
            http.get("/v1/batches/a"),
            http.post("/v1/batches/a/cancel"),
        ]
        for answer in answers:
            assert "--state-dir DIR" in check_error(answer, 501)["message"]


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, 60),
        ({"dp": 2}, 120),
        ({"max_inflight": 10}, 5),
        ({"max_inflight": 1}, 1),
        ({"dp": 2, "max_inflight_per_engine": 8}, 8),
    ],
)
def test_num_in_flight_follows_rows_and_limits(fields: dict[str, Any], want: int) -> None:
    config = ServerConfig(engine=EngineConfig(model="a"), **fields)
    assert num_in_flight(config, "cpu") == want


def test_state_quota_must_be_a_size() -> None:
    with pytest.raises(ConfigError, match="--state-quota 0: must be at least 1"):
        msgspec.structs.replace(CONFIG, state_quota=0).check()
