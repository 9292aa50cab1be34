"""The scheduler: it decides in two calls a step which request computes how many tokens, in which pages.

No clock, file, socket or tensor belongs here. Start with `api.py`, the two calls, then `reference/`; `backend.py`
chooses between the reference and the one in Rust, `rust/minisgl-core`.
"""
