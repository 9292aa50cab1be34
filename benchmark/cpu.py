"""The CPU engine beside llama.cpp and the torch engine, without a server, and what the machine could do at most.

    python -m benchmark.cpu limits
    python -m benchmark.cpu offline --llama-bin BIN --models FOLDER --out DIR

`offline` decodes 1, 8 and 32 sequences and prefills one prompt: of the embedded model, and of random weights in the
shapes of Qwen3-0.6B as Q4_1, Q8_0 and bfloat16 (GGUF files that llama.cpp reads too, written once into `--models`).
Parts with names of larger models have their shapes, with as many `--layers` as memory holds: a prompt of 512 tokens,
and 128 tokens behind none and behind 4,096. All variants of a part are alive at once and asked in turns; the tables
have medians with the lowest and the highest round, and how each of ours stands against each of the others, paired by
round. `--rehearse` runs the echo engine in seconds.

Our engines run in processes of their own (`--child`: an `EngineConfig` and then questions as JSON lines on stdin): what
runs is the server's step loop, scheduler and engine. All prompts differ, so no prefix cache helps; loading is outside
the figures. llama.cpp runs by its own benchmark of batches, which samples nothing, or as the package xllamacpp, whose
server's own times are told. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from minisgl.bench.compare_variants import Child, Missing
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.stats import paired_difference, turns
from minisgl.config import ConfigError, EngineConfig
from minisgl.message import AddRequest, FromEngine, StepTokens
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.intake import LoopSettings
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from minisgl.weights.sources import find_smollm2

ROOT = Path(__file__).resolve().parents[1]
ENGINES: dict[str, dict[str, Any]] = {
    "exact": {"engine": "cpu", "activations": "exact"},
    "bf16": {"engine": "cpu", "activations": "bf16"},
    "int8": {"engine": "cpu", "activations": "int8"},
    "torch": {"engine": "torch", "dtype": "float32", "device": "cpu"},
    "torch-bf16": {"engine": "torch", "dtype": "bfloat16", "device": "cpu"},
    "echo": {"engine": "echo"},
}
OURS = ("exact", "bf16", "int8")
LLAMA, BATCHED_BENCH = "llama.cpp", "llama-batched-bench"
PARTS = {
    "smollm2": ("exact", "bf16", "int8", LLAMA, "torch"),
    "q4_1": ("int8", "exact", LLAMA),
    "q8_0": ("int8", "exact", LLAMA),
    "bf16": ("bf16", "exact", "torch-bf16"),  # llama.cpp is no opponent there
    "qwen3-4b": ("exact", "int8", LLAMA),
    "qwen3-30b-a3b": ("exact", "int8", LLAMA),
    "gpt-oss-20b": ("exact", "int8", LLAMA),
}
START_S, RUN_S, BUILD_S = 600.0, 900.0, 900.0
FIRST_ID, LAST_ID = 5, 30_000  # ids below the first are often special; every vocabulary here has the last


@dataclass(frozen=True, slots=True)
class Point:
    """`batch` prompts of `num_in` tokens, answered by `num_out` each; a single token is the time of a prefill."""

    batch: int
    num_in: int
    num_out: int = 1
    label: str = ""

    @property
    def name(self) -> str:
        if self.label:
            return self.label
        return f"prefill {self.num_in}" if self.num_out == 1 else f"decode {self.batch}"


# ------------------------------------------------------------------------------------------------ one engine of ours


class Runner:
    """The loop of an engine, and the tokens that came by request."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = build_engine(config, lambda text, done=0, total=0: None)
        plane = build_control_plane(config, self.engine.info)
        self._loop = StepLoop(plane, self.engine, self._take, settings=LoopSettings(overlap=config.overlap))
        self._tokens: dict[int, int] = {}
        self._next_id = 0

    def _take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, StepTokens):
                if set(np.frombuffer(message.reasons, np.int32).tolist()) & {FinishReason.ERROR, FinishReason.ABORT}:
                    raise RuntimeError(f"a sequence failed: {message.errors}")
                for req_id in np.frombuffer(message.req_ids, np.int64).tolist():
                    self._tokens[req_id] = self._tokens.get(req_id, 0) + 1

    def ask(self, batch: int, num_in: int, num_out: int, seed: Sequence[int]) -> dict[str, float]:
        """Prefill until every sequence has a token, then the rest: tokens a second of the part that is asked for."""
        generator, vocab = np.random.default_rng(list(seed)), self.engine.info.vocab_size
        sampling = SamplingParams(temperature=0, max_tokens=num_out, seed=0, ignore_eos=True)
        prompts = [generator.integers(FIRST_ID, vocab, num_in, dtype=np.int32) for _ in range(batch)]
        requests = [AddRequest(self._next_id + i, one.tobytes(), sampling) for i, one in enumerate(prompts)]
        self._next_id += batch
        self._tokens.clear()
        began = time.perf_counter()
        self._loop.step(requests)
        while len(self._tokens) < batch:
            self._loop.step([])
        first, done = time.perf_counter(), sum(self._tokens.values())
        while not self._loop.idle:
            self._loop.step([])
        took = time.perf_counter() - first
        if sum(self._tokens.values()) != batch * num_out:
            raise RuntimeError(f"{sum(self._tokens.values())} tokens instead of {batch * num_out}")
        return {"tok_s": num_in / (first - began) if num_out == 1 else (batch * num_out - done) / took}


