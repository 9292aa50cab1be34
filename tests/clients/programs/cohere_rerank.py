"""Cohere's clients, old and new, ask for a ranking."""

import json
import os

import cohere

URL = os.environ["MINISGL_URL"]
DOCUMENTS = ["Bread is made of flour.", "Paris is the capital of France.", "The train to Lyon is late."]
found = {}
for kind in (cohere.ClientV2, cohere.Client):
    client = kind(api_key="none", base_url=URL)
    answer = client.rerank(model="smollm2", query="What is the capital of France?", documents=DOCUMENTS, top_n=2)
    found[kind.__name__] = [(one.index, one.relevance_score) for one in answer.results]
print(json.dumps(found))
