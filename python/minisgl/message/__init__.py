"""Typed messages between the HTTP process and the engine process."""

from minisgl.message.types import (
    SCHEMA_VERSION,
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineReady,
    EngineStats,
    FinishRequest,
    FromEngine,
    Heartbeat,
    LoadProgress,
    PromptLogprobs,
    Shutdown,
    StepTokens,
    ToEngine,
    TokenLogprobs,
)
from minisgl.message.wire import MessageError, decode_from_engine, decode_to_engine, encode

__all__ = [
    "SCHEMA_VERSION",
    "AbortRequest",
    "AddRequest",
    "EngineFailed",
    "EngineReady",
    "EngineStats",
    "FinishRequest",
    "FromEngine",
    "Heartbeat",
    "LoadProgress",
    "MessageError",
    "PromptLogprobs",
    "Shutdown",
    "StepTokens",
    "ToEngine",
    "TokenLogprobs",
    "decode_from_engine",
    "decode_to_engine",
    "encode",
]
