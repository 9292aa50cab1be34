"""The scheduler: two calls per step decide which requests compute how many tokens, and in which KV pages. It uses no
clock, file, socket or tensor. Start with `api.py` (the two calls), then read `reference/`; `backend.py` chooses between
the Python reference and the Rust implementation in `rust/minisgl-core`."""
