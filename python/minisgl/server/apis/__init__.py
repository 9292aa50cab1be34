"""A folder for each API. Each converts bodies into a `Turn`, a `Continuation` or embedding inputs of `core/`, and
formats results in its own shape. An API imports `core/` and no other API: code that two of them share moves there.
Start reading in `openai/chat.py`."""
