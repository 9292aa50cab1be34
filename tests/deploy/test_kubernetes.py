"""The Kubernetes manifests: references hold, probes ask routes of a real server, flags are the server's, and a pod is
given the time that the server's drain takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl import envs
from tests.helpers.deploy import AFTER_THE_DRAIN_S, CACHE, DEPLOY, MINISGL_PORT, USER, documents, served, stages
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.seconds import WAIT_S

OBJECTS = {one["kind"]: one for one in documents("kubernetes/minisgl.yaml")}
POD: dict[str, Any] = OBJECTS["Deployment"]["spec"]["template"]
SPEC: dict[str, Any] = POD["spec"]
(CONTAINER,) = SPEC["containers"]
(PATCH,) = documents("kubernetes/cuda.yaml")
(PATCHED,) = PATCH["spec"]["template"]["spec"]["containers"]
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def test_the_objects_are_one_of_each() -> None:
    assert len(documents("kubernetes/minisgl.yaml")) == len(OBJECTS) == 4
    versions = {kind: one["apiVersion"] for kind, one in OBJECTS.items()}
    assert versions == {"Secret": "v1", "PersistentVolumeClaim": "v1", "Service": "v1", "Deployment": "apps/v1"}


def test_references_between_objects_resolve() -> None:
    labels = POD["metadata"]["labels"]
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels == OBJECTS["Service"]["spec"]["selector"]
    ports = {one["name"]: one["containerPort"] for one in CONTAINER["ports"]}
    assert ports == {"http": MINISGL_PORT}
    assert [one["targetPort"] for one in OBJECTS["Service"]["spec"]["ports"]] == ["http"]
    assert {CONTAINER[probe]["httpGet"]["port"] for probe in PROBES} == {"http"}
    volumes = {one["name"]: one for one in SPEC["volumes"]}
    assert {one["name"] for one in CONTAINER["volumeMounts"]} == volumes.keys()
    assert (
        volumes["cache"]["persistentVolumeClaim"]["claimName"] == OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]
    )
    for one in CONTAINER["env"]:
        asked = one["valueFrom"]["secretKeyRef"]
        assert one["name"] in envs.ALL and asked["name"] == OBJECTS["Secret"]["metadata"]["name"]
        assert asked["key"] in OBJECTS["Secret"]["stringData"]
    assert PATCHED["name"] == CONTAINER["name"], "the patch would add a container"
    added = {one["name"] for one in PATCH["spec"]["template"]["spec"]["volumes"]}
    assert {one["name"] for one in PATCHED["volumeMounts"]} == added


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """What the pod runs, at a free port, without a model."""
    words = [*stages(DEPLOY / "Dockerfile")["cpu"].words("ENTRYPOINT"), *CONTAINER["args"]]
    secret = OBJECTS["Secret"]["stringData"]["api-key"]
    with serving(*words[2:], "--port", "0", "--engine", "echo", env={"MINISGL_API_KEY": secret}) as running:
        yield running


@pytest.mark.parametrize("probe", PROBES)
def test_probes_use_routes_without_a_key(server: ServerProcess, probe: str) -> None:
    """A probe calls the pod by its address, and shows no key."""
    path = CONTAINER[probe]["httpGet"]["path"]
    headers = {"Host": "pod.example:1919", "User-Agent": "kube-probe/1.32"}
    assert httpx.get(server.url + path, headers=headers, timeout=WAIT_S).status_code == 200
    assert httpx.get(f"{server.url}/metrics", headers=headers, timeout=WAIT_S).status_code == 401


def test_a_pod_is_served_until_no_one_asks_it_and_ends_when_it_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    for target, container in (("cpu", CONTAINER), ("cuda", PATCHED)):
        assert container["image"] == f"minisgl:{target}"
        entry = stages(DEPLOY / "Dockerfile")[target].words("ENTRYPOINT")[1:]
        config = served(monkeypatch, [*entry, *container["args"]])
        assert (config.host, config.port) == ("0.0.0.0", MINISGL_PORT)
        program, before = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
        assert program == "sleep" and int(before) >= CONTAINER["readinessProbe"]["periodSeconds"]
        assert SPEC["terminationGracePeriodSeconds"] >= int(before) + config.limits.drain_timeout + AFTER_THE_DRAIN_S
        # the pool's default size is of the node's memory, not of the limit's
        on_device = config.engine.device == "cuda"
        assert on_device or config.engine.num_pages is not None or "memory" not in container["resources"]["limits"]


def test_a_model_has_time_to_load_and_a_hang_is_seen() -> None:
    startup, liveness = CONTAINER["startupProbe"], CONTAINER["livenessProbe"]
    assert startup["httpGet"]["path"] == "/readyz" and startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert liveness["httpGet"]["path"] == "/livez" and liveness["periodSeconds"] * liveness["failureThreshold"] <= 60
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert all(CONTAINER[probe]["timeoutSeconds"] < CONTAINER[probe]["periodSeconds"] for probe in PROBES)


def test_the_pod_is_the_images_user_and_writes_only_where_it_has_a_volume() -> None:
    security = SPEC["securityContext"]
    assert security["runAsNonRoot"] and {security[one] for one in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert {one["mountPath"] for one in CONTAINER["volumeMounts"]} == {CACHE, "/tmp"}
