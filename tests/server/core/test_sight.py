"""Images in the bodies of all APIs, for a model that sees: one image is one prompt, whichever API it came by."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from minisgl.config import ImageLimits
from minisgl.images import ImageError
from minisgl.images.fetch import Fetcher
from minisgl.images.processors import Processor
from minisgl.message import AddRequest
from minisgl.prompt_image import FIRST_VIRTUAL_ID, virtual_ids
from minisgl.server.core.bodies import ChatMessage, ImagePart
from minisgl.server.core.resume import Said
from minisgl.server.core.sight import leave_out_oldest
from minisgl.utils.installed import how_to_get
from tests.helpers.image_files import BROKEN_PILLOW, encoded, hostile
from tests.helpers.server import CONFIG, Frontend, frontend, prompt_ids, prompt_text
from tests.helpers.sight import (
    END_ID,
    MARKED,
    PAD_ID,
    PARTS,
    START_ID,
    TEMPLATE,
    data_url,
    in_base64,
    png,
    prepared,
    seeing_frontend,
)
from tests.server.core.test_resume import asked

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA, OLLAMA_TEXT, COMPLETION = "/api/chat", "/api/generate", "/completion"
ONE, OTHER = png(), png(40, 16, seed=1)
TOKENS_OF_ONE = 12
CALL = {"id": "c", "type": "function", "function": {"name": "shoot", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "shoot"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def server(front_end: str, folder: Path) -> Iterator[Frontend]:
    config = msgspec.structs.replace(CONFIG, tool_call_parser="hermes", images=ImageLimits(max_images=3))
    with seeing_frontend(folder, front_end=front_end, config=config) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


def image_url(data: bytes = ONE, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def block(data: bytes = ONE) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": in_base64(data)}}


def input_image(data: bytes = ONE) -> dict[str, Any]:
    return {"type": "input_image", "detail": "auto", "image_url": data_url(data)}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 8, **more}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def sent(http: httpx.Client, server: Frontend, path: str, body: dict[str, Any], marker: str = "say:ok") -> AddRequest:
    """Send a body, which must succeed, and return its request to the engine."""
    before = len(server.engine.requests(marker))
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-minisgl-ignored" not in answer.headers
    return server.engine.requests(marker)[before]


def check(request: AddRequest, folder: Path, *files: bytes, max_tokens: int | None = None) -> None:
    """Check that a request has the virtual ids and the patches of these images, in order, each between its markers."""
    ids = np.array(prompt_ids(request))
    assert len(request.images) == len(files)
    for image, data in zip(request.images, files, strict=True):
        [want] = prepared(folder, data, max_tokens).tiles
        assert (image.digest, image.grid, image.pixels) == (want.digest, want.grid, want.pixels)
        end = image.start + image.num_tokens
        assert ids[image.start - 1] == START_ID and ids[end] == END_ID
        assert (ids[image.start : end] == virtual_ids(want.digest, want.num_tokens)).all()
    assert (ids >= FIRST_VIRTUAL_ID).sum() == sum(image.num_tokens for image in request.images)
    assert PAD_ID not in ids


RESULT_OF_CALL = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [CALL]}]
IN_RESULTS: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "messages": [
                *RESULT_OF_CALL,
                {"role": "tool", "tool_call_id": "c", "content": [text("say:ok"), image_url()]},
            ],
            "tools": TOOLS,
        },
    ),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "q"},
                {"type": "function_call", "call_id": "c", "name": "shoot", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": "say:ok"}, input_image()],
                },
            ]
        },
    ),
    (
        MESSAGES,
        {
            "max_tokens": 8,
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "shoot", "input": {}}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": [text("say:ok"), block()]}],
                },
            ],
        },
    ),
    (
        OLLAMA,
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "shoot"}}]},
                {"role": "tool", "content": "say:ok", "images": [in_base64(ONE)]},
            ],
            "stream": False,
        },
    ),
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat(image_url(), text("say:ok"))),
    (CHAT, chat(image_url(detail="high"), text("say:ok"), n=2, stream=True)),
    (CHAT, chat({"type": "image_url", "image_url": data_url(ONE)}, text("say:ok"))),
    (CHAT, chat({"type": "image_url", "image_url": {"url": in_base64(ONE)}}, text("say:ok"))),
    (CHAT, chat({"type": "input_image", "image_url": f"DATA:;base64,{in_base64(ONE)}"}, text("say:ok"))),
    (RESPONSES, {"input": [{"role": "user", "content": [input_image(), {"type": "input_text", "text": "say:ok"}]}]}),
    (MESSAGES, {"max_tokens": 8, "messages": [{"role": "user", "content": [block(), text("say:ok")]}]}),
    (
        MESSAGES,
        {
            "max_tokens": 8,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "url", "url": data_url(ONE)}},
                        text("say:ok"),
                    ],
                }
            ],
        },
    ),
    (OLLAMA, {"messages": [{"role": "user", "content": "say:ok", "images": [in_base64(ONE)]}], "stream": False}),
    (OLLAMA_TEXT, {"prompt": "say:ok", "images": [in_base64(ONE)]}),
    (
        COMPLETION,
        {
            "prompt": {
                "prompt_string": "<user><__media__>say:ok</user>\n<assistant>",
                "multimodal_data": [in_base64(ONE)],
            }
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_image_is_the_same_prompt_by_every_api(
    http: httpx.Client, server: Frontend, folder: Path, path: str, body: dict[str, Any]
) -> None:
    request = sent(http, server, path, body)
    check(request, folder, ONE)
    assert prompt_text(request) == "<user>say:ok</user>\n<assistant>" and request.images[0].start == 7


@pytest.mark.parametrize(("path", "body"), IN_RESULTS)
def test_an_image_in_a_tools_result_is_seen(
    http: httpx.Client, server: Frontend, folder: Path, path: str, body: dict[str, Any]
) -> None:
    request = sent(http, server, path, body)
    check(request, folder, ONE)
    words = prompt_text(request)
    assert words.endswith("<tool>say:ok</tool>\n<assistant>") and "left out" not in words


def test_several_images_keep_their_order_and_places(http: httpx.Client, server: Frontend, folder: Path) -> None:
    parts = [text("a"), image_url(OTHER), text("b"), image_url(), image_url(OTHER), text("say:ok")]
    request = sent(http, server, CHAT, chat(*parts))
    check(request, folder, OTHER, ONE, OTHER)
    ids = prompt_ids(request)
    assert ids[request.images[0].start - 2] == ord("a") and ids[request.images[1].start - 2] == ord("b")


def test_choices_share_one_preparation(
    http: httpx.Client, server: Frontend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bytes] = []
    prepare = Processor.prepare

    def counted(self: Processor, data: Any, **how: Any) -> Any:
        calls.append(data)
        return prepare(self, data, **how)

    monkeypatch.setattr(Processor, "prepare", counted)
    fresh = png(24, 24, seed=9)
    for path, body in ((CHAT, chat(image_url(fresh), text("say:both"), n=3)), (RESPONSES, None), (CHAT, None)):
        again = {
            "input": [{"role": "user", "content": [input_image(fresh), {"type": "input_text", "text": "say:both"}]}]
        }
        sent(
            http,
            server,
            path,
            body or (again if path == RESPONSES else chat(image_url(fresh), text("say:both"))),
            "both",
        )
    assert calls == [fresh]
    assert all(len(request.images) == 1 for request in server.engine.requests("say:both"))


def test_low_detail_takes_fewer_tokens(http: httpx.Client, server: Frontend, folder: Path) -> None:
    large = png(200, 200)
    request = sent(http, server, CHAT, chat(image_url(large, detail="low"), text("say:low")), "say:low")
    check(request, folder, large, max_tokens=256)
    assert request.images[0].num_tokens <= 256 < prepared(folder, large).num_tokens
    check(sent(http, server, CHAT, chat(image_url(large), text("say:high")), "say:high"), folder, large)


def test_usage_and_counts_have_the_placeholders(http: httpx.Client, server: Frontend) -> None:
    whole = http.post(CHAT, json=chat(image_url(), text("say:ok"))).json()["usage"]
    assert whole["prompt_tokens_details"]["image_tokens"] == TOKENS_OF_ONE
    bare = http.post(CHAT, json=chat(text("say:ok"))).json()["usage"]
    assert "image_tokens" not in bare["prompt_tokens_details"]
    assert whole["prompt_tokens"] == bare["prompt_tokens"] + TOKENS_OF_ONE + 2
    counted = [
        http.post("/tokenize", json={"messages": chat(image_url(), text("say:ok"))["messages"]}).json()["count"],
        http.post(f"{RESPONSES}/input_tokens", json=BODIES[5][1]).json()["input_tokens"],
        http.post(f"{MESSAGES}/count_tokens", json={"messages": BODIES[6][1]["messages"]}).json()["input_tokens"],
    ]
    assert counted == [whole["prompt_tokens"]] * 3


def test_ids_for_clients_have_the_marker_for_each_position(http: httpx.Client, server: Frontend) -> None:
    body = chat(image_url(), text("say:ok"), return_token_ids=True)
    shown = http.post(CHAT, json=body).json()["prompt_token_ids"]
    assert shown[6 : 8 + TOKENS_OF_ONE] == [START_ID, *[PAD_ID] * TOKENS_OF_ONE, END_ID]
    tokens = http.post("/tokenize", json={"messages": body["messages"], "return_token_strs": True}).json()
    assert tokens["tokens"] == shown and tokens["token_strs"][7] == "<|image_pad|>"
    assert http.post("/detokenize", json={"tokens": shown}).json()["prompt"].count("<|image_pad|>") == TOKENS_OF_ONE
    rendered = http.post("/apply-template", json={"messages": body["messages"]}).json()["prompt"]
    assert rendered == f"<user>{MARKED}say:ok</user>\n<assistant>"


@pytest.mark.parametrize("place", ["text", "before", "beside"])
def test_a_text_that_spells_the_marker_is_no_image(
    http: httpx.Client, server: Frontend, folder: Path, place: str
) -> None:
    spelled = f"{MARKED} \ue0010\ue001say:ok" if place != "text" else "\ue0010\ue001" + MARKED + "say:ok"
    body = chat(*([] if place == "text" else [image_url()]), text(MARKED + "say:ok"))
    request = sent(http, server, CHAT, body)
    check(request, folder, *([] if place == "text" else [ONE]))
    assert prompt_text(request).count("<|image_pad|>") == 1
    both = sent(http, server, CHAT, chat(image_url(), text(spelled)))
    check(both, folder, ONE)
    assert "\ue0010\ue001" in prompt_text(both), "the mark of an image is not to be guessed"


LARGE = [image_url(encoded(Image.new("L", (1600, 1600), i))) for i in range(3)]
ERRORS: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, chat(image_url(), image_url(b"GIF89a")), "messages.0.content.1.image_url", "head"),
    (
        CHAT,
        chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
        "messages.0.content.0.image_url",
        "file:",
    ),
    (CHAT, chat({"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}), "messages.0", "--image-hosts"),
    (CHAT, chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}), "messages.0", "base64"),
    (
        CHAT,
        chat({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}),
        "messages.0",
        "data:image/png;base64,",
    ),
    (CHAT, chat({"type": "image_url"}), "messages.0.content.0.image_url", "must be"),
    (CHAT, chat({"type": "image_url", "image_url": {"url": 7}}), "messages.0.content.0.image_url", "must be"),
    (CHAT, chat({"type": "image_url", "image_url": ""}), "messages.0.content.0.image_url", "must be"),
    (CHAT, chat(image_url(detail="ultra")), "messages.0.content.0.image_url.detail", "low, high or auto"),
    (CHAT, chat({**image_url(), "detail": "ultra"}), "messages.0.content.0.detail:", "low, high or auto"),
    (CHAT, chat({"type": "image"}), "messages.0.content.0.image_url", "must be a data URL or base64 (got null)"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{**input_image(), "detail": "ultra"}]}]},
        "input.0.content.0.detail:",
        "low, high or auto",
    ),
    (CHAT, chat(*[image_url()] * 4), "messages.0.content.3.image_url", "at most 3 images (--max-images)"),
    (CHAT, chat(image_url(), text("a"), prompt_logprobs=0), "prompt_logprobs", "images"),
    (CHAT, chat(image_url(), text("a"), truncate_prompt_tokens=9), "truncate_prompt_tokens", "images"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
        "input.0.content.0.file_id",
        "no stored files",
    ),
    (
        RESPONSES,
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [input_image(), input_image(b"x")]},
            ]
        },
        "input.1.output.1.image_url",
        "no PNG",
    ),
    (
        MESSAGES,
        {"max_tokens": 8, "messages": [{"role": "user", "content": [text("a"), block(b"x")]}]},
        "messages.0.content.1.source",
        "no PNG",
    ),
    (
        MESSAGES,
        {
            "max_tokens": 8,
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "file_1"}}]}
            ],
        },
        "messages.0.content.0.source",
        "no stored files",
    ),
    (
        MESSAGES,
        {
            "max_tokens": 8,
            "messages": [
                *IN_RESULTS[2][1]["messages"][:2],
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block(b"x")]}]},
            ],
        },
        "messages.2.content.0.content.0.source",
        "no PNG",
    ),
    (OLLAMA, {"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}, "messages.0.images.0", "no PNG"),
    (OLLAMA_TEXT, {"prompt": "a", "images": ["%"]}, "images.0", "base64"),
    (OLLAMA_TEXT, {"prompt": "a", "images": [in_base64(ONE)], "raw": True}, "images", "raw"),
    (
        COMPLETION,
        {"prompt": {"prompt_string": "a", "multimodal_data": [in_base64(ONE)]}},
        "prompt.prompt_string",
        "<__media__> once for each image, 1 in all",
    ),
    (
        COMPLETION,
        {"prompt": [{"prompt_string": "<__media__>", "multimodal_data": ["AAAA"]}]},
        "prompt.0.multimodal_data.0",
        "no PNG",
    ),
    (COMPLETION, {"prompt": [{"prompt_string": "<__media__>", "multimodal_data": ["AAAA"]}] * 20}, "prompt", "at most"),
    (
        CHAT,
        {"messages": chat(*LARGE, image_url())["messages"][:1]},
        "messages.0.content.3",
        "at most",
    ),
    ("/v1/cache/prefixes", {"messages": chat(image_url())["messages"]}, "messages", "images"),
]


@pytest.mark.parametrize(("path", "body", "param", "reason"), ERRORS)
def test_a_bad_image_names_its_field_and_the_reason(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, reason: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message: str = error if isinstance(error, str) else error["message"]
    assert message.startswith(param) and reason in message and len(message) < 400


def test_a_prompt_beyond_the_context_says_what_images_take(http: httpx.Client, server: Frontend) -> None:
    large = [image_url(png(512, 512, seed)) for seed in range(3)]
    words = "x" * 1100
    error = http.post(CHAT, json=chat(*large, text(words))).json()["error"]
    assert error["code"] == "context_length_exceeded" and "(3072 of them of images)" in error["message"]
    blocks = [block(png(512, 512, seed)) for seed in range(3)]
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": [*blocks, text(words)]}]}
    message = http.post(MESSAGES, json=body).json()["error"]["message"]
    assert message.startswith("prompt is too long: ") and "(3072 of them of images)" in message


BEYOND: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [1, FIRST_VIRTUAL_ID]}),
    ("/v1/completions", {"prompt": [[1], [FIRST_VIRTUAL_ID + 5]]}),
    (COMPLETION, {"prompt": [FIRST_VIRTUAL_ID]}),
    ("/generate", {"input_ids": [FIRST_VIRTUAL_ID]}),
    ("/v1/cache/prefixes", {"token_ids": [FIRST_VIRTUAL_ID]}),
    ("/v1/embeddings", {"input": [FIRST_VIRTUAL_ID]}),
    ("/detokenize", {"tokens": [FIRST_VIRTUAL_ID]}),
    (CHAT, chat(text("a"), logit_bias={str(FIRST_VIRTUAL_ID): 1})),
    (CHAT, chat(text("a"), stop_token_ids=[FIRST_VIRTUAL_ID])),
]


@pytest.mark.parametrize(("path", "body"), BEYOND)
def test_virtual_ids_cannot_be_sent(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400 and "token ids must be below" in answer.text, answer.text


def test_images_of_others_than_users_and_tools_are_left_out_and_named(http: httpx.Client, server: Frontend) -> None:
    turns = [
        {"role": "system", "content": [text("be"), image_url()]},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [text("so"), image_url()]},
        {"role": "user", "content": [text("say:named"), {"type": "input_audio", "input_audio": {}}]},
    ]
    answer = http.post(CHAT, json={"messages": turns})
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-minisgl-ignored"].split(", ")
    assert sorted(named) == ["messages.content.image_url", "messages.content.input_audio"]
    request = server.engine.requests("say:named")[0]
    assert not request.images and "[image_url left out" in prompt_text(request)


ENOUGH = [png(16, 16, seed) for seed in range(4)]
AFTER: list[tuple[str, str, list[dict[str, Any]], str]] = [
    (
        CHAT,
        "messages",
        [{"role": "user", "content": [text("q"), image_url(one), image_url(two)]} for one, two in [ENOUGH[:2]]],
        "messages.content.image_url",
    ),
    (
        MESSAGES,
        "messages",
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "shoot", "input": {}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [*map(block, ENOUGH[:2])]}],
            },
        ],
        "messages.content.content.image",
    ),
    (RESPONSES, "input", [{"role": "user", "content": [*map(input_image, ENOUGH[:2])]}], "input.content.input_image"),
    (
        OLLAMA,
        "messages",
        [{"role": "user", "content": "q", "images": [*map(in_base64, ENOUGH[:2])]}],
        "messages.images",
    ),
]


@pytest.mark.parametrize(("path", "field", "turns", "name"), AFTER)
def test_the_oldest_images_of_a_conversation_beyond_the_limit_are_left_out_and_named(
    http: httpx.Client, server: Frontend, folder: Path, path: str, field: str, turns: list[dict[str, Any]], name: str
) -> None:
    *_, asks = BODIES[0 if path == CHAT else 8 if path == OLLAMA else 5 if path == RESPONSES else 6][1][field]
    turns = [*turns, {"role": "assistant", "content": "so"}, asks, {"role": "assistant", "content": "so"}, asks]
    before = len(server.engine.requests("say:ok"))
    answer = http.post(path, json={field: turns, **({"max_tokens": 8} if path == MESSAGES else {"stream": False})})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-minisgl-ignored"] == name
    request = server.engine.requests("say:ok")[before]
    check(request, folder, ENOUGH[1], ONE, ONE)
    assert "left out: this model reads the newest images only]" in prompt_text(request)


def test_groups_of_the_oldest_images_are_left_out_so_that_the_prompt_begins_alike() -> None:
    def kept(count: int, *, last: int = 1) -> list[int]:
        """Return the images that stay of `count`, one in a message, and of `last` more in a last message."""
        contents = [[i] for i in range(count)] + ([[*range(count, count + last)]] if last else [])
        turns = [
            ChatMessage.model_validate(
                {"role": "user", "content": [{"type": "image", "image_url": f"{i}"} for i in of]}
            )
            for of in contents
        ]
        names = leave_out_oldest(turns, 8)
        found = [int(part.image_url) for one in turns for _, part in one.images() if isinstance(part, ImagePart)]
        assert names == ("messages.content.image",) * (count + last - len(found))
        return found

    assert [kept(count)[0] for count in range(4, 14)] == [0, 0, 0, 0, 2, 2, 4, 4, 6, 6]
    assert kept(1, last=8) == [*range(1, 9)] and kept(2, last=7) == [*range(2, 9)], "those of the last message stay"
    assert kept(2, last=9) == [*range(2, 11)], "and are refused if they are too many"


def test_a_tools_images_beyond_the_limit_become_notes_too(http: httpx.Client, server: Frontend, folder: Path) -> None:
    [(path, body)] = [one for one in IN_RESULTS if one[0] == CHAT]
    *turns, result = body["messages"]
    result = {**result, "content": [text("say:many"), *map(image_url, ENOUGH)]}
    before = len(server.engine.requests("say:many"))
    answer = http.post(path, json={**body, "messages": [*turns, result]})
    assert answer.status_code == 200 and answer.headers["x-minisgl-ignored"] == "messages.content.image_url"
    check(server.engine.requests("say:many")[before], folder, *ENOUGH[1:])
    counted = http.post("/tokenize", json={"messages": [*turns, result], "tools": TOOLS}).json()["count"]
    assert counted == answer.json()["usage"]["prompt_tokens"]


def test_a_stored_response_keeps_its_images(http: httpx.Client, server: Frontend, folder: Path) -> None:
    first = http.post(RESPONSES, json=BODIES[5][1]).json()
    body = {"previous_response_id": first["id"], "input": "say:then"}
    check(sent(http, server, RESPONSES, body, "say:then"), folder, ONE)
    items = http.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][0] == input_image()


def test_the_server_says_that_the_model_sees(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["vision"] is True
    assert "vision" in http.post("/api/show", json={"model": "scripted"}).json()["capabilities"]
    assert http.get("/props").json()["modalities"]["vision"] is True
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas.keys() >= {"ImagePart", "ImageBlock", "InputImage", "MediaPrompt"}


@pytest.mark.parametrize("pillow", [None, BROKEN_PILLOW], ids=["missing", "broken"])
def test_without_pillow_the_model_reads_text_only_and_errors_say_how_to_install_it(
    folder: Path, front_end: str, pillow: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", pillow)  # type: ignore[arg-type]  # None: no such module
    with seeing_frontend(folder, front_end=front_end) as server, server.http() as http:
        assert "vision" not in http.get("/v1/models").json()["data"][0]
        assert "vision" not in http.post("/api/show", json={"model": "scripted"}).json()["capabilities"]
        for path, body in BODIES:
            answer = http.post(path, json=body)
            assert answer.status_code == 400 and how_to_get("images") in answer.text, answer.text
        history = [*chat(image_url(), text("q"))["messages"], {"role": "assistant", "content": "a"}]
        answer = http.post(CHAT, json={"messages": [*history, {"role": "user", "content": "say:on"}]})
        assert answer.status_code == 200 and answer.headers["x-minisgl-ignored"] == "messages.content.image_url"


def test_urls_are_fetched_from_listed_hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(self: Fetcher, url: str, bounds: object = None) -> bytes:
        asked.append(url)
        if "b.example" in url:
            raise ImageError("image host b.example: it is not one that this server loads from (--image-hosts)")
        return ONE

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    config = msgspec.structs.replace(CONFIG, images=ImageLimits(image_hosts=("a.example",)))
    with seeing_frontend(folder, config=config) as server, server.http() as http:
        url = "https://a.example/one.png"
        body = chat({"type": "image_url", "image_url": {"url": url}}, text("say:ok"))
        check(sent(http, server, CHAT, body), folder, ONE)
        body = chat({"type": "image_url", "image_url": {"url": "http://b.example/"}})
        error = http.post(CHAT, json=body).json()["error"]
    assert error["param"] == "messages.0.content.0.image_url" and "b.example" in error["message"]
    assert asked == [url, "http://b.example/"]


@pytest.mark.python_front_end
def test_a_stream_with_an_image_goes_on_at_another_server(folder: Path) -> None:
    config = msgspec.structs.replace(CONFIG, resumable=True)
    body = chat(image_url(), text("say:one two three"), stream=True)
    with seeing_frontend(folder, config=config) as server, server.http() as http:
        server.engine.pace_s = 0.001  # else the whole text comes at once
        _, marks = asked(http, CHAT, body)
        assert marks[0].origin is not None
        begun = Said(marks[0].origin, [mark.tokens for mark in marks[: len(marks) // 2] if mark.tokens])
        asked(http, CHAT, body, begun)
        first, second = server.engine.requests("say:one")
    assert second.num_generated and second.images == first.images
    assert second.tokens.startswith(first.tokens)
    limits = msgspec.structs.replace(config.images, max_image_tokens=512)  # which has another prompt for an image
    with (
        seeing_frontend(folder, config=msgspec.structs.replace(config, images=limits)) as server,
        server.http() as http,
        pytest.raises(AssertionError, match="other_model"),
    ):
        asked(http, CHAT, body, begun)


def test_hostile_images_are_refused_or_seen(http: httpx.Client, server: Frontend) -> None:
    for seed in range(40):
        kind, data = hostile(seed)
        answer = http.post(CHAT, json=chat(image_url(data), text("say:ok")))
        assert answer.status_code in (200, 400), (kind, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == "messages.0.content.0.image_url", kind
    assert http.post(CHAT, json=chat(image_url(), text("say:ok"))).status_code == 200


ONLY_TEXT_OF_TOOLS = TEMPLATE.replace(
    "{% if message.content is string %}",
    "{% if message.role == 'tool' %}{{ message.content if message.content is string else '' }}"
    "{% elif message.content is string %}",
)
TURNS = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('take turns') }}{% endif %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}" + PARTS + "{% endif %}</{{ message.role }}>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ONE_BY_ONE = TEMPLATE.replace(
    "{% for call in message.tool_calls or [] %}",
    "{% for call in (message.tool_calls or [])[:1] %}",
)
NEIGHBOURS = [
    {"role": "user", "content": [text("a"), image_url(OTHER)]},
    {"role": "user", "content": [image_url(), text("say:ok")]},
]
OUT_OF_ORDER: list[dict[str, Any]] = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "tool_calls": [CALL, {**CALL, "id": "d"}],
    },
    {"role": "tool", "tool_call_id": "d", "content": [image_url(OTHER)]},
    {"role": "tool", "tool_call_id": "c", "content": [image_url()]},
    {"role": "user", "content": "say:ok"},
]
ARRANGED: list[tuple[str, list[dict[str, Any]], Sequence[bytes]]] = [
    (ONLY_TEXT_OF_TOOLS, IN_RESULTS[0][1]["messages"], [ONE]),
    (TURNS, NEIGHBOURS, [OTHER, ONE]),
    (ONE_BY_ONE, OUT_OF_ORDER, [ONE, OTHER]),
]


@pytest.mark.parametrize(("template", "turns", "order"), ARRANGED, ids=["tools", "joined", "reordered"])
def test_images_survive_what_a_template_needs(
    folder: Path, template: str, turns: list[dict[str, Any]], order: Sequence[bytes]
) -> None:
    config = msgspec.structs.replace(CONFIG, tool_call_parser="hermes")
    with seeing_frontend(folder, template, config=config) as server, server.http() as http:
        check(sent(http, server, CHAT, {"messages": turns, "tools": TOOLS}), folder, *order)


def test_a_template_without_images_is_an_error(folder: Path) -> None:
    template = "{% for message in messages %}<user>{{ message.content }}</user>{% endfor %}"
    with seeing_frontend(folder, template) as server, server.http() as http:
        error = http.post(CHAT, json=chat(image_url(), text("a"))).json()["error"]
    assert error["param"] == "messages" and "shows no images" in error["message"]


def test_a_model_that_does_not_see_refuses_images_of_a_prompt() -> None:
    with frontend() as server, server.http() as http:
        media = {"prompt": {"prompt_string": "<__media__>", "multimodal_data": [in_base64(ONE)]}}
        for path, body in ((OLLAMA_TEXT, {"prompt": "a", "images": [in_base64(ONE)]}), (COMPLETION, media)):
            answer = http.post(path, json=body)
            assert answer.status_code == 400 and "this model reads text only" in answer.text
        assert "vision" not in http.get("/v1/models").json()["data"][0]
        assert http.post(COMPLETION, json={"prompt": {"prompt_string": "say:ok"}}).json()["content"] == "ok"
