"""Routing of requests among several engines: the policy, without sockets.

The pool (`rust/minisgl-router`) transports the messages. Start with `api.py`, the interface, and `reference.py`, the
plain implementation.
"""
