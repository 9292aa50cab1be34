"""Comparison of an answer with what its model computes: where they differ, and by how much.

Invariants: a reported log probability is the model's own, before temperature, penalties and masks; nothing unknown is
reported: a receipt has digests only, so positions and values need the answer's ids, text or log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from minisgl.config import ConfigError
from minisgl.receipt import LogprobDigest, Receipt, Tokens
from minisgl.sampling_params import ParamError, SamplingParams

if TYPE_CHECKING:
    from minisgl.llm import LLM, Completion, Encoded

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Answer:
    """Known parts of an answer, in addition to its receipt. `logprobs` are those of the tokens of its text."""

    ids: list[int] | None = None
    text: str | None = None
    logprobs: list[float] | None = None

    @classmethod
    def of_choice(cls, choice: dict[str, Any]) -> Answer:
        """Read the ids (present with `return_token_ids`) and `logprobs` of one choice of a response. Ollama's
        `logprobs` are the list itself."""
        found = choice.get("logprobs") or {}
        found = {"content": found} if isinstance(found, list) else found
        logprobs = found.get("token_logprobs") or [one.get("logprob") for one in found.get("content") or ()]
        return cls(_list_of(int, choice.get("token_ids")), None, _list_of(float, logprobs) or None)

    def answered(self, data: bytes) -> Answer:
        """Return a copy with the answer of a file: token ids if `data` is a JSON list of them, else text."""
        try:
            return replace(self, ids=msgspec.json.decode(data, type=list[int]), text=None)
        except msgspec.MsgspecError:
            return replace(self, ids=None, text=data.decode(errors="replace"))


def differences(
    llm: LLM, claim: Receipt, prompt: Encoded, *, lora: str | None = None, said: Answer | None = None
) -> list[str]:
    """Compute the answer of the receipt `found` alone and return a line for each difference from the receipt and from
    `said`; empty if all are equal. `llm` must have the receipt's model and arithmetic."""
    ours, theirs = (
        [image.digest.hex() for image in prompt.images],
        [] if isinstance(claim.images, msgspec.UnsetType) else list(claim.images),
    )
    if ours != theirs:
        return [_different_images(ours, theirs)]
    if Tokens.of(prompt.ids.tolist()) != claim.prompt:
        return [f"another prompt: {len(prompt.ids)} tokens, in the receipt {claim.prompt.count}, with another digest"]
    sampling = claim.sampling
    if claim.finish_reason == "abort":  # ended by the client, at an unpredictable token
        sampling = msgspec.structs.replace(sampling, max_tokens=max(1, claim.answer.count))
    if claim.logprobs is not None:
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    llm.clear_cache()
    (output,) = llm.generate([prompt], sampling, lora=lora, progress=False)
    computed = output.outputs[0]
    if computed.error:
        raise ConfigError(computed.error)
    return list(_Comparison(llm, claim, prompt, computed, lora).lines(said or Answer()))


