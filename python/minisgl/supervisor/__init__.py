"""`minisgl serve`: a server and its engine process, from the start to the end.

What the processes do belongs to `server/` and `runner/`; several models to `registry/`. Start with `start.py`, then
`serving.py`.
"""
