"""Files from a hub, which is a stand-in on loopback: what is asked, what is kept, what is said when it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl.config import ConfigError, ModelSource
from minisgl.weights import hub as client
from minisgl.weights.hub_names import INDEX, HubRequest
from minisgl.weights.sources import find_model
from tests.helpers.forking import Minisgl, run
from tests.helpers.model_hub import COMMIT, ModelHub, Repo, model_hub, sha256
from tests.helpers.seconds import WAIT_S

REPO, GATED, FOLDER, SPLIT = "someone/some-GGUF", "someone/gated-GGUF", "someone/folder", "someone/split-GGUF"
SMALL, LARGE = b"GGUF" + bytes(range(200)), b"GGUF" + os.urandom(3_000_000)
TOWER = b"GGUF a tower"
WEIGHTS = {f"model-0000{i}-of-00002.safetensors": os.urandom(1000 + i) for i in (1, 2)}
INDEXED = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'


def quiet(text: str, done: int = 0, total: int = 0) -> None:
    pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    with model_hub() as found:
        found.repos = {
            REPO: Repo(
                {"README.md": b"#", "some-Q4_K_M.gguf": LARGE, "some-Q8_0.gguf": SMALL, "mmproj-F16.gguf": TOWER}
            ),
            GATED: Repo({"some-Q4_0.gguf": SMALL}, gated=True),
            SPLIT: Repo({f"Q4_0/x-Q4_0-0000{i}-of-00003.gguf": SMALL + bytes([i]) for i in (1, 2, 3)}),
            FOLDER: Repo(
                {
                    "config.json": b"{}",
                    INDEX: INDEXED,
                    "onnx/config.json": b"",
                    "consolidated.safetensors": b"",
                    **WEIGHTS,
                }
            ),
        }
        for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", "MODELSCOPE", "TRANSF"))]:
            monkeypatch.delenv(name)
        for name, value in found.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(client, "FIRST_WAIT_S", 0.0)
        yield found


def test_a_file_by_its_quantization(hub: ModelHub, tmp_path: Path) -> None:
    """In huggingface_hub's layout; the second time only the commit is asked for."""
    said: list[str] = []
    found = find_model(f"{REPO}:q4_k_m", lambda text, done=0, total=0: said.append(text))
    cache = tmp_path / "home" / "hub" / "models--someone--some-GGUF"
    assert found == cache / "snapshots" / COMMIT / "some-Q4_K_M.gguf" and found.read_bytes() == LARGE
    assert found.resolve() == cache / "blobs" / sha256(LARGE)
    assert (cache / "refs" / "main").read_text() == COMMIT
    assert [one.name for one in (cache / "blobs").iterdir()] == [sha256(LARGE)]
    assert any(line.startswith(f"downloading {REPO} (3.0 MB)") for line in said)
    hub.asked.clear()
    assert find_model(f"{REPO}:Q4_K_M", quiet) == found
    assert [one.path for one in hub.asked] == [f"/api/models/{REPO}/revision/main"]


def test_the_tower_of_a_model_is_fetched_with_it(hub: ModelHub) -> None:
    """Also if only the model is in the cache. Without a tower, and without the hub, the cache serves."""
    name = f"{REPO}:Q8_0"
    found = find_model(name, quiet)
    hub.asked.clear()
    said: list[str] = []
    assert find_model(name, lambda text, done=0, total=0: said.append(text), mmproj=True) == found
    assert f"{REPO}: some-Q8_0.gguf, mmproj-F16.gguf" in said
    assert (found.parent / "mmproj-F16.gguf").read_bytes() == TOWER and len(hub.of_files()) == 1
    hub.asked.clear()
    assert find_model(name, quiet, mmproj=True) == found and not hub.of_files()
    assert find_model(f"{SPLIT}:Q4_0", quiet, mmproj=True).name == "x-Q4_0-00001-of-00003.gguf"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (REPO, "some-Q4_K_M.gguf"),
        (f"{REPO}/some-Q8_0.gguf", "some-Q8_0.gguf"),
        ("HOST/someone/some-GGUF/resolve/main/some-Q8_0.gguf", "some-Q8_0.gguf"),
        (f"{SPLIT}:Q4_0", "Q4_0/x-Q4_0-00001-of-00003.gguf"),
        (f"{SPLIT}/Q4_0/x-Q4_0-00002-of-00003.gguf", "Q4_0/x-Q4_0-00001-of-00003.gguf"),
    ],
)
@pytest.mark.parametrize("source", ["huggingface", "modelscope"])
def test_file_can_be_named_by_path_or_address(hub: ModelHub, name: str, file: str, source: ModelSource) -> None:
    name = name.replace("HOST", "https://huggingface.co" if source == "huggingface" else "https://modelscope.cn/models")
    found = find_model(name, quiet, source=source)
    assert found.as_posix().endswith(file)
    repo = SPLIT if "split" in name else REPO
    parts = [one for one in hub.repos[repo].files if one.startswith("Q4_0/")] or [file]
    snapshot = next(one for one in found.parents if one.parent.name == "snapshots")
    assert {part: (snapshot / part).read_bytes() for part in parts} == {
        one: hub.repos[repo].files[one] for one in parts
    }


