"""The tokenizer of a GGUF file, from its metadata, as tokenizer.json and tokenizer_config.json.

`tokenizer.ggml.model` names the kind: byte-level BPE (gpt2), sentencepiece's BPE (llama) and unigram (t5), BPE over
plain text (gemma4), WordPiece (bert).

`tokenizer.ggml.pre` names the pre-tokenizer of byte-level BPE: `PRE` is the table of the names that llama.cpp knows.
Where llama.cpp's regular expressions are only approximate, the table follows the model's own tokenizer.json: letters of
both cases beyond ASCII (gpt-4o, tekken) and the normal form of composed characters (`nfc`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minisgl.config import ConfigError
from minisgl.weights.gguf_config import Fields

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # llama.cpp's token types
_SPACE = "\u2581"  # sentencepiece's mark of a space
_ELSEWHERE = "--tokenizer takes that of another folder or hub id, such as the model that the file was made of"

_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT, _DIGITS3 = r"\p{N}", r"\p{N}{1,3}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_RUNS = "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_GPT4O = rf"{_WORD}{_UPPER}*{_LOWER}+{_SHORT}?|{_WORD}{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = r"[\p{Han}]+|" + _GPT4O.replace(_UPPER, _UPPER[:-1] + _NOT_HAN).replace(_LOWER, _LOWER[:-1] + _NOT_HAN).replace(
    "/]*", "]*"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_WORD = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK = rf"{_DEEPSEEK_WORD}[\r\n]*|{_SPACES}"
_CASED = (  # letters with two cases that the model's authors listed
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_OF_ASIA = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_EAST_ASIAN = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


@dataclass(frozen=True)
class SplitRule:
    """A pre-tokenizer: the text is split by each pattern in turn, into matches and the pieces between them."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a word that is a token is used as it is, without applying merges."""
    nfc: bool = False
    adds_bos: bool = False
    """Default of `add_bos_token` if the file does not have it."""
    adds_eos: bool = False
    adds_sep: bool = False
    of_text: bool = False
    """Whether merges apply to text, with byte tokens for unknown characters and sentencepiece's spaces."""
    keeps_newlines: bool = False
    """Whether a token of newlines alone is used as it is, without applying merges."""


_OF_GPT2 = SplitRule((_GPT2,))
_OF_ROBERTA = replace(_OF_GPT2, adds_sep=True)
_OF_LINES = SplitRule((r"[^\n]+|\n+",), of_text=True)
_OF_GEMMA4 = replace(_OF_LINES, keeps_newlines=True)
_OF_DIGITS = SplitRule((_DIGIT, _GPT2))
_OF_LLAMA3 = SplitRule((_LLAMA3,), ignore_merges=True, adds_bos=True)
_OF_QWEN2 = SplitRule((_QWEN2,))
_OF_GPT4O = SplitRule((_GPT4O,))
_OF_DEEPSEEK3 = SplitRule((_DIGITS3, _CJK, _DEEPSEEK))
_OF_BLOOM = SplitRule((_BLOOM,))
_OF_BAILING = SplitRule(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)
_OF_AYA = SplitRule((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))

