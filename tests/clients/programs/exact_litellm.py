"""LiteLLM before each API of the server: calls, streams, forms, embeddings, errors by their kinds."""

import json

import litellm
from checks import CALL, CITY, MODEL, URL, check, raises, said, tell

litellm.drop_params = False
litellm.num_retries = 0
PARAMETERS = {"type": "object", "properties": {"rank": {"type": "integer"}}, "required": ["rank"]}
TOOL = {"type": "function", "function": {"name": "rate", "description": "Rate.", "parameters": PARAMETERS}}
CHAT = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
HOSTED = CHAT | {"model": f"hosted_vllm/{MODEL}"}
MESSAGES = CHAT | {"model": f"anthropic/{MODEL}", "api_base": URL, "max_tokens": 200}
WAYS = (CHAT, HOSTED, MESSAGES)


def chat(way, text="Hello", **more):
    return litellm.completion(**way, messages=more.pop("messages", said(text)), **more)


def joined(parts):
    return "".join(part.choices[0].delta.content or "" for part in parts)


@check
def texts():
    for way in WAYS:
        found = chat(way)
        assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("Hello", "stop"), way["model"]
        assert found.usage.completion_tokens == 6, found.usage


@check
def streams():
    for way in WAYS:
        parts = list(chat(way, stream=True))
        assert joined(parts) == "Hello" and parts[-1].choices[0].finish_reason == "stop", way["model"]


@check
def the_usage_of_a_stream():
    parts = list(chat(CHAT, stream=True, stream_options={"include_usage": True}))
    assert litellm.stream_chunk_builder(parts).usage.completion_tokens == 6


@check
async def asynchronous():
    for way in WAYS:
        found = await litellm.acompletion(**way, messages=said())
        stream = await litellm.acompletion(**way, messages=said(), stream=True)
        assert found.choices[0].message.content == joined([part async for part in stream]) == "Hello"


@check
def calls():
    for way in WAYS:
        for choice in ("auto", "required"):
            found = chat(way, CALL, tools=[TOOL], tool_choice=choice).choices[0]
            [call] = found.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("rate", {"rank": 7}), way["model"]
            assert found.finish_reason == "tool_calls", way["model"]


@check
def streamed_calls():
    for way in WAYS:
        whole = litellm.stream_chunk_builder(list(chat(way, CALL, tools=[TOOL], stream=True))).choices[0]
        [call] = whole.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("rate", {"rank": 7}), way["model"]
        assert whole.finish_reason == "tool_calls", way["model"]


@check
def a_named_tool():
    named = {"type": "function", "function": {"name": "rate"}}
    for way in WAYS:
        assert chat(way, CALL, tools=[TOOL], tool_choice=named).choices[0].message.tool_calls, way["model"]


@check
def results_of_calls():
    for way in WAYS:
        first = chat(way, CALL, tools=[TOOL]).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "say:seven"}
        found = chat(way, messages=[*said(CALL), first.model_dump(), result], tools=[TOOL])
        assert found.choices[0].message.content == "seven", way["model"]


@check
def forms():
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "c", "schema": PARAMETERS}}):
        assert json.loads(chat(CHAT, CITY, response_format=form).choices[0].message.content)["name"] == "Paris"


@check
def thoughts():
    for way in (CHAT, HOSTED, MESSAGES):
        message = chat(way, "<think>Hm.</think>Yes").choices[0].message
        assert (message.content, message.reasoning_content) == ("Yes", "Hm."), way["model"]


@check
def several_choices():
    assert [one.message.content for one in chat(CHAT, n=2).choices] == ["Hello"] * 2


@check
def sampling():
    more = {"temperature": 0.5, "top_p": 0.5, "seed": 1, "stop": ["l"], "presence_penalty": 1, "user": "me"}
    assert chat(CHAT, **more).choices[0].message.content == "He"


@check
def limits():
    for way in (CHAT, HOSTED, MESSAGES | {"max_tokens": 3}):
        found = chat(way | {"max_tokens": 3}).choices[0]
        assert (found.message.content, found.finish_reason) == ("Hel", "length"), way["model"]


@check
def completions():
    way = CHAT | {"model": f"text-completion-openai/{MODEL}"}
    assert litellm.text_completion(**way, prompt="say:Hello").choices[0].text == "Hello"
    parts = litellm.text_completion(**way, prompt="say:Hello", stream=True)
    assert "".join(part.choices[0].text or "" for part in parts) == "Hello"


@check
def embeddings():
    found = litellm.embedding(**CHAT, input=["abcd", "abcd"])
    assert len(found.data) == 2 and len(found.data[0]["embedding"]) == 4


@check
def responses():
    found = litellm.responses(**CHAT, input="say:Hello")
    assert found.output[0].content[0].text == "Hello"
    kinds = [event.type for event in litellm.responses(**CHAT, input="say:Hello", stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


@check
async def anthropic_messages():
    found = await litellm.anthropic.messages.acreate(**MESSAGES, messages=said())
    assert found["content"][0]["text"] == "Hello"


@check
def errors():
    raises(litellm.NotFoundError, lambda: chat(CHAT | {"model": "openai/other"}))
    raises(litellm.BadRequestError, lambda: chat(CHAT, temperature=9))
    raises(litellm.ContextWindowExceededError, lambda: chat(CHAT, "x" * (1 << 17)))
    raises(litellm.InternalServerError, lambda: chat(CHAT, messages=[{"role": "user", "content": "fail:"}]))
    raises(litellm.Timeout, lambda: chat(CHAT, messages=[{"role": "user", "content": "hang:x"}], timeout=0.3))


tell()