@pytest.mark.parametrize("source", ["huggingface", "modelscope"])
def test_folder_of_safetensors_is_fetched(hub: ModelHub, source: ModelSource) -> None:
    found = find_model(FOLDER, quiet, source=source)
    assert {one.name: one.read_bytes() for one in found.iterdir()} == {"config.json": b"{}", INDEX: INDEXED, **WEIGHTS}
    hub.asked.clear()
    assert find_model(FOLDER, quiet, source=source) == found and not hub.of_files()


def test_dummy_weights_need_no_weights(hub: ModelHub) -> None:
    assert {one.name for one in find_model(FOLDER, quiet, load_format="dummy").iterdir()} == {"config.json", INDEX}
    assert not hub.of_files()


def test_a_token_is_shown_to_the_hub_alone(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "member")
    assert find_model(GATED, quiet).read_bytes() == SMALL
    assert {one.token for one in hub.asked if one.port == "hub"} == {"Bearer member"}
    assert {one.token for one in hub.asked if one.port == "cdn"} == {None}


# token, what is asked for -> what is said, and what to do
REFUSED = [
    (None, GATED, r"is gated on Hugging Face and HF_TOKEN is not set \(401\), .*accept its terms at http.*gated-GGUF"),
    ("other", GATED, r"the account of HF_TOKEN has no access \(403\), .*accept its terms"),
    ("wrong", REPO, r"does not let HF_TOKEN read someone/some-GGUF \(401\), .*check the token"),
    (None, "someone/nothing", r"is not on Hugging Face, or is private \(401\): check the spelling, or set HF_TOKEN"),
    ("other", "someone/nothing", r"not on Hugging Face \(404\): check the spelling, or try another hub .*modelscope"),
    (None, f"{REPO}:Q2_K", "has no GGUF file in Q2_K: there are Q4_K_M, Q8_0"),
    (None, f"{REPO}/other.gguf", r"has no file other.gguf: there are some-Q4_K_M.gguf, some-Q8_0.gguf"),
]


@pytest.mark.parametrize(("token", "name", "said"), REFUSED)
def test_hub_error_statuses_say_what_to_do(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch, token: str | None, name: str, said: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=rf"^--model {name}: .*{said}"):
        find_model(name, quiet)


def test_incomplete_repositories_and_rate_limits_are_errors(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"has no revision v7 \(404\)"):
        find_model(REPO, quiet, revision="v7")
    hub.repos[SPLIT].files.pop("Q4_0/x-Q4_0-00002-of-00003.gguf")
    with pytest.raises(ConfigError, match=r"1 of 3 parts are missing: Q4_0/x-Q4_0-00002-of-00003.gguf"):
        find_model(SPLIT, quiet)
    hub.repos["a/b"] = Repo({"pytorch_model.bin": b"", "config.json": b"{}"})
    with pytest.raises(ConfigError, match="a/b: has neither safetensors nor GGUF files"):
        find_model("a/b", quiet)
    hub.limits.append("600")
    with pytest.raises(ConfigError, match=r"takes no more requests for 600 s \(429\).*wait, or set HF_TOKEN"):
        find_model(REPO, quiet)
    hub.failures.extend([503] * client.TRIES)
    with pytest.raises(ConfigError, match=r"503 Service Unavailable.* is not in the cache: check the network"):
        find_model(REPO, quiet)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        ConfigError, match=r"cannot be reached \(.*refused.*try another hub \(--model-source modelscope\)"
    ):
        find_model(REPO, quiet, source="huggingface")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set, and someone/some-GGUF is not in the cache: unset it"):
        find_model(REPO, quiet)


