"""Request and response bodies of the routes for operators."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr

from minisgl.server.core.answers import Answer
from minisgl.server.core.bodies import Conversation, Messages, ModelBody
from minisgl.server.core.fields import Items, TokenId, described


class PrefixRequest(ModelBody, Conversation):
    """Body with exactly one of `text`, `messages` and `token_ids`."""

    text: StrictStr | None = described("The beginning of a completion's prompt.")
    messages: Messages | None = described("The beginning of a conversation, rendered by the chat template.")
    add_generation_prompt: StrictBool | None = described(
        "End the prefix with the beginning of an assistant message; false by default."
    )
    token_ids: Items[TokenId] | None = described("Token ids.")
    pin: StrictBool | None = described(
        "Keep it until it is removed; true by default. Otherwise it can be evicted like all others."
    )
    wait: StrictBool | None = described("Answer when it is computed, not already when it is accepted; true by default.")


class LoadAdapterRequest(ModelBody):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        description="The name that requests use as `model`."
    )
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="A folder with an adapter saved by peft, below the server's `lora_folder`."
    )
    load_inplace: Literal[False] | None = described("Only false; unload the old adapter first.")


class UnloadAdapterRequest(ModelBody):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        description="The name under which it was loaded."
    )


class EnginePrefix(Answer):
    engine: int
    state: Literal["warming", "ready", "refused", "failed"]
    hits: int


class PrefixAnswer(Answer):
    """Prefix in the cache. `pages`: KV pages of `tokens`; `hits`: requests that found it; `reason`: of a refusal."""

    id: str
    object: Literal["cache.prefix"]
    tokens: int
    pages: int
    pinned: bool
    state: Literal["warming", "ready", "refused", "failed"]
    reason: str | None = None
    hits: int
    engines: list[EnginePrefix]


class PrefixList(Answer):
    object: Literal["list"]
    data: list[PrefixAnswer]


class PrefixDeleted(Answer):
    id: str
    object: Literal["cache.prefix"]
    deleted: bool


class EngineFreed(Answer):
    engine: int
    freed_pages: int


class CacheAnswer(Answer):
    object: Literal["cache"]
    freed_pages: int
    engines: list[EngineFreed]


class Version(Answer):
    version: str


class Status(Answer):
    status: str


class Stats(Answer):
    """Statistics of server and engine; times in seconds since the start. `engine` is null before its first step."""

    model: str
    simulated: str | None
    schedule_policy: str
    load: dict[str, float]
    http: dict[str, Any]
    engine: dict[str, Any] | None


class Health(Answer):
    status: str
    stats: dict[str, Any] | None = None
