"""Sessions of seven turns, with bodies as known agents send them (in words of our own), over templates of all kinds:
each turn is answered, finds nearly all of the turn before it in the prefix cache, and its stream gives what it says
whole.

The agents: Claude Code 2.1.197, Codex CLI 0.171.0, opencode 1.18.33 and Cline 3.0.65.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest

from minisgl.message import AddRequest
from minisgl.tokenizer import ChatTemplate, Tokenizer
from minisgl.tokenizer.echo import ECHO_BOS, ECHO_EOS, echo_json
from tests.helpers.chat_templates import SOURCES, TOKENS, real_sources
from tests.helpers.server import CONFIG, Frontend, frontend, prompt_text

Body = dict[str, Any]
NUM_TURNS = 7  # each remainder by 2 and 3, and what comes with every fourth turn twice
SHARE = 0.95
RULES = " ".join(f"Rule {i}: work carefully, and say what was done." for i in range(200))  # agents have more
TEMPLATES = {name: SOURCES[name] for name in ("strict", "turns", "open", "channels", "nine", "last")} | real_sources()
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def call(turn: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': f'make step{turn}'}})}</tool_call>"


@cache
def replies(source: str) -> dict[str, str]:
    """Return what the model says by the newest result that it sees: a thought now and then, a text, a call or two."""
    asked = ChatTemplate(source, TOKENS).render([{"role": "user", "content": "question"}])
    opens = "" if asked.rstrip().endswith("<think>") else "<think>\n"

    def says(turn: int) -> str:
        thought = f"{opens}Step {turn} comes next.\n</think>\n\n" if turn % 3 == 1 or not opens else ""
        text = f"Now to step {turn}.\n" if turn % 2 else ""
        return thought + text + call(turn) * (1 + turn % 2)

    found = {f"result of turn {turn};": says(turn + 1) for turn in reversed(range(1, NUM_TURNS))}
    return {**found, "begin the task": says(1)}


class Agent:
    """A program with its own form of bodies. It keeps what was said, and asks again with all of it."""

    path: str

    def first(self) -> Body:
        """Return the first body."""
        raise NotImplementedError

    def next(self, body: Body, answer: Body, turn: int) -> Body:
        """Return the body of the next turn: all of this one, the answer, and what came of it."""
        raise NotImplementedError

    def stream(self, url: str, body: Body) -> Body:
        """Return what a parser of the program's kind makes of the answer's events."""
        raise NotImplementedError

    def said(self, answer: Body) -> Any:
        """Return the blocks, items or message of an answer, without ids, which are new in each."""
        raise NotImplementedError


class ClaudeCode(Agent):
    path = "/v1/messages"

    def first(self) -> Body:
        lines = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch=1;"}]
        lines += [
            {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("You code.", RULES)
        ]
        reminder = "<system-reminder>\nToday is a working day.\n</system-reminder>"
        return {
            "model": "scripted",
            "max_tokens": 32000,
            "system": lines,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": text} for text in (reminder, "begin the task")]},
                {"role": "system", "content": "Tools that may be named: none."},
            ],
            "tools": [{"name": "shell", "description": "Run it.", "input_schema": SCHEMA}],
            "metadata": {"user_id": "user_1_session_1"},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "medium"},
        }

    def next(self, body: Body, answer: Body, turn: int) -> Body:
        results: list[Body] = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": text_of(turn)}]}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        more: list[Body] = []
        if turn % 2:
            results.append(
                {"type": "text", "text": "<system-reminder>\nThe list of tasks is empty.\n</system-reminder>"}
            )
        if turn % 4 == 2:
            more = [{"role": "system", "content": "A file was changed by its user."}]
        said = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
        system = [{**body["system"][0], "text": body["system"][0]["text"].replace("cch=1", f"cch={turn}")}]
        return {**body, "system": system + body["system"][1:], "messages": [*body["messages"], *said, *more]}

    def stream(self, url: str, body: Body) -> Body:
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with client.messages.stream(model="", max_tokens=1, messages=[], extra_body=body) as events:
            return events.get_final_message().to_dict()

    def said(self, answer: Body) -> Any:
        return answer["stop_reason"], [without_ids(block) for block in answer["content"]]


class Codex(Agent):
    path = "/v1/responses"

    def first(self) -> Body:
        def said(role: str, text: str) -> Body:
            return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

        return {
            "model": "scripted",
            "instructions": RULES,
            "input": [
                said("developer", "<permissions instructions>All is allowed.</permissions instructions>"),
                said("user", "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>"),
                said("user", "begin the task"),
            ],
            "tools": [
                {"type": "function", "name": "shell", "description": "", "strict": False, "parameters": SCHEMA},
                {"type": "custom", "name": "apply_patch", "description": "Changes files."},
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "session",
        }

    def next(self, body: Body, answer: Body, turn: int) -> Body:
        items = [{name: value for name, value in item.items() if name != "status"} for item in answer["output"]]
        items += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": text_of(turn)}
            for item in answer["output"]
            if item["type"] == "function_call"
        ]
        if turn % 4 == 2:
            text = "<model_switch>Be brief from here on.</model_switch>"
            content = [{"type": "input_text", "text": text}]
            items.append({"type": "message", "role": "developer", "content": content})
        return {**body, "input": [*body["input"], *items]}

    def stream(self, url: str, body: Body) -> Body:
        """The program keeps the items that are done; the client's parser keeps them as they grow."""
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        done: list[Body] = []
        with client.responses.stream(model="", input=[], extra_body=body) as events:
            for event in events:
                if event.type == "response.output_item.done":
                    done.append(event.item.to_dict())
                if event.type == "response.completed":
                    assert [without_ids(item.to_dict()) for item in event.response.output] == [*map(without_ids, done)]
        return {"status": "completed", "output": done}

    def said(self, answer: Body) -> Any:
        return answer["status"], [without_ids(item) for item in answer["output"]]


