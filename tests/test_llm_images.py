"""Images in prompts of `LLM`: a tiny model that sees, on the CPU engine."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from minisgl.llm import LLM, RequestOutput
from minisgl.sampling_params import ParamError, SamplingParams
from tests.helpers.image_files import encoded
from tests.helpers.sight import MARKED, PAD_ID
from tests.helpers.vision_chat import talking

SIX = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PICTURE = Image.linear_gradient("L").resize((48, 32)).convert("RGB")
OTHER = PICTURE.transpose(Image.Transpose.ROTATE_180)
ASKED = [{"role": "user", "content": [{"type": "image", "image": PICTURE}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking(tmp_path_factory.mktemp("seer"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), engine="cpu", num_pages=256, page_size=4, log_level="error") as found:
        yield found


def chat(llm: LLM, *content: Any) -> RequestOutput:
    [found] = llm.chat([{"role": "user", "content": list(content)}], SIX, progress=False)
    assert found.outputs[0].error is None
    return found


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_an_image_is_the_same_however_it_is_given(llm: LLM, tmp_path: Path) -> None:
    (file := tmp_path / "a.png").write_bytes(encoded(PICTURE))
    url = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    ways = [
        {"type": "image", "image": PICTURE},
        {"type": "image", "image": file},
        {"type": "image", "image": str(file)},
        {"type": "image", "path": str(file)},
        {"type": "image", "image": file.read_bytes()},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "image_pil", "image_pil": PICTURE},
    ]
    first = chat(llm, text("What "), ways[0], text(" is it?"))
    assert first.num_cached_tokens == 0 and first.prompt is None
    assert first.prompt_token_ids.count(PAD_ID) == 48 * 32 // 64, "a token is a square of 8 pixels"
    for way in ways[1:]:
        again = chat(llm, text("What "), way, text(" is it?"))
        assert again.token_ids == first.token_ids and again.prompt_token_ids == first.prompt_token_ids
        assert again.num_cached_tokens >= len(first.prompt_token_ids) - 4, way


def test_a_text_that_looks_like_a_mark_is_no_image(llm: LLM) -> None:
    image = {"type": "image", "image": encoded(Image.new("RGB", (64, 64), (9, 8, 7)))}
    for mark in ("\ue0010\ue001", "\ue0015\ue001"):
        whole, alone = chat(llm, text(mark), image), chat(llm, image)
        assert len(whole.prompt_token_ids) < 2 * len(alone.prompt_token_ids)


def test_another_image_shares_the_text_before_it_only(llm: LLM) -> None:
    begin = text("Before the image. ")
    first, other = (chat(llm, begin, {"type": "image", "image": one}, text("!")) for one in (PICTURE, OTHER))
    at = first.prompt_token_ids.index(PAD_ID)
    assert other.num_cached_tokens == at // 4 * 4 and first.prompt_token_ids == other.prompt_token_ids


def test_a_prompt_with_markers_is_that_of_the_chat(llm: LLM) -> None:
    expected = chat(llm, {"type": "image", "image": PICTURE}, text("and"), {"type": "image", "image": OTHER})
    words = f"<user>{MARKED}and{MARKED}</user>\n<assistant>"
    prompts: list[Any] = [
        {"prompt": words, "images": [PICTURE, encoded(OTHER)]},
        {"prompt": words, "multi_modal_data": {"image": [PICTURE, OTHER]}},
        {"prompt_token_ids": llm.tokenizer.encode(words).tolist(), "images": (PICTURE, OTHER)},
        "no image",
    ]
    *found, plain = llm.generate(prompts, SIX, progress=False)
    for one in found:
        assert one.token_ids == expected.token_ids and one.prompt_token_ids == expected.prompt_token_ids
    assert found[0].prompt == words and found[2].prompt is None and plain.prompt == "no image"
    [swapped] = llm.generate({"prompt": words, "images": [OTHER, PICTURE]}, SIX, progress=False)
    assert swapped.num_cached_tokens < 12


def test_ids_may_be_lists_tuples_ranges_and_arrays(llm: LLM) -> None:
    ids = [5, 6, 7]
    forms: list[Any] = [ids, tuple(ids), range(5, 8), np.array(ids), np.array(ids, np.uint8)]
    [expected, *others] = [llm.generate(one, SIX, progress=False) for one in forms]
    assert [[one.token_ids for one in other] for other in others] == [[expected[0].token_ids]] * 4
    [*rows] = llm.generate(np.array([ids, ids]), SIX, progress=False)  # type: ignore[arg-type]
    assert [one.token_ids for one in rows] == [expected[0].token_ids] * 2


def test_low_detail_takes_fewer_tokens(llm: LLM) -> None:
    url = f"data:;base64,{base64.b64encode(encoded(PICTURE.resize((200, 200)))).decode()}"
    for part in (
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "input_image", "image_url": url, "detail": "low"},
    ):
        assert chat(llm, part).prompt_token_ids.count(PAD_ID) <= 256
    assert chat(llm, {"type": "image_url", "image_url": url}).prompt_token_ids.count(PAD_ID) == 625


PART: dict[str, Any] = {"role": "user", "content": ({"type": "text", "text": "a"},)}
WRONG_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages: must be a list of messages"),
    ("hello", "messages: must be a list of messages"),
    ({"role": "user", "content": "a"}, "messages: must be a list of messages"),
    (["hello"], r"messages\.0: must be a list of messages"),
    ([PART, "hello"], r"messages\.1: must be a message"),
    ([[PART], [{"content": "a"}]], r"messages\.1\.0\.role: must be a text"),
    ([{"role": "user"}], r"messages\.0\.content: must be a text or a list of parts .*got null"),
    ([{"role": "user", "content": np.zeros(3)}], r"messages\.0\.content: must be a text or a list of parts"),
    ([{"role": "user", "content": ["a"]}], r"messages\.0\.content\.0: a part must have one of the types text,"),
    ([{"role": "user", "content": [{"text": "a"}]}], r"messages\.0\.content\.0\.type: .*got null"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], r"content\.0\.type: .*got .input_audio."),
    ([{"role": "user", "content": [{"type": ["text"]}]}], r"content\.0\.type: a part must"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], r"content\.0\.text: must be a text \(got 5\)"),
    ([{"role": "user", "content": [{"type": "image"}]}], r"content\.0\.image: must be a PIL image, .*got null"),
    ([{"role": "user", "content": ({"type": "image", "image": np.zeros((8, 8, 3))},)}], r"content\.0\.image: must be"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "detail": "ultra"}}]}],
        r"messages\.0\.content\.0\.image_url\.detail: must be low, high or auto \(got .ultra.\)",
    ),
]


@pytest.mark.parametrize(("messages", "reason"), WRONG_MESSAGES)
def test_a_conversation_that_is_none_is_refused_with_its_place(llm: LLM, messages: Any, reason: str) -> None:
    with pytest.raises(ParamError, match=reason):
        llm.chat(messages, SIX, progress=False)


def test_parts_may_be_tuples_and_of_the_types_of_each_api(llm: LLM) -> None:
    first = chat(llm, text("a"))
    parts = ({"type": "input_text", "text": "a"},)
    [again] = llm.chat(({"role": "user", "content": parts},), SIX, progress=False)
    assert again.prompt_token_ids == first.prompt_token_ids


def test_limits_of_an_image_are_settings(folder: Path) -> None:
    large = {"type": "image", "image": PICTURE.resize((512, 512))}
    with LLM(str(folder), engine="cpu", num_pages=256, log_level="error", max_image_tokens=16) as llm:
        assert chat(llm, large).prompt_token_ids.count(PAD_ID) == 16
    with (
        LLM(str(folder), engine="cpu", num_pages=256, log_level="error", max_image_pixels=100) as llm,
        pytest.raises(ParamError, match=r"messages\.0\.content\.0\.image: .*more than the limit of 100"),
    ):
        chat(llm, large)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt": "no marker", "images": [PICTURE]}, "0 image markers .* for 1 images: write .*image_pad"),
        ({"prompt": MARKED, "images": [b"no picture"]}, r"images\.0: "),
        ({"prompt": MARKED, "images": "/no/such/file.png"}, r"images\.0: the image cannot be read"),
        ({"prompt": MARKED, "images": [3]}, r"images\.0: must be a PIL image, a path"),
        ({"prompt": MARKED, "images": np.zeros((8, 8, 3), np.uint8)}, r"images\.0: must be a PIL image"),
        (["a", {"prompt": MARKED, "images": [b"x"]}], r"prompts\.1\.images\.0: "),
        ({"prompt": MARKED, "multi_modal_data": [PICTURE]}, "multi_modal_data: must be a mapping"),
        ({"prompt": 0.5}, "prompt: must be a text, token ids"),
        ({"prompt_token_ids": [[1]]}, r"prompt: must be a text, token ids .*got \[\[1\]\]"),
        (None, "prompt: must be a text, token ids .*got null"),
        (b"bytes", "prompt: must be a text"),
        ([0.5], r"prompts\.0: must be a text"),
        ([[True]], r"prompts\.0: must be a text"),
        (["a", [1, "b"]], r"prompts\.1: must be a text"),
        (["a", None], r"prompts\.1: must be a text"),
        ([[1], [[1], [2, 3]]], r"prompts\.1: must be a text"),
        (np.zeros((2, 2)), r"prompts\.0: must be a text"),
        ([1, -7, 1 << 40], r"prompt\.1: token ids must be between 0 and \d+ \(got -7\)"),
        ([1 << 80], "prompt: must be a text, token ids"),
        ((x for x in "ab"), "prompt: must be a text"),
        ({"prompt": MARKED, "images": "https://a.example/a.png"}, "fetch a web address first"),
        ({"prompt": MARKED, "image": PICTURE}, "mapping with prompt and images"),
        ({"images": [PICTURE]}, "is missing beside the images"),
        ({"prompt": MARKED, "multi_modal_data": {"video": [PICTURE]}}, "must have images only"),
        ([(1 << 30) + 5], "token ids must be between 0"),
    ],
)
def test_a_bad_image_is_refused_with_its_place(llm: LLM, prompt: Any, reason: str) -> None:
    with pytest.raises(ParamError, match=reason):
        llm.generate(prompt, SIX, progress=False)


def test_prefixes_and_prompt_logprobs_have_no_images(llm: LLM) -> None:
    with pytest.raises(ParamError, match="prefix: must have no images"):
        llm.insert_prefix(ASKED)
    with pytest.raises(ParamError, match="prompt_logprobs: cannot be used with images"):
        llm.chat(ASKED, SamplingParams(prompt_logprobs=1), progress=False)


def test_an_engine_that_does_not_see_says_so() -> None:
    with (
        LLM("none", engine="echo", num_pages=64, log_level="error") as llm,
        pytest.raises(ParamError, match="does not see images on this engine"),
    ):
        llm.chat(ASKED, SIX, progress=False)


def test_a_missing_pillow_is_said_with_the_way_to_get_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    file = encoded(PICTURE)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ParamError, match=r"images\.0: images need Pillow"):
        llm.generate({"prompt": MARKED, "images": [file]}, SIX, progress=False)
