"""Helpers that several packages need: memory, progress, installed packages, other projects' names.

A helper with one caller belongs to that caller. The modules do not depend on each other.
"""
