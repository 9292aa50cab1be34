"""A chat in the terminal with any OpenAI-compatible server, and `client`, which speaks HTTP to one.

It is a client like any other: nothing of the server belongs here, and nothing here is imported by it. Start with
`terminal.py`, which reads lines and shows answers.
"""
