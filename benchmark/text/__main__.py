"""The gateway's text module beside Python's: encoding, decoding and chat templates, in one run.

    python -m benchmark.text [--rounds 15] [--out FOLDER]

Needs the folder of real data (`MINISGL_DATA`) and the extension module as it is released, with link-time
optimization. In each round both sides do every case once, in turns; figures are medians of the rounds. Both are called
from Python, so that what the call costs is in both: ids become a list on the gateway's side and an array on Python's; a
conversation goes to the gateway as JSON, and reading that is in its time. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl import envs
from minisgl._rust import GatewayTemplate, GatewayText
from minisgl.bench.report import Report, print_result, table
from minisgl.tokenizer import ChatTemplate, Tokenizer

NAMES = ("qwen3", "mistral-v3")
NUM_MESSAGES = 512
LONG_CHARS = 220_000  # about 50,000 tokens
NUM_DECODED = 1000
NO_CACHE = 0
CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class Case:
    """The same work on both sides; `before` prepares what a round needs, outside of the time."""

    name: str
    python: Callable[[Any], object]
    gateway: Callable[[Any], object]
    before: Callable[[], tuple[Any, Any]] = lambda: (None, None)

    def run(self) -> tuple[float, float]:
        """us of both."""
        for_python, for_gateway = self.before()
        began = time.perf_counter_ns()
        self.python(for_python)
        middle = time.perf_counter_ns()
        self.gateway(for_gateway)
        return (middle - began) / 1000, (time.perf_counter_ns() - middle) / 1000


def prompts(data: Path) -> list[str]:
    lines = (data / "prompts" / "mt_bench_questions.jsonl").read_text(encoding="utf-8").splitlines()
    found = [turn for line in lines for turn in json.loads(line)["turns"]]
    lines = (data / "prompts" / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
    return found + [json.loads(line)["answer"] for line in lines]


def conversation(texts: Sequence[str], num_messages: int, chars: int) -> list[dict[str, str]]:
    """Turns of about `chars` together, no two alike."""
    found = []
    each = chars // num_messages
    for i in range(num_messages):
        text = f"{i}. " + " ".join(texts[(i + k) % len(texts)] for k in range(8))
        found.append({"role": ("user", "assistant")[i % 2], "content": text[:each]})
    return found


def chatml(messages: Sequence[dict[str, str]], begin: str, end: str) -> str:
    return "".join(f"{begin}{message['role']}\n{message['content']}{end}\n" for message in messages)


def encoding(name: str, folder: Path, texts: Sequence[str]) -> list[Case]:
    python = Tokenizer.load(folder)
    python.prepare()
    file = str(folder / "tokenizer.json")
    gateway = GatewayText(file=file, cache_bytes=NO_CACHE)
    short, batch = texts[0], list(texts[:16])
    long = " ".join(texts)[:LONG_CHARS]
    begin, end = ("<|im_start|>", "<|im_end|>") if name == "qwen3" else ("[INST]", "</s>")
    turns = conversation(texts, NUM_MESSAGES, LONG_CHARS)
    chat = chatml(turns, begin, end)
    earlier = chatml(turns[:-2], begin, end)
    ids = python.encode(long).tolist()[:NUM_DECODED]

    def next_turn() -> tuple[Any, Any]:
        warm = GatewayText(file=file, cache_bytes=CACHE_BYTES) if not kept else kept[0]
        kept[:] = [warm]
        warm.encode(earlier, False)
        number[0] += 1
        new = {"role": "user", "content": f"{number[0]}: {texts[number[0] % len(texts)]}"}
        text = chatml([*turns[:-1], new], begin, end)
        return text, text

    kept: list[GatewayText] = []
    number = [0]

    def decode(push: Callable[[Sequence[int]], str]) -> None:
        for token_id in ids:
            push((token_id,))

    return [
        Case("encode, short", lambda _: python.encode(short), lambda _: gateway.encode(short)),
        Case("encode, 16 short", lambda _: python.encode_batch(batch), lambda _: [gateway.encode(t) for t in batch]),
        Case("encode, long", lambda _: python.encode(long), lambda _: gateway.encode(long)),
        Case("encode, chat of 512", lambda _: python.encode(chat, False), lambda _: gateway.encode(chat, False)),
        Case("encode, its next turn", lambda t: python.encode(t, False), lambda t: kept[0].encode(t, False), next_turn),
        Case(
            "decode, token by token",
            lambda _: decode(python.new_decoder().push),
            lambda _: decode(gateway.decoder().push),
        ),
    ]


def rendering(folder: Path, texts: Sequence[str]) -> list[Case]:
    source = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    if source is None:
        return []
    python, gateway = ChatTemplate(source, {}), GatewayTemplate(source, "string")
    python.render([{"role": "user", "content": "a"}])

    def case(count: int, chars: int) -> Case:
        messages = conversation(texts, count, chars)
        as_json = json.dumps(messages, ensure_ascii=False)
        assert gateway.render(as_json, "{}", True) == python.render(messages)
        return Case(
            f"render, {count} messages",
            lambda _: python.render(messages),
            lambda _: gateway.render(as_json, "{}", True),
        )

    return [case(3, 600), case(NUM_MESSAGES, LONG_CHARS)]


def measure(cases: Sequence[Case], rounds: int) -> dict[str, dict[str, list[float]]]:
    times: dict[str, dict[str, list[float]]] = {case.name: {"python": [], "gateway": []} for case in cases}
    for number in range(rounds + 1):
        for case in cases:
            passed = case.run()
            if number:  # the first warms up
                for side, value in zip(("python", "gateway"), passed, strict=True):
                    times[case.name][side].append(value)
    return times


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.text", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder for raw.json and README.md")
    parser.add_argument("--note", default="", help="what else the machine was doing")
    options = parser.parse_args(args)
    data = envs.data_dir()
    if data is None:
        parser.error(f"{envs.DATA} is not set: no real tokenizers")
    command = f"python -m benchmark.text --rounds {options.rounds}"
    report = None if options.out is None else Report(options.out, "The gateway's text module", command=command)
    texts = prompts(data)
    times: dict[str, dict[str, dict[str, list[float]]]] = {}
    rows = []
    for name in NAMES:
        folder = data / "tokenizers" / name
        times[name] = measure([*encoding(name, folder, texts), *rendering(folder, texts)], options.rounds)
        for case, by_side in times[name].items():
            python, gateway = (statistics.median(by_side[side]) for side in ("python", "gateway"))
            pairs = zip(by_side["gateway"], by_side["python"], strict=True)
            rows.append((name, case, python, gateway, f"{statistics.median(a / b for a, b in pairs):.3f}"))
    figures = table(("tokenizer", "work", "Python, us", "gateway, us", "gateway / Python"), rows)
    print(figures)
    if report is not None:
        report.section("Time of the same work", options.note, figures)
        report.write({"us": times})
    ratios = {f"{row[0]}: {row[1]}": float(row[4]) for row in rows}
    print_result({"benchmark": "text", "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
