"""Several models behind one port: which there are, which are loaded, and what they need (docs/models.md).

Each model's server is a whole `minisgl serve`: what it answers belongs to `server/`. Start with `room.py`, the rules,
then `registry.py`, which carries them out, and `front.py`, the way of a request.
"""
