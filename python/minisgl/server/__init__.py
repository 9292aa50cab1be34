"""The HTTP server: `app.py` puts it together, `routes.py` is the table of all routes, and `prepare.py` answers the
gateway's questions by the same functions. `gateway.py` decides who owns the port, `gateway_config.py` what the gateway
is told.

Behind walls: `core/`, the way of every request; `apis/`, a folder for each API; `admin/`, what operators ask and
change; `batches/`. Imports point one way: all know `core/`, `core/` knows none of them, no API knows another
(`tests/test_layering.py`). Text and engines without HTTP stand in `frontend/` and `tokenizer/`.

Start reading in `core/middleware.py`, at `Posts`.
"""
