"""The engine process: the loop in which the scheduler and an engine meet, and what starts and surrounds it.

Decisions belong to `scheduler/`, arithmetic to `engine/`, text and HTTP to the other process. Start with `loop.py`,
then `intake.py`; `process.py` is where it begins.
"""
