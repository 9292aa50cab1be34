"""Whatever schema is asked for, an answer that ends by itself parses and validates, by a validator that is not the
grammar's library; a limit of tokens that came first is the only excuse."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema
from jsonschema import Draft202012Validator, ValidationError, validators

from minisgl import LLM, SamplingParams, structured_outputs
from minisgl.sampling_params import ParamError
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.meaning import embedded_model
from tests.helpers.seconds import WAIT_S

# JSON schemas of the kinds that JSONSchemaBench collects: calls of functions, records, resources of clusters, events,
# recursive documents; some by hand, the rest drawn.
FORMATS = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
PATTERNS = ["^[a-z]+$", "^\\d{3}-\\d{4}$", "^(foo|bar)?$", "[A-Z]{2,5}", "^[^\\s]{1,8}$", "^\\w+@\\w+\\.com$", "x"]
NAMES = ["name", "id", "type", "kind", "tags", "é", "a b", "$x", "spec", "metadata", 'q"', "0"]

BY_HAND: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "array"},
    {},
    {"type": "string"},
    {"type": "boolean"},
    {"enum": ["a", 1, None, True, [1, "x"], {"k": []}]},
    {"const": {"nested": [1, 2, {"x": "y"}]}},
    {  # a function's arguments
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "City and country"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["location", "unit"],
        "additionalProperties": False,
    },
    {  # a record with references
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["street", "zip"],
            }
        },
        "type": "object",
        "properties": {"home": {"$ref": "#/$defs/address"}, "work": {"$ref": "#/$defs/address"}},
        "required": ["home"],
        "additionalProperties": False,
    },
    {  # a recursive document
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
    {  # a resource of a cluster
        "type": "object",
        "properties": {
            "apiVersion": {"const": "apps/v1"},
            "kind": {"const": "Deployment"},
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,10}[a-z0-9])?$"}},
                "required": ["name"],
            },
            "spec": {
                "type": "object",
                "properties": {
                    "replicas": {"type": ["integer", "null"], "minimum": 0},
                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                    "ports": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {"port": {"type": "integer", "minimum": 1, "maximum": 65535}},
                            "required": ["port"],
                        },
                        "minItems": 1,
                    },
                },
                "required": ["ports"],
            },
        },
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
    },
    {  # an event
        "type": "object",
        "properties": {
            "at": {"type": "string", "format": "date-time"},
            "user": {"type": "string", "format": "uuid"},
            "mail": {"type": ["string", "null"], "format": "email", "maxLength": 40},
            "amount": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1000},
        },
        "required": ["at", "user", "amount"],
    },
    {"type": "object", "patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object", "additionalProperties": {"type": "integer"}, "required": ["a"], "minProperties": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["a"]}], "items": False, "minItems": 2},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": "a"}, "x": {"type": "integer"}}, "required": ["t", "x"]},
            {"type": "object", "properties": {"t": {"const": "b"}, "y": {"type": "string"}}, "required": ["t", "y"]},
        ]
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
        ]
    },
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "enum": [f"value {i}" for i in range(1000)]},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"type": "integer", "multipleOf": 7, "minimum": -50},
    *({"type": "string", "format": one} for one in FORMATS),
    *({"type": "string", "pattern": one} for one in PATTERNS),
]

_small = {"type": "integer", "minimum": 0, "maximum": 4}


def _leaf(kind: str, *required: str, **keywords: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of this type, their keywords drawn from schemas of their own."""
    values = {name: from_schema(one) for name, one in keywords.items()}
    always = {"type": st.just(kind), **{name: values.pop(name) for name in required}}
    return st.fixed_dictionaries(always, optional=values)


_leaves = st.one_of(
    _leaf("string", minLength=_small, maxLength={"type": "integer", "minimum": 4, "maximum": 9}),
    _leaf("string", "format", format={"enum": FORMATS}),
    _leaf("string", "pattern", pattern={"enum": PATTERNS}),
    _leaf("integer", minimum={"type": "integer", "minimum": -50, "maximum": 0}, maximum={"enum": [1, 9, 10**6]}),
    _leaf("number", exclusiveMinimum={"type": "integer", "minimum": -9, "maximum": 9}),
    _leaf("number", "multipleOf", multipleOf={"enum": [0.5, 0.01, 3]}, minimum={"enum": [-5, 0, 2.5]}),
    _leaf("boolean"),
    _leaf("null"),
)


@st.composite
def _objects(draw: st.DrawFn, below: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), below, max_size=5))
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if draw(st.booleans()):
        found["required"] = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    if draw(st.booleans()):
        found["additionalProperties"] = draw(st.one_of(st.booleans(), below))
    return found


