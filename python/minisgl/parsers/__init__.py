"""Parsers, which take the text of an answer apart into content, reasoning and tool calls.

The parsers are in Rust (`rust/minisgl-text/src/answer`); events and fields of an API belong to `server/`. Start with
`api.py`.
"""
