"""Bodies of embeddings, responses and messages as clients send them: strategies of hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.helpers.bodies import odd_prompts, plain_texts

EMBEDDINGS = "/v1/embeddings"

_ids = st.lists(st.integers(0, 255), min_size=1, max_size=9)
inputs = st.one_of(
    plain_texts,
    st.lists(st.one_of(plain_texts, st.just("a")), min_size=1, max_size=4),
    _ids,
    st.lists(_ids, min_size=1, max_size=3),
    st.just(["x"] * 300),
)


@st.composite
def embedding_bodies(draw: st.DrawFn) -> dict[str, Any]:
    body: dict[str, Any] = {"input": draw(inputs)}
    for name, values in {
        "model": ["adapter", "scripted", None],
        "encoding_format": ["float", "base64", None],
        "dimensions": [1, 2, 3, 5, None],
        "pooling": ["mean", "last"],
        "priority": [0, -3],
        "user": ["u", None],
    }.items():
        if draw(st.booleans()):
            body[name] = draw(st.sampled_from(values))
    if draw(st.integers(0, 5)) == 0:
        body |= draw(
            st.sampled_from(
                [
                    {"dimensions": 0},
                    {"dimensions": 1.0},
                    {"encoding_format": "int8"},
                    {"pooling": "max"},
                    {"priority": 9},
                    {"truncate_prompt_tokens": 2},
                    {"model": "other"},
                    {"input": "x" * 600},
                    {"input": ["x"] * 1025},
                    {"unknown": 1},
                ]
            )
        )
    if draw(st.integers(0, 9)) == 0:
        body["input"] = draw(odd_prompts)
    return body
