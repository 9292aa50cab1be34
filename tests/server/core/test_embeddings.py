"""POST /v1/embeddings against an engine of scripted replies: the embedding of a prompt is its first four token ids."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from tests.helpers.server import MAX_SEQ_LEN, MODEL, VOCAB_SIZE, Frontend, check_error, frontend

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[Frontend]:
    with frontend(front_end=front_end, engine="cpu") as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


def unit(*numbers: float) -> list[float]:
    length = math.sqrt(sum(number * number for number in numbers))
    return [number / length for number in numbers]


def test_the_answer_has_openais_shape(http: httpx.Client) -> None:
    response = http.post(PATH, json={"model": MODEL, "input": "abcdef", "user": "me"})
    assert response.status_code == 200, response.text
    body = response.json()
    (found,) = body.pop("data")
    assert body == {"object": "list", "model": MODEL, "usage": {"prompt_tokens": 6, "total_tokens": 6}}
    assert (found["object"], found["index"]) == ("embedding", 0)
    assert found["embedding"] == pytest.approx(unit(97, 98, 99, 100), rel=1e-6)
    assert "x-request-id" in response.headers


@pytest.mark.parametrize("given", [["abcd", "ab"], [[97, 98, 99, 100], [97, 98]]], ids=["texts", "ids"])
def test_openais_client_reads_floats_and_bytes(server: Frontend, given: list[str] | list[list[int]]) -> None:
    """The client asks for base64 unless it is told otherwise, and decodes it."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)
    usual = client.embeddings.create(model=MODEL, input=given)  # type: ignore[arg-type]
    floats = client.embeddings.create(model=MODEL, input=given, encoding_format="float")  # type: ignore[arg-type]
    for answer in (usual, floats):
        assert [one.index for one in answer.data] == [0, 1] and answer.usage.prompt_tokens == 6
        assert answer.data[0].embedding == pytest.approx(unit(97, 98, 99, 100), rel=1e-6)
        assert answer.data[1].embedding == pytest.approx(unit(97, 98), rel=1e-6)
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=[97, 98], encoding_format="base64").parse()  # type: ignore[arg-type]
    text = raw.data[0].embedding
    assert isinstance(text, str)
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == pytest.approx(unit(97, 98), rel=1e-6)


def test_fewer_dimensions_are_normalized_again(http: httpx.Client) -> None:
    for dimensions in (1, 2, 4):
        body = http.post(PATH, json={"input": "abcd", "dimensions": dimensions}).json()
        assert body["data"][0]["embedding"] == pytest.approx(unit(*[97, 98, 99, 100][:dimensions]), rel=1e-6)


def test_the_end_of_an_input_is_kept(http: httpx.Client) -> None:
    body = http.post(PATH, json={"input": "x" * 2 * MAX_SEQ_LEN + "abcd", "truncate_prompt_tokens": 4}).json()
    assert body["data"][0]["embedding"] == pytest.approx(unit(97, 98, 99, 100), rel=1e-6)
    assert body["usage"]["prompt_tokens"] == 4


def test_pooling_reaches_the_engine(server: Frontend, http: httpx.Client) -> None:
    for pooling, marker in (("mean", "pool-1"), ("last", "pool-2"), (None, "pool-3")):
        http.post(PATH, json={"input": marker, "pooling": pooling})
        sampling = server.engine.wait_for_request(marker).sampling
        assert sampling.embedding == (pooling or "mean") and sampling.max_tokens == 1


@pytest.mark.parametrize(("own", "taken"), [("lasttoken", "last"), ("cls_token", "cls"), ("max_tokens", None)])
def test_the_models_own_pooling_is_taken(front_end: str, tmp_path: Path, own: str, taken: str | None) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{own}": True}))
    with frontend(front_end=front_end, engine="cpu", model_dir=str(tmp_path)) as server, server.http() as http:
        for pooling, marker in (("mean", "own-1"), ("last", "own-2"), (None, "own-3")):
            answer = http.post(PATH, json={"input": marker, "pooling": pooling})
            if expected := pooling or taken:
                assert server.engine.wait_for_request(marker).sampling.embedding == expected
            else:
                error = check_error(answer, 400)
                assert error["param"] == "pooling" and "asks for max_tokens: use mean, last or cls" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a", 5]}, "input.1"),
        ({"input": [VOCAB_SIZE]}, "input"),
        ({"input": [[-1]]}, "input.0.0"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": "x" * MAX_SEQ_LEN}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "abcdef", "dimensions": 5}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "priority": -(2**63)}, "priority"),
        ({"input": "a", "priority": 2**31}, "priority"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
    ids=str,
)
def test_invalid_fields_are_named(http: httpx.Client, fields: dict[str, object], param: str) -> None:
    error = check_error(http.post(PATH, json=fields), 400)
    assert error["param"] == param, error
    assert param.partition(".")[0] in error["message"]


def test_unknown_model_is_404(http: httpx.Client) -> None:
    assert check_error(http.post(PATH, json={"model": "other", "input": "a"}), 404)["param"] == "model"


def test_engine_without_embeddings_is_refused(front_end: str) -> None:
    with frontend(front_end=front_end, engine="echo") as server, server.http() as http:
        error = check_error(http.post(PATH, json={"input": "a"}), 400)
    assert "echo" in error["message"] and error["code"] == "unsupported_value"


@pytest.mark.parametrize("default", [None, "query"])
def test_texts_begin_with_the_prompt_that_is_named(front_end: str, tmp_path: Path, default: str | None) -> None:
    prompts = {"query": "q: ", "document": ""}
    settings = {"prompts": prompts, "default_prompt_name": default}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with frontend(front_end=front_end, engine="cpu", model_dir=str(tmp_path)) as server, server.http() as http:
        for fields, begin in (
            ({"prompt_name": "query"}, "q: "),
            ({"input_type": "document"}, ""),
            ({}, prompts[default] if default else ""),
        ):
            for given, ids in (("text", [*f"{begin}text".encode()[:4]]), ([97, 98], [97, 98])):
                (found,) = http.post(PATH, json={"input": given, **fields}).json()["data"]
                assert found["embedding"] == pytest.approx(unit(*ids), rel=1e-6)
        error = check_error(http.post(PATH, json={"input": "text", "prompt_name": "passage"}), 400)
        assert error["param"] == "prompt_name" and "query, document" in error["message"]
