"""Agents as their users start them, each in an environment of its own (`make client-test`): they read a file, change
it, run a command and end. What the model says is scripted; what the agents send, and do with it, is theirs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.message import AddRequest
from tests.helpers.clients import CLIENTS, environment, python_command
from tests.helpers.server import Frontend, prompt_text

AGENT_S = 120  # a failure, not a measurement
READ = "cat notes.txt"
CHANGE = "sed s/three/four/ notes.txt > new.txt && mv new.txt notes.txt && echo changed it"
RUN = "wc -w notes.txt"
CODEX = """
model = "scripted"
model_provider = "minisgl"

[model_providers.minisgl]
name = "minisgl"
base_url = "{url}/v1"
wire_api = "responses"
"""


def codex(url: str, folder: Path, task: str) -> list[str]:
    """With the configuration of docs/clients.md; its state lies in a folder of its own."""
    (folder.parent / "config.toml").write_text(CODEX.format(url=url))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-C", str(folder)]
    return [str(environment("codex") / "node_modules" / ".bin" / "codex"), "exec", *options, task]


def opencode(url: str, folder: Path, task: str) -> list[str]:
    """The same, over chats; what it may do unasked stands in its configuration, too."""
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "none"}}
    config = {"provider": {"minisgl": {**provider, "models": {"scripted": {}}}}, "permission": {"bash": "allow"}}
    (folder.parent / "opencode.json").write_text(json.dumps(config))
    command = str(environment("opencode") / "node_modules" / ".bin" / "opencode")
    return [command, "run", "--model", "minisgl/scripted", task]


def openai_agents(url: str, folder: Path, task: str) -> list[str]:
    program = CLIENTS / "programs" / "agent_openai_agents.py"
    return [*python_command("openai-agents"), str(program), str(folder), task]


# how it is started, its tool and the tool's argument, and what else a call has
AGENTS: dict[str, tuple[Callable[[str, Path, str], list[str]], str, str, dict[str, str]]] = {
    "codex": (codex, "exec_command", "cmd", {}),
    "opencode": (opencode, "bash", "command", {"description": "Does it."}),
    "openai-agents": (openai_agents, "run", "command", {}),
}


def script(agent: str, tool: str, argument: str, more: dict[str, str]) -> dict[str, str]:
    """What the model says to it, by what it has seen last."""

    def call(command: str) -> str:
        return f"<tool_call>{json.dumps({'name': tool, 'arguments': {argument: command, **more}})}</tool_call>"

    task = f"task of {agent}:"
    return {
        f"{task}.*2 notes.txt": "The file has two words.",
        f"{task}.*changed it": call(RUN),
        f"{task}.*three apples": call(CHANGE),
        task: call(READ),
    }


@pytest.fixture(scope="module")
def replies() -> dict[str, str]:
    return {seen: said for agent, (_, *tool) in AGENTS.items() for seen, said in script(agent, *tool).items()}


@pytest.mark.timeout(2 * AGENT_S)
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_ends_its_task(scripted: Frontend, agent: str, tmp_path: Path) -> None:
    start, tool, *_ = AGENTS[agent]
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text("three apples\n")
    task = f"This is the task of {agent}: correct the notes, then count their words."
    command = start(scripted.url, folder, task)
    home = dict.fromkeys(("HOME", "CODEX_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"), str(tmp_path))
    home |= {"PWD": str(folder), "MINISGL_URL": scripted.url, "OPENCODE_CONFIG": str(tmp_path / "opencode.json")}
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    before = len(scripted.engine.received)
    done = subprocess.run(
        command,
        env=env | home,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=AGENT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "The file has two words." in done.stdout
    assert (folder / "notes.txt").read_text() == "four apples\n"
    asked = [one for one in scripted.engine.received[before:] if isinstance(one, AddRequest)]
    assert len(asked) >= 4 and f'"name": "{tool}"' in prompt_text(asked[-1])
