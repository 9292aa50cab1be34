"""Which of several engines gets a request, and when: the policy, without sockets.

Carrying messages belongs to the pool (`rust/minisgl-router`). Start with `api.py`, which says what a router is, and
`reference.py`, the plain one.
"""
