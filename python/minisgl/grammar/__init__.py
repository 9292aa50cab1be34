"""Structured output: from what a client asks for to the masks that tokens are sampled by.

Which tokens are drawn is the engine's; what fields a request has, `server/`'s. Start with `sources.py` and `check.py`
in the HTTP process, `compiler.py` and `slots.py` in the engine process.
"""
