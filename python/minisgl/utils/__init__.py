"""Things that several rooms need and none of them owns: memory, progress, installed packages, other projects' words.

A helper with one caller belongs to that caller. There is no order: each module stands alone.
"""
