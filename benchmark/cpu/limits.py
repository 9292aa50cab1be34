"""What the machine can do at most, measured in the same run: memory read, multiply-adds in float32 and int8.

By the crate's example `limits` (a release build, made by cargo if it is not there): tight loops of each instruction set
on as many threads. Without cargo: torch's products and sums, which come near.

The figures are of this moment and this machine; each says which way it was found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from minisgl.bench.report import table

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("cargo", "run", "--quiet", "--release", "--locked", "-p", "minisgl-cpu", "--example", "limits", "--")
NAMES = {
    "read_gb_s": "memory read, GB/s",
    "f32_gmac_s": "float32, G multiply-adds/s",
    "int8_gmac_s": "int8, G multiply-adds/s",
    "bf16_gmac_s": "bfloat16, G multiply-adds/s",
}
BUILD_S = 900


def measure(threads: int, seconds: float = 0.4) -> dict[str, Any]:
    """By figure the best instruction set's; `all`: every one, and with one thread."""
    try:
        done = subprocess.run(
            [*COMMAND, str(threads), str(seconds)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {"from": "example limits", **found}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stderr", "") or str(error)
        print(f"limits: {said.strip()[-300:]}", file=sys.stderr)
        return {"from": "torch", **_by_torch(threads)}


def _by_torch(threads: int) -> dict[str, Any]:
    """In a process of its own: torch's threads would stand in the way of what comes after."""
    code = f"""
import json, time, torch
torch.set_num_threads({threads})
def best(work, call):
    took = []
    for _ in range(5):
        began = time.perf_counter(); call(); took.append(time.perf_counter() - began)
    return work / min(took) / 1e9
a = torch.ones(64 * 2**20)
b, c = torch.ones(1536, 1536), torch.empty(1536, 1536)
read, product = best(4 * a.numel(), a.sum), best(1536**3, lambda: torch.mm(b, b, out=c))
print(json.dumps({{"read_gb_s": read, "f32_gmac_s": product}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else {}


def limits_table(found: dict[str, Any]) -> str:
    rows = [(title, found[key], found.get("best", {}).get(key, "")) for key, title in NAMES.items() if key in found]
    return table(("limit", "measured", "by"), rows)


def shares(
    found: dict[str, Any], *, weight_bytes: int, parameters: int, kv_bytes: int, batch: int, tok_s: float, kind: str
) -> dict[str, float]:
    """Of each limit, what `tok_s` comes to. A decode step reads the weights once and `kv_bytes` for each row; a token
    is `parameters` multiply-adds. `kind`: float32 or int8 arithmetic."""
    shared: dict[str, float] = {}
    if read := found.get("read_gb_s"):
        shared["read"] = tok_s * (weight_bytes / batch + kv_bytes) / 1e9 / read
    if peak := found.get(f"{kind}_gmac_s"):
        shared[f"{kind} multiply-adds"] = tok_s * parameters / 1e9 / peak
    return shared
