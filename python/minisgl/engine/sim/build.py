"""A simulated engine from a configuration, with words of the tokenizer that it serves."""

from __future__ import annotations

import numpy as np

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.api import EngineInfo
from minisgl.engine.sim import SimEngine
from minisgl.engine.sim.clock import Clock
from minisgl.engine.sim.profile import load_profile
from minisgl.engine.sim.words import MARKS, WORDS
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer
from minisgl.utils.progress import Report
from minisgl.weights.sources import resolve_model

SIM_CONTEXT_LEN = 32_768
SIM_NUM_TOKENS = 1_048_576  # of the KV pool
SIM_WORDS = 1024


def build_sim(config: EngineConfig, report: Report, clock: Clock | None = None) -> SimEngine:
    """A simulated engine on the machine's clock, or on `clock`. Only the tokenizer of `--model` is read."""
    profile = load_profile(config.sim_profile)
    report(f"simulated engine, profile {profile.name}: {profile.about or 'no description'}; no model computes anything")
    model_dir = resolve_model(config.model, report, load_format="dummy")
    tokenizer = Tokenizer.load(model_dir, report)
    info = EngineInfo(
        name="sim",
        model_dir=str(model_dir),
        vocab_size=tokenizer.num_ids,
        context_len=config.max_seq_len or profile.context_len or SIM_CONTEXT_LEN,
        eos_ids=_eos_ids(tokenizer) if profile.eos_one_in else (),
        num_pages=config.num_pages or max(1, (profile.pool_tokens or SIM_NUM_TOKENS) // config.page_size),
        page_size=config.page_size,
        device=f"simulated {profile.name}",
        dtype="none",
        simulated=profile.name,
    )
    return SimEngine(info, _alphabet(tokenizer), config.max_running_requests, profile, clock)


def _alphabet(tokenizer: Tokenizer) -> Int32Array:
    """Ids whose texts look natural one after the other, [m] int32: common words and marks if the tokenizer has them as
    single tokens, else the first words that it has."""
    texts = [f"to {word}" for word in WORDS.split()] + [f"to{mark}" for mark in MARKS.split()]
    first = tokenizer.encode("to", add_special_tokens=False).tolist()
    encoded = [ids.tolist() for ids in tokenizer.encode_batch(texts, add_special_tokens=False)]
    found = [ids[-1] for ids in encoded if len(ids) == 2 and ids[:1] == first]
    if len(found) < len(texts) // 2:
        return tokenizer.word_ids(SIM_WORDS)
    return np.array(found, np.int32)


def _eos_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tokenizer.encode(tokenizer.special_tokens.get("eos_token", ""), add_special_tokens=False).tolist()
    if len(ids) != 1:
        raise ConfigError("--sim-profile: eos_one_in: the tokenizer names no single eos_token")
    return (ids[0],)
