"""A folder for each API that clients speak. Each turns bodies into a `Turn`, a `Continuation` or vectors of `core/`,
and shows what came in its own shape. An API imports `core/` and no other API: what two of them share moves there. Start
reading in `openai/chat.py`.
"""
