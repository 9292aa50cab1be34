"""Request fields that become `SamplingParams`: sampling, limits, and structured output in the fields of OpenAI, vLLM,
SGLang and llama.cpp.

Invariants: numeric bounds here are documentation, `SamplingParams.check` enforces them; equal formats give equal
grammar sources, whichever field requests them; null asks for nothing; two fields that request different formats are an
error that names both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag

from minisgl.config import MAX_PRIORITY
from minisgl.grammar.sources import ANY_OBJECT, GrammarSource, Kind, the_one
from minisgl.sampling_params import BOUNDS, ParamError, SamplingParams
from minisgl.server.core import fields
from minisgl.server.core.fields import Body, Int64, Side, TextOr, TokenId, described, present, ranged

MAX_CHOICE_TEXTS = 16_384
MAX_WHITESPACE_CHARS = 64
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
_AS_ASKED = ("temperature", "top_p", "seed", "n", "min_tokens", "ignore_eos", "min_p", *_PENALTIES)
"""Fields that are copied to `SamplingParams` unchanged."""


Schema = Annotated[
    Annotated[StrictStr, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<object>"),
]
Choice = Annotated[list[StrictStr], Field(fail_fast=True, max_length=MAX_CHOICE_TEXTS)]


class JsonSchemaFormat(Body):
    schema_: Schema | None = Field(
        default=None, alias="schema", description="The JSON schema, or its text. Default: any object."
    )
    name: StrictStr | None = described("Accepted, without effect.")
    description: StrictStr | None = described("Accepted, without effect.")
    strict: StrictBool | None = described(
        "No keyword of the schema is left out: what cannot be enforced is an error. By default the header "
        "`X-Minisgl-Ignored` names it."
    )


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = Field(description="The form.")
    json_schema: JsonSchemaFormat | None = described("Required with type `json_schema`.")
    schema_: Schema | None = Field(
        default=None, alias="schema", description="llama.cpp's: the schema of either JSON type, or its text."
    )

    def source(self, field: str) -> GrammarSource | None:
        if self.type == "text":
            return None
        if self.schema_ is not None:
            return _source("json_schema", self.schema_, f"{field}.schema", None)
        if self.type == "json_object":
            return GrammarSource("json_schema", ANY_OBJECT, field)
        if self.json_schema is None:
            raise ParamError(f"{field}.json_schema", None, "required for the type json_schema")
        schema = ANY_OBJECT if self.json_schema.schema_ is None else self.json_schema.schema_
        return _source("json_schema", schema, f"{field}.json_schema.schema", None, self.json_schema.strict is True)


class StructuredOutputs(Body):
    """vLLM's structured output: exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`."""

    json_: Schema | None = Field(default=None, alias="json", description="A JSON schema, or its text.")
    json_object: StrictBool | None = described("Any JSON object.")
    regex: StrictStr | None = described("A regular expression that matches the whole answer.")
    choice: Choice | None = described("The answer is one of these texts.")
    grammar: StrictStr | None = described("A grammar in Lark's notation (llguidance's dialect) or in llama.cpp's GBNF.")
    whitespace_pattern: StrictStr | None = described("A regular expression for the whitespace between JSON tokens.")
    disable_any_whitespace: StrictBool | None = described("No whitespace between JSON tokens.")
    disable_additional_properties: Literal[False] | None = described(
        "Only false; use `additionalProperties` in the schema."
    )
    disable_fallback: StrictBool | None = described("Accepted, without effect: there is only one library.")
    structural_tag: None = described("Not supported.")

    def sources(self, field: str) -> Iterator[GrammarSource]:
        whitespace = self.whitespace_pattern
        if self.disable_any_whitespace:
            if whitespace:
                raise ParamError(f"{field}.whitespace_pattern", whitespace, "excludes disable_any_whitespace")
            whitespace = ""
        given: list[tuple[str, Kind, Any]] = [
            ("json", "json_schema", self.json_),
            ("json_object", "json_schema", ANY_OBJECT if self.json_object else None),
            ("regex", "regex", self.regex),
            ("choice", "choice", self.choice),
            ("grammar", "grammar", self.grammar),
        ]
        for name, kind, value in given:
            if value is not None:
                yield _source(kind, value, f"{field}.{name}", whitespace if kind == "json_schema" else None)


