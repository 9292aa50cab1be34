"""Cohere's clients and rerankers of frameworks ask for a ranking: `rerankers.py NAME`, one of `ASK`, each in an
environment of its own."""

import json
import os
import sys
from collections.abc import Callable

URL = os.environ["MINISGL_URL"]
QUERY = "What is the capital of France?"
DOCUMENTS = ["Bread is made of flour.", "Paris is the capital of France.", "The train to Lyon is late."]
Ranked = list[tuple[int, float]]
"""Places of the best two documents, and their scores."""


def _of_cohere(kind: str) -> Ranked:
    import cohere

    client = getattr(cohere, kind)(api_key="none", base_url=URL)
    found = client.rerank(model="smollm2", query=QUERY, documents=DOCUMENTS, top_n=2)
    return [(one.index, one.relevance_score) for one in found.results]


def cohere_old() -> Ranked:
    return _of_cohere("Client")


def cohere_new() -> Ranked:
    return _of_cohere("ClientV2")


def langchain_cohere() -> Ranked:
    from langchain_cohere import CohereRerank

    client = CohereRerank(model="smollm2", cohere_api_key="none", base_url=URL, top_n=2)
    return [(one["index"], one["relevance_score"]) for one in client.rerank(DOCUMENTS, QUERY)]


def _of_nodes(postprocessor: object) -> Ranked:
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [NodeWithScore(node=TextNode(text=text)) for text in DOCUMENTS]
    found = postprocessor.postprocess_nodes(nodes, query_str=QUERY)  # type: ignore[attr-defined]
    return [(DOCUMENTS.index(one.node.get_content()), one.score) for one in found]


def llama_index_cohere() -> Ranked:
    from llama_index.postprocessor.cohere_rerank import CohereRerank

    return _of_nodes(CohereRerank(model="smollm2", api_key="none", base_url=URL, top_n=2))


def llama_index_jina() -> Ranked:
    from llama_index.postprocessor.jinaai_rerank import JinaRerank

    return _of_nodes(JinaRerank(model="smollm2", api_key="none", base_url=f"{URL}/v1", top_n=2))


def _of_litellm(model: str, api_base: str) -> Ranked:
    import litellm

    asked = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "api_key": "none", "api_base": api_base}
    found = litellm.rerank(model=model, **asked)
    return [(one["index"], one["relevance_score"]) for one in found.results]


def litellm_cohere() -> Ranked:
    return _of_litellm("cohere/smollm2", URL)


def litellm_jina() -> Ranked:
    return _of_litellm("jina_ai/smollm2", f"{URL}/v1/rerank")


def litellm_vllm() -> Ranked:
    return _of_litellm("hosted_vllm/smollm2", URL)


def haystack_cohere() -> Ranked:
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.cohere import CohereRanker

    ranker = CohereRanker(model="smollm2", api_key=Secret.from_token("none"), api_base_url=URL, top_k=2)
    found = ranker.run(query=QUERY, documents=[Document(content=text) for text in DOCUMENTS])["documents"]
    return [(DOCUMENTS.index(one.content), one.score) for one in found]


def haystack_jina() -> Ranked:
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.jina import JinaRanker

    ranker = JinaRanker(model="smollm2", api_key=Secret.from_token("none"), base_url=f"{URL}/v1/rerank", top_k=2)
    found = ranker.run(query=QUERY, documents=[Document(content=text) for text in DOCUMENTS])["documents"]
    return [(DOCUMENTS.index(one.content), one.score) for one in found]


ASK: dict[str, Callable[[], Ranked]] = {
    one.__name__: one
    for one in (
        cohere_old,
        cohere_new,
        langchain_cohere,
        llama_index_cohere,
        llama_index_jina,
        litellm_cohere,
        litellm_jina,
        litellm_vllm,
        haystack_cohere,
        haystack_jina,
    )
}

if __name__ == "__main__":
    print(json.dumps(ASK[sys.argv[1]]()))
