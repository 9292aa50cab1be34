"""Text and engines without HTTP: requests go to an engine, its tokens become text; `server/` and `LLM` stand on it.

HTTP and the shapes of answers belong to `server/`, the engine's loop to `runner/`. Start with `engine_client.py`,
then `output_processor.py`.
"""
