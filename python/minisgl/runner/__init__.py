"""The engine process: the step loop that connects scheduler and engine, and the code that starts and surrounds it.
Decisions belong to `scheduler/`, arithmetic to `engine/`, text and HTTP to the front-end process. Start with `loop.py`,
then `intake.py`; `process.py` is the entry point."""
