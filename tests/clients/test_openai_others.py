"""What the reference of OpenAI's API shows of models, embeddings and errors, as test_openai_chats.py."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types import CreateEmbeddingResponse, Model

from minisgl.config import ApiKey
from tests.helpers.exact import held
from tests.helpers.server import CONFIG, MODEL, Frontend, frontend


def test_models_are_listed_and_found_by_id(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert client.models.retrieve(MODEL).id == model.id == MODEL and model.object == "model"
    assert held(Model, client.models.with_raw_response.retrieve(MODEL).text).owned_by == "minisgl"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


IDS = [97, 98, 99, 100]


@pytest.mark.parametrize("given", ["abcd", ["abcd", "abcd"], IDS, [IDS, IDS]], ids=["text", "texts", "ids", "lists"])
def test_embeddings_in_base64_equal_those_in_float(client: openai.OpenAI, given: Any) -> None:
    whole = client.embeddings.create(model=MODEL, input=given)  # base64 between them
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=given, encoding_format="float")
    found = held(CreateEmbeddingResponse, raw.text)
    assert [one.index for one in found.data] == list(
        range(2 if isinstance(given[0], (str, list)) and len(given) == 2 else 1)
    )
    for left, right in zip(whole.data, found.data, strict=True):
        assert left.embedding == pytest.approx(right.embedding, abs=1e-6)


@pytest.mark.refused
def test_other_routes_are_not_there(client: openai.OpenAI) -> None:
    calls = [
        lambda: client.moderations.create(input="x"),
        lambda: client.images.generate(prompt="x"),
        lambda: client.audio.speech.create(input="x", model="x", voice="alloy"),
        client.files.list,
        client.batches.list,
        client.fine_tuning.jobs.list,
        client.vector_stores.list,
        client.conversations.create,
        lambda: client.models.delete(MODEL),
    ]
    for call in calls:
        with pytest.raises(openai.APIStatusError) as error:
            call()  # type: ignore[no-untyped-call]
        assert error.value.status_code in (404, 405, 501) and error.value.body  # 501: without a folder for batches


# ---------------------------------------------------------------------------------------------------------- errors


def chat(client: openai.OpenAI, text: str = "say:Hello", **more: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": [{"role": "user", "content": text}], **more})


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        chat(client, model="other")
    assert (error.value.code, error.value.param, error.value.status_code) == ("model_not_found", "model", 404)
    assert error.value.request_id


def test_a_prompt_beyond_the_context_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, "x" * (1 << 17))
    assert error.value.code == "context_length_exceeded"


def test_a_failure_is_a_server_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as error:
        chat(client, "fail:")
    assert error.value.status_code == 500


def test_a_failure_within_a_stream_is_an_api_error(client: openai.OpenAI) -> None:
    seen = ""
    with pytest.raises(openai.APIError) as error:
        for chunk in chat(client, "fail:abc", stream=True):
            seen += chunk.choices[0].delta.content or ""
    assert "abc".startswith(seen) and "scripted failure" in error.value.message


def test_a_client_timeout_aborts_the_request(client: openai.OpenAI, scripted: Frontend) -> None:
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.2), "hang:x")
    with chat(client, "hang:x", stream=True) as stream:
        next(iter(stream))
    scripted.wait_until(lambda: scripted.num_live == 0)


def test_an_unreachable_server_is_a_connection_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(openai.APIConnectionError):
        chat(openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0))


def test_keys(front_end: str) -> None:
    config = msgspec.structs.replace(CONFIG, api_keys=(ApiKey(name="one", key="secret"),))
    with frontend(front_end=front_end, config=config) as running:
        url = f"{running.url}/v1"
        with pytest.raises(openai.AuthenticationError):
            chat(openai.OpenAI(base_url=url, api_key="wrong", max_retries=0))
        assert chat(openai.OpenAI(base_url=url, api_key="secret")).choices[0].message.content == "Hello"


def test_a_foreign_origin_is_not_permitted(client: openai.OpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError):
        chat(client, extra_headers={"Origin": "http://evil.example"})


def test_a_rate_limited_request_is_retried(scripted: Frontend, client: openai.OpenAI) -> None:
    """The client waits as long as it is told, and asks again."""
    told = [httpx.Response(429, headers={"retry-after-ms": "1"}, json={"error": {"message": "later"}})]

    def answer(request: httpx.Request) -> httpx.Response:
        return told.pop() if told else httpx.Client().send(request)

    inner = httpx.Client(transport=httpx.MockTransport(answer))
    again = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=1, http_client=inner)
    assert chat(again).choices[0].message.content == "Hello" and not told