def child() -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        runner = Runner(msgspec.json.decode(sys.stdin.readline(), type=EngineConfig))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"dtype": runner.engine.info.dtype}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(runner.ask(**json.loads(line))), file=out, flush=True)
    runner.engine.close()
    return 0


# ---------------------------------------------------------------------------------------------------------- variants

Ask = Callable[[Point, Sequence[int]], float]


@contextlib.contextmanager
def start(name: str, model: Path, points: Sequence[Point], threads: int, llama: Mapping[str, Path]) -> Iterator[Ask]:
    """A variant, to be asked for the tokens a second of a point. Raises `Missing`, when asked, too."""
    longest = max(point.num_in + point.num_out for point in points)
    if name not in ENGINES:
        if name in llama and (llama[name] / "xllamacpp").is_dir():
            with _served(llama[name], model, threads, longest + 16) as ask:
                yield ask
        else:
            yield _llama(name, model, threads, llama)
        return
    rows = max(point.batch for point in points)
    settings = {
        "model": "smollm2" if model == find_smollm2() else str(model),
        "num_threads": threads,
        "num_pages": 64 + sum(point.batch * (-(-(point.num_in + point.num_out) // 16) + 1) for point in points),
        "max_running_requests": max(rows, 4),
        "max_seq_len": longest + 16,
        **ENGINES[name],
    }
    try:
        config = msgspec.convert(settings, EngineConfig).check()
    except (msgspec.ValidationError, ValueError) as error:
        raise Missing(f"this checkout refuses it: {error}") from error
    with Child((sys.executable, "-m", "benchmark.cpu", "--child")) as process:
        assert process.process.stdin is not None
        process.process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.process.stdin.flush()
        process.line(START_S)
        yield lambda point, seed: float(process.ask({**_sizes(point), "seed": list(seed)})["tok_s"])


def _sizes(point: Point) -> dict[str, int]:
    return {"batch": point.batch, "num_in": point.num_in, "num_out": point.num_out}


def _llama(name: str, file: Path, threads: int, llama: Mapping[str, Path]) -> Ask:
    """llama.cpp: a process for every question, its loading outside the figures."""
    if name not in llama:
        raise Missing("give the folder of llama.cpp's programs: --llama-bin DIR")
    program = llama[name] / BATCHED_BENCH
    if not program.is_file():
        raise Missing(f"no {BATCHED_BENCH} in {llama[name].name}")

    def ask(point: Point, seed: Sequence[int]) -> float:
        num_out = max(point.num_out, 2)
        context = -(-point.batch * (point.num_in + num_out) // 256) * 256
        sizes = (context, point.num_in, num_out, point.batch, threads, threads)
        flags = [text for flag, size in zip(("-c", "-npp", "-ntg", "-npl", "-t", "-tb"), sizes, strict=True)
                 for text in (flag, str(size))]  # fmt: skip
        command = [str(program), "-m", str(file), *flags, "-b", "2048", "-ub", "512", "--output-format", "jsonl"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=RUN_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Missing(str(error)) from error
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise Missing(f"exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        return float(json.loads(lines[-1])["speed_pp" if point.num_out == 1 else "speed_tg"])

    return ask


@contextlib.contextmanager
def _served(folder: Path, file: Path, threads: int, length: int) -> Iterator[Ask]:
    """The server of the package xllamacpp in `folder`, asked for one sequence at a time."""
    program = str(ROOT / "python" / "minisgl" / "bench" / "compare_llama_cpp.py")
    sizes = (str(file), str(threads), "1", str(-(-length // 256) * 256))
    with Child(("env", f"PYTHONPATH={folder}", sys.executable, "-P", program, *sizes)) as process:
        url = process.line(START_S)["url"]

        def ask(point: Point, seed: Sequence[int]) -> float:
            if point.batch > 1:
                raise Missing("xllamacpp is asked for one sequence at a time")
            ids = np.random.default_rng(list(seed)).integers(FIRST_ID, LAST_ID, point.num_in).tolist()
            body = {"prompt": ids, "n_predict": point.num_out, "temperature": 0}
            data = json.dumps({**body, "cache_prompt": False, "ignore_eos": True}).encode()
            try:
                with urllib.request.urlopen(urllib.request.Request(f"{url}/completion", data), timeout=RUN_S) as answer:
                    times = json.load(answer)["timings"]
            except OSError as error:
                raise Missing(str(error)) from error
            return float(times["prompt_per_second" if point.num_out == 1 else "predicted_per_second"])

        yield ask


def llama_folders(given: Sequence[str]) -> dict[str, Path]:
    """By variant, from DIR (the variant `llama.cpp`) or NAME=DIR (another build: `llama.cpp NAME`)."""
    found = {}
    for text in given:
        name, sign, folder = text.rpartition("=")
        found[f"{LLAMA} {name}" if sign else LLAMA] = Path(folder).expanduser()
    return found


@dataclass(slots=True)
class Found:
    """Tokens a second by variant, point and round; why a variant was not measured."""

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def measure(
    names: Sequence[str], model: Path, points: Sequence[Point], rounds: int, threads: int, llama: Mapping[str, Path]
) -> Found:
    """A variant that fails is named with its reason and ends no other; prompts depend on round and point alone."""
    found = Found()
    with contextlib.ExitStack() as stack:
        alive: dict[str, Ask] = {}
        for name in names:
            own = stack.enter_context(contextlib.ExitStack())
            try:
                ask = own.enter_context(start(name, model, points, threads, llama))
                ask(Point(min(2, points[0].batch), 16, 4), (0, 0))  # warms up
                alive[name] = ask
            except Missing as error:
                own.close()
                found.missing[name] = str(error)
        for number, name in turns(list(alive), rounds):
            if name in found.missing:
                continue
            try:
                answers = {point.name: alive[name](point, (number + 1, i)) for i, point in enumerate(points)}
            except Missing as error:
                found.missing[name] = str(error)
                found.samples.pop(name, None)
                continue
            print(f"round {number + 1}: {name}: {answers}", file=sys.stderr, flush=True)
            for point, tok_s in answers.items():
                found.samples.setdefault(name, {}).setdefault(point, []).append(tok_s)
    return found


# ------------------------------------------------------------------------------------------------------------ models


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 with a tied head, or a model of experts with a head of its own."""

    layers: int = 28
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 3072
    vocab: int = 151_936
    context: int = 40_960
    arch: str = "qwen3"
    experts: int = 0
    per_token: int = 0
    expert_inner: int = 0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, rows first."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "token_embd.weight", (self.vocab, self.hidden)
        yield "output_norm.weight", (self.hidden,)
        sizes: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.hidden,),
            "attn_q": (queries, self.hidden),
            "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden),
            "attn_q_norm": (self.head_dim,),
            "attn_k_norm": (self.head_dim,),
            "attn_output": (self.hidden, queries),
            "ffn_norm": (self.hidden,),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }
        if self.experts:
            yield "output.weight", (self.vocab, self.hidden)
            for name in ("ffn_gate", "ffn_up", "ffn_down"):
                rows, columns = sizes.pop(name)
                of = {self.inner: self.expert_inner}
                wide = (of.get(rows, rows), columns) if name != "ffn_down" else (rows, of.get(columns, columns))
                sizes[f"{name}_exps"] = (self.experts, *wide)
            sizes["ffn_gate_inp"] = (self.experts, self.hidden)
        biases: dict[str, tuple[int, ...]] = {}
        if self.arch == "gpt-oss":
            biases = {name: shape[:-1] for name, shape in sizes.items() if len(shape) > 1}
            for gone in ("attn_q_norm", "attn_k_norm"):
                del sizes[gone]
            sizes["post_attention_norm"] = sizes.pop("ffn_norm")
            sizes["attn_sinks"] = (self.heads,)
        for i in range(self.layers):
            yield from ((f"blk.{i}.{name}.weight", shape) for name, shape in sizes.items())
            yield from ((f"blk.{i}.{name}.bias", shape) for name, shape in biases.items())


SHAPES = {
    "qwen3-4b": ("q4_0", Shape(36, 2560, 32, 8, 128, 9728)),
    "qwen3-30b-a3b": (
        "q4_0",
        Shape(48, 2048, 32, 4, 128, 6144, arch="qwen3moe", experts=128, per_token=8, expert_inner=768),
    ),
    "gpt-oss-20b": (
        "mxfp4",
        Shape(24, 2880, 64, 8, 64, 2880, 201_088, 131_072, "gpt-oss", experts=32, per_token=4, expert_inner=2880),
    ),
}


def random_weights(kind: str, folder: Path, shape: Shape | None = None) -> Path:
    """A file of `kind` (q4_1, q8_0, bf16) with the same weights in every type, written now if it is not there. The
    tokenizer is the embedded model's, with made-up tokens up to the size of the vocabulary."""
    shape, quantized = shape or Shape(), gguf.GGMLQuantizationType[kind.upper()]
    path = folder / f"{shape.arch}-{shape.layers}x{shape.hidden}-random-{kind}.gguf"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(part := path.with_suffix(".part"), shape.arch, use_temp_file=True)
    writer.add_name("random weights")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.per_token)
        writer.add_expert_feed_forward_length(shape.expert_inner)
    if shape.arch == "gpt-oss":
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    _add_tokenizer(writer, shape.vocab)
    generator = np.random.default_rng(0)
    for name, sizes in shape.tensors():
        if len(sizes) == 1 or name.endswith(".bias"):
            writer.add_tensor(name, np.full(sizes, 1.0 if "norm" in name else 0.0, np.float32))
        elif "gate_inp" in name:
            writer.add_tensor(name, generator.standard_normal(sizes, np.float32) * np.float32(0.02))
        else:
            own = gguf.GGMLQuantizationType.Q8_0 if kind == "mxfp4" and "_exps" not in name else quantized
            _add_random(writer, name, sizes, own, generator)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)
    return path


def _add_random(
    writer: gguf.GGUFWriter,
    name: str,
    sizes: tuple[int, ...],
    kind: gguf.GGMLQuantizationType,
    generator: np.random.Generator,
) -> None:
    """Some rows at once: a whole embedding in float32 is 600 MB. Experts have the rows of one, in other orders."""
    rows, columns = sizes[-2:]
    pieces = [generator.standard_normal((min(8192, rows - at), columns), np.float32) * np.float32(0.02)
              for at in range(0, rows, 8192)]  # fmt: skip
    quants = np.concatenate([gguf.quantize(piece, kind) for piece in pieces])
    if len(sizes) == 3:
        quants = np.stack([np.roll(quants, expert, axis=0) for expert in range(sizes[0])])
    writer.add_tensor(name, quants, raw_dtype=kind)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    fields = gguf.GGUFReader(find_smollm2()).fields

    def own(key: str) -> Any:
        return fields[f"tokenizer.ggml.{key}"].contents()

    tokens, kinds = list(own("tokens")), list(own("token_type"))
    more = range(vocab - len(tokens))
    writer.add_tokenizer_model(own("model"))
    writer.add_tokenizer_pre(own("pre"))
    writer.add_token_list([*tokens, *(f"<made-up-{i}>" for i in more)])
    writer.add_token_types([*kinds, *[int(gguf.TokenType.UNUSED)] * len(more)])
    writer.add_token_merges(own("merges"))
    writer.add_bos_token_id(int(own("bos_token_id")))
    writer.add_eos_token_id(int(own("eos_token_id")))


def model_size(file: Path) -> dict[str, int]:
    """Bytes and numbers of the matrices that a token goes through, and KV bytes of a token (f16)."""
    matrices = [tensor for tensor in gguf.GGUFReader(file).tensors if len(tensor.shape) == 2]
    heads = [tensor for tensor in matrices if tensor.name in ("token_embd.weight", "output.weight")]
    used = [*(tensor for tensor in matrices if tensor not in heads), heads[-1]]
    keys = [tensor for tensor in matrices if ".attn_k.weight" in tensor.name]
    return {
        "weight_bytes": sum(int(tensor.n_bytes) for tensor in used),
        "parameters": sum(int(tensor.n_elements) for tensor in used),
        "head": int(heads[-1].n_elements),
        "kv_bytes": sum(2 * 2 * int(tensor.shape[1]) for tensor in keys),
    }


# ------------------------------------------------------------------------------------------------------------ limits

LIMITS = {
    "read_gb_s": "memory read, GB/s",
    "f32_gmac_s": "float32, G multiply-adds/s",
    "int8_gmac_s": "int8, G multiply-adds/s",
    "bf16_gmac_s": "bfloat16, G multiply-adds/s",
}
COMMAND = ("cargo", "run", "--quiet", "--release", "--locked", "-p", "minisgl-cpu", "--example", "limits", "--")


def limits(threads: int, seconds: float = 0.4) -> dict[str, Any]:
    """What the machine can do at most: by figure the best instruction set's, from tight loops of the crate's example
    `limits`. Empty without cargo, which builds it."""
    try:
        command = [*COMMAND, str(threads), str(seconds)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S, check=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stderr", "") or str(error)
        print(f"limits: {said.strip()[-300:]}", file=sys.stderr)
        return {}


def limits_table(found: Mapping[str, Any]) -> str:
    best = found.get("best", {})
    return table(("limit", "measured", "by"), [(LIMITS[k], found[k], best.get(k, "")) for k in LIMITS if k in found])


def shares(
    found: Mapping[str, Any], size: Mapping[str, int], point: Point, tok_s: float, kind: str
) -> dict[str, float]:
    """The share of each limit that `tok_s` comes to. A decode step reads the weights once and the KV of each row; a
    token is `parameters` multiply-adds of `kind`, but a prompt needs the head only once."""
    shared: dict[str, float] = {}
    if (read := found.get("read_gb_s")) and point.num_out > 1:
        kv_bytes = size["kv_bytes"] * (point.num_in + point.num_out / 2)
        shared["read"] = tok_s * (size["weight_bytes"] / point.batch + kv_bytes) / 1e9 / read
    if peak := found.get(f"{kind}_gmac_s"):
        needed = size["parameters"] - (size["head"] if point.num_out == 1 else 0)
        shared["multiply-adds"] = tok_s * needed / 1e9 / peak
    return shared


# ----------------------------------------------------------------------------------------------------------- offline


def speeds_table(found: Found, points: Sequence[Point]) -> str:
    def cell(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    rows = [(name, *(cell(of[point.name]) for point in points)) for name, of in found.samples.items()]
    return table(("tok/s, median (lowest to highest)", *(point.name for point in points)), rows)


def against(found: Found, points: Sequence[Point]) -> str:
    """Each of ours beside each of the others, paired by round."""
    rows = [
        (mine, other, *(str(paired_difference(theirs[point.name], ours[point.name])) for point in points))
        for mine, ours in found.samples.items()
        for other, theirs in found.samples.items()
        if mine in OURS and other not in OURS
    ]
    return table(("tok/s of", "against", *(point.name for point in points)), rows) if rows else ""


def shares_table(found: Found, points: Sequence[Point], most: Mapping[str, Any], model: Path) -> str:
    kinds, size, rows = {"exact": "f32", "bf16": "bf16", "int8": "int8"}, model_size(model), []
    for name in [name for name in found.samples if name in kinds]:
        cells = []
        for point in points:
            tok_s = statistics.median(found.samples[name][point.name])
            shared = shares(most, size, point, tok_s, kinds[name])
            cells.append(", ".join(f"{what} {share:.0%}" for what, share in shared.items()))
        rows.append((name, *cells))
    return table(("share of the limits", *(point.name for point in points)), rows) if rows and most else ""


def points_of(part: str, *, rehearse: bool) -> list[Point]:
    """Random weights of 0.6B parameters get shorter ones: the slower variant takes minutes a round."""
    if rehearse:
        return [Point(1, 16, 8), Point(1, 16)]
    if part in SHAPES:
        tokens = (Point(1, 1, 129, "tg128"), Point(1, 4096, 129, "tg128 at 4096"))
        return [Point(1, 512, 1, "pp512"), *tokens]
    num_in, num_out, prefill = (128, 64, 512) if part == "smollm2" else (32, 24, 256)
    return [*(Point(batch, num_in, num_out) for batch in (1, 8, 32)), Point(1, prefill)]


def offline(args: argparse.Namespace, report: Report | None) -> dict[str, Any]:
    llama, raw = llama_folders(args.llama_bin), dict[str, Any]()
    most = {} if args.rehearse else limits(args.threads)
    if report is not None and most:
        report.section("Limits of the machine", limits_table(most))
    with tempfile.TemporaryDirectory() as scratch:
        for part in args.only or PARTS:
            names = [*PARTS[part], *(name for name in llama if name != LLAMA and LLAMA in PARTS[part])]
            names = ["echo"] if args.rehearse else [name for name in names if name in (args.variants or names)]
            points = points_of(part, rehearse=args.rehearse)
            embedded = part == "smollm2" or args.rehearse
            kind, shape = SHAPES.get(part, (part, Shape()))
            if part in SHAPES and args.layers is not None:
                shape = replace(shape, layers=min(args.layers, shape.layers))
            model = find_smollm2() if embedded else random_weights(kind, args.models or Path(scratch), shape)
            found = measure(names, model, points, args.rounds, args.threads, llama)
            missing = table(("not measured", "why"), found.missing.items()) if found.missing else ""
            texts = [
                speeds_table(found, points),
                against(found, points),
                shares_table(found, points, {} if shape.experts else most, model),
            ]
            text = "\n\n".join(one for one in (*texts, missing) if one)
            print(f"\n{part}\n\n{text}\n", flush=True)
            raw[part] = {"samples": found.samples, "missing": found.missing}
            if report is not None:
                layers = f", {shape.layers} layers" if part in SHAPES else ""
                report.section(f"{part} ({args.threads} threads{layers})", text)
                report.write({"limits": most, **raw})
    return {"bench": "cpu offline", **raw}


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["--child"]:
        return child()
    parser = argparse.ArgumentParser(
        prog="benchmark.cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("limits", "offline"))
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    parser.add_argument("--rounds", type=int, default=3, help="of every figure (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of every variant (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="at most, of the shapes of larger models")
    llama = "llama.cpp's programs, from a native build, or a folder with xllamacpp in it; NAME=DIR for another one"
    parser.add_argument("--llama-bin", action="append", default=[], metavar="DIR", help=llama)
    parser.add_argument("--models", type=Path, metavar="DIR", help="keep the random weights there (default: made anew)")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), help="of the parts of `offline`")
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help="only these")
    parser.add_argument("--rehearse", action="store_true", help="tiny and without a model, to try the command itself")
    args = parser.parse_args(given)
    if args.part == "limits":
        found = limits(args.threads)
        print(limits_table(found))
        print_result({"bench": "cpu limits", **found})
        return 0 if found else 1
    command = public_command(given, "python -m benchmark.cpu")
    report = None if args.out is None else Report(args.out, "The CPU engine offline", command=command)
    print_result(offline(args, report))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's exit handlers may wait for threads that nobody needs any more
