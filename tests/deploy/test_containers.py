"""Images and compose files: what a build may see, what a container runs, and that its health check and its end work."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.config import ServerConfig
from tests.helpers.deploy import (
    AFTER_THE_DRAIN_S,
    CACHE,
    DEPLOY,
    MINISGL_PORT,
    ROOT,
    USER,
    Stage,
    context,
    documents,
    seconds,
    served,
    stages,
)
from tests.helpers.e2e import ServerProcess
from tests.helpers.seconds import WAIT_S

STAGES = stages(DEPLOY / "Dockerfile")
TARGETS = ("cpu", "cuda")
SERVER = documents("compose.yaml")[0]["services"]["minisgl"]
CUDA = documents("compose.cuda.yaml")[0]["services"]["minisgl"]
COMPOSE = documents("compose.yaml")[0]
TOOLS = ("cargo", "rustc", "gcc", "maturin")


def entry(target: str) -> list[str]:
    return STAGES[target].words("ENTRYPOINT")[1:]


def test_copied_files_exist_and_include_all_that_the_wheel_needs() -> None:
    seen = context(ROOT / ".dockerignore")
    copied = set()
    for rest in STAGES["wheel"].all("COPY"):
        *sources, _ = rest.split()
        for source in sources:
            found = {name for name in seen if name == source or name.startswith(f"{source}/")}
            assert found, f"{source} is not there, or .dockerignore leaves it out"
            copied |= found
    assert seen == copied, "a build would see what it does not use"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings = project["tool"]["maturin"]
    needed = {
        "Cargo.lock",
        project["project"]["readme"],
        *project["project"]["license-files"],
        settings["manifest-path"],
    }
    members = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]["members"]
    needed |= {f"{member}/Cargo.toml" for member in members}
    needed |= {"python/minisgl/__init__.py", "python/minisgl/web/index.html"}
    assert needed <= copied
    rust = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]["package"]["rust-version"]
    assert STAGES["wheel"].base == f"docker.io/library/rust:{rust}-slim-bookworm"


def test_what_is_installed_has_the_versions_and_hashes_of_the_lock_file() -> None:
    assert "uv.lock" in STAGES["wheel"].all("COPY")[0] and "--frozen" in STAGES["wheel"].environment["LOCKED"]
    installs = [
        words.strip()
        for stage in STAGES.values()
        for rest in stage.all("RUN")
        for words in rest.split("&&")
        if "pip install" in words
    ]
    assert len(installs) == 5
    for words in installs:
        named = words.partition("pip install")[2].split()
        assert "--require-hashes" in named or all("==" in one for one in named if one[0] not in "-/"), words


def test_what_git_does_not_have_or_no_build_needs_is_left_out() -> None:
    seen = context(ROOT / ".dockerignore")
    assert not [
        name for name in seen if name.startswith(("tests/", "benchmark/", ".git", "docs/")) or name.endswith(".so")
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_not_root_and_ends_as_the_server_does(target: str) -> None:
    stage = STAGES[target]
    assert stage.last("USER") == f"{USER}:{USER}" and f"--uid {USER} " in " ".join(stage.all("RUN"))
    assert stage.last("STOPSIGNAL") == "SIGTERM"
    assert stage.last("EXPOSE") == str(MINISGL_PORT)
    folders = [value for name, value in stage.environment.items() if name not in ("PATH", "CUDA_HOME") and "/" in value]
    assert len(folders) >= 2 and all(value.startswith(f"{CACHE}/") for value in folders)


def test_no_stage_takes_what_is_not_made_before() -> None:
    names = list(STAGES)
    for at, stage in enumerate(STAGES.values()):
        for rest in stage.all("COPY"):
            if rest.startswith("--from="):
                assert rest.removeprefix("--from=").split()[0] in names[:at]
    final = STAGES["cpu"]
    assert not [tool for tool in TOOLS for rest in final.all("RUN") if tool in rest]
    assert final.all("COPY") == ["--from=cpu-environment /opt/minisgl /opt/minisgl"]


@pytest.mark.parametrize("target", TARGETS)
def test_flags_of_images_and_services_are_valid(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = served(monkeypatch, [*entry(target), *STAGES[target].words("CMD")])
    assert (config.host, config.port) == ("0.0.0.0", MINISGL_PORT)
    service = SERVER if target == "cpu" else SERVER | CUDA
    assert service["image"] == f"minisgl:{target}" and service["build"]["target"] == target
    composed = served(monkeypatch, [*entry(target), *service["command"]])
    assert (composed.host, composed.port) == ("0.0.0.0", MINISGL_PORT)
    check_patience(composed, seconds(SERVER["stop_grace_period"]))


def check_patience(config: ServerConfig, patience_s: float) -> None:
    """Whoever stops the server waits until it has drained and ended."""
    assert patience_s >= config.limits.drain_timeout + AFTER_THE_DRAIN_S


@pytest.fixture
def container() -> Iterator[ServerProcess]:
    """The command of an image, at a free port, without a model."""
    words = STAGES["cpu"].words("ENTRYPOINT") + STAGES["cpu"].words("CMD")
    assert words[:2] == ["minisgl", "serve"]
    with ServerProcess([*words[2:], "--port", "0", "--engine", "echo"]) as running:
        yield running


def check(stage: Stage, url: str) -> int:
    program, *rest = stage.healthcheck
    assert program == "python"
    command = [word.replace(f"http://127.0.0.1:{MINISGL_PORT}/", f"{url}/") for word in rest]
    assert command != rest
    return subprocess.run([sys.executable, *command], check=False, capture_output=True, timeout=WAIT_S).returncode


def test_the_health_check_sees_a_server_and_its_end(container: ServerProcess) -> None:
    assert all(check(STAGES[target], container.url) == 0 for target in TARGETS)
    assert container.stop(getattr(signal, STAGES["cpu"].last("STOPSIGNAL"))) == 0, container.lines
    assert all(check(STAGES[target], container.url) != 0 for target in TARGETS)


def test_services_find_each_other_and_their_files() -> None:
    services: dict[str, Any] = COMPOSE["services"]
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            there = (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
            assert there, f"{name}: {source}"
        assert set(service.get("depends_on", ())) <= services.keys()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "only this machine"
    for service in (SERVER, SERVER | {"build": SERVER["build"] | CUDA["build"]}):
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert f"cache:{CACHE}" in SERVER["volumes"] and SERVER["read_only"] and SERVER["tmpfs"] == ["/tmp"]
    (scraped,) = documents("prometheus/prometheus.yml")[0]["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"minisgl:{MINISGL_PORT}"]}] and "minisgl" in services


def test_grafana_is_given_its_source_and_its_board() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = documents("grafana/provisioning/datasources/prometheus.yml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in COMPOSE["services"]
    assert source["jsonData"]["timeInterval"] == documents("prometheus/prometheus.yml")[0]["global"]["scrape_interval"]
    (provider,) = documents("grafana/provisioning/dashboards/minisgl.yml")[0]["providers"]
    boards = provider["options"]["path"]
    grafana = COMPOSE["services"]["grafana"]
    assert f"./grafana/minisgl.json:{boards}/minisgl.json:ro" in grafana["volumes"]
    assert f"./{provisioning.relative_to(DEPLOY)}:/etc/grafana/provisioning:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{boards}/minisgl.json"
