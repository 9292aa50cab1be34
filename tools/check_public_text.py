"""Refuse tracked text that a reader of the repository alone could not follow, or that identifies a person's machine:
home paths, hosts, keys, private endpoints, package registries; folders outside the checkout, issue numbers that no
tracker here has, borrowed machines.

Run from anywhere; prints one line per finding and exits with 1 if there is any. `127.0.0.1` and `localhost` are allowed
in examples. Patterns are written so that this file does not match itself. File names are checked like text, and
compressed files by their contents. Merely unclear text is not reported in records of runs, which are never edited.
"""

from __future__ import annotations

import gzip
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATTERNS: dict[str, re.Pattern[str]] = {
    "home path": re.compile(r"(?<![\w.])/(?:home|Users)/[A-Za-z0-9_.-]+|(?<![\w./])/root(?=/)"),
    "work path": re.compile(r"(?<![\w./-])/work(?:space)?/[A-Za-z0-9_.-]"),
    "windows home path": re.compile(r"[A-Za-z]:\\+Users\\+\w"),
    "private key": re.compile(r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY"),
    "access key": re.compile(
        r"\b(?:AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9]{32,})"
    ),
    "user at host": re.compile(r"\b[a-z_][a-z0-9_-]*@(?:ip-\d|[a-z0-9-]+\.(?:internal|local|lan|corp)\b)"),
    "internal host": re.compile(r"\b[a-z0-9][a-z0-9-]*\.(?:internal|corp|lan|intra)\b(?!\()"),
    "private address": re.compile(
        r"(?<![\d.])(?:10\.\d{1,3}|192\.168|172\.(?:1[6-9]|2\d|3[01])|169\.254)\.\d{1,3}\.\d{1,3}(?![\d.])"
    ),
    "package registry": re.compile(
        r"https?://[^\s\"')]*(?:pypi[.]|pythonhosted[.]|crates[.]io|npmjs|artifactory|nexus|/simple\b)"
        r"|\b(?:pypi|pythonhosted)[.]org\b|\b(?:index|static)[.]crates[.]io\b|--(?:extra-)?index-url[ =]"
    ),
}
UNCLEAR: dict[str, re.Pattern[str]] = {
    "folder beside the checkout": re.compile(r"[.][.]/share[d]\b"),
    "issue of no tracker": re.compile(
        r"(?<![\w/]#)\bissues? +#?\d+\b|\bthe issues? (?:asks?|says?|wants?)\b", re.IGNORECASE
    ),
    "machine on loan": re.compile(
        r"\b(?:machine|gpu|device|box)s?\b[^.]{0,40}\blen[t]\b|\blen[t]\b[^.]{0,40}\b(?:machine|gpu|device|box)",
        re.IGNORECASE,
    ),
}
RECORDS = "benchmark/runs/"
KNOWN = {(".ci/run", "folder beside the checkout")}
"""CI's path of `MINISGL_DATA`, in a file that only CI runs."""
# crates.io appears in every Cargo.lock, as the name of the default registry; the other one has torch without CUDA
ALLOWED = re.compile(
    r"registry\+https://github\.com/rust-lang/crates[.]io-index|--index[-]url https://download\.pytorch\.org/whl/cpu\b"
)
LOCK = "uv.lock"
PUBLIC_PACKAGE = re.compile(r'"https:[/]{2}(?:pypi[.]org/simple|files[.]pythonhosted[.]org/packages/[^"]+)"')
"""Package hosts that a lock file may name; no other, because a private mirror looks like any address."""


def host_pattern(host: str) -> dict[str, re.Pattern[str]]:
    """Return the pattern for this machine's host name, often part of benchmark results; empty for ordinary words."""
    ordinary = len(host) < 5 or not re.search(r"[-.\d]", host) or host.startswith("localhost")
    return {} if ordinary else {"this host": re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-])")}


def findings(text: str, host: str = "", name: str = "") -> Iterator[tuple[int, str, str]]:
    """Yield (line number, kind, match) of all text that must not be public in `name`. `host`: this machine's name."""
    patterns = PATTERNS | host_pattern(host) | ({} if name.startswith(RECORDS) else UNCLEAR)
    allowed = ALLOWED
    if name == LOCK:
        allowed, patterns = PUBLIC_PACKAGE, patterns | {"package registry": re.compile(r"\w+://[^\s\"]*")}
    for number, line in enumerate(text.splitlines(), 1):
        cleaned = allowed.sub("", line)
        for kind, pattern in patterns.items():
            if (name, kind) not in KNOWN and (match := pattern.search(cleaned)):
                yield number, kind, match.group(0)


def tracked_files(root: Path) -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    return [root / name for name in listing.split("\0") if name]


def main(root: Path = ROOT) -> int:
    host = socket.gethostname()
    bad = 0
    for file in tracked_files(root):
        name = file.relative_to(root).as_posix()
        try:
            data = file.read_bytes()
            text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
        except (UnicodeDecodeError, FileNotFoundError, gzip.BadGzipFile):
            text = ""  # a picture, or deleted in the working tree
        for number, kind, match in [*findings(f"/{name}", host), *findings(text, host, name)]:
            print(f"{name}:{number}: {kind}: {match}")
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
