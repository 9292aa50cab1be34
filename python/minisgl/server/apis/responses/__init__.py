"""OpenAI's Responses API: items instead of messages (`body.py`), more types of tools (`tools.py`), named events
(`endpoint.py`), and stored responses (`store.py`). What it shares with chat is in `core/turn.py`. Start reading in
`endpoint.py`, at `responses_endpoint`."""
