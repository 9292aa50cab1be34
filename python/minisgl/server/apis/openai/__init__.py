"""OpenAI's API, and what vLLM, Cohere and Jina add to it: chat, completions, tokens, rerank, score and classify. Its
bodies stand in `core/bodies.py`, because other APIs' bodies become them; `answers.py` has the shapes of its answers.
The API of responses is another one. Start reading in `chat.py`.
"""
