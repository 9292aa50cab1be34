"""OpenAI's API of responses: items instead of messages (`body.py`), tools of more kinds (`tools.py`), named events
(`endpoint.py`), and answers that are kept (`store.py`). What it shares with chat is `core/turn.py`'s. Start reading in
`endpoint.py`, at `responses_endpoint`.
"""
