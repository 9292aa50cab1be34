"""Parsers that split a model's output into content, reasoning and tool calls.

They are implemented in Rust (`rust/minisgl-text/src/answer`); events and fields of an API belong to `server/`. Start
with `api.py`.
"""
