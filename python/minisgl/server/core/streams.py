"""Stream formats: which routes may stream and in which format, how an event is written, and the keep-alive bytes, which
no client takes for output. Ollama's lines, which name the model, are made in `ollama/endpoint.py`."""

from __future__ import annotations

import msgspec

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
STREAMED = {
    "/v1/chat/completions": (EVENTS,),
    "/v1/completions": (EVENTS,),
    "/generate": (LINES, EVENTS),  # lines for `prompt`, events for `text` and `input_ids`
    "/v1/responses": (EVENTS,),
    "/v1/messages": (EVENTS,),
    "/completion": (EVENTS,),
    "/infill": (EVENTS,),
    "/api/chat": (LINES,),
    "/api/generate": (LINES,),
}
"""Routes that may stream, with their content types."""
STREAMS = frozenset({"/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages"})
"""Routes whose streams another server can continue."""
SSE_DONE = b"data: [DONE]\n\n"
SSE_PING = b": ping\n\n"
"""Keep-alive bytes of server-sent events: a comment, which is no event."""
EVENT_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
"""Keep-alive event for Anthropic's clients."""
LINE_PING = b'{"text_delta":""}\n'
"""Keep-alive line for clients of /generate that read JSON lines."""


def sse(data: object, name: str = "") -> bytes:
    """Return one server-sent event, with `name` as its event type if given."""
    return b"%bdata: %b\n\n" % (b"event: %b\n" % name.encode() if name else b"", msgspec.json.encode(data))


def ping_of(path: str, kind: str) -> bytes:
    """Return the keep-alive bytes of a stream of this path and content type."""
    if path == "/v1/messages":
        return EVENT_PING
    return SSE_PING if kind.startswith(EVENTS) else LINE_PING
