"""Refuse tracked text that names a person's machine: home paths, hosts, keys, private endpoints, package registries.

Run from anywhere in the repository; prints one line per finding and exits with 1 if there is any. `127.0.0.1` and
`localhost` are for examples. Patterns are written so that this file does not match itself.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    ),
}
# crates.io appears in every Cargo.lock, as the name of the default registry
ALLOWED = re.compile(r"registry\+https://github\.com/rust-lang/crates[.]io-index")


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """(line number, kind, match) of everything that must not be public."""
    for number, line in enumerate(text.splitlines(), 1):
        cleaned = ALLOWED.sub("", line)
        for kind, pattern in PATTERNS.items():
            if found := pattern.search(cleaned):
                yield number, kind, found.group(0)


def tracked_files(root: Path) -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    return [root / name for name in listing.split("\0") if name]


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    bad = 0
    for file in tracked_files(root):
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # a picture, or deleted in the working tree
        for number, kind, match in findings(text):
            print(f"{file.relative_to(root)}:{number}: {kind}: {match}")
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
