"""Engines compute the step plans of a scheduler, in order, and return the sampled tokens by row.

The scheduler decides what a step computes for which request; an engine sees neither text nor messages. Start with
`api.py`, then `echo.py`, the plainest engine, or `cpu_engine.py`, the engine that serves on CPUs.
"""
