"""The HTTP server. `app.py` assembles it, `routes.py` is the table of all routes, `prepare.py` prepares requests for
the gateway with the same functions, `gateway.py` decides which front end owns the port, and `gateway_config.py` is the
gateway's configuration.

Folders: `core/`, the code that every request passes through; `apis/`, one folder per API; `admin/`, routes for
operators; `batches/`. Imports point one way: all import `core/`, `core/` imports none of them, no API imports another
(`tests/test_layering.py`). Text processing and engine clients without HTTP are in `frontend/` and `tokenizer/`.

Start reading in `core/middleware.py`, at `Posts`.
"""
