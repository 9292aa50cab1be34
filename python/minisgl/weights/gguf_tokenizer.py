"""The tokenizer of a GGUF file, from its metadata, as tokenizer.json and tokenizer_config.json.

Keeps true: byte-level BPE only; each pre-tokenizer is known by its name or refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minisgl.config import ConfigError

Get = Callable[..., Any]

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name == "smollm":
        # digits one by one, before the byte-level step with its own splitting
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if name in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    patterns = {"qwen2": _QWEN2, "llama-bpe": _LLAMA3}
    if name not in patterns:
        known = "smollm, gpt-2, default, qwen2, llama-bpe"
        raise ConfigError(f"GGUF: tokenizer.ggml.pre: {name!r} is not known: only {known}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def tokenizer_files(get: Get) -> dict[str, Any]:
    """File name -> content, to be written as JSON. `get(key, default)` reads the metadata."""
    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ConfigError(f"GGUF: tokenizer.ggml.model: {kind!r} is not imported: only gpt2 (byte-level BPE)")
    tokens: list[str] = get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in get("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, whatever its merges say
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    types = get("tokenizer.ggml.token_type")
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name in ("bos", "eos"):
        if (token_id := get(f"tokenizer.ggml.{name}_token_id", -1)) >= 0:
            config[f"{name}_token"] = tokens[token_id]
    if "bos_token" in config and get("tokenizer.ggml.add_bos_token", False):
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, vocab[bos])]
        )
    if template := get("tokenizer.chat_template", ""):
        config["chat_template"] = template
    return {"tokenizer.json": json.loads(tokenizer.to_str()), "tokenizer_config.json": config}
