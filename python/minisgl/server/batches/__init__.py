"""Files of requests that are answered in the background, as OpenAI's batches: uploads (`upload.py`, `multipart.py`),
what is kept on disk (`store.py`, `lines.py`), who asks the lines (`runner.py`), and the routes (`endpoint.py`). A line
goes the way of any POST, so nothing of an API belongs here. Start reading in `runner.py`.
"""