@pytest.mark.parametrize("error", [httpx.TooManyRedirects("round"), httpx.DecodingError("bad"), KeyError("x")])
def test_a_download_that_breaks_in_any_way_is_none(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A worker that ended in silence left links that lead nowhere, and the cache had the model."""

    def breaks(*_: object) -> None:
        raise error

    monkeypatch.setattr(client.Hub, "file_address", breaks)
    with pytest.raises(ConfigError, match=f"the download broke: {type(error).__name__}"):
        find_model(REPO, quiet)
    assert not [one for one in (tmp_path / "home").rglob("*") if one.is_symlink()]


def test_temporary_errors_are_retried(hub: ModelHub) -> None:
    hub.limits.extend(["0", "0"])
    hub.failures.extend([500, 503])
    hub.cuts.extend([1000, 1, 200_000])
    assert find_model(REPO, quiet).read_bytes() == LARGE
    assert [one.range for one in hub.of_files()] == [
        None, *(f"bytes={at}-{len(LARGE) - 1}" for at in (1000, 1001, 201_001))
    ]  # fmt: skip


def test_segments_side_by_side(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a server that takes no ranges."""
    monkeypatch.setattr(client, "SEGMENT", 700_000)
    hub.takes_ranges = False
    assert find_model(REPO, quiet).read_bytes() == LARGE
    assert len({one.range for one in hub.of_files()}) == 5


def test_interrupted_download_resumes(hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another version is in the cache: that is not what was asked for."""
    hub.cuts.extend([1_000_000, *[0] * client.TRIES])
    with pytest.raises(ConfigError, match=r"broke 5 times .* 1.0 of 3.0 MB are kept, and the same command continues"):
        find_model(REPO, quiet)
    hub.cuts.clear()
    hub.asked.clear()
    assert find_model(REPO, quiet).read_bytes() == LARGE
    assert [one.range for one in hub.of_files()] == [f"bytes=1000000-{len(LARGE) - 1}"]
    assert [one.name for one in (tmp_path / "home/hub/models--someone--some-GGUF/blobs").iterdir()] == [sha256(LARGE)]


def test_killed_download_resumes(hub: ModelHub, tmp_path: Path) -> None:
    hub.stall_at = 1_500_000
    command = [sys.executable, "-m", "minisgl", "pull", REPO]
    with Minisgl(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert hub.stalled.wait(WAIT_S)
        notes = tmp_path / "home/hub/models--someone--some-GGUF/blobs" / f"{sha256(LARGE)}.minisgl.progress"
        while not notes.exists() or int.from_bytes(notes.read_bytes(), "little") < hub.stall_at:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    hub.stall_at = None
    hub.asked.clear()
    done = run(command)
    assert Path(done.stdout.strip()).read_bytes() == LARGE
    assert [one.range for one in hub.of_files() if "Q4_K_M" in one.path] == [f"bytes=1500000-{len(LARGE) - 1}"]
    assert "1.5 of 3.0 MB are already downloaded" in done.stderr


def test_two_processes_fetch_once(hub: ModelHub) -> None:
    command = [sys.executable, "-m", "minisgl", "pull", REPO]
    both = [Minisgl(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    ended = [(one.communicate()[1].decode(), one.returncode) for one in both]
    assert [code for _, code in ended] == [0, 0], ended
    files = sorted(one.path.rpartition("|")[2] for one in hub.of_files())
    assert files == ["mmproj-F16.gguf", "some-Q4_K_M.gguf"]


def test_a_wrong_hash_is_no_model(hub: ModelHub, tmp_path: Path) -> None:
    hub.wrong = "some-Q8_0.gguf"
    with pytest.raises(
        ConfigError, match=r"some-Q8_0.gguf arrived with another hash than the hub lists, and was removed"
    ):
        find_model(f"{REPO}:Q8_0", quiet)
    assert not any((tmp_path / "home/hub/models--someone--some-GGUF/blobs").iterdir())
    hub.wrong = ""
    assert find_model(f"{REPO}:Q8_0", quiet).read_bytes() == SMALL


def test_full_disk_is_an_error_that_keeps_received_bytes(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed before; or in the middle, where what arrived is kept."""
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(9_000_000, 0, 1_000_000))
        with pytest.raises(ConfigError, match=r"0.00 GB have to be fetched, and 0.00 GB are free in .*: remove models"):
            find_model(REPO, quiet)
    assert not hub.of_files()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ConfigError, match=r"the disk of .* is full: remove models .*HF_HOME"):
            find_model(REPO, quiet)
    assert find_model(REPO, quiet).read_bytes() == LARGE


@pytest.mark.parametrize("name", [f"{REPO}:Q8_0", SPLIT, FOLDER])
@pytest.mark.parametrize("offline", [True, False], ids=["offline", "no network"])
def test_cached_model_is_used_without_a_hub(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch, name: str, offline: bool
) -> None:
    found = find_model(name, quiet)
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1") if offline else monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    said: list[str] = []
    assert find_model(name, lambda text, done=0, total=0: said.append(text)) == found
    assert not hub.asked and "using the cached" in said[-1]
    next(
        one for one in (found if found.is_dir() else found.parent).iterdir() if "0002" in one.name or one == found
    ).unlink()
    with pytest.raises(ConfigError, match="is not in the cache"):
        find_model(name, quiet, source="huggingface")


