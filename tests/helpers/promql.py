"""What a PromQL query asks for, held against what a server prints.

Invariants: a query that this finds nothing wrong with names only metrics, labels and values of labels that are there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

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
