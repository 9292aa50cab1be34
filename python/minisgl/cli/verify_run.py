"""The work of `minisgl verify`: computes the answer of a receipt again, alone, and compares."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from minisgl import receipt
from minisgl.cli.flags import loaded
from minisgl.cli.verify_answer import Answer, differences
from minisgl.config import ConfigError, EngineConfig, ImageLimits
from minisgl.receipt import Numerics, Receipt, Tokens

if TYPE_CHECKING:
    from minisgl.llm import LLM

EQUAL, DIFFERS = 0, 1
CHUNK, PAGE_SIZE = 48, 8
"""Prefill chunk and page size in tokens; they differ from a server's, which must change no bit."""


def run(args: argparse.Namespace) -> int:
    claim, said = _receipt(Path(args.receipt), args.index)
    if args.answer is not None:
        said = said.answered(_read(Path(args.answer)))
    if args.signer is not None and claim.signer != args.signer:
        raise ConfigError(f"--signer {args.signer}: the receipt is signed by {claim.signer or 'nobody'}")
    numerics = claim.numerics
    if numerics.engine not in receipt.ENGINES:
        raise ConfigError(f"receipt: numerics.engine: {numerics.engine!r} is none of {', '.join(receipt.ENGINES)}")
    config = EngineConfig.of(
        {
            "model": args.model,
            "mmproj": args.mmproj,
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
    if (weights := receipt.weights_digest(config)) != claim.model.weights:
        differ.append(f"another model: weights {weights}, in the receipt {claim.model.weights}")
    adapter = None if args.lora is None else receipt.folder_digest(args.lora)
    if adapter != claim.model.adapter:
        differ.append(f"another adapter: {adapter or 'none'}, in the receipt {claim.model.adapter or 'none'}")
    if differ:
        return _say(differ)
    with loaded(config) as llm:
        return _say(_computed(llm, claim, said, args))


def _say(differ: list[str]) -> int:
    for line in differ:
        print(f"differs: {line}")
    return DIFFERS if differ else EQUAL


def _receipt(file: Path, index: int) -> tuple[Receipt, Answer]:
    """Read a receipt, or a response that has one, whose other parts are the second value. Raises `ConfigError`."""
    data, said = _read(file), Answer()
    try:
        whole = json.loads(data)
        if not isinstance(whole.get("receipt"), int):  # a receipt's own field `receipt` is its version
            choice = whole["choices"][index] if "choices" in whole else whole
            data, said = msgspec.json.encode(choice["receipt"]), Answer.of_choice(choice)
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: has no receipt: {error!r}") from error
    return receipt.parse(data), said


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def _computed(llm: LLM, claim: Receipt, said: Answer, args: argparse.Namespace) -> list[str]:
    ours = receipt.numerics(llm.config, llm.engine_info.name, llm.engine_info.details)
    for name in Numerics.__struct_fields__:
        if (mine := getattr(ours, name)) != (theirs := getattr(claim.numerics, name)):
            return [f"other arithmetic: {name} is {mine} here, in the receipt {theirs}"]
    from minisgl.cli.verify_prompt import PromptReader  # imports the server

    model = _texts(llm)
    for name in ("tokenizer", "template"):
        if getattr(claim.model, name) != model[name]:
            return [f"another {name}: {model[name]}, in the receipt {getattr(claim.model, name)}"]
    limits = ImageLimits(max_images=args.max_images, max_image_tokens=args.max_image_tokens)
    reader = PromptReader(llm, args.image, limits)
    prompts = reader.read(_read(Path(args.prompt)), f"--prompt {args.prompt}")
    prompt = next((one for one in prompts if Tokens.of(one.ids.tolist()) == claim.prompt), prompts[0])
    if args.lora is not None:
        llm.load_lora("adapter", args.lora)
    differ = differences(llm, claim, prompt, lora=None if args.lora is None else "adapter", said=said)
    if not differ:
        print(f"equal: {claim.answer.count} tokens, bit for bit" + ("" if claim.signer is None else ", signed"))
    return differ


def _texts(llm: LLM) -> dict[str, str]:
    from minisgl.tokenizer.tokenizer import tokenizer_json

    return {
        "tokenizer": receipt.text_digest(tokenizer_json(llm.engine_info.model_dir)),
        "template": receipt.text_digest(llm.tokenizer.template_source()),
    }
