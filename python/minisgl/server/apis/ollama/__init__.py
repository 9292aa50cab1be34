"""Ollama's API, as a translation of chats, completions and embeddings."""
