"""Routes by which operators ask and change things while the server runs: health, figures and metrics (`health.py`), a
stream of what the scheduler does (`live.py`), the prefix cache (`prefixes.py`) and adapters (`adapters.py`). What
clients ask for text does not belong here. Start reading in `health.py`.
"""
