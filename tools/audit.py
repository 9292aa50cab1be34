"""`make audit`: check the locked dependencies for vulnerabilities by pip-audit (PyPI) and cargo-audit (RustSec).

Invariants: a package or service that could not be checked is reported in the tool's own words and is no failure,
because the services are not reachable everywhere; a finding that `ALLOWED` does not name fails.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ALLOWED: dict[str, str] = {}
"""Allowed advisories by id (PYSEC-..., GHSA-..., RUSTSEC-...), with the reason why each does not affect us."""
LAST_WORDS = 400


def python_findings(report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the findings of pip-audit's JSON report as `id: package version`, and why it skipped packages."""
    findings, skipped = [], []
    for package in report["dependencies"]:
        if reason := package.get("skip_reason"):
            skipped.append(reason)
        findings += [f"{vuln['id']}: {package['name']} {package['version']}" for vuln in package.get("vulns", ())]
    return findings, skipped


def rust_findings(report: dict[str, Any]) -> list[str]:
    """Return the findings of cargo-audit's JSON report, including its warnings (unmaintained, yanked)."""
    entries = [*report["vulnerabilities"]["list"], *(one for many in report["warnings"].values() for one in many)]
    return [
        f"{(one.get('advisory') or {'id': one['kind']})['id']}: {one['package']['name']} {one['package']['version']}"
        for one in entries
    ]


def _run(*command: str) -> tuple[dict[str, Any] | None, str]:
    """Run a command; return the JSON that it prints (`None` if it prints none) and the end of its output."""
    beside = Path(sys.executable).parent / command[0]
    path = str(beside) if beside.exists() else shutil.which(command[0])
    if path is None:
        return None, f"{command[0]} is not installed"
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True, check=False, timeout=600)
        return json.loads(done.stdout), done.stderr[-LAST_WORDS:]
    except subprocess.TimeoutExpired:
        return None, "no response in 600 s"
    except ValueError:
        return None, (done.stderr or done.stdout).strip()[-LAST_WORDS:]


def audit(requirements: str) -> list[str]:
    """Return the findings of both tools, and print what could not be checked."""
    findings: list[str] = []
    quiet = ("--require-hashes", "--disable-pip", "--progress-spinner", "off", "--format", "json")
    report, words = _run("pip-audit", "--requirement", requirements, *quiet)
    if report is None:
        print(f"audit: not checked: pip-audit: {words}")
    else:
        findings, skipped = python_findings(report)
        asked = len(report["dependencies"]) - len(skipped)
        print(f"audit: Python: {asked} of {len(report['dependencies'])} packages checked, {len(findings)} findings")
        if skipped:
            print(f"audit: not checked: {skipped[0]}" + (f" (and {len(skipped) - 1} more)" if skipped[1:] else ""))
    report, words = _run("cargo", "audit", "--json")
    if report is None:
        print(f"audit: not checked: cargo audit (cargo install cargo-audit --locked): {words}")
    else:
        print(f"audit: Rust: {len(of_rust := rust_findings(report))} findings")
        findings += of_rust
    return findings


def main(requirements: str) -> int:
    findings = audit(requirements)
    for one in findings:
        reason = ALLOWED.get(one.partition(":")[0])
        print(
            f"audit: {one}: {'allowed: ' + reason if reason else 'FOUND: update it, or say in tools/audit.py why not'}"
        )
    return int(any(one.partition(":")[0] not in ALLOWED for one in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
