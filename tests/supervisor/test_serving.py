"""The start of a server: why it failed is not lost, whatever is heard first; and the command that it prints works."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.config import ConfigError, EngineConfig, ServerConfig
from minisgl.frontend.engine_client import EngineGone
from minisgl.runner.launch import LastWords
from minisgl.supervisor import serving

WHY = "engine 0: --model none: no such folder"


@pytest.mark.parametrize("first", ["the process", "its connection"])
@pytest.mark.parametrize(
    ("words", "said", "kind"),
    [(LastWords(WHY), WHY, EngineGone), (LastWords(WHY, True), WHY, ConfigError), (None, "engine", EngineGone)],
)
async def test_the_reason_of_an_engine_that_could_not_start(
    first: str, words: LastWords | None, said: str, kind: type[Exception]
) -> None:
    client: Any = SimpleNamespace(ready=asyncio.get_running_loop().create_future())
    client.fail = lambda text: client.ready.set_exception(EngineGone(text))
    if first == "its connection":
        client.fail("engine 0: the connection ended")
    process: Any = SimpleNamespace(last_words=words, wait=lambda: asyncio.sleep(0 if first == "the process" else 60))
    with pytest.raises(kind, match=said):
        await serving._until_ready(client, process, asyncio.Event())


@pytest.mark.parametrize(("chats", "route"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_the_command_to_try_is_one_that_works(monkeypatch: pytest.MonkeyPatch, chats: bool, route: str) -> None:
    said: list[str] = []
    monkeypatch.setattr(serving, "say", said.append)
    front_end: Any = SimpleNamespace(name="rust")
    ready: Any = SimpleNamespace(
        engine="cpu",
        kind="decoder",
        gives_scores=False,
        device="cpu",
        dtype="",
        engine_details="",
        cpu_backend="python",
        max_seq_len=9,
        num_pages=1,
        page_size=1,
        eos_ids=(2,),
    )
    config = ServerConfig(engine=EngineConfig(model="base"))
    serving._greet(config, front_end, "http://here", ready, 1.0, chats=chats)
    assert f"curl http://here{route} " in said[-1]
    assert any("--chat-template" in line for line in said) is not chats