class OpenCode(Agent):
    path = "/v1/chat/completions"

    def first(self) -> Body:
        return {
            "model": "scripted",
            "max_tokens": 32000,
            "messages": [
                {"role": "system", "content": RULES},
                {"role": "system", "content": "Here is what surrounds you: a folder."},
                {"role": "user", "content": "begin the task"},
            ],
            "tools": [{"type": "function", "function": {"name": "shell", "description": "", "parameters": SCHEMA}}],
            "tool_choice": "auto",
        }

    def next(self, body: Body, answer: Body, turn: int) -> Body:
        message = answer["choices"][0]["message"]
        said = {"role": "assistant", "content": message["content"] or "", "tool_calls": message.get("tool_calls", [])}
        if message.get("reasoning_content"):
            said["reasoning_content"] = message["reasoning_content"]
        results: list[Body] = [
            {"role": "tool", "tool_call_id": one["id"], "content": text_of(turn)} for one in said["tool_calls"]
        ]
        return {**body, "messages": [*body["messages"], said, *results]}

    def stream(self, url: str, body: Body) -> Body:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with client.chat.completions.stream(model="", messages=[], extra_body=body) as events:
            return events.get_final_completion().to_dict()

    def said(self, answer: Body) -> Any:
        [choice] = answer["choices"]
        message = {name: choice["message"].get(name) or None for name in ("content", "reasoning_content")}
        calls = [without_ids(one) for one in choice["message"].get("tool_calls") or ()]
        return choice["finish_reason"], message, calls


class Cline(OpenCode):
    """Its texts are lists of parts, and a note on its surroundings follows the results, as a message of the user."""

    def first(self) -> Body:
        parts = [{"type": "text", "text": text} for text in ("<task>\nbegin the task\n</task>", "# Open files: none")]
        messages = [{"role": "system", "content": RULES}, {"role": "user", "content": parts}]
        return {**super().first(), "messages": messages, "temperature": 0}

    def next(self, body: Body, answer: Body, turn: int) -> Body:
        found = super().next(body, answer, turn)
        note = [{"type": "text", "text": f"# Surroundings of turn {turn}"}]
        return {
            **found,
            "messages": [*found["messages"], *([{"role": "user", "content": note}] if turn % 3 == 1 else [])],
        }


def without_ids(value: Any) -> Any:
    """Return a part of an answer without ids, and without what only clients add."""
    if isinstance(value, dict):
        names = value.keys() - {"id", "call_id", "index", "parsed", "parsed_arguments"}
        return {name: without_ids(value[name]) for name in sorted(names) if value[name] is not None}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def text_of(turn: int) -> str:
    return f"result of turn {turn}; exit code 0"


AGENTS: dict[str, Callable[[], Agent]] = {
    "claude-code": ClaudeCode,
    "codex": Codex,
    "opencode": OpenCode,
    "cline": Cline,
}


@pytest.fixture(scope="module", params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(front_end: str, template: str) -> Iterator[Frontend]:
    tokens = {"bos_token": ECHO_BOS, "eos_token": ECHO_EOS}
    tokenizer = Tokenizer.from_json(echo_json(), tokens, {"default": TEMPLATES[template]})
    config = msgspec.structs.replace(CONFIG, tool_call_parser="hermes", reasoning_parser="qwen3")
    with frontend(
        front_end=front_end,
        config=config,
        max_seq_len=1 << 16,
        tokenizer=tokenizer,
        replies=replies(TEMPLATES[template]),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Frontend) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


@pytest.mark.parametrize("name", AGENTS)
def test_a_session_is_answered_cached_and_streamed(
    client: httpx.Client, server: Frontend, template: str, name: str
) -> None:
    agent = AGENTS[name]()
    body, before = agent.first(), ""
    for turn in range(1, NUM_TURNS + 1):
        num_received = len(server.engine.received)
        response = client.post(agent.path, json=body)
        assert response.status_code == 200, (turn, response.text)
        assert f"make step{turn}" in response.text
        [asked] = [one for one in server.engine.received[num_received:] if isinstance(one, AddRequest)]
        prompt = prompt_text(asked)
        pairs = enumerate(zip(before, prompt, strict=False))
        num_same = next((at for at, (one, other) in pairs if one != other), len(before))
        share = 0.85 if "qwen" in template.lower() else SHARE  # a question ends what it shows of earlier thoughts
        assert num_same >= share * len(before), (turn, before[num_same : num_same + 200], prompt[num_same:][:200])
        before = prompt + said(replies(TEMPLATES[template]), prompt)
        streamed = agent.stream(server.url, body)
        assert agent.said(streamed) == agent.said(response.json()), turn
        body = agent.next(body, streamed, turn)


def said(by_pattern: dict[str, str], prompt: str) -> str:
    return next(text for pattern, text in by_pattern.items() if re.search(pattern, prompt))
