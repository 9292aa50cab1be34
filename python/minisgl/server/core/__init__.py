"""The way of every request, whichever API it belongs to: connection (`http.py`), who may ask (`middleware.py`), body
(`request.py`, `bodies.py`, `fields.py`), prompt (`turn.py` for conversations, `continuation.py` for texts,
`embeddings.py`; `prompts.py` encodes), admission (`admission.py`), the engine (`running.py`), and what formatters read
(`generation.py`, `sections.py`, `formatter.py`).

No route and no shape of one API's answers belongs here; what two APIs share does. Start reading in `middleware.py`, at
`Posts`; docs/request.md follows a chat on.
"""
