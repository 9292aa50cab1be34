"""Ollama's API: chat, generate and embeddings (`endpoint.py`, `body.py`), and information about models (`models.py`,
with `described.py` for their files). Start reading in `endpoint.py`, at `chat_endpoint`."""
