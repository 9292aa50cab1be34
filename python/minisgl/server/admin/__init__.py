"""Routes for operators of a running server: health, statistics and metrics (`health.py`), a stream of scheduler events
(`live.py`), the prefix cache (`prefixes.py`) and adapters (`adapters.py`). Routes that generate text do not belong
here. Start reading in `health.py`."""
