"""Ollama's API: chat, generate and embeddings (`endpoint.py`, `body.py`), and what it asks about models (`models.py`,
with `described.py` for their files). Start reading in `endpoint.py`, at `chat_endpoint`.
"""
