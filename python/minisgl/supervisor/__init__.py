"""The life of `minisgl serve`: a server and its engine process, from start to end.

The work of the processes is in `server/` and `runner/`; several models are in `registry/`. Start with `start.py`, then
`serving.py`.
"""