def _different_images(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Return a line about the first image that differs from the receipt."""
    if len(ours) != len(theirs):
        return f"another number of images: {len(ours)}, in the receipt {len(theirs)}: give each with --image, in order"
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return (
        f"another image {at}: {ours[at]}, in the receipt {theirs[at]} (the digest of its pixels after resizing, which "
        "depends on the server's --max-image-tokens)"
    )


@dataclass(frozen=True, slots=True)
class _Comparison:
    llm: LLM
    claim: Receipt
    prompt: Encoded
    computed: Completion
    lora: str | None

    def lines(self, said: Answer) -> list[str]:
        claim, computed = self.claim, self.computed
        differ, is_other = [], Tokens.of(computed.token_ids) != claim.answer
        if is_other:
            known = said.ids is not None or said.text is not None
            hint = "" if known else " (where is known with --answer, or of an answer with return_token_ids)"
            differ.append(
                f"another answer: {len(computed.token_ids)} tokens, in the receipt {claim.answer.count}, with another "
                f"digest{hint}"
            )
        elif claim.finish_reason not in (computed.finish_reason, "abort"):
            differ.append(f"it ends otherwise: {computed.finish_reason}, in the receipt {claim.finish_reason}")
        elif claim.logprobs is not None and _digest(computed.logprobs) != claim.logprobs:
            differ.append(self._compare_logprobs(said.logprobs))
        if said.ids is not None:
            differ += self._compare_ids(said.ids)
        elif said.text is not None and said.text != computed.text:
            differ.append(self._compare_text(said.text))
        return differ

    # ----------------------------------------------------------------------------------------------- probabilities

    def _compare_logprobs(self, given: list[float] | None) -> str:
        """Return a line about differing log probabilities, with where and by how much if the answer has `given`."""
        text = "the same tokens, with other probabilities: computed by other arithmetic"
        if given is None:
            return f"{text} (a receipt has their digest alone: by how much is known of an answer with logprobs)"
        if _digest(given) != self.claim.logprobs:
            return f"{text} (the answer's logprobs are not those of its receipt)"
        theirs, ours = np.array(given, np.float32), np.array(self.computed.logprobs, np.float32)
        if len(theirs) != len(ours):
            return f"{text}, of {len(theirs)} tokens, computed of {len(ours)}"
        apart = np.abs(theirs.astype(np.float64) - ours)
        first, most = int(np.argmax(theirs != ours)), int(np.argmax(apart))
        return (
            f"{text}, from token {first} on: {theirs[first]!s}, computed {ours[first]!s}; at most {apart[most]:.3g} "
            f"apart, at token {most}"
        )

    def _logprob(self, common: Sequence[int], token: int) -> float | None:
        """Return the log probability of `token` after the prompt and `common`, or None if it is not valid there."""
        alone = SamplingParams(max_tokens=1, temperature=0, allowed_token_ids=(token,), ignore_eos=True, logprobs=0)
        prompt = replace(self.prompt, ids=np.append(self.prompt.ids, np.array(common, np.int32)))
        try:
            (output,) = self.llm.generate([prompt], alone, lora=self.lora, progress=False)
        except ParamError:  # not in the vocabulary, or beyond the context
            return None
        return next(iter(output.outputs[0].logprobs), None)

    # ------------------------------------------------------------------------------------------------------ places

    def _compare_ids(self, ids: list[int]) -> list[str]:
        ours = self.computed.token_ids
        if ids == ours:
            return []
        lines = []
        if Tokens.of(ids) != self.claim.answer:
            lines.append(f"the answer's {len(ids)} tokens are not those of the receipt")
        at = next((i for i, (a, b) in enumerate(zip(ids, ours, strict=False)) if a != b), min(len(ids), len(ours)))
        return [*lines, f"the answer from token {at} on: {self._compare_tokens(ids[at : at + 1], at)}"]

    def _compare_tokens(self, theirs: Sequence[int], at: int) -> str:
        """Return the answer's token at `at` (`theirs`; empty: its end) and the computed one, with log probabilities."""
        ours = self.computed.token_ids
        pair = [tuple(theirs), tuple(ours[at : at + 1])]
        logprobs = [self._logprob(ours[:at], *one) if one else None for one in pair]
        shown = [
            f"{one[0]} {self.llm.tokenizer.decode(one, skip_special_tokens=False)!r}" if one else "its end"
            for one in pair
        ]
        texts = [
            f"{text} (log probability {np.float32(given)!s})" if given is not None else text
            for text, given in zip(shown, logprobs, strict=True)
        ]
        first, second = logprobs
        apart = "" if first is None or second is None else f": {abs(first - second):.6g} apart"
        return f"{texts[0]}, computed {texts[1]}{apart}"

    def _compare_text(self, text: str) -> str:
        """Return a line about the first differing character, and about the first differing token if the tokenizer gives
        the computed tokens up to there."""
        ours = self.computed.text
        at = next((i for i, (a, b) in enumerate(zip(text, ours, strict=False)) if a != b), min(len(text), len(ours)))
        said = f"the answer from character {at} on: {text[at : at + 20]!r}, computed {ours[at : at + 20]!r}"
        index, length = self._last_token_before(at)
        rest, decode = text[length:], self.llm.tokenizer.decode
        theirs = self.llm.tokenizer.encode(rest, add_special_tokens=False).tolist()[:1] if rest else []
        common = self.computed.token_ids[:index]
        if decode([*common, *theirs]) != text[: length + len(decode(theirs))]:
            return said
        return f"{said}; token {index}: {self._compare_tokens(theirs, index)}"

    def _last_token_before(self, at: int) -> tuple[int, int]:
        """Return the number of tokens before the one with character `at`, and how many characters they have."""
        decoder, length, before = self.llm.tokenizer.new_decoder(), 0, (0, 0)
        for index, token in enumerate(self.computed.token_ids, 1):
            length += len(decoder.push([token]))
            if length > at:
                break
            before = (index, length)
        return before


def _list_of(kind: type[T], given: object) -> list[T] | None:
    """Convert a JSON value to a list of `kind`, or return None if it is no such list."""
    try:
        return msgspec.convert(given, list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError:
        return None


def _digest(logprobs: Sequence[float]) -> str:
    digest = LogprobDigest()
    digest.add(logprobs)
    return digest.shown()
