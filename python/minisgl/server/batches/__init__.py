"""OpenAI's Batch API: files of requests that are answered in the background. Uploads (`upload.py`, `multipart.py`),
storage (`store.py`, `lines.py`), execution (`runner.py`) and routes (`endpoint.py`). A line is handled like any POST,
so no API's code belongs here. Start reading in `runner.py`."""
