"""The sampling fields of the protocol over a real server on the echo engine, whose log probabilities are known: a token
has one half, those that follow it in the vocabulary a quarter, an eighth, and so on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from minisgl.engine.echo import EOS_ID, VOCAB_SIZE
from minisgl.tokenizer.echo import ECHO_BOS_ID as BOS_ID
from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.server import check_error, events, post

HALF = pytest.approx(math.log(0.5))
QUARTER = pytest.approx(math.log(0.25))
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[ServerProcess]:
    flags = ("--engine", "echo", "--page-size", "4", "--num-pages", "512", "--max-prefill-length", "64")
    with serving(*flags, "--frontend", front_end) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}, "logprobs"),
        (TEXT, {"prompt": ["a", "b"], "logprobs": 20}, "logprobs"),
        (TEXT, {"prompt": "a" * 400, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 20}, "logprobs"),
    ],
)
def test_too_many_log_probabilities_return_400(http: httpx.Client, path: str, body: dict[str, Any], field: str) -> None:
    answer = http.post(path, json={"max_tokens": 200, "n": 128, **body})
    error = check_error(answer, 400)
    assert error["param"] == field and "at most 262144 are allowed in one request" in error["message"]


def test_default_max_tokens_is_lowered_to_the_limit_of_log_probabilities(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "n": 128}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200 and answer.headers["x-minisgl-max-tokens"] == str((1 << 18) // 128 // 21)


@pytest.mark.parametrize("stream", [False, True])
def test_the_choices_of_a_prompt_share_its_log_probabilities(http: httpx.Client, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": ["ab" * 40, "c" * 30], "prompt_logprobs": 20, "max_tokens": 3, "seed": 1}
    one, several = post(http, TEXT, **body), http.post(TEXT, json={**body, "n": 2, "stream": stream})
    choices = [choice for event in events(several.text)[:-1] for choice in event["choices"]] if stream else None
    found: dict[int, list[Any]] = {}
    for choice in choices or several.json()["choices"]:
        if "prompt_logprobs" in choice:
            found.setdefault(choice["index"], []).append(choice["prompt_logprobs"])
    alone = [choice["prompt_logprobs"] for choice in one["choices"]]
    assert [found[at] for at in range(4)] == [[alone[0]], [alone[0]], [alone[1]], [alone[1]]]


def test_chat_logprobs_through_the_openai_client(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(
        model="smollm2", messages=messages, seed=1, max_tokens=40, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        assert token.bytes == list(token.token.encode()) and token.logprob == HALF
        first, second = token.top_logprobs
        assert first.token == token.token and first.logprob == HALF and second.logprob == QUARTER
        assert second.bytes == [(token.bytes[0] + 1) % VOCAB_SIZE]


def test_a_stream_has_the_same_logprobs(client: openai.OpenAI) -> None:
    settings: Any = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "again"}],
        "seed": 5,
        "max_tokens": 30,
        "logprobs": True,
        "stop": ["  "],
        "n": 2,
    }
    whole = client.chat.completions.create(**settings)
    texts, tokens = ["", ""], [list[str](), list[str]()]
    for chunk in client.chat.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs and choice.logprobs.content:
                tokens[choice.index] += [token.token for token in choice.logprobs.content]
    for i, choice in enumerate(whole.choices):
        assert choice.message.content == texts[i] and choice.logprobs and choice.logprobs.content
        assert [token.token for token in choice.logprobs.content] == tokens[i]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt", ["héllo wörld, this prompt is longer than a chunk of 64 tokens, by a few", [104, 105]]
)
def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, prompt: Any, stream: bool) -> None:
    """Twice, so that the second time the prompt is cached: prompt log probabilities are computed all the same."""
    plain = client.completions.create(model="smollm2", prompt=prompt, seed=3, max_tokens=5, echo=True)
    text = prompt if isinstance(prompt, str) else "hi"
    assert plain.choices[0].text.startswith(text)
    for _ in range(2):
        settings: Any = {"model": "smollm2", "prompt": prompt, "seed": 3, "max_tokens": 5, "echo": True, "logprobs": 1}
        if stream:
            found = {"text": "", "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            for chunk in client.completions.create(**settings, stream=True):
                piece = chunk.choices[0].logprobs
                assert piece is not None
                found["text"] += chunk.choices[0].text  # type: ignore[operator]
                for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    found[name] += getattr(piece, name)
        else:
            choice = client.completions.create(**settings).choices[0]
            assert choice.logprobs is not None
            found = {"text": choice.text, **choice.logprobs.model_dump()}
        assert found["text"] == plain.choices[0].text
        num_prompt = len(text.encode())
        logprobs, offsets = found["token_logprobs"], found["text_offset"]
        assert len(logprobs) == len(found["tokens"]) == len(offsets) >= num_prompt + 1
        assert logprobs[0] is None and logprobs[1:] == [HALF] * (len(logprobs) - 1)
        assert found["top_logprobs"][0] is None and len(found["top_logprobs"][1]) == 1
        assert offsets[0] == 0 and offsets[num_prompt] == len(text) and offsets == sorted(offsets)


def test_echo_with_max_tokens_0_scores_the_prompt_alone(http: httpx.Client) -> None:
    answer = post(http, TEXT, prompt="score me", max_tokens=0, echo=True, logprobs=0)
    choice = answer["choices"][0]
    assert choice["text"] == "score me" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == 8
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == 8


def test_prompt_logprobs_of_a_completion_have_one_entry_per_token(http: httpx.Client) -> None:
    found = post(http, TEXT, prompt="abc", max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert found[0] is None and len(found) == 3
    assert found[1] == {"98": {"logprob": HALF, "decoded_token": "b"}}


@pytest.mark.parametrize("n", [1, 3])
def test_prompt_logprobs_of_a_chat_stream_come_with_the_first_event(http: httpx.Client, n: int) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, "prompt_logprobs": 1, "n": n}
    found = post(http, CHAT, **body)["prompt_logprobs"]
    assert found[0] is None and len(found) == len("<user>abc</user>\n<assistant>")
    assert found[6] == {"97": {"logprob": HALF, "decoded_token": "a"}}
    first, *rest = events(http.post(CHAT, json={**body, "stream": True}).text)
    assert first["prompt_logprobs"] == found and not any("prompt_logprobs" in event for event in rest)
    assert http.post(CHAT, json={**body, "prompt_logprobs": 21}).json()["error"]["param"] == "prompt_logprobs"


def test_bytes_that_are_no_text_are_spelled_out(http: httpx.Client) -> None:
    found = post(http, TEXT, prompt="é", max_tokens=1, echo=True, logprobs=0, ignore_eos=True)["choices"][0]["logprobs"]
    assert found["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"] and found["text_offset"][:3] == [0, 0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_index_the_returned_text(http: httpx.Client, stream: bool) -> None:
    """Special tokens are shown, half a character is one U+FFFD, and the answer begins where the prompt ends."""
    prompt = [BOS_ID, *"hé".encode(), *"👩".encode()[:2], EOS_ID, 0xFF, *"👩".encode(), *"é".encode()[:1]]
    text = "<|bos|>hé\ufffd<|eos|>\ufffd👩\ufffd"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 4, "seed": 3, "ignore_eos": True}
    answer = http.post(TEXT, json={**body, "stream": stream})
    found: dict[str, list[Any]] = {}
    whole = ""
    for piece in events(answer.text)[:-1] if stream else [answer.json()]:
        choice = piece["choices"][0]
        whole += choice["text"]
        for name, values in choice["logprobs"].items():
            found[name] = [*found.get(name, []), *values]
    assert whole.startswith(text)
    assert found["text_offset"][: len(prompt) + 1] == [0, 7, 8, 8, 9, 9, 10, 17, 18, 18, 18, 18, 19, 20]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or whole.startswith(token, offset) or token == "<|eos|>"
    assert found["top_logprobs"][0] is None
    for token, logprob, top in list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))[
        1:
    ]:
        assert top[token] == logprob


def test_top_logprobs_have_the_token_itself(http: httpx.Client) -> None:
    found = post(http, TEXT, prompt="a", max_tokens=3, logprobs=0, ignore_eos=True)["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{token: HALF} for token in found["tokens"]]


def test_best_of_returns_n(http: httpx.Client) -> None:
    answer = post(http, TEXT, prompt=["a", "b"], n=2, best_of=4, seed=1, max_tokens=8, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 64 and answer["choices"][0]["logprobs"] is None


def test_n_computes_the_prompt_once() -> None:
    """All but the last page of the prompt, which each choice writes for itself, comes from the first one."""
    prompt = "a prompt that nobody has sent before, of 61 characters in all"
    assert len(prompt) == 61
    with serving("--engine", "echo", "--page-size", "4") as server, httpx.Client(base_url=server.url) as http:

        def totals() -> tuple[int, int]:
            found = http.get("/health").json()["stats"]
            return found["num_prompt_tokens_total"], found["num_cached_tokens_total"]

        post(http, TEXT, prompt=prompt, n=8, max_tokens=4, seed=1)
        until(lambda: totals() == (8 * 61, 7 * 60), f"prompt and cached tokens: {totals()}")


def test_a_stop_string_before_min_tokens_does_not_stop(http: httpx.Client) -> None:
    body = {"prompt": "stop early", "seed": 2, "max_tokens": 40, "ignore_eos": True}
    free = post(http, TEXT, **body)["choices"][0]["text"]
    at = free.index(" ", 3)
    early = post(http, TEXT, **body, stop=" ")["choices"][0]
    assert early["text"] == free[: free.index(" ")] and early["finish_reason"] == "stop"
    later = post(http, TEXT, **body, stop=" ", min_tokens=at + 2)["choices"][0]
    assert later["text"] == free[: free.index(" ", at + 1)] and later["finish_reason"] == "stop"


def test_assistant_prefill_goes_on_with_the_message(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    rendered = post(http, "/tokenize", messages=messages, continue_final_message=True, return_token_strs=True)
    assert "".join(rendered["token_strs"]) == "<user>hi</user>\n<assistant>Well, "
    plain = post(http, "/tokenize", messages=messages)
    text = post(http, "/detokenize", tokens=plain["tokens"])["prompt"]
    assert text == "<user>hi</user>\n<assistant>Well, </assistant>\n<assistant>"
    answer = post(http, CHAT, messages=messages, continue_final_message=True, seed=1, max_tokens=6)
    same = post(http, TEXT, prompt="<user>hi</user>\n<assistant>Well, ", seed=1, max_tokens=6)
    assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    error = http.post(CHAT, json={"messages": messages, "continue_final_message": True, "add_generation_prompt": True})
    assert error.status_code == 400 and "continue_final_message" in error.json()["error"]["message"]


def test_tokenize_and_detokenize_are_inverse_and_refuse_bad_fields(http: httpx.Client) -> None:
    found = post(http, "/tokenize", prompt="héy")
    assert found["tokens"] == list("héy".encode()) and found["count"] == 4 and found["max_model_len"] > 0
    assert post(http, "/detokenize", tokens=[104, 105, EOS_ID])["prompt"] == "hi<|eos|>"
    found = post(http, "/detokenize", tokens=[104, 105, EOS_ID], skip_special_tokens=True)
    assert found == {"prompt": "hi", "content": "hi"}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        answer = http.post(path, content=json.dumps(body))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


# ------------------------------------------------------------------------------------------------------------- SGLang


@pytest.mark.parametrize("start", [None, 0, 2])
def test_sglang_logprobs_of_a_stream_equal_those_of_a_response(http: httpx.Client, start: int | None) -> None:
    """The same of a stream, whose events have all so far."""
    asked = {
        "input_ids": [*b"hello"],
        "sampling_params": {"max_new_tokens": 6, "sampling_seed": 1},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
        **({} if start is None else {"logprob_start_len": start}),
    }
    answer = post(http, "/generate", **asked)
    meta = answer["meta_info"]
    tokens = [token for token in answer["output_ids"] if token != EOS_ID]
    assert [one[1] for one in meta["output_token_logprobs"]][: len(tokens)] == tokens
    assert "".join(one[2] for one in meta["output_token_logprobs"]) == answer["text"]
    assert all(one[0] == HALF for one in meta["output_token_logprobs"])
    for top, (_, token, _) in zip(meta["output_top_logprobs"], meta["output_token_logprobs"], strict=True):
        assert [one[:2] for one in top] == [[HALF, token], [QUARTER, (token + 1) % VOCAB_SIZE]]
    if start is None:
        assert "input_token_logprobs" not in meta
    else:
        assert [one[1] for one in meta["input_token_logprobs"]] == [*b"hello"][start:]
        assert (meta["input_token_logprobs"][0][0] is None) == (start == 0)
    *streamed, last = events(http.post("/generate", json={**asked, "stream": True}).text)
    assert last == "[DONE]"
    found = streamed[-1]["meta_info"]
    assert {name: found[name] for name in found if "logprob" in name} == {
        name: meta[name] for name in meta if "logprob" in name
    }


def test_sglang_logprobs_have_no_texts_by_default(http: httpx.Client) -> None:
    meta = post(http, "/generate", text="hi", sampling_params={"max_new_tokens": 3}, return_logprob=True)["meta_info"]
    assert all(text is None for _, _, text in meta["output_token_logprobs"]) and "output_top_logprobs" not in meta
    assert "output_token_logprobs" not in post(http, "/generate", text="hi", max_tokens=3)["meta_info"]
