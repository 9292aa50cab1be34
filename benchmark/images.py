"""Measure what images cost: a vision tower beside the text model's prompts, a cached image beside cached text, and the
inter-token latency (ITL) of other streams beside images that are refused.

    python -m benchmark.images [--side 512] [--layers 24 28] [--seconds 10] [--turns 5] [--out DIR]

The engine has random weights in the sizes of Qwen3-VL-2B, in bfloat16. The FLOPs of the tower and of a text prompt of
as many tokens are counted; the tower's time is compared with the time that its FLOPs take at the prompt's rate. Hostile
images (`tests/helpers/image_files.py`) that are refused go to a server with a tiny model that sees, one after the
other, while four streams of text are timed; turns with and without them alternate. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.images import Bounds, ImageError
from minisgl.message import AddRequest
from minisgl.prompt_image import PromptImage, digest_of, virtual_ids
from minisgl.runner.build import build_engine
from minisgl.sampling_params import SamplingParams
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.engines import Collector
from tests.helpers.image_files import decoded, hostile
from tests.helpers.vision_chat import talking

PATCH, MERGE, VOCAB = 16, 2, 151_936
TEXT = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
TOWER = {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048}
HEAD_DIM = 128


def write_folder(folder: Path, tower_layers: int, text_layers: int) -> None:
    """Write the config and the image processor's settings of a model in these sizes."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
    text: dict[str, Any] = {
        **TEXT,
        "num_hidden_layers": text_layers,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
    }
    text |= {"rope_parameters": rope, "max_position_embeddings": 8192, "model_type": "qwen3_vl_text"}
    taps = [at for at in (5, 11, 17) if at < tower_layers]
    tower: dict[str, Any] = {
        **TOWER,
        "depth": tower_layers,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    tower |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": taps, "hidden_act": "gelu_pytorch_tanh"}
    config: dict[str, Any] = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
    }
    config |= {"text_config": text, "vision_config": tower, "image_token_id": VOCAB - 1, "tie_word_embeddings": True}
    processor: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
    }
    processor |= {"temporal_patch_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16_777_216}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def tower_flops(layers: int, patches: int) -> float:
    """Return the FLOPs of the tower over an image: layers, attention of all patches to all, mergers."""
    hidden, inner, out = TOWER["hidden_size"], TOWER["intermediate_size"], TOWER["out_hidden_size"]
    joined, mergers = hidden * MERGE**2, 1 + sum(at < layers for at in (5, 11, 17))
    of_layer = patches * (4 * hidden**2 + 2 * hidden * inner) + 2 * patches**2 * hidden
    of_mergers = patches // MERGE**2 * mergers * (joined**2 + joined * out)
    return 2.0 * (layers * of_layer + of_mergers + patches * 3 * PATCH**2 * 2 * hidden)


def prompt_flops(layers: int, tokens: int) -> float:
    """Return the FLOPs of a prompt with the logits of each token."""
    hidden, heads, kv = TEXT["hidden_size"], TEXT["num_attention_heads"], TEXT["num_key_value_heads"]
    of_token = hidden * HEAD_DIM * (2 * heads + 2 * kv) + 3 * hidden * TEXT["intermediate_size"]
    return 2.0 * (layers * (tokens * of_token + tokens**2 * heads * HEAD_DIM) + tokens * hidden * VOCAB)


def image_of(side: int, seed: int) -> PromptImage:
    grid = (side // PATCH, side // PATCH)
    pixels = np.random.default_rng(seed).integers(0, 256, grid[0] * grid[1] * 3 * PATCH**2, np.uint8).tobytes()
    return PromptImage(digest_of("benchmark", grid, pixels), 0, grid[0] * grid[1] // MERGE**2, grid, pixels)


def seconds_of(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def of_engine(side: int, layers: Sequence[int], turns: int) -> dict[str, float]:
    """Measure the tower beside prompts, and a cached image beside cached text, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), *layers)
        config = EngineConfig(model=folder, engine="cpu", load_format="dummy", num_pages=400, max_seq_len=2048)
        engine = build_engine(config, lambda text, done=0, total=0: None)
        assert isinstance(engine, CpuEngine)
        one, number = Collector(engine, config), 0
        tokens = image_of(side, 0).num_tokens
        text = np.random.default_rng(1).integers(0, VOCAB // 2, tokens).astype(np.int32)

        def ask(ids: np.ndarray[Any, Any], images: tuple[PromptImage, ...]) -> float:
            nonlocal number
            number += 1
            prompt = np.concatenate([ids, text[:1]]).astype(np.int32)
            sampling = SamplingParams(temperature=0, seed=0, max_tokens=1, ignore_eos=True)
            one.loop.step([AddRequest(number, prompt.tobytes(), sampling, images=images)])

            def until_idle() -> None:
                while not one.loop.idle:
                    one.loop.step([])

            return seconds_of(until_idle)

        towers, prompts, seen, read = [list[float]() for _ in range(4)]
        shown = image_of(side, 0)
        for turn in range(turns):
            fresh = image_of(side, 1 + turn)
            towers.append(seconds_of(lambda fresh=fresh: engine.rust.see_ahead(fresh, True, 1e6)))  # type: ignore[misc]
            prompts.append(seconds_of(lambda: engine.rust.prompt_logits(text, ())))
            seen.append(ask(virtual_ids(shown.digest, tokens), (shown,)))
            read.append(ask(text, ()))
        one.close()
    tower, prompt = statistics.median(towers), statistics.median(prompts)
    by_rate = tower_flops(layers[0], 4 * tokens) / (prompt_flops(layers[1], tokens) / prompt)
    return {
        "tokens": tokens,
        "tower_s": tower,
        "tower_s_at_the_rate_of_prompts": by_rate,
        "tower_ratio": tower / by_rate,
        "cached_image_s": statistics.median(seen[1:]),
        "cached_text_s": statistics.median(read[1:]),
    }


async def _stream(http: httpx.AsyncClient, until: float, gaps: list[float]) -> None:
    while time.perf_counter() < until:
        body = {
            "messages": [{"role": "user", "content": "go on"}],
            "max_tokens": 200,
            "stream": True,
            "ignore_eos": True,
        }
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            last: float | None = None
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now


def refused(count: int) -> list[bytes]:
    """Return bodies of requests, each with a hostile image that is refused."""
    bodies = list[bytes]()
    for seed in itertools.count():
        data = hostile(seed)[1]
        if isinstance(decoded(data, Bounds()), ImageError):
            url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
            bodies.append(json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode())
        if len(bodies) == count:
            break
    return bodies


async def _send(http: httpx.AsyncClient, until: float, statuses: dict[int, int], bodies: Sequence[bytes]) -> None:
    for body in itertools.cycle(bodies):
        if time.perf_counter() >= until:
            return
        status = (await http.post("/v1/chat/completions", content=body)).status_code
        statuses[status] = statuses.get(status, 0) + 1


async def _turn(
    server: ServerProcess, seconds: float, statuses: dict[int, int], bodies: Sequence[bytes]
) -> list[float]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        until, gaps = time.perf_counter() + seconds, list[float]()
        jobs = [_stream(http, until, gaps) for _ in range(4)]
        await asyncio.gather(*jobs, _send(http, until, statuses, bodies))
        return gaps


def of_server(seconds: float, turns: int) -> dict[str, Any]:
    """Measure the gaps of four streams with and without a client that sends hostile images, in turns."""
    alone, beside, statuses, bodies = list[float](), list[float](), dict[int, int](), refused(60)
    with tempfile.TemporaryDirectory() as folder:
        model = talking(Path(folder), num_hidden_layers=24, intermediate_size=20_000)
        with serving("--model", str(model), "--num-threads", "1") as server:
            for _ in range(turns):
                alone += asyncio.run(_turn(server, seconds, statuses, ()))
                beside += asyncio.run(_turn(server, seconds, statuses, bodies))
    found = {
        f"itl_p{percent}_{name}_ms": float(np.percentile(gaps, percent)) * 1000
        for name, gaps in (("alone", alone), ("beside", beside))
        for percent in (50, 99)
    }
    return {**found, "gaps": len(alone) + len(beside), "hostile_by_status": statuses}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--side", type=int, default=512, help="pixels of a side of the image")
    parser.add_argument("--layers", type=int, nargs=2, default=(24, 28), help="of the tower, of the text model")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a turn of streams")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder of the report")
    args = parser.parse_args(argv)
    result = of_engine(args.side, args.layers, args.turns) | of_server(args.seconds, args.turns)
    if args.out is not None:
        command = public_command(sys.argv[1:] if argv is None else argv, "python -m benchmark.images")
        report = Report(args.out, "What images cost", command=command)
        report.section("Results", table(("measure", "value"), result.items()))
        report.write({"result": result})
    print_result(result)


if __name__ == "__main__":
    main()
