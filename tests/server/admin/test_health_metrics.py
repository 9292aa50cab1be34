"""GET /metrics: the names that docs/metrics.md promises, and values that add up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from minisgl.message import AbortRequest
from tests.helpers.server import CONFIG, READY, STATS, WAIT_S, Frontend, check_error, failed_step, frontend, one_token

TABLE = Path(__file__).parents[3] / "docs" / "metrics.md"
ROW = re.compile(r"^\| (`minisgl:.*?) \| (\w+) \|", re.MULTILINE)
NAME = re.compile(r"`(minisgl:\w+)`")


@pytest.fixture
def server(front_end: str) -> Iterator[Frontend]:
    with frontend(front_end=front_end) as running:
        running.engine.send(STATS)
        running.wait_until(lambda: running.client.stats is not None)
        yield running


def scrape(server: Frontend) -> dict[str, Metric]:
    with server.http() as http:
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def samples(server: Frontend) -> dict[str, float]:
    """Values by name, with the reason appended where there is one; buckets left out."""
    return {
        one.name + one.labels.get("reason", ""): one.value
        for family in scrape(server).values()
        for one in family.samples
        if "le" not in one.labels
    }


def complete(server: Frontend, prompt: str, **more: object) -> None:
    with server.http() as http:
        assert http.post("/v1/completions", json={"prompt": prompt, **more}).status_code == 200


def test_docs_list_exactly_what_is_exposed(server: Frontend) -> None:
    complete(server, "say:a")
    exposed = {
        family.name + ("_total" if family.type == "counter" else ""): family.type for family in scrape(server).values()
    }
    exposed = {name: kind for name, kind in exposed.items() if not name.endswith("_created")}
    rows = ROW.findall(TABLE.read_text(encoding="utf-8"))
    documented = {name: kind for names, kind in rows for name in NAME.findall(names)}
    assert exposed == documented


def test_engine_values_are_those_of_its_snapshot(server: Frontend) -> None:
    found = samples(server)
    assert found["minisgl:requests_running"] == 3 and found["minisgl:requests_waiting"] == 2
    pages = [found[f"minisgl:kv_pages{kind}"] for kind in ("_free", "_evictable", "_protected", "_held")]
    assert pages == [40, 8, 10, 6] and sum(pages) == found["minisgl:kv_pages"]
    assert found["minisgl:kv_usage_ratio"] == 16 / 64
    assert found["minisgl:prompt_tokens_total"] == 700 and found["minisgl:cached_tokens_total"] == 300
    assert found["minisgl:retractions_total"] == 5 and found["minisgl:steps_total"] == 900
    assert found["minisgl:engine_up"] == 1


def test_requests_and_tokens_are_counted_once(server: Frontend) -> None:
    complete(server, "say:abc", n=2)  # 2 stops, 4 tokens each with their EOS
    complete(server, "say:abcdef", max_tokens=2)  # 1 length, 2 tokens
    complete(server, "burst:abSTOPcd", stop="STOP")  # 1 stop, 6 tokens
    with server.http() as http:
        check_error(http.post("/v1/completions", json={"prompt": "fail:", "stream": True}), 500)
        check_error(http.post("/v1/completions", json={"prompt": "a", "n": 0}), 400)  # never accepted
    found = samples(server)
    assert found["minisgl:requests_accepted_total"] == 5
    assert {name: found.get(f"minisgl:requests_finished_total{name}", 0) for name in ("stop", "length", "error")} == {
        "stop": 3,
        "length": 1,
        "error": 1,
    }
    assert found["minisgl:generated_tokens_total"] == 8 + 2 + 6
    assert found["minisgl:ttft_seconds_count"] == 4 and found["minisgl:e2e_seconds_count"] == 4
    assert found["minisgl:queue_seconds_count"] == 5 and found["minisgl:queue_seconds_sum"] > 0
    assert found["minisgl:prompt_length_tokens_count"] == 5 and found["minisgl:answer_length_tokens_count"] == 4
    assert found["minisgl:answer_length_tokens_sum"] == 8 + 2 + 6
    assert 0 < found["minisgl:ttft_seconds_sum"] <= found["minisgl:e2e_seconds_sum"]


def test_tokens_of_a_request_that_fails_later_count_too(server: Frontend) -> None:
    body = {"prompt": "hang:abc", "stream": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        while not json.loads(next(lines)[6:])["choices"][0]["text"].endswith("c"):  # an id may end so, too
            pass
        server.engine.send(failed_step(server.engine.wait_for_request("hang:abc").req_id, "broken"))
        assert any("broken" in line for line in lines)
    found = samples(server)
    assert found["minisgl:generated_tokens_total"] == 3
    assert found["minisgl:requests_finished_totalerror"] == 1


def test_metrics_after_disconnect_count_an_abort(server: Frontend) -> None:
    body = {"prompt": "hang:a", "n": 3, "stream": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_bytes())
    server.engine.wait_for_end(AbortRequest, {one.req_id for one in server.engine.requests("hang:a")})
    found = samples(server)
    assert found["minisgl:requests_accepted_total"] == found["minisgl:requests_finished_totalabort"] == 3
    assert found["minisgl:e2e_seconds_count"] == 0


def test_itl_samples_are_fewer_than_tokens(server: Frontend) -> None:
    """A gap for each token that came after the first one, on its own."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(complete, server, "gaps hang:", max_tokens=20)
        request = server.engine.wait_for_request("gaps ")
        for sent in range(1, 5):
            server.engine.send(one_token(request.req_id, ord("a")))
            while samples(server).get("minisgl:generated_tokens_total") != sent:
                pass
        server.engine.send(failed_step(request.req_id, "enough"))
        with pytest.raises(AssertionError):
            waiting.result(WAIT_S)
    assert samples(server)["minisgl:itl_seconds_count"] == 3


