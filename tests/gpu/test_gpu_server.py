"""Real servers on the device, over sockets: chats as streams, a clean end; an error of the device ends all of it."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from minisgl.config import ConfigError
from minisgl.weights.sources import find_smollm2
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.gpu import DEVICE, REHEARSAL, WIDE, checkpoint
from tests.helpers.meaning import FRANCE

ENDS_WITHIN_S = 30.0
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
FLAGS = ("--device", DEVICE, "--num-pages", "400", "--max-running-requests", "8", "--max-prefill-length", "64")


def model(folder: Path) -> str:
    """Random weights, and a tokenizer whose tokens are the bytes."""
    bytes_of = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(bytes_of, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return str(checkpoint("qwen3-tied", folder, vocab_size=256, **WIDE)[0])


@contextmanager
def asked(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        yield connection.getresponse()
    finally:
        connection.close()


def chat(server: ServerProcess, number: int, **settings: Any) -> tuple[str, str, dict[str, Any]]:
    """Text, reason and usage of a streamed answer."""
    body = {
        "messages": [{"role": "user", "content": f"{'Tell me more. ' * (number % 4)}Number {number}?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": number,
        "max_tokens": 24,
        **settings,
    }
    text, reason, usage = "", "", {}
    with asked(server, "/v1/chat/completions", body) as answer:
        assert answer.status == 200, answer.read()
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        chunk = json.loads(line)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
    return text, reason, usage


@pytest.mark.parametrize("plane", ["python", "rust_hotpath"])
def test_chats_metrics_and_a_clean_end(plane: str, tmp_path: Path) -> None:
    with serving("--model", model(tmp_path), "--dtype", "bfloat16", "--cpu-backend", plane, *FLAGS) as server:
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda i: chat(server, i, temperature=0.9), range(24)))
        assert all(reason == "length" and usage["completion_tokens"] == 24 for _, reason, usage in answers)
        assert len({text for text, _, _ in answers}) > 12
        with asked(server, "/metrics") as answer:
            metrics = answer.read().decode()
        values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        assert float(values["minisgl:generated_tokens_total"]) == 24 * 24
        assert float(values["minisgl:cached_tokens_total"]) > 0
        assert f'cpu_backend="{plane}"' in metrics and f'device="{"cpu" if REHEARSAL else "cuda"}' in metrics
        with asked(server, "/health") as answer:
            assert answer.status == 200


SPOILED = '''
import importlib.util, sys

class Spoil:
    """Found by name instead of the engine's module, which it loads and changes."""

    def find_spec(self, name, path, target=None):
        if name != "minisgl.engine.torch_engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), spoil(module))
        return spec

def spoil(module):
    import torch
    hidden, calls = module.TorchEngine._hidden, []

    def spoiled(self, inputs, forward):
        found = hidden(self, inputs, forward)
        calls.append(len(calls))
        if len(calls) < 30:
            return found
        if not found.is_cuda:
            self._device.survives_errors = False  # as with a real one
            raise RuntimeError("CUDA error: device-side assert triggered")
        outside = torch.full((1,), 1_000_000, device=found.device)
        return found + torch.zeros(4, device=found.device, dtype=found.dtype)[outside]

    module.TorchEngine._hidden = spoiled

sys.meta_path.insert(0, Spoil())
'''


def test_an_error_of_the_device_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    """A kernel reads out of bounds in the middle of some answers: they end with an error or a broken stream, the server
    with its exit code, soon."""
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "sitecustomize.py").write_text(SPOILED)
    path = os.pathsep.join([str(changed), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ["--model", model(tmp_path), "--cuda-graph-max-bs", "0", *FLAGS]
    server = ServerProcess(arguments, {"PYTHONPATH": path})
    try:
        children = server.children()

        def ends(number: int) -> str:
            try:
                with asked(server, "/v1/completions", {"prompt": "a", "max_tokens": 200, "stream": True}) as answer:
                    return "" if answer.status != 200 else answer.read().decode()
            except (OSError, http.client.HTTPException) as error:
                return type(error).__name__

        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(ends, i) for i in range(4)]
            code = server.process.wait(ENDS_WITHIN_S)
            began = time.monotonic()
            texts = [one.result(ENDS_WITHIN_S) for one in waiting]
        assert code == 1, "\n".join(server.lines)
        assert time.monotonic() - began < ENDS_WITHIN_S
        assert not any('"finish_reason":"length"' in text for text in texts), "none had 200 tokens by then"
        server._reader.join(10)
        assert any("device-side assert" in line and "cannot go on" in line for line in server.lines) or any(
            "minisgl: " in line and "device-side assert" in line for line in server.lines
        ), "\n".join(server.lines)
        assert not any(child.is_running() for child in children)
        server.check_no_files()
    finally:
        server.kill()


def test_the_embedded_model_knows_paris() -> None:
    """Its weights (94 MiB) do not travel with the source: where the package is installed, real words show that the
    whole way is right."""
    try:
        find_smollm2()
    except ConfigError as error:
        pytest.skip(str(error))
    with serving("--model", "smollm2", *FLAGS) as server:
        for number in range(3):
            question = [{"role": "user", "content": FRANCE}]
            text, reason, _ = chat(server, number, messages=question, temperature=0, max_tokens=40)
            assert "Paris" in text and reason == "stop"
