"""What `minisgl verify` does: compute the answer of a receipt once more, alone, and compare."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from minisgl import receipt
from minisgl.cli import request_body
from minisgl.config import ConfigError, EngineConfig
from minisgl.receipt import LogprobDigest, Numerics, Receipt, Tokens

if TYPE_CHECKING:
    from minisgl.llm import LLM, Completion

EQUAL, DIFFERS = 0, 1
CHUNK, PAGE_SIZE = 48, 8
"""Of tokens: other divisions of the prompt and of the KV pool than servers have, which change no bit."""


def run(args: argparse.Namespace) -> int:
    found = _receipt(Path(args.receipt), args.index)
    if args.signer is not None and found.signer != args.signer:
        raise ConfigError(f"--signer {args.signer}: the receipt is signed by {found.signer or 'nobody'}")
    numerics = found.numerics
    if numerics.engine not in receipt.ENGINES:
        raise ConfigError(f"receipt: numerics.engine: {numerics.engine!r} is none of {', '.join(receipt.ENGINES)}")
    config = EngineConfig.of(
        {
            "model": args.model,
            "engine": numerics.engine,
            "activations": numerics.activations,
            "kv_dtype": numerics.kv_dtype,
            "quantization": numerics.quantization,
            "max_prefill_length": CHUNK,
            "page_size": PAGE_SIZE,
            "log_level": "error",
        }
    )
    differ = []
    if (weights := receipt.weights_digest(config)) != found.model.weights:
        differ.append(f"another model: weights {weights}, in the receipt {found.model.weights}")
    adapter = None if args.lora is None else receipt.folder_digest(args.lora)
    if adapter != found.model.adapter:
        differ.append(f"another adapter: {adapter or 'none'}, in the receipt {found.model.adapter or 'none'}")
    if differ:
        return _say(differ)
    from minisgl.llm import LLM

    settings = msgspec.structs.asdict(config)
    settings |= msgspec.structs.asdict(settings.pop("debug"))
    with LLM(settings.pop("model"), **settings) as llm:
        return _say(_computed(llm, found, args))


def _say(differ: list[str]) -> int:
    for line in differ:
        print(f"differs: {line}")
    return DIFFERS if differ else EQUAL


def _receipt(file: Path, index: int) -> Receipt:
    """Of a file with a receipt, or with a whole answer that has one."""
    data = _read(file)
    try:
        whole = json.loads(data)
        if "receipt" not in whole:
            data = msgspec.json.encode(whole["choices"][index]["receipt"])
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: no receipt there: {error!r}") from error
    return receipt.parse(data)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def _computed(llm: LLM, found: Receipt, args: argparse.Namespace) -> list[str]:
    ours = receipt.numerics(llm.config, llm.engine_info.name, llm.engine_info.details)
    for name in Numerics.__struct_fields__:
        if (mine := getattr(ours, name)) != (theirs := getattr(found.numerics, name)):
            return [f"other arithmetic: {name} is {mine} here, in the receipt {theirs}"]
    model = _texts(llm)
    for name in ("tokenizer", "template"):
        if getattr(found.model, name) != model[name]:
            return [f"another {name}: {model[name]}, in the receipt {getattr(found.model, name)}"]
    ids = _prompt(llm, args.prompt)
    if args.lora is not None:
        llm.load_lora("adapter", args.lora)
    answer = None if args.answer is None else _read(Path(args.answer))
    differ = differences(llm, found, ids, lora=None if args.lora is None else "adapter", answer=answer)
    if not differ:
        print(f"equal: {found.answer.count} tokens, bit for bit" + ("" if found.signer is None else ", signed"))
    return differ


def differences(
    llm: LLM, found: Receipt, prompt: list[int], *, lora: str | None = None, answer: bytes | None = None
) -> list[str]:
    """Between what `llm`, of the receipt's model and numerics, computes alone, the receipt, and the `answer` (a text,
    or ids in JSON)."""
    if Tokens.of(prompt) != found.prompt:
        return [f"another prompt: {len(prompt)} tokens, in the receipt {found.prompt.count}, with another digest"]
    sampling = found.sampling
    if found.finish_reason == "abort":  # it was ended from outside, at no place that can be computed
        sampling = msgspec.structs.replace(sampling, max_tokens=max(1, found.answer.count))
    if found.logprobs is not None:
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    llm.clear_cache()
    (output,) = llm.generate([prompt], sampling, lora=lora, progress=False)
    return _compared(llm, found, output.outputs[0], answer)


def _compared(llm: LLM, found: Receipt, computed: Completion, answer: bytes | None) -> list[str]:
    if computed.error:
        raise ConfigError(computed.error)
    differ = []
    if Tokens.of(computed.token_ids) != found.answer:
        differ.append(f"another answer: {len(computed.token_ids)} tokens, in the receipt {found.answer.count}")
    elif found.finish_reason not in (computed.finish_reason, "abort"):
        differ.append(f"it ends otherwise: {computed.finish_reason}, in the receipt {found.finish_reason}")
    elif found.logprobs is not None:
        digest = LogprobDigest()
        digest.add(computed.logprobs)
        if digest.shown() != found.logprobs:
            differ.append("the same tokens, with other probabilities: computed by other arithmetic")
    if answer is not None and (where := _first_difference(llm, computed, answer)) is not None:
        differ.append(where)
    return differ


def _first_difference(llm: LLM, computed: Completion, answer: bytes) -> str | None:
    """Where the answer that was given leaves the computed one."""
    ids = _ids(answer)
    if ids is None:
        text = answer.decode(errors="replace")
        if text == computed.text:
            return None
        at = next((i for i, (a, b) in enumerate(zip(text, computed.text, strict=False)) if a != b), None)
        at = min(len(text), len(computed.text)) if at is None else at
        return f"the answer from character {at} on: {text[at : at + 20]!r}, computed {computed.text[at : at + 20]!r}"
    if ids == computed.token_ids:
        return None
    pairs = zip(ids, computed.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(computed.token_ids)))
    shown = [
        f"{one[at]} {llm.tokenizer.decode(one[at : at + 1])!r}" if at < len(one) else "none"
        for one in (ids, computed.token_ids)
    ]
    return f"the answer from token {at} on: {shown[0]}, computed {shown[1]}"


def _ids(data: bytes) -> list[int] | None:
    """None: it is text."""
    try:
        return msgspec.json.decode(data, type=list[int])
    except msgspec.MsgspecError:
        return None


def _texts(llm: LLM) -> dict[str, str]:
    from minisgl.tokenizer.tokenizer import tokenizer_json

    return {
        "tokenizer": receipt.text_digest(tokenizer_json(llm.engine_info.model_dir)),
        "template": receipt.text_digest(llm.tokenizer.template_source()),
    }


def _prompt(llm: LLM, file: str) -> list[int]:
    """The ids of a request's body, of a list of ids, or of a text."""
    data = _read(Path(file))
    said = f"--prompt {file}"
    try:
        is_body = isinstance(json.loads(data), dict | list)
    except ValueError:
        is_body = False
    body = request_body.read(data, said) if is_body else {"text": data.decode(errors="surrogateescape")}
    return request_body.ids_of(llm, body, said, is_prefix=False)
