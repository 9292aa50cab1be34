"""Agents as their users start them, each in an environment of its own (`make client-test`): they read a file, change
it, run a command and end; those that show pictures look at one. What the model says is scripted; what the agents send,
and do with it, is theirs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest

from minisgl.message import AddRequest
from minisgl.server.core.generation import num_image_tokens
from tests.helpers.clients import CLIENTS, PYCACHE, environment, python_command
from tests.helpers.seconds import patiently
from tests.helpers.server import CONFIG, Frontend, prompt_text
from tests.helpers.sight import png, seeing_frontend

AGENT_S = patiently(120)  # a failure, not a measurement
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


def call(tool: str, **arguments: object) -> str:
    """As the model writes it."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def codex(url: str, folder: Path, task: str) -> list[str]:
    """With the configuration of docs/clients.md; its state lies in a folder of its own."""
    (folder.parent / "config.toml").write_text(CODEX.format(url=url))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-C", str(folder)]
    return [str(environment("codex") / "node_modules" / ".bin" / "codex"), "exec", *options, task]


def opencode(url: str, folder: Path, task: str) -> list[str]:
    """The same, over chats; what it may do unasked stands in its configuration, too."""
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "none"}}
    model = {"modalities": {"input": ["text", "image"], "output": ["text"]}}
    config = {"provider": {"minisgl": {**provider, "models": {"scripted": model}}}, "permission": {"bash": "allow"}}
    (folder.parent / "opencode.json").write_text(json.dumps(config))
    command = str(environment("opencode") / "node_modules" / ".bin" / "opencode")
    return [command, "run", "--model", "minisgl/scripted", task]


def cline(url: str, folder: Path, task: str) -> list[str]:
    """The same; it is told once where its provider is."""
    command = str(environment("cline") / "node_modules" / ".bin" / "cline")
    auth = ["auth", "-p", "openai-compatible", "-k", "none", "-m", "scripted", "-b", f"{url}/v1"]
    subprocess.run([command, *auth], env=env_of(url, folder), check=True, capture_output=True, timeout=AGENT_S)
    return [command, "-P", "openai-compatible", "-m", "scripted", "-c", str(folder), task]


def claude_code(url: str, folder: Path, task: str) -> list[str]:
    """Over messages. Its own program of this machine's kind: the package's script may not have been run."""
    [command, *_] = (environment("claude-code") / "node_modules" / "@anthropic-ai").glob("claude-code-*/claude")
    return [str(command), "--model", "scripted", "--allowedTools", "Bash,Read,Edit", "-p", task]


LLM_MODEL = """
- model_id: scripted
  model_name: scripted
  api_base: "{url}/v1"
  supports_tools: true
"""
LLM_TOOL = """
import subprocess

def run(command: str) -> str:
    "Run a command in the folder."
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    return done.stdout + done.stderr
"""


def llm(url: str, folder: Path, task: str) -> list[str]:
    """With a function of the command line as its tool."""
    (folder.parent / "extra-openai-models.yaml").write_text(LLM_MODEL.format(url=url))
    return [str(environment("llm") / "bin" / "llm"), "-m", "scripted", "--key", "none", "--functions", LLM_TOOL, task]


def program(name: str, place: str) -> Callable[[str, Path, str], list[str]]:
    """One of ours that makes an agent of a package's parts. `place`: its environment."""

    def start(url: str, folder: Path, task: str) -> list[str]:
        return [*python_command(place), str(CLIENTS / "programs" / f"agent_{name}.py"), str(folder), task]

    return start


def aider(url: str, folder: Path, task: str) -> list[str]:
    """It has no tools: blocks of changes, which it makes, and a command of its own, whose failure it tells."""
    at = ["--model", "openai/scripted", "--openai-api-base", f"{url}/v1", "--openai-api-key", "none"]
    quiet = ["--no-git", "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--yes-always"]
    tests = ["--auto-test", "--test-cmd", f"{RUN}; grep four notes.txt", "--edit-format", "diff"]
    return [str(environment("aider") / "bin" / "aider"), *at, *quiet, *tests, "--message", task, "notes.txt"]


def block(old: str, new: str) -> str:
    """A change as aider's models write it."""
    return f"notes.txt\n```\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n"


