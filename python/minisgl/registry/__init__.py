"""Several models behind one port: which exist, which are loaded, and what they need (docs/models.md).

Each model's server is a whole `minisgl serve`, whose work is in `server/`. Start with `room.py`, the rules, then
`registry.py`, which carries them out, and `front.py`, the path of a request.
"""
