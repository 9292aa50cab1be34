"""Code that every request passes through, whichever API it belongs to: connection (`http.py`), authorization
(`middleware.py`), body (`request.py`, `bodies.py`, `fields.py`), prompt (`turn.py` for conversations, `continuation.py`
for texts, `embeddings.py`; `prompts.py` encodes), admission (`admission.py`), the engine (`running.py`), and the
results that formatters read (`generation.py`, `sections.py`, `formatter.py`).

No route and no response shape of a single API belongs here; what two APIs share does. Start reading in `middleware.py`,
at `Posts`; docs/request.md follows a chat request.
"""
