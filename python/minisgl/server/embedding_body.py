"""The body and the answer of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictStr, Tag

from minisgl.config import MAX_PRIORITY
from minisgl.server.bodies import prompt_kind
from minisgl.server.fields import Body, Int64, Items, TokenId, described

MAX_INPUTS = 1024


EmbeddingInput = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[list[StrictStr], Field(fail_fast=True, max_length=MAX_INPUTS), Tag("<texts>")]
    | Annotated[Items[TokenId], Tag("<ids>")]
    | Annotated[list[Items[TokenId]], Field(fail_fast=True, max_length=MAX_INPUTS), Tag("<id_lists>")],
    Discriminator(prompt_kind),
]


class EmbeddingRequest(Body):
    model: StrictStr | None = described("The served model's name; may be left out.")
    input: EmbeddingInput = Field(
        description=f"A text, up to {MAX_INPUTS} of them, token ids, or lists of token ids: each is one embedding."
    )
    encoding_format: Literal["float", "base64"] | None = described(
        "`float` (default): lists of numbers. `base64`: their bytes as little-endian float32."
    )
    dimensions: Int64 | None = described(
        "Only so many of the first numbers, brought to length 1 again; default: all that the model has.", minimum=1
    )
    pooling: Literal["mean", "last"] | None = described(
        "Of which tokens' hidden states: `mean` (default) of all, or the `last` one, for models that are trained so."
    )
    truncate_prompt_tokens: Int64 | None = described(
        "Keep only so many of the last tokens of each input; -1: as many as fit.", minimum=-1
    )
    priority: Int64 | None = described(
        "Requests with smaller numbers go first; 0 by default.", minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY
    )
    user: StrictStr | None = described("Ignored.")

    def inputs(self) -> list[Any]:
        """Texts and lists of token ids."""
        given = self.input
        if isinstance(given, str):
            return [given]
        return [given] if given and isinstance(given[0], int) else list(given)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class EmbeddingObject(_Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # a text with `base64`


class EmbeddingUsage(_Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(_Answer):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
