"""Anthropic's API: messages of blocks and their events (`endpoint.py`, `body.py`), and cards of models (`models.py`).
The shape of its errors is `core/errors.py`'s. Start reading in `endpoint.py`, at `messages_endpoint`.
"""
