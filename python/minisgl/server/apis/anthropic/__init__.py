"""Anthropic's API: messages of blocks and their events (`endpoint.py`, `body.py`), and model cards (`models.py`). Its
errors are formatted in `core/errors.py`. Start reading in `endpoint.py`, at `messages_endpoint`."""
