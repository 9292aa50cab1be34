"""Images in prompts of `LLM`: a tiny model that sees, on the CPU engine."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from minisgl.llm import LLM, RequestOutput
from minisgl.sampling_params import ParamError, SamplingParams
from tests.helpers.sight import MARKED, PAD_ID
from tests.helpers.vision_chat import talking

SIX = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PICTURE = Image.linear_gradient("L").resize((48, 32)).convert("RGB")
OTHER = PICTURE.transpose(Image.Transpose.ROTATE_180)


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


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
    (file := tmp_path / "a.png").write_bytes(png(PICTURE))
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
    image = {"type": "image", "image": png(Image.new("RGB", (64, 64), (9, 8, 7)))}
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
        {"prompt": words, "images": [PICTURE, png(OTHER)]},
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


def test_limits_of_an_image_are_settings(folder: Path) -> None:
    large = {"type": "image", "image": PICTURE.resize((512, 512))}
    with LLM(str(folder), engine="cpu", num_pages=256, log_level="error", max_image_tokens=16) as llm:
        assert chat(llm, large).prompt_token_ids.count(PAD_ID) == 16
    with (
        LLM(str(folder), engine="cpu", num_pages=256, log_level="error", max_image_pixels=100) as llm,
        pytest.raises(ParamError, match=r"messages\.0\.content\.0: .*more than the limit of 100"),
    ):
        chat(llm, large)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt": "no marker", "images": [PICTURE]}, "0 image markers .* for 1 images: write .*image_pad"),
        ({"prompt": MARKED, "images": [b"no picture"]}, r"images\.0: "),
        ({"prompt": MARKED, "images": "/no/such/file.png"}, r"images\.0: the image cannot be read"),
        ({"prompt": MARKED, "images": [3]}, r"images\.0: must be a PIL image, a path"),
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
    messages = [{"role": "user", "content": [{"type": "image", "image": PICTURE}]}]
    with pytest.raises(ParamError, match="prefix: must have no images"):
        llm.insert_prefix(messages)
    with pytest.raises(ParamError, match="prompt_logprobs: cannot be used with images"):
        llm.chat(messages, SamplingParams(prompt_logprobs=1), progress=False)


def test_an_engine_that_does_not_see_says_so() -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": PICTURE}]}]
    with (
        LLM("none", engine="echo", num_pages=64, log_level="error") as llm,
        pytest.raises(ParamError, match="does not see images on this engine"),
    ):
        llm.chat(messages, SIX, progress=False)


def test_a_missing_pillow_is_said_with_the_way_to_get_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    file = png(PICTURE)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ParamError, match=r"images\.0: images need Pillow"):
        llm.generate({"prompt": MARKED, "images": [file]}, SIX, progress=False)
