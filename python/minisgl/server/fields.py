"""What all request bodies are made of: strict types, bounded lists, described fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictInt, StrictStr, Tag

from minisgl.server import refused

TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Int64 = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
T = TypeVar("T")
# the first bad item is enough: to list a million findings takes long, and the event loop stands still meanwhile
Items = Annotated[list[T], Field(fail_fast=True)]
MAX_PARTS = 4096  # of one message


def text_or_list(value: object) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


TextOrParts = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[list[T], Field(fail_fast=True, max_length=MAX_PARTS), Tag("<list>")],
    Discriminator(text_or_list),
]


def described(description: str, **bounds: Any) -> Any:
    return Field(default=None, description=description, json_schema_extra=bounds or None)


ENOUGH_CHARS = 1 << 16  # more are not counted


def chars_of(value: object) -> int:
    """About as many as its JSON has."""
    found, todo = 0, [value]
    while todo and found <= ENOUGH_CHARS:
        one = todo.pop()
        if isinstance(one, dict):
            found += sum(map(len, one)) + 4 * len(one)
            todo.extend(one.values())
        elif isinstance(one, list):
            todo.extend(one)
        found += len(one) + 2 if isinstance(one, str) else 2
    return found


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())

    # other servers' names -> those of the fields that do the same
    ALIASES: ClassVar[dict[str, str]] = {}
    # field -> values that ask for nothing; anything else is refused until a later version can do it
    NOT_YET: ClassVar[refused.Table] = {}
