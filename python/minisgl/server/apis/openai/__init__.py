"""OpenAI's API, with the additions of vLLM, Cohere and Jina: chat, completions, tokens, rerank, score and classify. Its
request bodies are in `core/bodies.py`, because other APIs' bodies are converted to them; `answers.py` has the response
models. The Responses API is in another folder. Start reading in `chat.py`."""
