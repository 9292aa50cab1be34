"""How far the torch engine's logits are from transformers in float32, by type and by kind of CPU.

    python -m benchmark.offline.agreement --out FOLDER [--tokens 2000]

The prompts of MINISGL_DATA (first turns of MT-bench and questions of GSM8K in turns) go through the embedded model,
each as one request of the real step loop; what the head gives at every position is compared with transformers'
float32 logits after the same tokens. Each type runs on this CPU as it is, and held down to AVX2 by variables, in
processes of their own one after the other; the reference is computed in each of them. `rounded` is the same with the
logits rounded to bfloat16 before anything is made of them, as a head that puts out bfloat16 gives them.

KL is that of the engine's distribution from the reference's, in nats, mean over positions; top-1 the share of
positions with the same likeliest token; ties the share where the engine's two likeliest are equal. The last line of
stdout is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl import envs
from minisgl.config import EngineConfig
from minisgl.engine import dtypes
from minisgl.message import AddRequest
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.weights.sources import resolve_model

CPUS = {"as it is": {}, "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}}
TYPES = ("float32", "bfloat16")


def texts() -> list[str]:
    folder = envs.data_dir()
    if folder is None:
        raise SystemExit(f"{envs.DATA} is not set")

    def lines(name: str) -> list[Any]:
        return [json.loads(line) for line in (folder / "prompts" / name).read_text(encoding="utf-8").splitlines()]

    turns = [one["turns"][0] for one in lines("mt_bench_questions.jsonl")]
    questions = [one["question"] for one in lines("gsm8k_test.jsonl")]
    return list(itertools.chain.from_iterable(zip(turns, questions, strict=False)))


class Ours:
    """What the engine's head gives after each token of a prompt."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        config = EngineConfig(
            model=str(folder),
            engine="torch",
            dtype=dtype,  # type: ignore[arg-type]
            device="cpu",
            num_pages=256,
            max_seq_len=2048,
            max_running_requests=1,
            max_prefill_length=2048,
            num_threads=threads,
        )
        engine = build_engine(config, lambda text, done=0, total=0: None)
        self._pieces: list[Tensor] = []
        model = engine._model  # type: ignore[attr-defined]
        head = model.logits

        def logits(hidden: Tensor) -> Tensor:
            self._pieces.append(head(hidden))
            return self._pieces[-1]

        model.logits = logits
        self._engine = engine
        self._loop = StepLoop(build_control_plane(config, engine.info), engine, lambda messages: None)

    def logits(self, number: int, ids: list[int]) -> Tensor:
        """Prompt positions, for which log probabilities are asked, and the last one, which is sampled from."""
        self._pieces.clear()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0, seed=0)
        self._loop.step([AddRequest(number, np.array(ids, np.int32).tobytes(), params)])
        while not self._loop.idle:
            self._loop.step([])
        found = torch.cat(self._pieces).float()
        assert len(found) == len(ids)
        return found

    def close(self) -> None:
        self._engine.close()


class Sums:
    def __init__(self) -> None:
        self._count = self._same = self._ties = 0
        self._kl = self._largest_kl = self._off = 0.0

    def add(self, expected: Tensor, found: Tensor) -> None:
        kl = (expected.double().softmax(-1) * (expected.double().log_softmax(-1) - found.double().log_softmax(-1))).sum(
            -1
        )
        top = found.topk(2).values
        self._count += len(found)
        self._same += int((expected.argmax(-1) == found.argmax(-1)).sum())
        self._ties += int((top[:, 0] == top[:, 1]).sum())
        self._kl += float(kl.sum())
        self._largest_kl = max(self._largest_kl, float(kl.max()))
        self._off = max(self._off, float((expected - found).abs().max()))

    def figures(self) -> dict[str, float]:
        return {
            "tokens": self._count,
            "mean_kl": self._kl / self._count,
            "max_kl": self._largest_kl,
            "top1": self._same / self._count,
            "ties": self._ties / self._count,
            "max_logit_error": self._off,
        }


@torch.inference_mode()
def measure(dtype: str, num_tokens: int, threads: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    folder = resolve_model("smollm2", lambda text, done=0, total=0: None)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, ours = Tokenizer.load(folder), Ours(folder, dtype, threads)
    exact, rounded, left, seconds = Sums(), Sums(), num_tokens, 0.0
    for number, text in enumerate(texts()):
        ids = [int(i) for i in tokenizer.encode(text)][:left]
        if not ids:
            break
        left -= len(ids)
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
        began = time.monotonic()
        found = ours.logits(number, ids)
        seconds += time.monotonic() - began
        exact.add(expected, found)
        rounded.add(expected, found.bfloat16().float())
    ours.close()
    auto, why = dtypes.choose("auto", "bfloat16", torch.device("cpu"))
    return {
        "dtype": dtype,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "auto": auto,
        "auto_because": why,
        "seconds": round(seconds, 2),
        **exact.figures(),
        "rounded": rounded.figures(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for raw.json")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=tuple(dtypes.DTYPES), help="one type, in this process")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args.tokens, args.threads)))
        return 0
    machine = {"processor": platform.machine(), "torch": torch.__version__, "python": platform.python_version()}
    result: dict[str, Any] = {"machine": machine, "model": "smollm2", "threads": args.threads, "results": []}
    for (cpu, variables), dtype in itertools.product(CPUS.items(), TYPES):
        command = [sys.executable, "-m", "benchmark.offline.agreement", "--only", dtype]
        command += ["--tokens", str(args.tokens), "--threads", str(args.threads)]
        done = subprocess.run(
            command, env=envs.child_environment(variables), stdout=subprocess.PIPE, text=True, check=True
        )
        one = {"cpu": cpu, **json.loads(done.stdout.splitlines()[-1])}
        result["results"].append(one)
        print(f"{cpu}, {dtype}: KL {one['mean_kl']:.2e}, top-1 {one['top1']:.2%}, {one['seconds']} s", file=sys.stderr)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "raw.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
