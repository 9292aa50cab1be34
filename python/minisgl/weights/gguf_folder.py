"""A GGUF file as the model folder that the rest of minisgl reads: config.json and the tokenizer, from its header alone.
The tensors stay in the file; `gguf_import` makes folders with weights.

The tokenizer of a GGUF file, from its metadata, as tokenizer.json and tokenizer_config.json: byte-level BPE with the
pre-tokenizers that are known by name, and sentencepiece's BPE ("llama").

Invariants: the folder appears whole or not at all, and stands for one model as it is now: its path, the sizes and times
of its parts, the header of the first.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minisgl import _rust, envs
from minisgl.config import ConfigError
from minisgl.utils.made_once import made_once
from minisgl.weights.gguf_config import ROPE_FACTORS, Fields, config_of

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # llama.cpp's token types
_SPACE = "\u2581"  # sentencepiece's

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
        raise ConfigError(f"tokenizer.ggml.pre: {name!r} is not known: only {known}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def tokenizer_files(fields: Fields) -> dict[str, str]:
    """File name -> content. Raises `ConfigError`."""
    kind, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"tokenizer.ggml.model: {kind!r} is not imported: only gpt2 (byte-level BPE) and llama (sentencepiece)"
        )
    tokens = fields.texts("tokenizer.ggml.tokens")
    types = fields.wholes("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.token_type: {len(types)} types of {len(tokens)} tokens")
    tokenizer = _byte_level(fields, tokens, pre) if kind == "gpt2" else _sentencepiece(fields, tokens, types)
    _add_tokens(tokenizer, tokens, types)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name in ("bos", "eos"):
        if (token_id := fields.whole(key := f"tokenizer.ggml.{name}_token_id", -1)) >= 0:
            if token_id >= len(tokens):
                raise ConfigError(f"{key}: {token_id}: there are {len(tokens)} tokens")
            config[f"{name}_token"] = tokens[token_id]
    if "bos_token" in config and fields.flag("tokenizer.ggml.add_bos_token", kind == "llama"):
        bos, bos_id = config["bos_token"], fields.whole("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
        )
    if template := fields.text("tokenizer.chat_template", ""):
        config["chat_template"] = template
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
    }


def _sentencepiece(fields: Fields, tokens: list[str], types: list[int]) -> Tokenizer:
    """BPE whose merges are every two pieces that are a piece together, the best score first; bytes for what is no
    piece."""
    scores = fields.reals("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.scores: {len(scores)} scores of {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    merges = [
        (-scores[vocab[piece]], vocab[left], vocab[right], left, right)
        for piece in pieces
        for at in range(1, len(piece))
        if (left := piece[:at]) in pieces and (right := piece[at:]) in pieces
    ]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in sorted(merges)],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space, plain = normalizers.Replace(" ", _SPACE), decoders.Replace(_SPACE, " ")
    steps: list[decoders.Decoder] = [plain, decoders.ByteFallback(), decoders.Fuse()]
    if fields.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = space
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _byte_level(fields: Fields, tokens: list[str], pre: str) -> Tokenizer:
    merges: list[tuple[str, str]] = []
    for merge in fields.texts("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space:
            raise ConfigError(f"tokenizer.ggml.merges: {merge!r} has no two parts")
        merges.append((left, right))
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        # Llama 3 takes a word that is a token as it is, whatever its merges say
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the package has no base class for its errors
        raise ConfigError(f"tokenizer.ggml.merges: {error}") from error
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """What is never cut."""
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])


FORMAT = "2"  # part of the key: a change of what is written makes new folders
SOURCE = "source.json"
_MOST_FACTORS = 4096


def gguf_folder(file: Path) -> Path:
    """The folder for `file`, made now if it is not there. Raises `ConfigError`."""
    named, place = file.absolute(), file.resolve()  # parts are known by names, not by where links lead
    try:
        head_bytes = _rust.gguf_head_bytes(named)
        with place.open("rb") as opened:
            head = opened.read(head_bytes)
        now = [part.stat() for part in _rust.gguf_parts(named)]
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    key = hashlib.sha256(head)
    key.update("".join([f"\n{place}", *(f"\n{one.st_size}\n{one.st_mtime_ns}" for one in now)]).encode())
    name = f"{key.hexdigest()[:32]}-{FORMAT}"
    return made_once(envs.cache_dir() / "gguf-text" / name, lambda partial: _write(named, partial))


def gguf_file(folder: Path) -> Path | None:
    """The file that `folder` was made of by `gguf_folder`; None for every other folder."""
    try:
        place = Path(json.loads((folder / SOURCE).read_text(encoding="utf-8"))["gguf"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / SOURCE}: {error!r}: remove the folder") from error
    return place


def _write(file: Path, folder: Path) -> None:
    write_text_files(file, read_header(file), folder)
    (folder / SOURCE).write_text(json.dumps({"gguf": str(file)}), encoding="utf-8")


def read_header(file: Path) -> _rust.GgufHeader:
    """Raises `ConfigError`."""
    try:
        return _rust.gguf_header(file)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def write_text_files(file: Path, header: _rust.GgufHeader, folder: Path) -> dict[str, Any]:
    """config.json, generation_config.json and the tokenizer, into `folder`; returns the first. Raises `ConfigError`."""

    try:
        fields = Fields(header["metadata"])
        shapes = {name: shape for name, (_, shape) in header["tensors"].items()}
        config = config_of(fields, shapes, _factors(header))
        generation: dict[str, Any] = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
        end_of_turn = fields.whole("tokenizer.ggml.eot_token_id", -1)
        if end_of_turn not in (-1, config["eos_token_id"]):
            generation["eos_token_id"] = [config["eos_token_id"], end_of_turn]
        files = {
            "config.json": json.dumps(config, indent=2, ensure_ascii=False),
            "generation_config.json": json.dumps(generation, indent=2),
            **tokenizer_files(fields),
        }
    except ConfigError as error:
        raise ConfigError(f"{file.name}: {error}") from error
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return config


def _factors(header: _rust.GgufHeader) -> Sequence[float] | None:
    """What rotary frequencies are divided by: the one tensor that a config needs."""
    if ROPE_FACTORS not in header["tensors"]:
        return None
    kind, shape = header["tensors"][ROPE_FACTORS]
    place, start, end = header["places"][ROPE_FACTORS]
    if kind != "F32" or len(shape) != 1 or shape[0] > _MOST_FACTORS:
        raise ConfigError(f"tensor {ROPE_FACTORS}: {list(shape)} in {kind} is not imported")
    with place.open("rb") as opened:
        opened.seek(start)
        return struct.unpack(f"<{shape[0]}f", opened.read(end - start))
