"""The offline API's prefixes: kept until they are removed, computed while it loads, refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import ConfigError
from minisgl.llm import LLM
from minisgl.sampling_params import ParamError, SamplingParams

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
SYSTEM = "You answer in one word, in verse."


def load(**more: Any) -> LLM:
    return LLM("none", engine="echo", page_size=4, log_level="error", **{"num_pages": 80, "max_seq_len": 120, **more})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with load() as found:
        yield found


def cached(llm: LLM, prompt: str | list[int]) -> int:
    return llm.generate(prompt, PARAMS, progress=False)[0].num_cached_tokens


def flood(llm: LLM) -> None:
    llm.generate([f"{i} " * 36 for i in range(12)], PARAMS, progress=False)


def test_a_prefix_is_kept_until_it_is_removed(llm: LLM) -> None:
    prefix, loose = llm.insert_prefix(SYSTEM), llm.insert_prefix("a text that is not pinned", pin=False)
    assert prefix.num_tokens == len(SYSTEM) and cached(llm, SYSTEM + "!!!") == 32
    assert cached(llm, "a text that is not pinned at all") == 24
    flood(llm)
    assert cached(llm, SYSTEM + "!!!") == 32 and cached(llm, "a text that is not pinned, no") == 0
    llm.remove_prefix(prefix)
    llm.remove_prefix(prefix)
    llm.remove_prefix(loose)
    flood(llm)
    assert cached(llm, SYSTEM + "!!!") == 0


def test_a_conversation_begins_with_it(llm: LLM) -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    prefix = llm.insert_prefix(messages)
    [answer] = llm.chat([*messages, {"role": "user", "content": "Why?"}], PARAMS, progress=False)
    assert answer.num_cached_tokens == prefix.num_tokens // 4 * 4 > len(SYSTEM)
    llm.remove_prefix(prefix)


def test_the_cache_is_emptied(llm: LLM) -> None:
    prefix = llm.insert_prefix([7] * 20)
    cached(llm, "something else that is cached")
    assert llm.clear_cache() > 0 and llm.clear_cache() == 0
    assert cached(llm, "something else that is cached") == 0 and cached(llm, [7] * 24) == 20
    llm.remove_prefix(prefix)
    assert llm.clear_cache() >= 5


def test_what_cannot_be_kept_is_refused_with_a_reason(llm: LLM) -> None:
    for prefix, reason in (
        ("abc", "at least 4"),
        ("", "at least one token"),
        ("x" * 120, "at most 119"),
        ([300], "token ids must be"),
    ):
        with pytest.raises(ParamError, match=reason):
            llm.insert_prefix(prefix)
    first = llm.insert_prefix([1] * 100)
    with pytest.raises(ParamError, match="pin"):
        llm.insert_prefix([2] * 100)
    llm.remove_prefix(first)
    llm.remove_prefix(llm.insert_prefix([2] * 100))


def test_some_are_computed_while_it_loads(tmp_path: Path) -> None:
    file = tmp_path / "prefix.txt"
    file.write_text("out of a file, as it stands", encoding="utf-8")
    with load(warm_prefixes=[SYSTEM, f"@{file}"]) as llm:
        assert cached(llm, SYSTEM + "?") == 32 and cached(llm, "out of a file, as it stands.") == 24
    with pytest.raises(ConfigError, match=r"nowhere\.txt: cannot be read"):
        load(warm_prefixes=["@nowhere.txt"])
    with pytest.raises(ConfigError, match="--cache naive"):
        load(warm_prefixes=[SYSTEM], cache="naive")
    with pytest.raises(ParamError, match="pin"):
        load(warm_prefixes=[SYSTEM], max_pinned_ratio=0.0)


def test_budgets() -> None:
    with load(cache_token_budget=20) as llm:
        llm.generate(["a" * 30, "b" * 30], PARAMS, progress=False)
        assert llm.clear_cache() <= 5
    with load(cache_max_prompt=20) as llm:
        assert [cached(llm, text) for text in ("a" * 21, "a" * 21, "b" * 20, "b" * 20)] == [0, 0, 0, 16]
    for name, value in (("cache_token_budget", 0), ("cache_max_prompt", -1), ("max_pinned_ratio", 1.5)):
        with pytest.raises(ConfigError, match=name):
            load(**{name: value})


def test_without_a_cache_nothing_is_kept() -> None:
    with load(cache="naive") as llm, pytest.raises(ParamError, match="naive"):
        llm.insert_prefix(SYSTEM)