def env_of(url: str, folder: Path) -> dict[str, str]:
    """All that an agent keeps lies beside its folder."""
    homes = ("HOME", "CODEX_HOME", "LLM_USER_PATH", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")
    home = dict.fromkeys(homes, str(folder.parent))
    home |= {"PWD": str(folder), "MINISGL_URL": url, "OPENCODE_CONFIG": str(folder.parent / "opencode.json")}
    home |= {"CLINE_SESSION_BACKEND_MODE": "local", "PYTHONPYCACHEPREFIX": PYCACHE}  # no process outlives the first
    home |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "CLAUDE_CONFIG_DIR": str(folder.parent)}
    home |= {"ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return env | home


LAST_WORDS = "The file has two words."


@dataclass(frozen=True)
class Agent:
    start: Callable[[str, Path, str], list[str]]
    tool: str = "run"
    argument: str = "command"
    are_many: bool = False  # commands, in a list
    more: Mapping[str, object] = field(default_factory=dict)  # of each call
    last: str = LAST_WORDS  # what the model says at the end
    says: Mapping[str, str] = field(default_factory=dict)  # without tools, by what it has seen last


AGENTS = {
    "codex": Agent(codex, "exec_command", "cmd"),
    "opencode": Agent(opencode, "bash", more={"description": "Does it."}),
    "claude-code": Agent(
        claude_code,
        says={
            ".*2 notes.txt": LAST_WORDS,
            ".*has been updated": call("Bash", command=RUN, description="Counts the words."),
            ".*three apples": call("Edit", file_path="notes.txt", old_string="three", new_string="four"),
            "": call("Read", file_path="notes.txt"),
        },
    ),
    "cline": Agent(cline, "run_commands", "commands", are_many=True),
    "llm": Agent(llm),
    "aider": Agent(
        aider,
        says={
            ".*2 notes.txt": LAST_WORDS + "\n\n" + block("five apples", "four apples"),
            "": block("three apples", "five apples"),
        },
    ),
    "goose": Agent(program("goose", "goose")),
    "openai-agents": Agent(program("openai_agents", "openai-agents")),
    "langgraph": Agent(program("langgraph", "langchain")),
    "llama-index": Agent(program("llama_index", "llama-index")),
    "pydantic-ai": Agent(program("pydantic_ai", "pydantic-ai")),
    "smolagents": Agent(program("smolagents", "smolagents"), last=call("final_answer", answer=LAST_WORDS)),
}


def script(name: str, agent: Agent) -> dict[str, str]:
    """What the model says to it, by what it has seen last."""

    def runs(command: str) -> str:
        return call(agent.tool, **{agent.argument: [command] if agent.are_many else command}, **agent.more)

    task = f"task of {name}:"
    if agent.says:
        return {task + seen: said for seen, said in agent.says.items()}
    return {
        f"{task}.*2 notes.txt": agent.last,
        f"{task}.*changed it": runs(RUN),
        f"{task}.*three apples": runs(CHANGE),
        task: runs(READ),
    }


@pytest.fixture(scope="module")
def replies() -> dict[str, str]:
    return {seen: said for name, agent in AGENTS.items() for seen, said in script(name, agent).items()}


def work(name: str, frontend: Frontend, folder: Path, task: str) -> tuple[str, list[AddRequest]]:
    """Run an agent in a folder until it ends. Returns what it printed and the requests that it sent."""
    before = len(frontend.engine.received)
    done = subprocess.run(
        AGENTS[name].start(frontend.url, folder, task),
        env=env_of(frontend.url, folder),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=AGENT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout, [one for one in frontend.engine.received[before:] if isinstance(one, AddRequest)]


@pytest.mark.timeout(2 * AGENT_S)
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_ends_its_task(scripted: Frontend, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text("three apples\n")
    task = f"This is the task of {name}: correct the notes, then count their words."
    printed, asked = work(name, scripted, folder, task)
    assert LAST_WORDS in printed
    assert (folder / "notes.txt").read_text() == "four apples\n"
    if not AGENTS[name].says:
        assert len(asked) >= 4 and f'"name": "{AGENTS[name].tool}"' in prompt_text(asked[-1])


LOOKS = {
    "codex": call("view_image", path="screen.png"),
    "opencode": call("read", filePath="screen.png"),
    "claude-code": call("Read", file_path="screen.png"),
}
"""Calls of tools that return a picture, by agent."""


@pytest.fixture(scope="module")
def seeing(front_end: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """A server like `scripted`, whose model sees."""
    replies = {f"task of {name}:.*<tool>": LAST_WORDS for name in LOOKS}
    replies |= {f"task of {name}:": said for name, said in LOOKS.items()}
    config = msgspec.structs.replace(CONFIG, tool_call_parser="hermes")
    folder = tmp_path_factory.mktemp("seer")
    with seeing_frontend(folder, front_end=front_end, config=config, max_seq_len=1 << 16, replies=replies) as running:
        yield running


@pytest.mark.timeout(2 * AGENT_S)
@pytest.mark.parametrize("name", LOOKS)
def test_an_agent_s_tool_shows_a_picture_to_a_model_that_sees(seeing: Frontend, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "screen.png").write_bytes(png(160, 120))
    printed, asked = work(name, seeing, folder, f"This is the task of {name}: look at the screen.")
    assert LAST_WORDS in printed
    assert num_image_tokens(np.frombuffer(asked[-1].tokens, np.int32)) == 20 * 15