def test_itl_is_never_longer_than_e2e(server: Frontend) -> None:
    """Tokens that come with the first one have no gap that anybody saw."""
    complete(server, "say:abcdefgh", max_tokens=8)
    found = samples(server)
    assert found["minisgl:itl_seconds_count"] <= 7
    assert found["minisgl:itl_seconds_sum"] <= found["minisgl:e2e_seconds_sum"]


def test_buckets_begin_at_a_millisecond(server: Frontend) -> None:
    families = scrape(server)
    for name in ("ttft", "itl", "e2e"):
        bounds = [float(one.labels["le"]) for one in families[f"minisgl:{name}_seconds"].samples if "le" in one.labels]
        assert bounds[0] == 0.001 and bounds == sorted(bounds) and len(bounds) > 10


@pytest.mark.parametrize(("dp", "routing"), [(1, "none"), (2, "least_load")])
def test_scheduler_front_end_and_routing_are_named(front_end: str, dp: int, routing: str) -> None:
    """The scheduler is the one that serves after a failover."""
    config = msgspec.structs.replace(CONFIG, dp=dp, routing="least_load")
    with (
        frontend(front_end=front_end, config=config, num_engines=None if dp == 1 else dp) as server,
        server.http() as http,
    ):
        (info,) = scrape(server)["minisgl:server_info"].samples
        assert info.labels == {"scheduler": READY.cpu_backend, "frontend": front_end, "routing": routing}
        server.engine.send(msgspec.structs.replace(STATS, num_failovers_total=1, cpu_backend="python"))
        server.wait_until(lambda: server.client.stats is not None)
        (info,) = scrape(server)["minisgl:server_info"].samples
        health = http.get("/health").json()
        assert info.value == 1 and info.labels["scheduler"] == "python" == health["cpu_backend"]
        assert {name: health[name] for name in ("frontend", "routing")} == {"frontend": front_end, "routing": routing}
