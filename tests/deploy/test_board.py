"""The Grafana board, the alerts and Prometheus's configuration ask servers only for what they say.

A parser of PromQL reads out of each query what it asks for, and that is held against `/metrics` of servers that have
served; where Prometheus is installed it asks them, too.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.e2e import ServerProcess, until
from tests.helpers.seconds import WAIT_S
from tools.write_board import written

# What a PromQL query asks for, held against what a server prints. Invariants: a query that this finds nothing wrong
# with names only metrics, labels and values of labels that are there.
OF_THE_SCRAPE = frozenset({"job", "instance"})
# what Grafana puts in place of its variables: intervals, and texts within quotes
INTERVALS = {"$__rate_interval": "1m", "$__range": "30m"}


@dataclass
class Scraped:
    """The samples of `/metrics`: values of each label by name. `up` is Prometheus's own."""

    names: dict[str, dict[str, set[str]]] = field(default_factory=lambda: {"up": {}})

    @classmethod
    def of(cls, text: str) -> Scraped:
        found = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = found.names.setdefault(sample.name, defaultdict(set))
                for name, value in sample.labels.items():
                    labels[name].add(value)
        return found


def parsed(query: str) -> promql.Expr:
    """Raises `ValueError`: also for a function that there is not, and for a wrong number or kind of arguments."""
    for name, text in INTERVALS.items():
        query = query.replace(name, text)
    return promql.parse(query)


def selectors(expression: promql.Expr) -> list[promql.VectorSelector]:
    found: list[promql.VectorSelector] = []

    def visit(one: promql.Expr) -> None:
        if isinstance(one, promql.VectorSelector):
            found.append(one)

    promql.walk(expression, visit)
    return found


def names(query: str) -> set[str]:
    return {one.name or "" for one in selectors(parsed(query))}


def wrong(query: str, scraped: Scraped) -> list[str]:
    """What the query asks for and the server does not have."""
    expression = parsed(query)
    found = [one for selector in selectors(expression) for one in _wrong_selector(selector, scraped.names)]

    def visit(one: promql.Expr) -> None:
        if isinstance(one, promql.AggregateExpr) and one.modifier is not None:
            found.extend(_wrong_labels(one.modifier.labels, one.expr, scraped.names))
        if isinstance(one, promql.BinaryExpr) and one.modifier is not None and one.modifier.matching is not None:
            found.extend(_wrong_labels(one.modifier.matching.labels, one, scraped.names))

    promql.walk(expression, visit)
    return found


def _wrong_selector(selector: promql.VectorSelector, there: Mapping[str, Mapping[str, set[str]]]) -> Iterator[str]:
    labels = there.get(selector.name or "")
    if labels is None:
        yield f"no metric {selector.name}"
        return
    for matcher in selector.matchers.matchers:
        if matcher.name in OF_THE_SCRAPE:
            continue
        values = labels.get(matcher.name, set())
        chosen = matcher.op in (promql.MatchOp.Equal, promql.MatchOp.Re)
        if not values:
            yield f"{selector.name} has no label {matcher.name}"
        elif chosen and not any(re.fullmatch(matcher.value, value) for value in values):
            yield f"{selector.name} has no {matcher.name}={matcher.value}, but {sorted(values)}"


def _wrong_labels(
    asked: list[str], expression: promql.Expr, there: Mapping[str, Mapping[str, set[str]]]
) -> Iterator[str]:
    for selector in selectors(expression):
        for label in asked:
            if label not in OF_THE_SCRAPE and label not in there.get(selector.name or "", {label: set()}):
                yield f"{selector.name} has no label {label}"


def labels_of_result(query: str) -> set[str]:
    """Labels that the outermost grouping leaves; none without one."""
    found: list[set[str]] = []

    def visit(one: promql.Expr) -> bool:
        if isinstance(one, promql.AggregateExpr):
            found.append(set(one.modifier.labels if one.modifier is not None else ()))
        return not found

    promql.walk(parsed(query), visit)
    return found[0] if found else set()


DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "minisgl.json").read_text(encoding="utf-8"))
PANELS = [one for one in BOARD["panels"] if one["type"] != "row"]
RULES = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
VARIABLE = re.compile(r"label_values\((.+), (\w+)\)")

# what only some servers print
OF_THE_GATEWAY = {"minisgl:gateway_requests_total", "minisgl:encode_cache_texts_total"}
OF_A_POOL = {"minisgl:engine_losses_total", "minisgl:pool_requests_moved_total", "minisgl:pool_requests_waiting"}
LACKING = {"python": OF_THE_GATEWAY | OF_A_POOL, "rust": OF_A_POOL, "pool": set()}


def queries() -> dict[str, str]:
    """Every one of the board and the alerts, by where it stands."""
    found = {f"{one['title']} {target['refId']}": target["expr"] for one in PANELS for target in one["targets"]}
    assert len(found) == sum(len(one["targets"]) for one in PANELS)
    for one in BOARD["templating"]["list"]:
        if one["type"] == "query":
            asked = VARIABLE.fullmatch(one["query"]["query"])
            assert asked is not None and asked[2] in ("job", "instance")
            found[f"variable {one['name']}"] = asked[1]
    return found | {rule["alert"]: rule["expr"] for rule in RULES}