PRE: dict[str, SplitRule] = {
    "default": SplitRule((_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _OF_GPT2,
    "phi-2": _OF_GPT2,
    "mpt": replace(_OF_GPT2, nfc=True),
    "olmo": replace(_OF_GPT2, nfc=True),
    "modern-bert": replace(_OF_GPT2, nfc=True),
    "jais": _OF_GPT2,
    "trillion": _OF_GPT2,
    "granite-docling": _OF_GPT2,
    "exaone4": _OF_GPT2,
    "gigachat": _OF_GPT2,
    "a.x-4.0": _OF_GPT2,
    "mellum": _OF_GPT2,
    "jina-es": _OF_GPT2,
    "jina-de": _OF_GPT2,
    "jina-v2-es": _OF_GPT2,
    "jina-v2-de": _OF_GPT2,
    "jina-v1-en": _OF_ROBERTA,
    "jina-v2-code": _OF_ROBERTA,
    "roberta-bpe": _OF_ROBERTA,
    "granite-embed-multi-311m": _OF_GEMMA4,
    "sarvam-moe": _OF_LINES,
    "starcoder": _OF_DIGITS,
    "refact": _OF_DIGITS,
    "command-r": replace(_OF_DIGITS, nfc=True),
    "smollm": _OF_DIGITS,
    "codeshell": _OF_DIGITS,
    "exaone": _OF_DIGITS,
    "minerva-7b": _OF_DIGITS,
    "mellum2": _OF_DIGITS,
    "llama-bpe": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "falcon3": _OF_LLAMA3,
    "falcon-h1": _OF_LLAMA3,
    "pixtral": _OF_LLAMA3,
    "midm-2.0": _OF_LLAMA3,
    "lfm2": _OF_LLAMA3,
    "jina-v5-nano": _OF_LLAMA3,
    "dbrx": SplitRule((_LLAMA3,)),
    "smaug-bpe": SplitRule((_LLAMA3,)),
    "jais-2": SplitRule((_LLAMA3.replace(r"|\s+(?!\S)|\s+", _RUNS),)),
    "glm4": SplitRule((_LLAMA3,), ignore_merges=True),
    "chatglm-bpe": SplitRule((_LLAMA3,)),
    "qwen2": replace(_OF_QWEN2, nfc=True),
    "megrez": _OF_QWEN2,
    "deepseek-r1-qwen": _OF_QWEN2,
    "kormo": _OF_QWEN2,
    "f2llmv2": _OF_QWEN2,
    "stablelm2": _OF_QWEN2,
    "hunyuan": _OF_QWEN2,
    "solar-open": _OF_QWEN2,
    "grok-2": _OF_QWEN2,
    "qwen35": SplitRule(
        (_QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),),
        nfc=True,
    ),
    "gpt-4o": _OF_GPT4O,
    "llama4": _OF_GPT4O,
    "kanana2": _OF_GPT4O,
    "talkie": _OF_GPT4O,
    "minimax-m2": _OF_GPT4O,
    "granite-embed-multi-97m": replace(_OF_GPT4O, ignore_merges=True),
    "tekken": SplitRule((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "kimi-k2": SplitRule((_KIMI,)),
    "tiny_aya": _OF_AYA,
    "cohere2moe": _OF_AYA,
    "deepseek-v3": _OF_DEEPSEEK3,
    "hunyuan-dense": _OF_DEEPSEEK3,
    "joyai-llm": _OF_DEEPSEEK3,
    "hy_v4": _OF_DEEPSEEK3,
    "afmoe": SplitRule((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _OF_ASIA, _DEEPSEEK)),
    "youtu": SplitRule((_EAST_ASIAN, _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")), ignore_merges=True),
    "deepseek-llm": SplitRule(("[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_SIGNS}]+", r"\s+$", _HAN_AND_HANGUL, r"\p{N}+")),
    "chameleon": SplitRule(
        ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", "[\t\n]|    |  ", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        adds_bos=True,
    ),
    "deepseek-coder": SplitRule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, _DIGIT)),
    "falcon": SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom": _OF_BLOOM,
    "poro-chat": _OF_BLOOM,
    "gpt3-finnish": _OF_BLOOM,
    "viking": SplitRule((_BLOOM, _DIGIT)),
    "superbpe": SplitRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe": _OF_BAILING,
    "bailingmoe2": _OF_BAILING,
    "llada-moe": _OF_BAILING,
    "seed-coder": SplitRule(
        (_QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+").replace(r"|\p{N}|", r"|\p{N}{1}|"),)
    ),
    "laguna": SplitRule((r"[^\n]+|[\n]+", _QWEN2)),
    "minicpm5": SplitRule((_DIGITS3, _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")), ignore_merges=True),
    "exaone-moe": SplitRule(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
}

_KINDS = {
    "llama": SplitRule((), adds_bos=True),
    "gemma4": replace(_OF_GEMMA4, adds_bos=True),
    "bert": SplitRule((), adds_bos=True, adds_sep=True),
    "t5": SplitRule((), adds_eos=True),
}
"""Pre-tokenizers by `tokenizer.ggml.model`, except gpt2's."""

_ENDS_BY_KEY = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ENDS_OF_TURN = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "<turn|>", "[e~["}
_ENDS_OF_CALL = {"<|eom_id|>", "<|call|>", "<|calls|>", "<|flush|>", "<|return|>", "<|tool_response>"}
_ENDS_OF_TEXT = {"<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "</s>", "<eos>", "[EOS]"}
_ENDS_OF_DEEPSEEK = {"<｜end▁of▁sentence｜>"}
_ENDS_OF_FILL_IN = {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>"}
_ENDS_OF_FILE = {"<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"}
_ENDS = _ENDS_OF_TURN | _ENDS_OF_CALL | _ENDS_OF_TEXT | _ENDS_OF_DEEPSEEK | _ENDS_OF_FILL_IN | _ENDS_OF_FILE


def end_ids(fields: Fields) -> list[int]:
    """Return all token ids that end a response, the file's EOS first: those that a key names, and, as in llama.cpp,
    those with a known text. In a file without its own end of message (harmony), `<|end|>` is one. A token that may be
    ordinary text, such as HTML's `</s>` in Qwen's vocabulary, is an end only if its type is not normal."""
    tokens = fields.texts("tokenizer.ggml.tokens")
    types = fields.wholes("tokenizer.ggml.token_type")
    named = [fields.whole(f"tokenizer.ggml.{name}_token_id", -1) for name in _ENDS_BY_KEY]
    by_text = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if token in _ENDS and (kind != _NORMAL or token.startswith("<|"))
    }
    if {"<|return|>", "<|call|>"} <= by_text.keys() or {"<|calls|>", "<|flush|>"} <= by_text.keys():
        by_text.pop("<|end|>", None)
    if "<|tool_response>" in by_text:
        by_text.pop("</s>", None)
    return list(dict.fromkeys(i for i in (*named, *by_text.values()) if 0 <= i < len(tokens)))


def pre_tokenizer_of(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer for `patterns`, with the library's own, faster steps where possible."""
    is_gpt2 = patterns[-1] == _GPT2
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern == _DIGIT
        else pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in (patterns[:-1] if is_gpt2 else patterns)
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_gpt2))
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def template_files(fields: Fields) -> dict[str, str]:
    """Return the tokenizer files of a GGUF file that has only a chat template: file name to content."""
    config = _chat_template(fields)
    return {"tokenizer_config.json": json.dumps(config, ensure_ascii=False)} if config else {}


def _chat_template(fields: Fields) -> dict[str, Any]:
    """Return the chat template as in tokenizer_config.json: a string, or a list if the file has several named ones."""
    key = "tokenizer.chat_template"
    texts = {name: fields.text(f"{key}.{name}", "") for name in sorted(fields.suffixes(key))}
    others = [{"name": name, "template": text} for name, text in texts.items() if text]
    default = fields.text(key, "")
    if not others:
        return {"chat_template": default} if default else {}
    return {"chat_template": [*([{"name": "default", "template": default}] if default else []), *others]}


def tokenizer_files(fields: Fields) -> dict[str, str]:
    """Return the tokenizer files: file name to content. Raises `ConfigError` if the tokenizer is not supported."""
    kind, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", "default")
    if kind != "gpt2" and kind not in _KINDS:
        supported = "gpt2 (byte-level BPE), llama (sentencepiece), gemma4, bert (WordPiece) and t5 (unigrams)"
        raise ConfigError(f"tokenizer.ggml.model: {kind!r} is not imported: only {supported}; {_ELSEWHERE}")
    if kind == "gpt2" and pre not in PRE:
        raise ConfigError(f"tokenizer.ggml.pre: {pre!r} is not known: only {', '.join(PRE)}; {_ELSEWHERE}")
    tokens = fields.texts("tokenizer.ggml.tokens")
    types = fields.wholes("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.token_type: has {len(types)} types for {len(tokens)} tokens")
    rule = PRE[pre] if kind == "gpt2" else _KINDS[kind]
    if rule.keeps_newlines:
        types = [
            _USER_DEFINED if token.strip("\n") == "" else kind_of_token
            for token, kind_of_token in zip(tokens, types, strict=True)
        ]
    make = {"llama": _sentencepiece, "bert": _wordpiece, "t5": _unigram}.get(kind)
    tokenizer = _merged(fields, tokens, rule) if make is None else make(fields, tokens, types)
    _add_tokens(tokenizer, tokens, types)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    begin = "cls" if kind == "bert" and not fields.has("tokenizer.ggml.bos_token_id") else "bos"
    for name, spelled in {"bos": begin, "eos": "eos", "sep": "seperator"}.items():
        if (token_id := fields.whole(key := f"tokenizer.ggml.{spelled}_token_id", -1)) >= 0:
            if token_id >= len(tokens):
                raise ConfigError(f"{key}: {token_id}: must be below {len(tokens)}")
            config[f"{name}_token"] = tokens[token_id]
    adds = {"bos": rule.adds_bos, "eos": rule.adds_eos, "sep": rule.adds_sep}
    around = {
        name: [config[f"{name}_token"]]
        if f"{name}_token" in config and fields.flag(f"tokenizer.ggml.add_{name}_token", default)
        else []
        for name, default in adds.items()
    }
    if any(around.values()):
        begin_with, end, between = around["bos"], around["eos"], around["sep"]
        if kind == "bert":  # BERT's separator ends a sequence
            end, between = end or between, []
        elif pre == "modern-bert":  # a separator between two sequences, as in BERT, whatever its files say
            between = []
        one = [*begin_with, "$A", *end]
        special = {token: tokens.index(token) for added in around.values() for token in added}
        tokenizer.post_processor = processors.TemplateProcessing(
            single=one, pair=[*one, *between, "$B", *end], special_tokens=list(special.items())
        )
    config |= _chat_template(fields)
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
    }


def _sentencepiece(fields: Fields, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return sentencepiece's BPE: pieces merge if that gives a piece, best score first; unknown text is bytes."""
    scores = _scores(fields, tokens)
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
    space, has_prefix = normalizers.Replace(" ", _SPACE), fields.flag("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space]) if has_prefix else space
    tokenizer.decoder = _decoder(has_prefix)
    return tokenizer


def _decoder(has_prefix: bool) -> decoders.Decoder:
    """Return the decoder of sentencepiece's spaces and byte tokens."""
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)


def _wordpiece(fields: Fields, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return WordPiece. The file marks tokens that begin a word, whereas WordPiece marks those that continue one."""

    def own(token: str, kind: int) -> str:
        if kind == _CONTROL:
            return token
        return token[1:] if token.startswith(_SPACE) else f"##{token}"

    pieces = list(map(own, tokens, types))
    unknown = fields.whole("tokenizer.ggml.unknown_token_id", 100)
    if not 0 <= unknown < len(pieces):
        raise ConfigError(f"tokenizer.ggml.unknown_token_id: {unknown}: must be below {len(pieces)}")
    vocab = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token=pieces[unknown]))
    lowercase = fields.flag("tokenizer.ggml.normalizer.lowercase", True)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=fields.flag("tokenizer.ggml.normalizer.strip_accents", lowercase)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def _unigram(fields: Fields, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return the unigram model, which finds the most likely segmentation, with the normalizer table of the file."""
    scores = _scores(fields, tokens)
    least = min((score for score, kind in zip(scores, types, strict=True) if kind == _NORMAL), default=0.0)
    likely = (score if kind == _NORMAL else least for score, kind in zip(scores, types, strict=True))
    pieces = list(zip(tokens, likely, strict=True))
    unknown = next((i for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(models.Unigram(pieces, unknown, byte_fallback=_BYTE in types))
    steps: list[normalizers.Normalizer] = []
    if fields.has(key := "tokenizer.ggml.precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(byte & 255 for byte in fields.wholes(key))))
    if fields.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    has_prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    scheme = "always" if has_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    tokenizer.decoder = _decoder(has_prefix)
    return tokenizer


def _scores(fields: Fields, tokens: list[str]) -> list[float]:
    scores = fields.reals("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.scores: has {len(scores)} scores for {len(tokens)} tokens")
    return scores


def _merged(fields: Fields, tokens: list[str], rule: SplitRule) -> Tokenizer:
    """Return BPE with the file's own merges: over bytes, or over text (gemma4)."""
    merges: list[tuple[str, str]] = []
    for merge in fields.texts("tokenizer.ggml.merges"):
        space = merge.find(" ", 1)
        if space < 0:
            raise ConfigError(f"tokenizer.ggml.merges: {merge!r} must have two parts")
        merges.append((merge[:space], merge[space + 1 :]))
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges, byte_fallback=rule.of_text)
    except Exception as error:  # the package has no base class for its errors
        raise ConfigError(f"tokenizer.ggml.merges: {error}") from error
    tokenizer = Tokenizer(model)
    if rule.of_text:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rule.patterns[0]), behavior="isolated")
        tokenizer.decoder = _decoder(False)
        return tokenizer
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer_of(rule.patterns)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add the control and user-defined tokens, which are never split."""
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
