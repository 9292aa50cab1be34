"""Servers behind the Gateway API inference extension: objects that name each other, and metrics that a picker reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.deploy import DEPLOY, MINISGL_PORT, documents, served, stages
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.seconds import WAIT_S

POOL, ROUTE = documents("kubernetes/inference-pool.yaml")
(PATCH,) = documents("kubernetes/inference-pool-patch.yaml")
DEPLOYMENT = next(one for one in documents("kubernetes/minisgl.yaml") if one["kind"] == "Deployment")
READ = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}
"""What the reference picker reads of every server unless it is told other names."""


def patched() -> Any:
    """The deployment's container after the patch: the operations of RFC 6902 that the file has."""
    deployment = copy.deepcopy(DEPLOYMENT)
    for one in PATCH:
        *above, last = one["path"].removeprefix("/").split("/")
        place = deployment
        for name in above:
            place = place[int(name)] if isinstance(place, list) else place[name]
        assert isinstance(place, list)
        if one["op"] == "remove":
            del place[int(last)]
        else:
            assert (one["op"], last) == ("add", "-")
            place.append(one["value"])
    return deployment["spec"]["template"]["spec"]["containers"][0]


def words() -> list[str]:
    return [*stages(DEPLOY / "Dockerfile")["cpu"].words("ENTRYPOINT")[1:], *patched()["args"]]


def test_the_pool_has_the_deployments_pods_and_the_route_has_the_pool() -> None:
    assert POOL["apiVersion"] == "inference.networking.k8s.io/v1" and POOL["kind"] == "InferencePool"
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert POOL["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert [one["number"] for one in POOL["spec"]["targetPorts"]] == [MINISGL_PORT]
    [reference] = [one for rule in ROUTE["spec"]["rules"] for one in rule["backendRefs"]]
    group = POOL["apiVersion"].split("/")[0]
    assert reference == {"group": group, "kind": POOL["kind"], "name": POOL["metadata"]["name"]}


def test_the_patch_names_metrics_as_vllm_and_takes_the_key_away(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(monkeypatch, words()).metrics_aliases == "vllm"
    assert [one["name"] for one in patched().get("env", [])] == []
    assert [one["name"] for one in DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]["env"]] == [
        "MINISGL_API_KEY"
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(*words()[1:], "--port", "0", "--engine", "echo") as running:
        yield running


def test_an_endpoint_picker_finds_the_metrics_it_reads(server: ServerProcess) -> None:
    """Under the pod's address and without a key."""
    body = {"model": "smollm2", "prompt": "Hello", "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S).status_code == 200
    response = httpx.get(f"{server.url}/metrics", headers={"Host": f"pod.example:{MINISGL_PORT}"}, timeout=WAIT_S)
    assert response.status_code == 200
    found = {one.name: one for one in text_string_to_metric_families(response.text)}
    for name in READ:
        assert found[name].type == "gauge", name
        assert [sample.labels["model_name"] for sample in found[name].samples], name
    assert all(0 <= sample.value <= 1 for sample in found["vllm:kv_cache_usage_perc"].samples)
