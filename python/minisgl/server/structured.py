"""The form that an answer must have, in the fields of OpenAI, vLLM, SGLang and llama.cpp.

Invariants: whichever field is used, the same form is the same source; null asks for nothing; two fields that ask for
different forms are an error that names both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag

from minisgl.grammar.sources import ANY_OBJECT, GrammarSource, Kind, the_one
from minisgl.sampling_params import ParamError
from minisgl.server.fields import Body, described

MAX_CHOICE_TEXTS = 16_384
MAX_WHITESPACE_CHARS = 64


def _is_text(value: object) -> str:
    return "<text>" if isinstance(value, str) else "<object>"


Schema = Annotated[
    Annotated[StrictStr, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")], Discriminator(_is_text)
]
Choice = Annotated[list[StrictStr], Field(fail_fast=True, max_length=MAX_CHOICE_TEXTS)]


class JsonSchemaFormat(Body):
    schema_: Schema | None = Field(
        default=None, alias="schema", description="The JSON schema, or its text; missing: any object."
    )
    name: StrictStr | None = described("Accepted, without effect.")
    description: StrictStr | None = described("Accepted, without effect.")
    strict: StrictBool | None = described("Accepted, without effect: a schema is always kept to.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = Field(description="Which form.")
    json_schema: JsonSchemaFormat | None = described("With `json_schema`, which needs it.")
    schema_: Schema | None = Field(
        default=None, alias="schema", description="llama.cpp's place for the schema of either JSON type, or its text."
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
        asked = ANY_OBJECT if self.json_schema.schema_ is None else self.json_schema.schema_
        return _source("json_schema", asked, f"{field}.json_schema.schema", None)


class StructuredOutputs(Body):
    """vLLM's: one of the first five."""

    json_: Schema | None = Field(default=None, alias="json", description="A JSON schema, or its text.")
    json_object: StrictBool | None = described("Any JSON object.")
    regex: StrictStr | None = described("A regular expression, all of which the answer matches.")
    choice: Choice | None = described("The answer is one of these texts.")
    grammar: StrictStr | None = described("A grammar in Lark's notation (llguidance's dialect) or in llama.cpp's GBNF.")
    whitespace_pattern: StrictStr | None = described(
        "Of JSON: what may stand between its tokens, a regular expression."
    )
    disable_any_whitespace: StrictBool | None = described("Of JSON: nothing stands between its tokens.")
    disable_additional_properties: Literal[False] | None = described("Only false: say it in the schema.")
    disable_fallback: StrictBool | None = described("Accepted, without effect: there is one library.")
    structural_tag: None = described("Not supported.")

    def sources(self, field: str) -> Iterator[GrammarSource]:
        whitespace = self.whitespace_pattern
        if self.disable_any_whitespace:
            if whitespace:
                raise ParamError(f"{field}.whitespace_pattern", whitespace, "disable_any_whitespace says otherwise")
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
    """At most one of these asks for a form, or all for the same."""

    response_format: ResponseFormat | None = described(
        "OpenAI's form of the answer: text, any JSON object, or JSON by a schema."
    )
    structured_outputs: StructuredOutputs | None = described("vLLM's.")
    guided_json: Schema | None = described("vLLM's older name of `structured_outputs.json`.")
    guided_regex: StrictStr | None = described("vLLM's older name of `structured_outputs.regex`.")
    guided_choice: Choice | None = described(
        "vLLM's older name of `structured_outputs.choice`; an empty list asks for nothing."
    )
    guided_grammar: StrictStr | None = described("vLLM's older name of `structured_outputs.grammar`.")
    guided_whitespace_pattern: StrictStr | None = described(
        "vLLM's older name of `structured_outputs.whitespace_pattern`; with `guided_json`."
    )
    guided_decoding_backend: Literal["auto", "guidance", "llguidance"] | None = described(
        "Without effect: these are all llguidance."
    )
    json_schema: Schema | None = described("SGLang's and llama.cpp's: a JSON schema, or its text.")
    regex: StrictStr | None = described("SGLang's: as `structured_outputs.regex`.")
    ebnf: StrictStr | None = described("SGLang's: as `structured_outputs.grammar`.")
    grammar: StrictStr | None = described(
        "llama.cpp's: as `structured_outputs.grammar`; an empty text asks for nothing."
    )

    def grammar_source(self, names: Mapping[str, str] | None = None) -> GrammarSource | None:
        """`names`: how the client wrote a field, where that differs. Raises `ParamError`."""
        return the_one(list(self._sources(names or {})))

    def _sources(self, names: Mapping[str, str]) -> Iterator[GrammarSource]:
        def written(name: str) -> str:
            return names.get(name, name)

        if self.response_format is not None and (found := self.response_format.source(written("response_format"))):
            yield found
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


def _source(kind: Kind, value: Any, field: str, whitespace: str | None) -> GrammarSource:
    if not value and isinstance(value, (str, list)):
        raise ParamError(field, value, "must not be empty")
    if whitespace is not None and len(whitespace) > MAX_WHITESPACE_CHARS:
        raise ParamError(field, whitespace, f"its whitespace pattern has more than {MAX_WHITESPACE_CHARS} characters")
    return GrammarSource(kind, value, field, whitespace)