def test_a_hub_says_where_its_files_go(hub: ModelHub, tmp_path: Path) -> None:
    """It cannot write elsewhere, nor be something else than a hub."""
    hub.repos["a/b"] = Repo({"../../../evil.gguf": SMALL, "x/../y.gguf": SMALL, "good.gguf": SMALL})
    assert find_model("a/b", quiet).name == "good.gguf"
    assert not list(tmp_path.rglob("evil*"))
    hub.repos["a/c"] = Repo({"good.gguf": SMALL}, commit="../../x")
    with pytest.raises(ConfigError, match=f"{hub.endpoint} does not answer as Hugging Face does"):
        find_model("a/c", quiet)


def test_huggingface_hub_finds_what_was_fetched(hub: ModelHub, tmp_path: Path) -> None:
    """And what it fetched is found here."""
    import huggingface_hub

    cache = tmp_path / "home" / "hub"
    found = find_model(f"{REPO}:Q8_0", quiet)
    theirs = huggingface_hub.try_to_load_from_cache(REPO, "some-Q8_0.gguf", cache_dir=cache)
    assert theirs == str(found)
    (repo,) = huggingface_hub.scan_cache_dir(cache).repos
    assert (repo.repo_id, repo.nb_files, repo.size_on_disk) == (REPO, 1, len(SMALL))


def test_a_repository_is_asked_of_the_hub_that_was_named(hub: ModelHub) -> None:
    wanted = HubRequest("modelscope", REPO, quant="Q8_0")
    found = client.fetch(wanted, quiet)
    assert "modelscope" in found.as_posix() and found.read_bytes() == SMALL
    assert {one.path.split("?")[0] for one in hub.asked if one.port == "hub"} == {
        f"/api/v1/models/{REPO}/repo/files",
        f"/api/v1/models/{REPO}/repo",
    }
    hub.asked.clear()
    with pytest.raises(ConfigError, match=r"not on ModelScope.*MODELSCOPE_API_TOKEN"):
        find_model("someone/nothing", quiet, source="modelscope")


def test_a_proxy_in_between_is_said(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "")
    with pytest.raises(ConfigError, match="cannot be reached"):
        find_model(REPO, quiet)


MODELSCOPE = "/api/v1/models/"


@pytest.mark.parametrize("name", [f"{REPO}:Q8_0", FOLDER])
def test_modelscope_takes_over_where_hugging_face_does_not_answer(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is said in a line; the next start takes what is in the cache, also without any network."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    said: list[str] = []
    found = find_model(name, lambda text, done=0, total=0: said.append(text))
    assert "modelscope" in found.as_posix()
    assert re.match(r"Hugging Face cannot be reached .*: looking for someone/\S+ on ModelScope$", said[1])
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:1")
    assert find_model(name, quiet) == found
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_model(name, quiet) == found


def test_a_hub_that_does_not_answer_in_time_is_one_that_does_not_answer(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = httpx.Timeout
    monkeypatch.setattr(httpx, "Timeout", lambda *_, **__: times(0.05))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(client, "TRIES", 2)
        said: list[str] = []
        with contextlib.suppress(ConfigError):  # the stand-in may be late, too
            find_model(f"{REPO}:Q8_0", lambda text, done=0, total=0: said.append(text))
    assert "Hugging Face cannot be reached" in said[1] and said[1].endswith("on ModelScope")


@pytest.mark.parametrize("source", ["auto", "huggingface"])
def test_modelscope_is_not_asked_where_hugging_face_answers_or_was_named(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch, source: ModelSource
) -> None:
    for token, code in (None, 401), ("other", 404):
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(ConfigError, match=rf"is not on Hugging Face.* \({code}\)"):
            find_model("someone/nothing", quiet, source=source)
    hub.failures.extend([503] * client.TRIES)
    with pytest.raises(ConfigError, match="503 Service Unavailable"):
        find_model(REPO, quiet, source=source)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    for model, revision, hub_of in (
        (f"{REPO}:Q8_0", None, "huggingface"),
        (f"https://huggingface.co/{REPO}", None, source),
        (f"{REPO}:Q8_0", "v7", source),
    ):
        with pytest.raises(ConfigError, match=r"Hugging Face cannot be reached .* is not in the cache"):
            find_model(model, quiet, source=hub_of, revision=revision)  # type: ignore[arg-type]
    assert not [one for one in hub.asked if one.path.startswith(MODELSCOPE)]


def test_a_model_that_neither_hub_gives_names_both(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"reached .*, someone/nothing is not on ModelScope.* is not in the cache"):
        find_model("someone/nothing", quiet)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"Hugging Face cannot be reached .*, ModelScope cannot be reached"):
        find_model(REPO, quiet)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set, and someone/some-GGUF is not in the cache: unset it"):
        find_model(REPO, quiet)
