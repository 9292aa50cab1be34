"""Front-end code without HTTP: it submits requests to an engine and turns the engine's tokens into text; `server/` and
`LLM` are built on it. HTTP and response formats belong to `server/`, the engine's loop to `runner/`. Start with
`engine_client.py`, then `output_processor.py`."""
