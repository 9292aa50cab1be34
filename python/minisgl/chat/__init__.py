"""A chat in the terminal with any OpenAI-compatible server, and `client`, its HTTP client.

It depends on nothing of the server, and nothing here is imported by the server. Start with `terminal.py`, which reads
lines and shows answers.
"""
