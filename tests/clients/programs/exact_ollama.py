"""ollama: chats, prompts, streams, tools as functions, forms, thinking, vectors, models, errors; both clients."""

import ollama
from checks import CITY, MODEL, PARIS, URL, City, called, check, raises, said, tell

client = ollama.Client(host=URL)
later = ollama.AsyncClient(host=URL)


def rate(rank: int) -> str:
    """
    Rate a city.

    Args:
      rank: From 0 to 99.

    Returns:
      What became of it.
    """
    return f"rated {rank}"


@check
def chats():
    found = client.chat(MODEL, said())
    assert found.message.content == found["message"]["content"] == "Hello"
    assert (found.done, found.done_reason, found.eval_count) == (True, "stop", 6)
    assert found.total_duration == found.prompt_eval_duration + found.eval_duration > 0 == found.load_duration


@check
def streams():
    parts = list(client.chat(MODEL, said(), stream=True))
    assert "".join(part.message.content for part in parts) == "Hello"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True] and parts[-1].eval_count == 6


@check
async def asynchronous():
    assert (await later.chat(MODEL, said())).message.content == "Hello"
    texts = [part.response async for part in await later.generate(MODEL, "say:Hello", stream=True)]
    assert "".join(texts) == "Hello"


@check
def prompts():
    found = client.generate(MODEL, "say:Hello", system="Be brief.", keep_alive="5m")
    assert (found.response, found.done_reason) == ("Hello", "stop")
    assert client.generate(MODEL, "say:Hello", raw=True).response == "Hello"
    assert client.generate(MODEL).done_reason == "load"


@check
def options():
    assert client.chat(MODEL, said(), options={"stop": ["l"], "seed": 1, "temperature": 0}).message.content == "He"
    found = client.chat(MODEL, said(), options=ollama.Options(num_predict=2, num_thread=4))
    assert (found.message.content, found.done_reason) == ("He", "length")


@check
def functions_are_tools():
    asked = said(called("rate", {"rank": 7}))
    message = client.chat(MODEL, asked, tools=[rate]).message
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("rate", {"rank": 7})
    result = {"role": "tool", "tool_name": "rate", "content": rate(**call.function.arguments)}
    again = client.chat(MODEL, [*asked, message, result, *said("done")], tools=[rate])
    assert again.message.content == "done" and not again.message.tool_calls


@check
def streamed_calls():
    parts = list(client.chat(MODEL, said(called("rate", {"rank": 7})), tools=[rate], stream=True))
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("rate", {"rank": 7})]


@check
def forms():
    for form in (City.model_json_schema(), "json"):
        found = client.chat(MODEL, said(CITY), format=form).message.content
        assert City.model_validate_json(found) == PARIS


@check
def thinking():
    message = client.chat(MODEL, said("<think>Hm.</think>Yes."), think=True).message
    assert (message.thinking, message.content) == ("Hm.", "Yes.")
    assert client.generate(MODEL, "say:Yes.", think=False).response == "Yes."


@check
def log_probabilities():
    found = client.chat(MODEL, said("ab"), logprobs=True, top_logprobs=1).logprobs
    assert [one.token for one in found[:2]] == ["a", "b"] and found[0].top_logprobs


@check
def vectors():
    found = client.embed(MODEL, ["ab", "c"])
    assert len(found.embeddings) == 2 and found.prompt_eval_count == 3
    assert client.embeddings(MODEL, "ab").embedding == found.embeddings[0]
    assert len(client.embed(MODEL, "ab", dimensions=1).embeddings[0]) == 1


@check
def models():
    [model] = client.list().models
    assert model.model == MODEL and model.details.format
    [running] = client.ps().models
    assert (running.model, running.digest) == (MODEL, model.digest) and running.context_length
    shown = client.show(MODEL)
    assert {"completion", "tools"} <= set(shown.capabilities) and shown.template


@check
def errors():
    for call in (
        lambda: client.chat("other", said()),
        lambda: list(client.chat("other", said(), stream=True)),
        lambda: client.show("other"),
    ):
        error = raises(ollama.ResponseError, call)
        assert error.status_code == 404 and "does not exist here" in error.error
    assert (
        "options.temperature"
        in raises(ollama.ResponseError, lambda: client.chat(MODEL, said(), options={"temperature": 9})).error
    )
    fails = [{"role": "user", "content": "fail:ab"}]
    assert raises(ollama.ResponseError, lambda: list(client.chat(MODEL, fails, stream=True))).error


@check
def images_are_left_out_where_there_is_text():
    picture = {"role": "user", "content": "say:x", "images": [b"png"]}
    assert client.chat(MODEL, [picture]).done
    alone = raises(ollama.ResponseError, lambda: client.chat(MODEL, [{**picture, "content": ""}]))
    assert alone.status_code == 400 and "reads text only" in alone.error


@check
def other_models_are_refused():
    for call in (
        lambda: client.pull("other"),
        lambda: client.push("other"),
        lambda: client.delete("other"),
        lambda: client.copy(MODEL, "other"),
        lambda: client.create("other", from_=MODEL),
    ):
        assert raises(ollama.ResponseError, call).status_code == 501


tell()
