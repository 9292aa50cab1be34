"""minisgl: a compact LLM inference server."""
