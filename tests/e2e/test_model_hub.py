"""Real servers whose model comes from a hub, a stand-in on loopback: fetched, served, served again without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.e2e import serving
from tests.helpers.gguf import write_gguf, written_model
from tests.helpers.model_hub import ModelHub, Repo, model_hub
from tests.helpers.models import save
from tests.helpers.seconds import WAIT_S

ASKED = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def answer(name: str, env: dict[str, str]) -> tuple[list[int], list[str]]:
    """Eight tokens, greedily, and what the server said."""
    with serving("--model", name, "--num-pages", "16", "--max-running-requests", "2", env=env) as server:
        answered: dict[str, Any] = httpx.post(server.url + "/v1/completions", json=ASKED | {"model": name}).json()
        return answered["choices"][0]["token_ids"], server.lines


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repo]:
    """One model as a file, in parts and as a folder."""
    base, model = tmp_path_factory.mktemp("models"), written_model("qwen3-tied")
    file = write_gguf(base / "tiny-F32.gguf", model, "qwen3")
    (base / "parts").mkdir()
    write_gguf(base / "parts" / "tiny-F32.gguf", model, "qwen3", tensors_a_part=12)
    folder = save(model, base / "folder", shards=True)
    from minisgl.weights.gguf_folder import gguf_folder

    texts = [one for one in gguf_folder(file).iterdir() if one.name.startswith("tokenizer")]
    return {
        "owner/tiny-GGUF": Repo({file.name: file.read_bytes(), "README.md": b"#"}),
        "owner/tiny-parts-GGUF": Repo({one.name: one.read_bytes() for one in (base / "parts").iterdir()}),
        "owner/tiny": Repo({one.name: one.read_bytes() for one in [*folder.iterdir(), *texts]}),
    }


def test_a_file_and_a_folder(models: dict[str, Repo], tmp_path: Path) -> None:
    """The same tokens from all; then with the hub gone, from the cache."""
    with model_hub() as hub:
        hub.repos = models
        env = hub.environment(tmp_path)
        tokens, lines = answer("owner/tiny-GGUF:F32", env)
        assert len(tokens) == 8 and any("downloading owner/tiny-GGUF" in line for line in lines), lines
        assert answer("owner/tiny", env)[0] == tokens
        assert answer("owner/tiny-parts-GGUF", env)[0] == tokens
        _check_second_start(hub, env, tokens)
    for name in models:
        again, lines = answer(name, env)
        assert again == tokens and any("using the cached" in line for line in lines), lines


def test_one_of_several_is_fetched_when_it_is_asked_for(models: dict[str, Repo], tmp_path: Path) -> None:
    name = "owner/tiny-parts-GGUF"
    with model_hub() as hub:
        hub.repos = models
        flags = ("--model", name, "--model", "owner/no-such", "--num-pages", "16", "--max-running-requests", "2")
        with serving(*flags, env=hub.environment(tmp_path)) as server:
            about = lambda: httpx.get(f"{server.url}/v1/models/{name}").json()  # noqa: E731
            assert about()["size"] is None and not hub.of_files()
            answered = httpx.post(server.url + "/v1/completions", json=ASKED | {"model": name}, timeout=WAIT_S)
            assert len(answered.json()["choices"][0]["token_ids"]) == 8
            size = sum(len(one) for one in models[name].files.values())
            assert about()["size"] == size and about()["state"] == "loaded"
            set_aside = httpx.get(f"{server.url}/health").json()["memory"]["set_aside"]
            assert set_aside == size + (512 + 160) * 2**20  # and not all that there is
            refused = httpx.post(
                server.url + "/v1/completions", json=ASKED | {"model": "owner/no-such"}, timeout=WAIT_S
            )
            assert refused.status_code == 503 and "owner/no-such" in refused.json()["error"]["message"]


def _check_second_start(hub: ModelHub, env: dict[str, str], tokens: list[int]) -> None:
    hub.asked.clear()
    assert answer("owner/tiny-GGUF:F32", env)[0] == tokens and not hub.of_files()
