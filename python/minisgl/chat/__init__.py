"""A chat in the terminal, for any OpenAI-compatible server: `client` (HTTP), `session` (conversation and commands),
`terminal` (reading and writing), `own_server` (a server of its own).
"""
