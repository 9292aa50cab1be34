"""The command `minisgl bench`: loads, measurements and reports that users run on their own machines.

Studies for a page of the documentation are in `benchmark/`. Start with `serve_run.py` for a server under load, or
`offline_run.py` for the step loop alone.
"""