def _arrays(below: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    sizes = {"minItems": st.integers(0, 3), "maxItems": st.integers(3, 5)}
    return st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": below}, optional=sizes),
        st.fixed_dictionaries(
            {"type": st.just("array"), "prefixItems": st.lists(below, min_size=1, max_size=3), "items": st.just(False)}
        ),
    )


def _deeper(below: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    any_of = st.fixed_dictionaries({"anyOf": st.lists(below, min_size=1, max_size=3)})
    return st.one_of(_objects(below), _objects(below), _arrays(below), any_of)


_enums = st.fixed_dictionaries(
    {"enum": st.lists(st.sampled_from(["a", "b\n", "é", 1, 2.5, None, True, [1], {"k": "v"}]), min_size=1, max_size=4)}
)
drawn: st.SearchStrategy[dict[str, Any]] = st.recursive(st.one_of(_enums, _leaves), _deeper, max_leaves=8)


BATCH = 20
LEAP_SECOND = re.compile(r"(\d\d:\d\d):60")


def _multiple(_: object, of: Any, value: Any, __: object) -> Iterator[ValidationError]:
    """Exactly, also of numbers with hundreds of digits or an exponent of as many, which the echo engine writes."""
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        return
    scale = max(0, -int(Decimal(of).as_tuple().exponent))
    step = int(Decimal(of).scaleb(scale))
    _, digits, exponent = Decimal(value).as_tuple()
    number, places = int("".join(map(str, digits))), int(exponent) + scale
    if places < 0 and number:  # so many zeros must end it
        zeros = len(str(number)) - len(str(number).rstrip("0"))
        number = number // 10**-places if zeros >= -places else 1
        places = 0 if zeros >= -places else -1
    if (places < 0 and number) or number * pow(10, max(places, 0), step) % step:
        yield ValidationError(f"{value} is no multiple of {of}")


def _number(text: str) -> Decimal:
    """Exponents of more digits than `Decimal` has say as much with ten of them."""
    return Decimal(re.sub(r"(?<=[eE])([+-]?)\d{11,}", r"\g<1>9999999999", text))


Exact = validators.extend(Draft202012Validator, {"multipleOf": _multiple})


def problem(schema: dict[str, Any], text: str) -> str:
    """Why the text is no instance of the schema; empty if it is one."""
    try:
        # decimal: of 539.68 a float is no multiple of 0.01; leap seconds: the library allows them in any minute
        value = json.loads(LEAP_SECOND.sub(r"\1:59", text), parse_float=_number)
    except ValueError as error:
        return f"does not parse: {error}"
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = Exact(exact, format_checker=Draft202012Validator.FORMAT_CHECKER)
    found = next(validator.iter_errors(value), None)
    return "" if found is None else found.message


class Proof:
    """What became of all the schemas."""

    def __init__(self, llm: LLM, max_tokens: int) -> None:
        self._llm = llm
        self._max_tokens = max_tokens
        self.counts: Counter[str] = Counter()

    def add(self, schemas: Sequence[dict[str, Any]], seed: int, temperature: float = 1.0) -> None:
        taken, each = [], []
        for schema in schemas:
            try:
                grammar = structured_outputs(json=schema)
            except ParamError as error:
                assert re.search("not disjoint|Unsatisfiable|oneOf constraints", error.reason), (schema, error)
                self.counts["refused"] += 1
                continue
            params = SamplingParams(grammar=grammar, seed=seed, temperature=temperature, max_tokens=self._max_tokens)
            taken.append(schema)
            each.append(params)
        prompts = [f"{seed} {i}: an example of {json.dumps(schema)[:100]} is" for i, schema in enumerate(taken)]
        for schema, output in zip(taken, self._llm.generate(prompts, each, progress=False), strict=True):
            [answer] = output.outputs
            assert answer.finish_reason in ("stop", "length"), (schema, answer.error)
            self.counts[answer.finish_reason] += 1
            if answer.finish_reason == "stop":
                assert not (reason := problem(schema, answer.text)), (schema, answer.text, reason)


def run(proof: Proof, num_schemas: int, temperature: float = 1.0) -> None:
    @settings(
        max_examples=num_schemas // BATCH,
        database=None,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(drawn, min_size=BATCH, max_size=BATCH), st.integers(0, 2**31))
    def add(schemas: list[dict[str, Any]], seed: int) -> None:
        proof.add(schemas, seed, temperature)

    add()


# --------------------------------------------------------------------------------------------------------------- echo


@pytest.fixture(scope="module")
def echo() -> Iterator[LLM]:
    with LLM("none", engine="echo", num_pages=4096, page_size=16, max_seq_len=1400, log_level="error") as found:
        yield found


def test_handwritten_schemas_are_followed(echo: LLM) -> None:
    proof = Proof(echo, 1200)
    proof.add(BY_HAND, 1)
    assert proof.counts["refused"] == 0 and proof.counts["stop"] > 0.8 * len(BY_HAND), proof.counts


def test_random_schemas_are_followed(echo: LLM) -> None:
    proof = Proof(echo, 1200)
    run(proof, 60)
    assert proof.counts["stop"] > 40, proof.counts


@pytest.mark.slow
def test_a_thousand_schemas_are_followed(echo: LLM) -> None:
    proof = Proof(echo, 1200)
    for seed in range(5):
        proof.add(BY_HAND, seed)
    run(proof, 1000)
    print(proof.counts)
    assert proof.counts.total() > 1000 and proof.counts["stop"] > 0.85 * proof.counts.total(), proof.counts


# ------------------------------------------------------------------------------------------------------------ a model


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    embedded_model()
    with LLM("smollm2", engine="cpu", max_running_requests=16, max_seq_len=1024, log_level="error") as found:
        yield found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_handwritten_schemas_are_followed_by_a_real_model(smollm2: LLM, temperature: float) -> None:
    proof = Proof(smollm2, 60)
    proof.add(BY_HAND[:16], 7, temperature)
    assert proof.counts["stop"] >= 4, proof.counts


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_schemas_are_followed_by_a_real_model(smollm2: LLM, temperature: float, times: int) -> None:
    proof = Proof(smollm2, 100)
    proof.add(BY_HAND, 1, temperature)
    run(proof, 300 * times, temperature)
    print(proof.counts)
    assert proof.counts.total() > 300 * times and proof.counts["stop"] > 0.4 * proof.counts.total(), proof.counts


# ----------------------------------------------------------------------------------------------------------- a server

FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BY_HAND[7], "strict": True}}},
    {"structured_outputs": {"json": BY_HAND[9]}},
    {"guided_regex": "[a-f0-9]{4}(-[a-f0-9]{4}){1,3}"},
    {"guided_choice": ["yes", "no", "maybe é"]},
    {"ebnf": 'root ::= "(" root ")" | [a-z]+'},
]


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[ServerProcess]:
    with serving("--engine", "echo", "--no-access-log", "--frontend", front_end) as running:
        yield running


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_a_stream_is_the_whole_answer_in_parts(server: ServerProcess, form: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        model, seeds = client.models.list().data[0].id, range(3)
        for seed in seeds:
            chat: Any = {"model": model, "messages": [{"role": "user", "content": "a"}], "extra_body": form}
            chat |= {"seed": seed, "n": 2, "max_tokens": 300}
            whole = client.chat.completions.create(**chat)
            parts, reasons = ["", ""], ["", ""]
            for chunk in client.chat.completions.create(**chat, stream=True):
                for choice in chunk.choices:
                    parts[choice.index] += choice.delta.content or ""
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            assert parts == [choice.message.content for choice in whole.choices]
            assert reasons == [choice.finish_reason for choice in whole.choices]


def test_a_regex_holds_with_other_sampling_fields(server: ServerProcess) -> None:
    """`stop` may cut an answer, `suffix` is another matter, the rest changes nothing about the form."""
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:

        def post(**more: Any) -> Any:
            answer = http.post("/v1/completions", json={"prompt": "a", "regex": "[ab]{30}", "max_tokens": 100, **more})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"]

        whole = re.compile("[ab]{30}")
        assert all(whole.fullmatch(one["text"]) for one in post(n=3))
        [one] = post(n=1, best_of=3, logprobs=2)
        assert whole.fullmatch(one["text"]) and len(one["logprobs"]["tokens"]) == 30
        [one] = post(echo=True)
        assert one["text"][0] == "a" and whole.fullmatch(one["text"][1:])
        [one] = post(max_tokens=5)
        assert one["finish_reason"] == "length" and re.fullmatch("[ab]{5}", one["text"])
        [one] = post(max_tokens=0, echo=True)
        assert one["text"] == "a"
        [one] = post(stop="a")
        assert re.fullmatch("b*", one["text"]) and one["finish_reason"] == "stop"
        [one] = post(stop_token_ids=[ord("a")])
        assert re.fullmatch("b*", one["text"])
        assert post(seed=5) == post(seed=5)


def test_a_grammar_error_found_by_the_engine_returns_400(server: ServerProcess) -> None:
    body = {"prompt": "a", "guided_grammar": 'start: <no_such_token> "a"'}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 400 and "no_such_token" in answer.json()["error"]["message"], answer.text