class Structured(Body):
    """Fields for structured output. If several are given, they must request the same format."""

    response_format: ResponseFormat | None = described("OpenAI's: text, any JSON object, or JSON by a schema.")
    structured_outputs: StructuredOutputs | None = described("vLLM's.")
    guided_json: Schema | None = described("vLLM's older name of `structured_outputs.json`.")
    guided_regex: StrictStr | None = described("vLLM's older name of `structured_outputs.regex`.")
    guided_choice: Choice | None = described(
        "vLLM's older name of `structured_outputs.choice`; an empty list has no effect."
    )
    guided_grammar: StrictStr | None = described("vLLM's older name of `structured_outputs.grammar`.")
    guided_whitespace_pattern: StrictStr | None = described(
        "vLLM's older name of `structured_outputs.whitespace_pattern`; with `guided_json`."
    )
    guided_decoding_backend: Literal["auto", "guidance", "llguidance"] | None = described(
        "Without effect: all of these mean llguidance."
    )
    json_schema: Schema | None = described("SGLang's and llama.cpp's: a JSON schema, or its text.")
    regex: StrictStr | None = described("SGLang's: as `structured_outputs.regex`.")
    ebnf: StrictStr | None = described("SGLang's: as `structured_outputs.grammar`.")
    grammar: StrictStr | None = described("llama.cpp's: as `structured_outputs.grammar`; an empty text has no effect.")

    def grammar_source(self, names: Mapping[str, str] | None = None) -> GrammarSource | None:
        """Return the requested grammar's source, if any. `names`: the client's names of fields. Raises `ParamError`."""
        return the_one(list(self._sources(names or {})))

    def _sources(self, names: Mapping[str, str]) -> Iterator[GrammarSource]:
        def written(name: str) -> str:
            return names.get(name, name)

        if self.response_format is not None and (source := self.response_format.source(written("response_format"))):
            yield source
        if self.structured_outputs is not None:
            yield from self.structured_outputs.sources(written("structured_outputs"))
        given: list[tuple[str, Kind, Any]] = [
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice or None),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("json_schema", "json_schema", self.json_schema),
            ("regex", "regex", self.regex),
            ("ebnf", "grammar", self.ebnf),
            ("grammar", "grammar", self.grammar or None),
        ]
        for name, kind, value in given:
            if value is not None:
                whitespace = self.guided_whitespace_pattern if name == "guided_json" else None
                yield _source(kind, value, written(name), whitespace)


def _source(kind: Kind, value: Any, field: str, whitespace: str | None, strict: bool = False) -> GrammarSource:
    if not value and isinstance(value, (str, list)):
        raise ParamError(field, value, "must not be empty")
    if whitespace is not None and len(whitespace) > MAX_WHITESPACE_CHARS:
        raise ParamError(field, whitespace, f"its whitespace pattern has more than {MAX_WHITESPACE_CHARS} characters")
    return GrammarSource(kind, value, field, whitespace, strict)


Stop = TextOr[Annotated[list[StrictStr], Field(fail_fast=True, max_length=BOUNDS.max_stop_strings)]]


class StreamOptions(Body):
    include_usage: StrictBool | None = described("Send one more chunk with the usage before the end of the stream.")
    continuous_usage_stats: StrictBool | None = described("With `include_usage`: send the usage so far in each chunk.")


