"""Engines: they compute the plans of a scheduler, in order, and return tokens by row.

What a step computes for whom is the scheduler's to decide; text and messages do not come here. Start with `api.py`,
then `echo.py`, the plainest engine, or `cpu_engine.py`, which serves.
"""
