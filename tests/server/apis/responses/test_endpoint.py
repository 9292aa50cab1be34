"""POST /v1/responses with the official client, against an engine of scripted replies. That client's typed models are
the schema that answers are held against."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from minisgl.config import ApiKey
from tests.helpers.server import CONFIG, MAX_SEQ_LEN, MODEL, Frontend, check_error, failed_step, frontend, prompt_text

PATH = "/v1/responses"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def create(client: openai.OpenAI, given: Any, **more: Any) -> Response:
    return client.responses.create(model=MODEL, input=given, **more)


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    Response.model_validate_json(response.content, strict=True)
    found: dict[str, Any] = response.json()
    return found


def events(text: str) -> list[dict[str, Any]]:
    """Each held against the client's schema; its name is the type of its data."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = EVENTS.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"
        found.append(event.model_dump(by_alias=True, exclude_unset=True))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_whole_answer_has_the_exact_shape(http: httpx.Client) -> None:
    body = post(http, model=MODEL, input="say:Hello", metadata={"a": "b"}, temperature=0.5)
    assert body.pop("id").startswith("resp_")
    assert isinstance(body.pop("created_at"), int) and isinstance(body.pop("completed_at"), int)
    [item] = body.pop("output")
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    usage = body.pop("usage")
    num_prompt = len("<user>say:Hello</user>\n<assistant>")
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (num_prompt, 6, num_prompt + 6)
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert body == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": MODEL,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }


def test_events_come_in_order(http: httpx.Client) -> None:
    response = http.post(PATH, json={"input": "say:Hello", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-minisgl-cached-tokens"].isdigit() and response.headers["x-minisgl-max-tokens"]
    found = events(response.text)
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event["delta"] for event in found[4:-4]) == "Hello" == found[-4]["text"]
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["output"] == []
    last = found[-1]["response"]
    assert last["output"] == [found[-2]["item"]] and last["status"] == "completed"
    assert {event["item_id"] for event in found if "item_id" in event} == {last["output"][0]["id"]}


def test_the_stream_helper_ends_with_the_whole_answer(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="say:Hello there") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == "Hello there" == final.output_text
    kept = client.responses.retrieve(final.id)
    assert (kept.output_text, kept.output[0].id) == (final.output_text, final.output[0].id)


def test_a_streamed_answer_is_the_whole_one(http: httpx.Client) -> None:
    def shown(body: dict[str, Any]) -> dict[str, Any]:
        items = [{**item, "id": ""} for item in body["output"]]
        return {**body, "id": "", "created_at": 0, "completed_at": 0, "usage": None, "output": items}

    for given in ({"input": "say:some text"}, {"input": "say:a longer text", "max_output_tokens": 4}):
        whole = post(http, **given)
        last = events(http.post(PATH, json={**given, "stream": True}).text)[-1]["response"]
        assert shown(last) == shown(whole)


def test_an_empty_answer_has_no_items(http: httpx.Client) -> None:
    assert post(http, input="say:")["output"] == []
    kinds = [event["type"] for event in events(http.post(PATH, json={"input": "say:", "stream": True}).text)]
    assert kinds == ["response.created", "response.in_progress", "response.completed"]


def test_a_blank_answer_is_text(http: httpx.Client) -> None:
    [item] = post(http, input="say: \n ")["output"]
    assert item["content"][0]["text"] == " \n "


def test_items_become_messages(client: openai.OpenAI, server: Frontend) -> None:
    items = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "items"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": "say:ok"},
    ]
    create(client, items, instructions="first")
    prompt = prompt_text(server.engine.wait_for_request("items"))
    assert prompt.startswith("<system>first</system>\n<system>rules</system>\n<user>one")
    assert prompt.endswith("<assistant>two</assistant>\n<user>say:ok</user>\n<assistant>")


def test_log_probabilities(http: httpx.Client) -> None:
    for more in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        error = check_error(http.post(PATH, json={"input": "say:ok", **more, "top_logprobs": 21}), 400)
        assert error["param"] == "top_logprobs"


# ------------------------------------------------------------------------------------------------------- what is kept


def test_previous_response_id_continues_the_conversation(client: openai.OpenAI, server: Frontend) -> None:
    first = create(client, "say:blue", instructions="not kept")
    second = create(client, "green", previous_response_id=first.id)
    third = create(client, [{"role": "user", "content": "goes on"}], previous_response_id=second.id)
    assert third.previous_response_id == second.id
    prompt = prompt_text(server.engine.wait_for_request("goes on"))
    turns = "<user>say:blue</user>\n<assistant>blue</assistant>\n<user>green</user>\n<assistant>blue</assistant>\n"
    assert prompt == f"{turns}<user>goes on</user>\n<assistant>"


def test_item_reference_is_resolved(client: openai.OpenAI, server: Frontend) -> None:
    first = create(client, "say:violet")
    reference = {"type": "item_reference", "id": first.output[0].id}
    create(client, [{"role": "user", "content": "colour?"}, reference, {"role": "user", "content": "say:refer"}])
    assert "<assistant>violet</assistant>" in prompt_text(server.engine.wait_for_request("say:refer"))


