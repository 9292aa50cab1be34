"""Frames whose bytes are recorded under `golden/`, one file each, as they stand on the socket: length, schema version,
messages. Read by the tests of both languages (`test_codec_golden.py`, and `message/tests.rs` of the gateway).

    python -m tests.message.golden_frames      # record them anew, after a new schema version
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from minisgl.message import (
    ID_LIMIT,
    SCHEMA_VERSION,
    AbortRequest,
    AdapterChanged,
    AddPrefix,
    AddRequest,
    CacheCleared,
    ClearCache,
    Embedding,
    EngineFailed,
    EngineReady,
    EngineSays,
    EngineState,
    EngineStats,
    FinishRequest,
    FromEngine,
    Heartbeat,
    Hello,
    LoadAdapter,
    LoadProgress,
    MeterReading,
    Narration,
    PrefixChanged,
    PrefixState,
    PromptLogprobs,
    RankUsage,
    RemovePrefix,
    Shutdown,
    StepTokens,
    StepView,
    ToEngine,
    TokenLogprobs,
    TreeView,
    UnloadAdapter,
    Watch,
    Watched,
    prepared,
)
from minisgl.message.codec import encode, framed, stamped
from minisgl.message.prepared import AnswerParts, PassOn, Prepared, PreparedGeneration, Read, WholeAnswer
from minisgl.prompt_image import PromptImage
from minisgl.sampling_params import SamplingParams

FOLDER = Path(__file__).with_name("golden")


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def int64(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


EVERY_FIELD = SamplingParams(
    max_tokens=70000,
    min_tokens=3,
    temperature=0.7,
    top_k=300,
    top_p=0.95,
    min_p=0.05,
    frequency_penalty=-1.5,
    presence_penalty=2.0,
    repetition_penalty=1.1,
    logit_bias={5: -100.0, 151643: 1.25, 0: 0.1},
    allowed_token_ids=(1, 128, 65536),
    bad_words=("bäd", "漢字"),
    bad_token_ids=((1, 2), (3,)),
    seed=-(2**63),
    n=128,
    stop=("\n\n", "x" * 40, "é" * 200),
    stop_token_ids=(7, 255, 256),
    ignore_eos=True,
    logprobs=0,
    prompt_logprobs=20,
    embedding="last",
    adapter=3,
)
IMAGE = PromptImage(bytes(range(32)), 1, 2, (2, 4), b"ab" * 40)
WIDE_IMAGE = PromptImage(bytes(32), 300, 70000, (2, 140000), b"c" * 300)
WITH_GRAMMAR = SamplingParams(max_tokens=5, seed=0, grammar="start: /ä/")

TO_ENGINE: dict[str, list[ToEngine]] = {
    "hello": [Hello("gateway")],
    "add": [AddRequest(0, int32(), SamplingParams())],
    "add_every_field": [AddRequest(ID_LIMIT - 1, int32(0, 1, 151643, 2**31 - 1), EVERY_FIELD, -3, 2, 5, True)],
    "add_images": [
        AddRequest(3, int32(1, 2**30, 2**31 - 1), SamplingParams(), images=(IMAGE, WIDE_IMAGE)),
        AddRequest(4, int32(1, 2**30, 2**31 - 1), SamplingParams(), images=(IMAGE, IMAGE)),
    ],
    "add_grammar": [AddRequest(3, int32(1), WITH_GRAMMAR)],
    "add_usual": [
        AddRequest(300, int32(*range(70)), SamplingParams(max_tokens=16, temperature=0.0, seed=2**63 - 1)),
        AddRequest(301, int32(*range(300)), SamplingParams(max_tokens=200, seed=200, stop=("\n",), n=2), 200),
    ],
    "abort": [AbortRequest(128), AbortRequest(65536)],
    "finish": [FinishRequest(2**32)],
    "prefixes": [AddPrefix(3, int32(1, 70000), True), AddPrefix(2**40, int32()), RemovePrefix(3), ClearCache()],
    "adapters": [LoadAdapter(3, "sql", "adapters/ä"), UnloadAdapter(70000)],
    "watch": [Watch(True, False)],
    "shutdown": [Shutdown()],
    "nothing_to_engine": [],
    "many": [AbortRequest(number) for number in range(17)],
}

READY = EngineReady(
    engine="echo",
    model_dir=None,
    vocab_size=151936,
    max_seq_len=40960,
    eos_ids=(151645, 2),
    num_pages=4096,
    page_size=16,
    device="cpu",
    dtype="bfloat16",
    cpu_backend="rust_hotpath",
)
STATS = EngineStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 2**40, 11)
STEP = StepTokens(
    step=70000,
    req_ids=int64(0, 3, ID_LIMIT - 1),
    tokens=int32(151643, 0, -1),
    reasons=int32(0, 2, 4),
)
STEP_VIEW = StepView(
    70000, 1.5e12, (0.5, 20.25, 0.0, 1.0), [(3, False, 16, 32, 48)], [(3, 32)], [(ID_LIMIT - 1, 2)], 1, [4], 5, 6, 7
)
FROM_ENGINE: dict[str, list[FromEngine]] = {
    "progress": [LoadProgress("loading weights"), LoadProgress("weights: ä", 3, 300)],
    "ready": [READY],
    "ready_every_field": [
        EngineReady(
            "torch",
            "models/a",
            1,
            2,
            (),
            3,
            4,
            "cuda",
            "float16",
            "python",
            "no extension",
            "a profile",
            "2 ranks",
            "encoder",
            True,
        )
    ],
    "stats": [STATS],
    "stats_every_field": [
        EngineStats(
            *range(11),
            cpu_backend="python",
            num_control_plane_calls_total=12,
            num_failovers_total=1,
            failover_reason="it broke",
            num_rows_total=13,
            num_step_tokens_total=14,
            batch_rows=15,
            cpu_s=1.5,
            resident_bytes=2**33,
            meters={"wait": MeterReading(1, 0.5, 0.25, 0.125, {-3: 1, 200: 2})},
            ranks=(RankUsage(1, 0.5, 2**32),),
            num_pinned_pages=16,
            num_inserted_pages_total=17,
            num_evicted_pages_total=18,
            num_hits_total=19,
            num_misses_total=20,
            prefixes=(PrefixState(3, 200, True, False, 70000),),
            num_drafted_total=21,
            num_accepted_total=22,
            store_bytes=2**34,
            num_store_written_total=23,
            num_store_loaded_total=24,
            num_store_dropped_total=25,
            num_store_failed_total=26,
            num_store_damaged_total=27,
            num_store_written_states_total=28,
            num_store_loaded_states_total=29,
            num_shadow_equal_total=30,
            num_shadow_different_total=31,
            num_shadow_failed_total=32,
            num_tower_runs_total=33,
            num_tower_hits_total=34,
            image_bytes=2**35,
        )
    ],
    "heartbeat": [Heartbeat("idle", 0.5), Heartbeat("forward", 1.25, 17, 2.5, 4096)],
    "step": [STEP],
    "step_every_field": [
        StepTokens(
            step=1,
            req_ids=STEP.req_ids,
            tokens=STEP.tokens,
            reasons=STEP.reasons,
            admitted_ids=int64(3, 4),
            cached_lens=int32(0, 4096),
            errors={ID_LIMIT - 1: "the forward failed"},
            logprobs=(
                TokenLogprobs(0, -0.5, (1, 70000), (-0.5, -1.25)),
                TokenLogprobs(1, float("-inf"), (), ()),
            ),
            prompt_logprobs=(PromptLogprobs(3, 1, (-1.5, -2.5), ((5,), (6,)), ((-0.5,), (-0.75,))),),
            embeddings=(Embedding(4, np.array([0.5, -1.0], "<f4").tobytes()),),
        )
    ],
    "narration": [Narration(("step 1: 2 rows", "step 2"))],
    "prefix_changed": [PrefixChanged(3, "ready"), PrefixChanged(2**40, "refused", "no room", True)],
    "cleared": [CacheCleared(70000)],
    "adapter_changed": [AdapterChanged(3, "loaded"), AdapterChanged(70000, "refused", "no such folder")],
    "watched": [Watched(70000, [STEP_VIEW], TreeView(2, 48, [(1, 0, 32, 32, 2, 0, 1, True, False, [5, 70000])]))],
    "says": [EngineSays(1, encode([STATS])[2:])],
    "engine_state": [EngineState(0, "ready"), EngineState(63, "dead", "exit code -9")],
    "failed": [EngineFailed("out of memory: set --num-pages")],
    "loading_to_ready": [LoadProgress("warm"), READY, STATS, Heartbeat("idle", 0.0)],
    "nothing_from_engine": [],
}
PREPARED: dict[str, Prepared] = {
    "prepared_generation": PreparedGeneration(
        shape="chat",
        stream=True,
        include_usage=True,
        shows_logprobs=False,
        id="chatcmpl-ä",
        created=2**33,
        model="a model",
        prompts=[int32(1, 70000), int32(2)],
        sampling=SamplingParams(max_tokens=5, seed=7, n=2, stop=("é",)),
        max_tokens=[5, 300],
        parts=AnswerParts(14, "qwen3", None, '{"get":{"type":"object"}}', True, False, 151668, [151657, 151658]),
        priority=-3,
        key=2,
        key_name="b",
        shortened_to="5,300",
        timeout_s=2.5,
        request_id="req-1",
        headers=[("x-request-id", "req-1"), ("vary", "Origin")],
    ),
    "prepared_plain": PreparedGeneration(
        "generate",
        False,
        False,
        True,
        "",
        0,
        "",
        [int32()],
        SamplingParams(),
        [],
        None,
        0,
        0,
        None,
        None,
        None,
        "r",
        [],
    ),
    "prepared_whole": WholeAnswer(429, "application/json", [("retry-after", "1")], b"{}"),
    "prepared_pass_on": PassOn(),
    "prepared_read": Read(),
}


def frames() -> dict[str, bytes]:
    """By name of the file."""
    found = {name: framed(encode(messages)) for name, messages in {**TO_ENGINE, **FROM_ENGINE}.items()}
    found |= {name: framed(prepared.encode(message)) for name, message in PREPARED.items()}
    found["stamped"] = framed(stamped(encode([STEP]), 2**62 + 5))
    found["foreign_version"] = framed((SCHEMA_VERSION + 1).to_bytes(2, "little") + encode([STEP])[2:])
    found["foreign_version_stamped"] = framed(
        (SCHEMA_VERSION + 1 | 0x8000).to_bytes(2, "little") + stamped(encode([STEP]), 5)[2:]
    )
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.bin"):
        old.unlink()
    for name, data in frames().items():
        (FOLDER / f"{name}.bin").write_bytes(data)
