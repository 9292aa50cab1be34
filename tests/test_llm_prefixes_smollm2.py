"""The embedded model says the same with a warm prefix as without, and computes less for it."""

from __future__ import annotations

from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.helpers.meaning import embedded_model

embedded_model()

SYSTEM = [{"role": "system", "content": "You are a helpful assistant. You answer briefly, and you count exactly. " * 3}]
QUESTIONS = ("What is the capital of France?", "Count from one to five.", "What is the opposite of hot?")
PARAMS = SamplingParams(max_tokens=24, temperature=0.0)


def test_a_warm_prefix_changes_no_text() -> None:
    chats = [[*SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
    with LLM("smollm2", num_pages=128, max_seq_len=512, log_level="error") as llm:
        cold = []
        for chat in chats:
            llm.clear_cache()
            [answer] = llm.chat([chat], PARAMS, progress=False)
            assert answer.num_cached_tokens == 0
            cold.append(answer)
        llm.clear_cache()
        prefix = llm.insert_prefix(SYSTEM)
        warm = llm.chat(chats, PARAMS, progress=False)
        for before, after in zip(cold, warm, strict=True):
            assert after.num_cached_tokens == prefix.num_tokens // 16 * 16 >= 32
            assert after.token_ids == before.token_ids
        assert "Paris" in warm[0].text