QUERIES = queries()


def test_the_dashboard_file_equals_the_generated_one() -> None:
    assert (DEPLOY / "grafana" / "minisgl.json").read_text(encoding="utf-8") == written(), (
        "run: python -m tools.write_board"
    )


def test_queries_use_only_metrics_of_real_servers(kind: str, server: ServerProcess) -> None:
    scraped = Scraped.of(httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text)
    asked = set().union(*map(names, QUERIES.values()))
    assert asked - scraped.names.keys() == LACKING[kind]
    complaints = {place: wrong(query, scraped) for place, query in QUERIES.items()}
    lacking = {f"no metric {name}" for name in LACKING[kind]}
    assert {place: found for place, found in complaints.items() if set(found) - lacking} == {}


@pytest.mark.parametrize("query", [
    "minisgl:engine_upp",
    'minisgl:requests_finished_total{reason="eror"}',
    'minisgl:requests_finished_total{cause="error"}',
    "sum by (motor) (minisgl:engine_ready)",
    "minisgl:engine_ready == on (motor) minisgl:engine_ready",
])  # fmt: skip
def test_a_query_for_an_unknown_metric_is_detected(query: str) -> None:
    scraped = Scraped.of(
        'minisgl:engine_up 1\nminisgl:engine_ready{engine="0"} 1\nminisgl:requests_finished_total{reason="error"} 1\n'
    )
    assert wrong(query, scraped) != []


@pytest.mark.parametrize("query", ["averge(minisgl:engine_up)", "rate(minisgl:engine_up)", "sum by minisgl:engine_up"])
def test_an_invalid_query_is_detected(query: str) -> None:
    with pytest.raises(ValueError):
        parsed(query)


def test_panels_keep_to_what_the_variables_choose_and_name_labels_that_are_left() -> None:
    assert [one["name"] for one in BOARD["templating"]["list"]] == ["source", "job", "instance"]
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"} and panel["description"]
        for target in panel["targets"]:
            assert target["expr"].count('{job=~"$job", instance=~"$instance"') == target["expr"].count("minisgl:")
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown == labels_of_result(target["expr"]) - {"le"}, panel["title"]


def test_panels_do_not_cover_each_other() -> None:
    places = [one["gridPos"] for one in BOARD["panels"]]
    assert all(one["x"] >= 0 and one["x"] + one["w"] <= 24 for one in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    ids = [one["id"] for one in BOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_alerts_have_a_severity_a_summary_and_a_description() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket") and set(rule["annotations"]) == {
            "summary",
            "description",
        }


@pytest.mark.parametrize("asked", [["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]])
def test_promtool_accepts_the_rules(asked: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        [promtool, *asked], cwd=DEPLOY / "prometheus", check=False, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_of_its_silence_and_of_its_words() -> None:
    cases = yaml.safe_load((DEPLOY / "prometheus" / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    silent = {one["alertname"] for case in cases for one in case.get("alert_rule_test", ())}
    spoken = "\n".join(
        one["expr"] for case in cases for one in case.get("promql_expr_test", ()) if one["exp_samples"] != []
    )
    for rule in RULES:
        assert rule["alert"] in silent and f'"{rule["alert"]}"' in spoken


@pytest.fixture
def prometheus(server: ServerProcess, tmp_path: Path) -> Iterator[str]:
    """The address of one that asks the server as deploy/prometheus says, only more often."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = dict.fromkeys(config["global"], "2s")  # of a busy machine
    config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
             f"--web.listen-address={address}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pool"], indirect=True)
def test_prometheus_answers_every_query(kind: str, prometheus: str) -> None:
    """On a server with everything: each panel shows something, and all alerts are evaluated."""

    def asked(query: str) -> list[Any]:
        for name, text in {"$__rate_interval": "1m", "$__range": "30m", "$job": ".*", "$instance": ".*"}.items():
            query = query.replace(name, text)
        answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=WAIT_S)
        assert answer.status_code == 200, (query, answer.text)
        found: list[Any] = answer.json()["data"]["result"]
        return found

    def ready() -> bool:
        """It listens before it has read its storage, and says 503 until then."""
        try:
            return httpx.get(f"{prometheus}/-/ready", timeout=WAIT_S).status_code == 200
        except httpx.TransportError:
            return False

    until(ready, "Prometheus does not start")
    until(lambda: bool(asked("count_over_time(minisgl:engine_up[1m]) > 1")), "Prometheus does not ask the server")
    alerts = {rule["alert"] for rule in RULES}

    def empty() -> list[str]:
        return [place for place, query in QUERIES.items() if place not in alerts and not asked(query)]

    # a scrape that a busy machine misses leaves a gap, and says for a moment that the server does not answer
    until(lambda: not empty(), f"panels without anything: {empty()}")
    groups = httpx.get(f"{prometheus}/api/v1/rules", timeout=WAIT_S).json()["data"]["groups"]
    assert {rule["name"] for group in groups for rule in group["rules"]} == alerts
    until(lambda: all(asked(rule["expr"]) == [] for rule in RULES), "an alert speaks")
