"""Frames that the page drops while a long answer grows: `python -m benchmark.online.page_frames --out FOLDER`.

Invariants: each answer stands beside the same answer, read by a page that shows nothing of it: what the machine itself
drops is seen. A scripted engine behind the real server gives the answer, a byte a token, at full speed and at a pace.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from tests.helpers import browser
from tests.helpers.server import MODEL, frontend

FRAME_MS = 1000 / 60
TEXT = "".join(f"{i}. A point of **many**, with `code` and a [link](https://example.com/{i}).\n\n" for i in range(30))
QUESTION = "What are the points?"
PACES_S = (0.0, 0.005)  # as fast as it comes; at most 200 tokens a second
ROUNDS = 3
WATCH = """() => { const all = window.drawn = []; const tick = now => { if (window.drawn !== all) return;
    all.push(now); requestAnimationFrame(tick); }; requestAnimationFrame(tick); }"""
READ = """async ([url, sent]) => { const answer = await fetch(url, { method: "POST",
    headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent) });
    for await (const _ of answer.body); }"""
SENT = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "stream": True}


def summed(drawn: list[float], before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    gaps = [b - a for a, b in itertools.pairwise(drawn)]
    dropped = sum(max(0, round(gap / FRAME_MS) - 1) for gap in gaps)
    busy = {
        f"{name}_s": round(after[name] - before[name], 3)
        for name in ("ScriptDuration", "LayoutDuration", "TaskDuration")
    }
    return {
        "seconds": round((drawn[-1] - drawn[0]) / 1000, 2),
        "frames": len(gaps),
        "dropped": dropped,
        "dropped_share": round(dropped / (len(gaps) + dropped), 4),
        "longest_ms": round(max(gaps), 1),
        **busy,
    }


def metrics(session: Any) -> dict[str, float]:
    return {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}


def measured(chromium: Any, url: str, *, shown: bool) -> dict[str, float]:
    """One answer: in the chat, or read by the page and thrown away."""
    with browser.tab(chromium, url, viewport={"width": 1280, "height": 800}) as tab:
        page = tab.open()
        session = tab.context.new_cdp_session(page)
        session.send("Performance.enable")
        page.evaluate(WATCH)
        before = metrics(session)
        if shown:
            tab.ask(QUESTION)
            page.wait_for_selector("#send:visible", timeout=300_000)
        else:
            page.evaluate(READ, [f"{url}/v1/chat/completions", SENT])
        return summed(page.evaluate("window.drawn"), before, metrics(session))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows = []
    with frontend(replies={QUESTION.rstrip("?"): TEXT}, max_seq_len=1 << 14) as server, browser.browser() as chromium:
        for _ in range(ROUNDS):
            for server.engine.pace_s in PACES_S:
                for shown in (False, True):
                    found = measured(chromium, server.url, shown=shown)
                    rows.append({"pace_s": server.engine.pace_s, "shown": shown} | found)
                    print(rows[-1], flush=True)
    for pace_s in PACES_S:
        for shown in (False, True):
            shares = [one["dropped_share"] for one in rows if (one["pace_s"], one["shown"]) == (pace_s, shown)]
            print(f"pace_s={pace_s} shown={shown}: {statistics.median(shares):.2%} of the frames dropped (median)")
    found = {"answer_tokens": len(TEXT), "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    (out / "raw.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
