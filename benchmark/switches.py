"""What a switch of models costs behind one port, and what a turn of an agent's long conversation does.

    python -m benchmark.switches switch --gap 0.3 7 --out FOLDER
    python -m benchmark.switches read --shape qwen2.5-1.5b --out FOLDER
    python -m benchmark.switches turns --out FOLDER

`switch`: two names of SmolLM2 of which one fits, asked for in turns: seconds from the request to the first event of its
stream with a text, so many seconds after the answer before it.

`read`: the same with two files of random weights in Q4_K_M, beside the seconds that reading such a file takes. "cold":
the system has forgotten the file, which is then read, or switched to; "warm": it has it in memory.

`turns`: 20,000 tokens of instructions and tools and 30 turns before a model of SmolLM2's size and random weights:
seconds to the first event of each turn, and the tokens that were found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from minisgl.bench.random_models import SHAPES, random_model, write_random
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.server_process import Launch, ServerProcess

COMMAND = "python -m benchmark.switches"
TIMEOUT_S = 600.0
CHUNK = 8 << 20
SIZE_OF_SMOLLM2 = replace(
    SHAPES["smollm2-1.7b"], layers=30, hidden=576, heads=9, kv_heads=3, inner=1536, context=40_960
)
TEMPLATE = (
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string", "description": "Where it lies. " * 8}}}


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[float, str, dict[str, Any]]:
    """Seconds to the first event of tokens, the text, and the usage."""
    began, first, text, usage = time.monotonic(), 0.0, "", dict[str, Any]()
    options = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", url + path, json={**options, **body}, timeout=TIMEOUT_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                said = choice.get("text", choice.get("delta", {}).get("content"))
                text += said or ""
                if (said or choice["finish_reason"]) and not first:
                    first = time.monotonic() - began
    return first, text, usage


def several(folder: Path, files: dict[str, str], memory: str, settings: str = "") -> Launch:
    """One port with these models, of which `memory` holds one."""
    lines = [
        f"- {{name: {name}, model: {model}, memory: {memory}, preload: {name == 'one'}}}"
        for name, model in files.items()
    ]
    (folder / "models.yaml").write_text(
        "models:\n" + "\n".join(lines).replace("True", "true").replace("False", "false")
    )
    flags = ("--models", str(folder / "models.yaml"), "--memory", memory, *settings.split())
    return Launch(flags=flags, env={"MINISGL_CACHE": str(folder)})


def first_of(url: str, model: str) -> float:
    return ask(url, "/v1/completions", {"model": model, "prompt": "The capital of France is", "max_tokens": 2})[0]


def switch(args: argparse.Namespace) -> dict[str, Any]:
    found = dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        launch = several(Path(folder), {"one": "smollm2", "two": "smollm2"}, "900MB")
        with ServerProcess(launch) as server:
            first_of(server.url, "one")
            time.sleep(max(args.gap))
            children = psutil.Process(server.pid).children(recursive=True)
            found["pss of what is behind the port, MiB"] = [one.memory_full_info().pss >> 20 for one in children]
            for gap in args.gap:
                times = []
                for turn in range(args.times):
                    times.append(first_of(server.url, ("two", "one")[turn % 2]))
                    time.sleep(gap)
                found[f"{gap:g} s apart"] = shown(times)
    return found


def shown(times: list[float]) -> dict[str, Any]:
    rounded = [round(one, 3) for one in times]
    return {"median_s": statistics.median(rounded), "max_s": max(rounded), "seconds": rounded}


def forget(path: Path) -> None:
    """Let the system forget the file, which nobody has mapped."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_to_read(path: Path) -> float:
    began, room = time.monotonic(), bytearray(CHUNK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(room):
            pass
    return time.monotonic() - began


def read(args: argparse.Namespace) -> dict[str, Any]:
    one = random_model(args.shape, "q4_k_m", args.layers)
    times: dict[str, list[float]] = {f"{what}, {how}": [] for how in ("cold", "warm") for what in ("file", "switch")}
    with tempfile.TemporaryDirectory(dir=one.parent) as folder:
        two = Path(folder, "two.gguf")
        shutil.copyfile(one, two)  # each has its own place in the system's memory
        settings = f"--max-seq-len 512 {args.flags}"
        size = two.stat().st_size
        memory = f"{(size >> 20) + 1024}MB"
        with ServerProcess(several(Path(folder), {"one": str(one), "two": str(two)}, memory, settings)) as server:
            for name in ("one", "two", "one"):  # what is made once of a file is made now
                first_of(server.url, name)
            for turn in range(args.times):
                name, path = "two", two  # two switches a turn: it is always "one" that is loaded here
                for how in (("cold", "warm"), ("warm", "cold"))[turn % 2]:
                    forget(path) if how == "cold" else seconds_to_read(path)
                    times[f"file, {how}"].append(seconds_to_read(path))
                    forget(path) if how == "cold" else seconds_to_read(path)
                    times[f"switch, {how}"].append(first_of(server.url, name))
                    name, path = ("one", one) if name == "two" else ("two", two)
            lines = server.last_lines(2000).splitlines()
    found = {name: shown(seconds) for name, seconds in times.items()}
    ratios = {how: found[f"switch, {how}"]["median_s"] / found[f"file, {how}"]["median_s"] for how in ("cold", "warm")}
    return {"file, MB": size / 1e6, **found, "switch / file": ratios, "lines": [one for one in lines if "load" in one]}


def turns(args: argparse.Namespace) -> dict[str, Any]:
    tools = [
        {"name": f"tool_{i}", "description": "Does what its name says.", "parameters": PARAMETERS}
        for i in range(args.tools)
    ]
    instructions = " ".join(f"Rule {i} of many." for i in range(args.rules))
    said: list[dict[str, Any]] = [{"role": "system", "content": instructions}]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model, template = Path(folder, "model.gguf"), Path(folder, "template.jinja")
        write_random(model, SIZE_OF_SMOLLM2, "q4_1")
        template.write_text(TEMPLATE)
        flags = ("--model", str(model), "--engine", "cpu", "--chat-template", str(template), "--max-seq-len", "32768")
        with ServerProcess(Launch(flags=flags)) as server:
            for turn in range(args.turns):
                said.append({"role": "user", "content": f"Turn {turn}: please go on, and do what comes next."})
                body = {"model": server.model, "messages": said, "max_tokens": 16, "ignore_eos": True}
                body["tools"] = [{"type": "function", "function": one} for one in tools]
                ttft, text, usage = ask(server.url, "/v1/chat/completions", body)
                said.append({"role": "assistant", "content": text})
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                one = {"turn": turn + 1, "ttft_s": round(ttft, 3), "prompt": usage["prompt_tokens"], "cached": cached}
                found.append(one)
                print(json.dumps(one), file=sys.stderr, flush=True)
    later = found[1:]
    third = max(1, len(later) // 3)
    early, late = (statistics.median(one["ttft_s"] for one in part) for part in (later[:third], later[-third:]))
    hit_rate = sum(one["cached"] for one in later) / sum(one["prompt"] for one in later)
    return {
        "turns": found,
        "hit rate from turn 2": hit_rate,
        "ttft, last third / first third of the others": late / early,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("switch", "read", "turns"))
    parser.add_argument("--gap", type=float, nargs="+", default=[0.3, 7.0], help="seconds between switches")
    parser.add_argument("--times", type=int, default=12)
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--layers", type=int, help="at most so many")
    parser.add_argument("--flags", default="", help="of the servers")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tools", type=int, default=100)
    parser.add_argument("--rules", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = {"switch": switch, "read": read, "turns": turns}[args.part](args)
    report = Report(args.out, "Switches of models", command=public_command(sys.argv[1:], COMMAND))
    report.section(args.part, table(("", "found"), [(name, json.dumps(value)) for name, value in found.items()]))
    report.write(found)
    print_result(found)


if __name__ == "__main__":
    main()
