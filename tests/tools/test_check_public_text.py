"""The check of public text finds what it must, and nothing in what is tracked."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

import pytest

from tools.check_public_text import PATTERNS, UNCLEAR, findings, main

# joined here, so that the check does not find its own samples
BAD = [
    ("home path", "/" + "home/someone/x"),
    ("home path", "in /" + "Users/someone"),
    ("home path", 'open("/' + 'root/.ssh/id")'),
    ("work path", "see /" + "work/main"),
    ("work path", "see /" + "workspace/main"),
    ("windows home path", "C:" + "\\Users\\me"),
    ("private key", "-----BEGIN " + "RSA PRIVATE KEY-----"),
    ("private key", "-----BEGIN " + "OPENSSH PRIVATE KEY-----"),
    ("private key", "-----BEGIN " + "PRIVATE KEY-----"),
    ("access key", "gh" + "p_" + "a" * 36),
    ("access key", "github" + "_pat_" + "a1" * 20),
    ("access key", "key = AK" + "IA" + "ABCDEFGH12345678"),
    ("access key", "h" + "f_" + "aB1" * 11),
    ("access key", "sk" + "-" + "aB1" * 11),
    ("user at host", "me@" + "box" + ".internal"),
    ("user at host", "me@" + "ip-" + "10"),
    ("internal host", "http://ci." + "corp/job"),
    ("internal host", "db1." + "lan:5432"),
    ("private address", "10" + ".1.2.3"),
    ("private address", "http://192" + ".168.0.7:1919"),
    ("private address", "172" + ".20.0.1"),
    ("private address", "169" + ".254.169.254"),
    ("package registry", "https://" + "pypi" + ".org/simple"),
    ("package registry", "https://mirror.example/artifact" + "ory/api"),
    ("package registry", "see pypi" + ".org"),
    ("package registry", "index" + ".crates.io"),
    ("package registry", "pip install --index" + "-url x"),
    ("folder beside the checkout", "../share" + "d/data"),
    ("issue of no tracker", "the bars of iss" + "ue 5, section 5"),
    ("issue of no tracker", "Iss" + "ues 7 and 8"),
    ("issue of no tracker", "iss" + "ue #12"),
    ("issue of no tracker", "what the iss" + "ues ask for"),
    ("machine on loan", "a machine that is len" + "t for half an hour"),
    ("machine on loan", "a len" + "t GPU"),
]
GOOD = [
    "http://127.0.0.1:1919",
    "http://localhost:1919",
    "../docs/benchmarking.md",
    "../shared_memory.py",
    "an issue of 2019, the issue tracker, tissue 5",
    "https://github.com/owner/repository/issues/5",
    "silent machines; a length of 5",
    "a 10.5 s run",
    "v1.2.3.4",
    "172.15.0.1 and 172.32.0.1 are public",
    "the root/ folder, homework/main, my/work/dir",
    "import torch._inductor.internal()",
    "mail@example.com",
    'source = "registry+https://github.com/rust-lang/crates' + '.io-index"',
    "https://huggingface.co/Qwen/Qwen3-0.6B",
    "sk-learn, hf_hub, ghp_short",
    "pip install torch --index" + "-url https://download.pytorch.org/whl/cpu",
]


@pytest.mark.parametrize(("kind", "text"), BAD)
def test_finds(kind: str, text: str) -> None:
    assert kind in {found for _, found, _ in findings(text)}


def test_every_kind_has_a_sample() -> None:
    assert {kind for kind, _ in BAD} == set(PATTERNS) | set(UNCLEAR)


@pytest.mark.parametrize("text", GOOD)
def test_leaves_alone(text: str) -> None:
    assert list(findings(text)) == []


def test_records_stay_as_they_were_written() -> None:
    text = "iss" + "ue 5, ../share" + "d/data"
    assert len(list(findings(text, name="worklog/2026-01-01-x.md"))) == 2
    assert list(findings(text, name="benchmark/runs/2026-01-01-x/README.md")) == []
    assert list(findings("../share" + "d/data", name=".ci/run")) == []


def test_a_lock_names_the_public_registry_and_no_other() -> None:
    registry, package = "https://py" + "pi.org/simple", "https://files.python" + "hosted.org/packages/a/b.whl"
    good = f'source = {{ registry = "{registry}" }}\n{{ url = "{package}", size = 1 }}'
    assert list(findings(good, name="uv.lock")) == []
    assert list(findings(good, name="pyproject.toml")) != []
    for other in (
        "https://mirror.example/packages/b.whl",
        "file:///wheels/b.whl",
        registry + ".example",
        "git+ssh://x/y",
    ):
        assert [kind for _, kind, _ in findings(f'{{ url = "{other}" }}', name="uv.lock")] == ["package registry"]


def test_says_the_line() -> None:
    assert [number for number, _, _ in findings("fine\n/" + "home/someone\nfine")] == [2]


@pytest.mark.parametrize(
    ("host", "is_found"), [("gpu-box7", True), ("runner", False), ("", False), ("localhost", False)]
)
def test_the_name_of_this_machine_is_found_if_it_is_a_name(host: str, is_found: bool) -> None:
    assert bool(list(findings(f'{{"node": "{host}"}}', host))) == is_found


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def track(repository: Path, name: str, content: bytes) -> None:
    (repository / name).write_bytes(content)
    subprocess.run(["git", "add", "-f", name], cwd=repository, check=True)


def test_a_planted_file_fails_the_check(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    track(repository, "fine.md", b"http://127.0.0.1:1919\n")
    track(repository, "picture.png", b"\x89PNG\xff\xfe")
    assert main(repository) == 0
    track(repository, "bad.md", b"one\n/" + b"home/someone\n")
    assert main(repository) == 1
    assert capsys.readouterr().out.startswith("bad.md:2: home path")


def test_a_compressed_file_is_read(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    track(repository, "broken.gz", b"no gzip")
    track(repository, "raw.json.gz", gzip.compress(b"one\n/" + b"home/someone\n"))
    assert main(repository) == 1
    assert capsys.readouterr().out == "raw.json.gz:2: home path: /" + "home/someone\n"


def test_what_is_not_tracked_is_not_read(repository: Path) -> None:
    (repository / "bad.md").write_text("/" + "home/someone")
    assert main(repository) == 0


def test_this_repository_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out
