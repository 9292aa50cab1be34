"""Flags about the model on real servers: --chat-template, --served-model-name, --generation-config, --max-model-len."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.helpers.e2e import serving
from tests.tokenizer.test_tokenizer import write_model

CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "vocab_size": 60,
    "eos_token_id": 59,
}


def test_chat_template_and_served_name_are_used() -> None:
    with serving("--engine", "echo", "--served-model-name", "parrot", "--chat-template", "{{ 'abc' }}") as server:
        body = {"model": "parrot", "messages": [{"role": "user", "content": "long" * 20}], "max_tokens": 1}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body).json()
        assert (answer["usage"]["prompt_tokens"], answer["model"]) == (3, "parrot")
        assert [one["id"] for one in httpx.get(server.url + "/v1/models").json()["data"]] == ["parrot"]


def test_models_sampling_defaults_and_context_length_are_used(tmp_path: Path) -> None:
    folder = write_model(tmp_path, config__json=CONFIG)
    generation = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    flags = ("--model", str(folder), "--load-format", "dummy", "--max-model-len", "64", "--chat-template", "{{ 'hi' }}")
    chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    with serving(*flags) as server:
        assert any("temperature 0.7, top_k 5, max_tokens 9" in line for line in server.lines), server.lines
        assert httpx.get(server.url + "/v1/models").json()["data"][0]["max_model_len"] == 64
        usage = httpx.post(server.url + "/v1/chat/completions", json=chat).json()["usage"]
        assert usage["completion_tokens"] == 9
    with serving(*flags, "--generation-config", "none") as server:
        assert not any("sampling defaults" in line for line in server.lines)
        usage = httpx.post(server.url + "/v1/chat/completions", json=chat).json()["usage"]
        assert usage["completion_tokens"] == 64 - usage["prompt_tokens"]