class Sampling(Structured):
    """Fields that all generating endpoints share."""

    NOT_YET: ClassVar[fields.Table] = fields.SHARED
    OTHERS: ClassVar[fields.Table] = fields.OTHERS
    IGNORED: ClassVar[fields.Table] = {name: fields.IGNORED[name] for name in ("user", "metadata", "store")}
    ALIASES: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("n_predict", "num_predict", "max_output_tokens"), "max_tokens"),
        "repeat_penalty": "repetition_penalty",
        "stop_sequences": "stop",
    }

    model: StrictStr | None = described("The served model's name; any other is 404. Default: the served model.")
    temperature: float | None = ranged("temperature", "0 is greedy: the most likely token, the lowest id on ties.")
    top_p: float | None = ranged(
        "top_p", "Sample from the fewest most likely tokens whose probabilities reach this; 0 is greedy."
    )
    top_k: Int64 | None = ranged("top_k", "Sample from the k most likely tokens; 0 and -1 mean all.")
    min_p: float | None = ranged("min_p", "Exclude tokens that are less likely than this share of the most likely one.")
    seed: Int64 | None = described("The same seed gives the same text, whatever else runs. Default: random.")
    n: Int64 | None = ranged("n", "Answers per prompt; the prompt is computed once.")
    max_tokens: Int64 | None = described(
        "Limit of generated tokens. The context is a limit in any case; -1 means no other.", minimum=-1
    )
    min_tokens: Int64 | None = ranged(
        "min_tokens", "No stop string or stop token ends the answer before this many tokens."
    )
    stop: Stop | None = described(
        f"Up to {BOUNDS.max_stop_strings} texts that end the answer; they are not part of it."
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=BOUNDS.max_stop_token_ids)] | None = (
        described(
            "More token ids that end the answer; they are not part of its text. An id beyond the vocabulary is an "
            "error."
        )
    )
    ignore_eos: StrictBool | None = described("Continue after the model's own end-of-sequence tokens.")
    frequency_penalty: float | None = ranged(
        "frequency_penalty", "Subtracted from a token's logit for each time that the answer has it already."
    )
    presence_penalty: float | None = ranged(
        "presence_penalty", "Subtracted from a token's logit once if the answer has it already."
    )
    repetition_penalty: float | None = ranged(
        "repetition_penalty",
        "Divides positive logits of tokens in the prompt or answer and multiplies negative ones. 1: off.",
    )
    logit_bias: Annotated[dict[StrictStr, float], Field(max_length=BOUNDS.max_logit_bias)] | None = described(
        "Token id (as a string) to a number from -100 to 100 that is added to its logit."
    )
    allowed_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=BOUNDS.max_allowed_token_ids)] | None
    ) = described("Only these token ids are generated.")
    bad_words: Annotated[list[StrictStr], Field(fail_fast=True, max_length=BOUNDS.max_bad_words)] | None = described(
        "Texts that are not generated: their tokens at the beginning of a text and after a space."
    )
    stream: StrictBool | None = described("Send the answer as it is generated.")
    stream_options: StreamOptions | None = described("Only with `stream`.")
    truncate_prompt_tokens: Int64 | None = described(
        "Keep only this many of the prompt's last tokens; -1: as many as leave room for `max_tokens`. A "
        "prompt longer than eight contexts is still an error.",
        minimum=-1,
    )
    truncation_side: Side = described("vLLM's: `right` keeps the first tokens instead.")
    return_token_ids: StrictBool | None = described(
        "Report `prompt_token_ids` and the generated `token_ids`, in a stream in each chunk."
    )
    priority: Int64 | None = described(
        "Smaller numbers go first, as in vLLM; 0 by default. One step counts like 64 later requests.",
        minimum=-MAX_PRIORITY,
        maximum=MAX_PRIORITY,
    )
    user: StrictStr | None = described("Accepted, without effect: the header `X-Minisgl-Ignored` names it.")
    metadata: dict[str, Any] | None = described("Accepted, without effect: the header names it.")
    store: StrictBool | None = described("Accepted, without effect: nothing is stored, and the header says so.")

    def to_sampling(self, max_tokens: int | None, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """Build and check `SamplingParams`. `defaults`: the model's, for fields that are missing; `overrides`: fields
        whose names or meanings differ between endpoints. Raises `ParamError`."""
        if self.stream_options is not None and not self.stream:
            raise ParamError("stream_options", self.stream_options.model_dump(exclude_none=True), "needs stream: true")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given = {name: getattr(self, name) for name in _AS_ASKED} | {
            "top_k": -1 if self.top_k == 0 else self.top_k,
            "logit_bias": _logit_bias(self.logit_bias),
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            "bad_words": None if self.bad_words is None else tuple(self.bad_words),
            **overrides,
        }
        fields = {**defaults, **present(given)}
        fields |= {"max_tokens": max_tokens, "stop": stop, "stop_token_ids": tuple(self.stop_token_ids or ())}
        return SamplingParams(**fields).check()

    def limit(self) -> int | None:
        """Return the client's maximum number of generated tokens; `None` if it names none."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise ParamError("logit_bias", key, "keys must be token ids")
    return {int(key): value for key, value in given.items()}


def shared_fields(body: Sampling, but_for: Collection[str]) -> dict[str, Any]:
    """Return the fields of `body` that every generating endpoint has and that are set, except `but_for`."""
    return present({name: getattr(body, name) for name in Sampling.model_fields if name not in but_for})
