"""Pictures that are cut into tiles (Idefics 3, SmolVLM), from the file to the logits: as transformers' processor and
model, and from the cache in the next turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from minisgl.config import ImageLimits
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.llm import LLM
from minisgl.llm_prompts import PromptEncoder
from minisgl.sampling_params import ParamError, SamplingParams
from minisgl.tokenizer import Tokenizer
from tests.helpers.engines import load
from tests.helpers.image_files import encoded, picture
from tests.helpers.models import LOGITS_WITHIN
from tests.helpers.sight import START_ID
from tests.helpers.vision_chat import SMOLVLM_TEMPLATE, talking_of_tiles

pytestmark = pytest.mark.any_cpu

ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
PORTRAIT, PANORAMA, PIXEL, LARGE = picture(50, 90, 1), picture(300, 20, 2), picture(1, 1, 3), picture(500, 400, 4)
CONTENTS: dict[str, list[Any]] = {
    "portrait, text behind": [PORTRAIT, "What is this?"],
    "panorama, text before": ["Look: ", PANORAMA],
    "one pixel, alone": [PIXEL],
    "several": ["One\n", LARGE, "\n\ntwo", PIXEL, PORTRAIT, "\nthree"],
    "one twice": [PANORAMA, PANORAMA],
}


def message(content: list[Any], role: str = "user") -> dict[str, Any]:
    parts = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image", "image": one} for one in content
    ]
    return {"role": role, "content": parts}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_of_tiles(tmp_path_factory.mktemp("tiles"), request.param)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[CpuEngine]:
    found, _ = load("cpu", folder, num_pages=64)
    assert isinstance(found, CpuEngine)
    yield found
    found.close()


def theirs(folder: Path, content: list[Any]) -> tuple[list[int], torch.Tensor]:
    """Return the ids and the logits of a conversation by transformers alone."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    processor = transformers.Idefics3Processor(
        Idefics3ImageProcessorPil(**settings), tokenizer, image_seq_len=16, chat_template=SMOLVLM_TEMPLATE
    )
    text = processor.apply_chat_template([message(content)], add_generation_prompt=True)
    images = [one for one in content if not isinstance(one, str)]
    given = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model = kind.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return given["input_ids"][0].tolist(), model(**given).logits[0]


@pytest.mark.parametrize("name", CONTENTS)
def test_a_conversation_is_that_of_transformers(folder: Path, engine: CpuEngine, name: str) -> None:
    ids, logits = theirs(folder, CONTENTS[name])
    ours = PromptEncoder(engine.info, Tokenizer.load(folder), ImageLimits()).encode_chat([message(CONTENTS[name])])
    assert ours.shown == ids
    found = np.frombuffer(engine.rust.prompt_logits(ours.ids, ours.images), np.float32).reshape(len(ids), -1)
    torch.testing.assert_close(torch.from_numpy(found.copy()), logits, rtol=0, atol=LOGITS_WITHIN)


def test_the_next_turn_has_the_tiles_from_the_cache(folder: Path) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
    first = message([LARGE, "What is this?"])
    more = [first, message(["It is"], "assistant"), message([PIXEL, "And this?"])]
    with LLM(str(folder), engine="cpu", num_pages=512, page_size=4, log_level="error") as llm:
        chat = partial(llm.chat, progress=False)
        [one], [two] = chat([first], params), chat(more, params)
        shared = len(PromptEncoder(llm.engine_info, llm.tokenizer, ImageLimits()).encode_chat([first]).ids)
        assert two.num_cached_tokens >= (shared - len("Assistant:")) // 4 * 4 > 160
        text = ["<image> as such, and ", PIXEL]  # what a user types is no image
        [typed] = chat([message(text)], params)
        assert typed.prompt_token_ids.count(START_ID) == 160
        with pytest.raises(ParamError, match=r"has 0 image markers \(token 258\) for 1 images of 10 tiles"):
            llm.generate([{"prompt": "none", "images": [LARGE]}], params, progress=False)
        [plain] = llm.generate([{"prompt": "see <image>", "images": [encoded(LARGE)]}], params, progress=False)
        assert plain.prompt_token_ids.count(START_ID) == 160
    with LLM(str(folder), engine="cpu", num_pages=512, page_size=4, log_level="error") as llm:
        [cold] = llm.chat(more, params, progress=False)
    assert cold.outputs[0].logprobs == two.outputs[0].logprobs and one.outputs[0].logprobs != two.outputs[0].logprobs
