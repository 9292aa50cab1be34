"""From the text of an answer to its parts: content, reasoning, tool calls.

The parsers are in Rust (`rust/minisgl-text/src/answer`); events and fields of an API belong to `server/`. Start with
`api.py`.
"""
