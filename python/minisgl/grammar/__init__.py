"""Structured output: turns what a client requests into masks for token sampling. Sampling itself belongs to the engine,
request fields to `server/`. Start with `sources.py` and `check.py` in the HTTP process, `compiler.py` and `slots.py` in
the engine process."""