def test_stored_response_is_returned_and_deleted(client: openai.OpenAI, http: httpx.Client) -> None:
    found = create(client, "say:kept", metadata={"k": "v"})
    assert client.responses.retrieve(found.id) == found
    items = client.responses.input_items.list(found.id)
    assert [item.content[0].text for item in items] == ["say:kept"]  # type: ignore[union-attr]
    ResponseItemList.model_validate_json(http.get(f"{PATH}/{found.id}/input_items").content, strict=True)
    client.responses.delete(found.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(found.id)
    with pytest.raises(openai.BadRequestError) as error:
        create(client, "say:x", previous_response_id=found.id)
    assert error.value.param == "previous_response_id"


def test_input_items_come_in_pages(client: openai.OpenAI, http: httpx.Client) -> None:
    given = [{"role": "user", "content": f"{i}"} for i in range(7)] + [{"role": "user", "content": "say:pages"}]
    found = create(client, given)
    for order, wanted in (("asc", [*"0123456", "say:pages"]), ("desc", ["say:pages", *"6543210"])):
        items = client.responses.input_items.list(found.id, limit=3, order=order)  # type: ignore[arg-type]
        assert [item.content[0].text for item in items] == wanted  # type: ignore[union-attr]
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=msg_x", "after")):
        assert check_error(http.get(f"{PATH}/{found.id}/input_items?{query}"), 400)["param"] == param


def test_store_false_stores_nothing(client: openai.OpenAI, http: httpx.Client) -> None:
    found = create(client, "say:forget", store=False)
    assert found.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)
    last = events(http.post(PATH, json={"input": "say:x", "store": False, "stream": True}).text)[-1]
    check_error(http.get(f"{PATH}/{last['response']['id']}"), 404)


def test_stored_response_of_another_key_is_404(front_end: str) -> None:
    keys = (ApiKey(name="one", key="key-of-one-000000"), ApiKey(name="two", key="key-of-two-000000"))
    config = msgspec.structs.replace(CONFIG, api_keys=keys)
    with frontend(front_end=front_end, config=config) as server, server.http() as http:
        heads = [{"Authorization": f"Bearer {key.key}"} for key in keys]
        name = http.post(PATH, json={"input": "say:mine"}, headers=heads[0]).json()["id"]
        assert http.get(f"{PATH}/{name}", headers=heads[0]).status_code == 200
        check_error(http.get(f"{PATH}/{name}", headers=heads[1]), 404)
        check_error(http.delete(f"{PATH}/{name}", headers=heads[1]), 404)
        check_error(http.get(f"{PATH}/{name}/input_items", headers=heads[1]), 404)
        body = {"input": "say:x", "previous_response_id": name}
        assert check_error(http.post(PATH, json=body, headers=heads[1]), 400)["param"] == "previous_response_id"
        check_error(http.get(f"{PATH}/{name}"), 401)


# ------------------------------------------------------------------------------------------------------------ failures


def test_a_failure_before_the_first_token_is_a_status(http: httpx.Client) -> None:
    for stream in (False, True):
        assert check_error(http.post(PATH, json={"input": "fail:", "stream": stream}), 500)["code"] == "engine_error"


def test_a_failure_in_a_stream_is_an_event(http: httpx.Client, server: Frontend) -> None:
    with http.stream("POST", PATH, json={"input": "hang:then fails", "stream": True}) as response:
        req_id = server.engine.wait_for_request("then fails").req_id
        text = ""
        for part in response.iter_text():
            text += part
            if '"delta":"' in text and "fails" in "".join(
                event["delta"] for event in events(text[: text.rindex("\n\n") + 2]) if "delta" in event
            ):
                server.engine.send(failed_step(req_id, "scripted failure"))
    last = events(text)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert "scripted failure" in last["response"]["error"]["message"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "mcp_call", "id": "x"}]}, "input"),
    ({"input": [{"type": "mesage", "role": "user", "content": "x"}]}, "input.0.type"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input.0.call_id"),
    ({"input": [{"type": "item_reference", "id": "msg_unknown"}]}, "input.0.id"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "max_tokens": 5}, "max_tokens"),
    ({"input": "x", "n": 2}, "n"),
    ({"input": "x", "temperature": 3}, "temperature"),
    ({"input": "x", "tools": [{"type": "local_shell"}]}, "tools.0.type"),
    ({"input": "x", "tool_choice": "maybe"}, "tool_choice"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "x", "truncation": "middle"}, "truncation"),
    ({"input": "x", "text": {"verbosity": "none"}}, "text.verbosity"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"input": "x", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"input": "x" * MAX_SEQ_LEN}, "input"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_invalid_fields_are_named(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert check_error(http.post(PATH, json=body), 400)["param"] == param


def test_truncation_auto_drops_oldest_messages(client: openai.OpenAI, server: Frontend) -> None:
    talk = [{"role": role, "content": f"{role[0]}{i} " + "x" * 60} for i in range(6) for role in ("user", "assistant")]
    items = [{"role": "system", "content": "rules"}, *talk, {"role": "user", "content": "say:shorter"}]
    with pytest.raises(openai.BadRequestError) as error:
        create(client, items)
    assert error.value.code == "context_length_exceeded"
    assert create(client, items, truncation="auto").output_text == "shorter"
    prompt = prompt_text(server.engine.wait_for_request("say:shorter"))
    assert prompt.startswith("<system>rules</system>\n<user>u4 ") and len(prompt) < MAX_SEQ_LEN
    one_more = len("<user>u3 </user>\n<assistant>a3 </assistant>\n") + 120
    assert len(prompt) + one_more >= MAX_SEQ_LEN


def test_input_tokens_equal_usage_of_the_response(http: httpx.Client) -> None:
    first = post(http, input="say:Hello")
    body = {"input": "say:again", "previous_response_id": first["id"], "instructions": "Be brief."}
    counted = http.post(f"{PATH}/input_tokens", json=body)
    assert counted.status_code == 200, counted.text
    assert counted.json() == {
        "object": "response.input_tokens",
        "input_tokens": post(http, **body)["usage"]["input_tokens"],
    }
    assert check_error(http.post(f"{PATH}/input_tokens", json={}), 400)["param"] == "input"
