"""What the server says of itself to Ollama's clients, and what it refuses because it has one model."""

from __future__ import annotations

import json
import struct
from datetime import datetime
from pathlib import Path

import httpx
import msgspec
import pytest

from minisgl.config import ApiKey, EngineConfig
from minisgl.server.apis.ollama.body import OllamaModels, OllamaShown, OllamaVersion
from minisgl.server.apis.ollama.described import described, parameter_size
from minisgl.server.apis.ollama.models import REFUSED
from minisgl.weights.sources import find_smollm2
from tests.helpers.fill_in import with_markers
from tests.helpers.server import CONFIG, MAX_SEQ_LEN, MODEL, chat_body, frontend


def check_error(response: httpx.Response, status: int) -> str:
    """The message; the body has nothing else."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"] and isinstance(body["error"], str) and body["error"]
    return str(body["error"])


def test_the_one_model_is_listed_and_runs(http: httpx.Client) -> None:
    for path in ("/api/tags", "/api/ps"):
        found = http.get(path).json()
        OllamaModels.model_validate(found, strict=True)
        [model] = found["models"]
        assert model["name"] == model["model"] == MODEL and len(model["digest"]) == 64
        datetime.fromisoformat(model["modified_at"])
    assert model["context_length"] == MAX_SEQ_LEN and datetime.fromisoformat(model["expires_at"]).year == 9999
    version = http.get("/api/version").json()
    OllamaVersion.model_validate(version, strict=True)


def test_show_lists_capabilities(http: httpx.Client, front_end: str) -> None:
    for body in ({"model": MODEL}, {"name": f"{MODEL}:latest"}):
        found = http.post("/api/show", json=body).json()
        OllamaShown.model_validate(found, strict=True)
        assert found["model_info"]["unknown.context_length"] == MAX_SEQ_LEN
        assert "completion" in found["capabilities"] and "insert" not in found["capabilities"]
    assert "does not exist here" in check_error(http.post("/api/show", json={"name": "other"}), 404)
    config = msgspec.structs.replace(CONFIG, reasoning_parser="qwen3")
    with (
        frontend(front_end=front_end, config=config, tokenizer=with_markers(), engine="cpu") as running,
        running.http() as able,
    ):
        shown = able.post("/api/show", json={"model": MODEL}).json()["capabilities"]
    assert {"completion", "thinking", "insert", "embedding"} <= set(shown)


def test_files_tell_family_and_size(front_end: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    with frontend(front_end=front_end, model_dir=str(tmp_path)) as running, running.http() as http:
        [model] = http.get("/api/tags").json()["models"]
        assert (model["size"], model["details"]["family"], model["details"]["format"]) == (1000, "llama", "safetensors")
        info = http.post("/api/show", json={"model": MODEL}).json()["model_info"]
        assert info == {
            "general.architecture": "llama",
            "general.basename": MODEL,
            "llama.context_length": MAX_SEQ_LEN,
        }
    file = tmp_path / "m.gguf"
    file.write_bytes(b"y" * 10)
    config = msgspec.structs.replace(CONFIG, engine=EngineConfig(model=str(file)))
    with frontend(front_end=front_end, config=config) as running, running.http() as http:
        [model] = http.get("/api/tags").json()["models"]
        assert (model["name"], model["size"], model["details"]["format"]) == ("m", 10, "gguf")
    config = msgspec.structs.replace(CONFIG, engine=EngineConfig(model="smollm2"))
    with frontend(front_end=front_end, config=config) as running, running.http() as http:
        [model] = http.get("/api/tags").json()["models"]
        assert (model["size"], model["details"]["format"]) == (find_smollm2().stat().st_size, "gguf")
        assert (model["details"]["parameter_size"], model["details"]["family"]) == ("134.52M", "llama")
        info = http.post("/api/show", json={"model": "SmolLM2:Latest"}).json()["model_info"]
        assert (info["general.basename"], info["llama.embedding_length"], info["llama.block_count"]) == (
            "smollm2",
            576,
            30,
        )
        assert info["general.parameter_count"] == 134_515_008 and info["llama.context_length"] == MAX_SEQ_LEN
        assert not [key for key in info if "token" in key and isinstance(info[key], str) and len(info[key]) > 100]


CONFIG_JSON = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_config_and_safetensors_tell_what_the_model_is(tmp_path: Path, nested: bool, packed: bool) -> None:
    config = {"model_type": "qwen3", "text_config": CONFIG_JSON} if nested else {**CONFIG_JSON}
    if packed:
        config["quantization_config"] = {}
    files = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for file in files:
        header = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": [1000, 600]}}).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header)
    found = described(config, files, "mine")
    assert found["general.architecture"] == "qwen3" and found["general.basename"] == "mine"
    assert (found["qwen3.block_count"], found["qwen3.embedding_length"]) == (2, 8)
    assert (found["qwen3.attention.head_count"], found["qwen3.attention.head_count_kv"]) == (4, 2)
    assert found.get("general.parameter_count") == (None if packed else 1_200_000)
    assert parameter_size(found) == ("" if packed else "1.20M")


@pytest.mark.parametrize(
    ("count", "shown"), [(0, ""), (999, "999"), (5_000, "5K"), (134_515_008, "134.52M"), (8_030_261_248, "8.0B")]
)
def test_numbers_of_parameters_are_written_as_ollama_does(count: int, shown: str) -> None:
    assert parameter_size({"general.parameter_count": count} if count else {}) == shown


def test_model_name_is_case_insensitive(http: httpx.Client) -> None:
    for name in (MODEL.upper(), MODEL.title(), f"{MODEL.upper()}:LATEST"):
        assert http.post("/api/show", json={"model": name}).status_code == 200, name
        assert http.post("/api/chat", json={**chat_body("say:a"), "model": name, "stream": False}).status_code == 200


def test_model_name_may_have_the_latest_tag(http: httpx.Client) -> None:
    for path in ("/api/chat", "/v1/chat/completions"):
        body = {**chat_body("say:a"), "model": f"{MODEL}:latest", "stream": False}
        assert http.post(path, json=body).status_code == 200, path
    assert http.post("/api/chat", json={**chat_body("say:a"), "model": f"{MODEL}:7b"}).status_code == 404


@pytest.mark.parametrize("path", REFUSED)
def test_routes_for_other_models_are_501(http: httpx.Client, path: str) -> None:
    method, why = REFUSED[path]
    answer = http.request(method, path, json={"model": MODEL, "source": MODEL, "destination": "b"})
    assert why in check_error(answer, 501) and path in answer.text
    check_error(http.get(path), 405)


def test_unknown_route_is_404_in_ollama_shape(http: httpx.Client) -> None:
    check_error(http.get("/api/nothing"), 404)


def test_routes_without_key_return_401(front_end: str) -> None:
    config = msgspec.structs.replace(CONFIG, api_keys=(ApiKey(name="a", key="k"),))
    with frontend(front_end=front_end, config=config) as running, running.http() as http:
        for method, path in (("GET", "/api/tags"), ("GET", "/api/version"), ("POST", "/api/chat")):
            body = {"messages": [], "stream": False} if method == "POST" else None
            check_error(http.request(method, path, json=body), 401)
            key = {"authorization": "Bearer k"}
            assert http.request(method, path, json=body, headers=key).status_code == 200


def test_while_it_loads_errors_have_ollama_s_form(front_end: str) -> None:
    with frontend(front_end=front_end, ready=False) as running, running.http() as http:
        check_error(http.get("/api/tags"), 503)
