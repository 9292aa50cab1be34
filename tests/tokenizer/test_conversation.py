"""Conversations in any order and form that the APIs allow, and what templates of all kinds make of them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from minisgl.tokenizer import ChatTemplate, ChatTemplateError
from tests.helpers.chat_templates import OURS, TOKENS, TOOL, real_sources

Message = dict[str, Any]
REAL = {name: ChatTemplate(source, TOKENS) for name, source in real_sources().items()}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def calls(*names: str, text: str = "", arguments: Any = '{"a": 1}', **more: Any) -> Message:
    """The id of a call is the name of its function with `call_`."""
    made = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}} for name in names
    ]
    return {"role": "assistant", "content": text, "tool_calls": made, **more}


def result(name: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": text}


# ------------------------------------------------------------------------------------------------------ single cases

CASES: dict[str, tuple[str, list[Message], str]] = {
    "two leading system messages": (
        "strict",
        [system("a"), system("b"), user("q")],
        "[system]a\n\nb[user]q[assistant]",
    ),
    "system behind an answer": (
        "strict",
        [user("one"), says("two"), system("shortly"), user("three")],
        "[user]one[assistant]two[user]shortly[user]three[assistant]",
    ),
    "system behind a result": (
        "strict",
        [user("q"), calls("f"), result("f", "r"), system("s")],
        "[user]q[assistant]<call f><a>1</call>[result]r[user]s[assistant]",
    ),
    "as it came": (
        "open",
        [system("a"), system("b"), user("q"), says("x"), says("y"), system("c"), user("q"), user("p")],
        "<|system|>a<|system|>b<|user|>q<|assistant|>x<|assistant|>y<|system|>c<|user|>q<|user|>p<|assistant|>",
    ),
    "users in a row": ("turns", [user("a"), user("b")], "[user]a\n\nb[model]"),
    "answers in a row": ("turns", [user("a"), says("b"), says("c"), user("d")], "[user]a[model]b\n\nc[user]d[model]"),
    "answer first": ("turns", [says("a"), user("b")], "[user][model]a[user]b[model]"),
    "system behind a turn": ("turns", [user("a"), system("s")], "[user]a\n\ns[model]"),
    "system alone": ("turns", [system("s")], "[user]s[model]"),
    "system before an answer": ("turns", [system("s"), says("a"), user("b")], "[user]s[model]a[user]b[model]"),
    "no system role": ("bare", [system("s"), user("q")], "[user]s\n\nq[model]"),
    "no system role, two of them": ("bare", [system("s"), system("t"), user("q")], "[user]s\n\nt\n\nq[model]"),
    "no tools": (
        "turns",
        [user("q"), calls("f", text="look"), result("f", "r"), user("so?")],
        '[user]q[model]look\n{"name": "f", "arguments": {"a": 1}}[user]Result of the call: r\n\nso?[model]',
    ),
    "reasoning is thinking": (
        "channels",
        [user("q"), calls("f", reasoning_content="because"), result("f", "r")],
        '[user]q[analysis]because[to f]{"a": 1}[f]r[assistant]',
    ),
    "reasoning beside text": (
        "channels",
        [user("q"), calls("f", text="look", reasoning_content="because"), result("f", "r")],
        '[user]q[analysis]because\n\nlook[to f]{"a": 1}[f]r[assistant]',
    ),
    "calls at once": (
        "channels",
        [user("q"), calls("f", "g"), result("g", "2"), result("f", "1")],
        '[user]q[to f]{"a": 1}[f]1[to g]{"a": 1}[g]2[assistant]',
    ),
    "calls in messages in a row": (
        "channels",
        [user("q"), calls("f"), calls("g"), result("f", "1"), result("g", "2")],
        '[user]q[to f]{"a": 1}[f]1[to g]{"a": 1}[g]2[assistant]',
    ),
    "result behind a text": (
        "channels",
        [user("q"), calls("f"), says("wait"), result("f", "1")],
        '[user]q[analysis]wait[to f]{"a": 1}[f]1[assistant]',
    ),
    "result of no call": (
        "channels",
        [user("q"), result("f", "1")],
        "[user]q[user]Result of the call: 1[assistant]",
    ),
    "system left out": ("channels", [user("q"), system("s"), user("p")], "[user]q[user]s[user]p[assistant]"),
    "nine letters, and a user behind a result": (
        "nine",
        [user("q"), calls("f"), result("f", "1"), user("p")],
        '[INST]q[/INST][CALLS]{"name": "f", "arguments": {"a": 1}} b8936a705[RESULT]1</s>[INST]p[/INST]',
    ),
    "text beside a call": (
        "nine",
        [user("q"), calls("f", text="look"), result("f", "1"), says("x"), user("p")],
        '[INST]q[/INST]look</s>[INST][/INST][CALLS]{"name": "f", "arguments": {"a": 1}} b8936a705[RESULT]1x</s>'
        "[INST]p[/INST]",
    ),
    "system with the last question alone, behind an answer": (
        "last",
        [system("s"), user("q"), says("a")],
        "[INST]s\n\nq[/INST]a</s>",
    ),
    "system with the last question alone, behind a result": (
        "last",
        [system("s"), user("q"), calls("f"), result("f", "1")],
        '[INST]s\n\nq[/INST][CALLS]{"name": "f", "arguments": {"a": 1}} b8936a705[RESULT]1',
    ),
    "system with the last question alone, before a question": (
        "last",
        [system("s"), user("q"), says("a"), user("p")],
        "[INST]s\n\nq[/INST]a</s>[INST]p[/INST]",
    ),
    "system collected": (
        "collected",
        [system("s"), user("q"), says("a"), system("t"), user("p")],
        "<s>s[User]q[Assistant]a</s>[User]t[User]p[Assistant]",
    ),
    "a later text beside a call": (
        "collected",
        [user("q"), calls("f", text="x"), result("f", "1"), calls("g", text="y"), result("g", "2")],
        '<s>[User]q[Assistant]x</s>[call]f\n{"a": 1}[output]1[Assistant]y</s>[call]g\n{"a": 1}[output]2[Assistant]',
    ),
    "an empty answer": (
        "first letter",
        [user("q"), says(""), user("p"), says(" x"), user("q")],
        "[user]q[assistant] [user]p[assistant] x[user]q[assistant]",
    ),
    "only ids are shown": (
        "open",
        [user("q"), calls("f", "g"), result("f", "1"), calls("f")],
        '<|user|>q<|assistant|><call functions.f:0>{"a": 1}</call><call functions.g:1>{"a": 1}</call><|tool|>1'
        '<|assistant|><call functions.f:2>{"a": 1}</call><|assistant|>',
    ),
}


@pytest.mark.parametrize(("name", "messages", "prompt"), CASES.values(), ids=CASES)
def test_a_conversation_in_an_order_that_its_template_refuses(name: str, messages: list[Message], prompt: str) -> None:
    assert OURS[name].render(messages) == prompt


def test_a_conversation_without_a_question_is_refused_with_the_template_s_reason() -> None:
    for messages in ([system("s")], [system("s"), says("a")], [calls("f"), result("f", "r")]):
        with pytest.raises(ChatTemplateError, match="nobody asked"):
            OURS["strict"].render(messages)


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("name", [*OURS, *REAL])
def test_an_empty_list_of_parts_is_an_empty_text(name: str) -> None:
    template = (OURS | REAL)[name]

    def prompt(content: Any) -> str | None:
        turns = [says(content), user("p"), calls("f", text=content), result("f", content), system(content), user("r")]
        try:
            return template.render([system(content), user("q"), *turns, user(content)])
        except ChatTemplateError:
            return None

    assert prompt([]) == prompt("")


BROKEN = ["not json", "[1]", '"x"', '{"a":3', '{"a": 1}}', "3", "true", "{'a': 1}", "<a>", '{"a": ' + "1" * 5000 + "}"]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("given", ["", " ", "null", None, " null ", {}, "{}"], ids=repr)
def test_empty_arguments_are_an_empty_object(name: str, given: Any) -> None:
    def prompt(arguments: Any) -> str:
        return OURS[name].render([user("q"), calls("f", arguments=arguments), result("f", "r")])

    missing = calls("f")
    del missing["tool_calls"][0]["function"]["arguments"]
    assert prompt(given) == prompt({}) == OURS[name].render([user("q"), missing, result("f", "r")])


@pytest.mark.parametrize("given", BROKEN, ids=lambda text: text[:16])
def test_broken_arguments_are_shown_to_the_model(given: str) -> None:
    def prompt(name: str) -> str:
        return OURS[name].render([user("q"), calls("f", arguments=given), result("f", "r")])

    assert f"<call f><arguments>{given}</call>" in prompt("strict")
    assert f"<call functions.f:0>{given}</call>" in prompt("open")
    assert f"[call]f\n{given}[output]" in prompt("collected")
    for name in OURS:
        assert given in prompt(name) or json.dumps(given)[1:-1] in prompt(name).replace("\\\\", "\\"), name


@pytest.mark.parametrize("arguments", ['{"b":  [null, 1.50]}', {"b": [None, 1.5]}, '{"b":[null,1.50]}'], ids=str)
def test_arguments_that_are_an_object_are_that_object(arguments: Any) -> None:
    messages = [user("q"), calls("f", arguments=arguments), result("f", "r")]
    assert "<call f><b>[None, 1.5]</call>" in OURS["strict"].render(messages)
    assert '{"b": [null, 1.5]}' in OURS["open"].render(messages)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    assert f"[call]f\n{text}[output]" in OURS["collected"].render(messages)


def test_calls_of_other_shapes_are_shown() -> None:
    odd: list[Any] = [{}, {"function": {"name": None}}, {"function": 3}, {"type": "custom", "custom": None}]
    for call in odd:
        assert "<call function></call>" in OURS["strict"].render([user("q"), says("", tool_calls=[call])])
    with pytest.raises(ChatTemplateError, match=r"messages\.1\.tool_calls\.0: must be an object"):
        OURS["strict"].render([user("q"), says("", tool_calls=["f"])])
    custom = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    assert "<call patch><input>*** Begin</call>" in OURS["strict"].render([user("q"), says("", tool_calls=[custom])])


# ---------------------------------------------------------------------------------------------------------- any order


class Words:
    """Makes conversations of any order. Each text in them is a word of its own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = 0

    def word(self) -> str:
        self._count += 1
        return f"word{self._count}x"

    def conversation(self) -> list[Message]:
        found, waiting = list[Message](), list[str]()
        for _ in range(self._random.randint(1, 9)):
            match self._random.choice(["system", "user", "user", "text", "call", "call", "tool", "tool"]):
                case "system":
                    found.append(system(self.word()))
                case "user":
                    parts = [{"type": "text", "text": self.word()} for _ in range(2)]
                    found.append({"role": "user", "content": self._random.choice([self.word(), parts])})
                case "text":
                    found.append(says(self._random.choice([self.word(), ""])))
                case "call":
                    names = [self.word() for _ in range(self._random.choice([1, 1, 2, 3]))]
                    text = self._random.choice([self.word(), ""])
                    arguments = self._random.choice(
                        ["", "null", "not json", "[1]", '{"a":3', '{"a": {"b": [1]}}', None]
                    )
                    found.append(calls(*names, text=text, arguments=arguments))
                    waiting += names
                case "tool":
                    name = waiting.pop(0) if waiting and self._random.random() < 0.9 else "nobody"
                    found.append(result(name, self.word()))
        return found


def words_of(message: Message) -> list[str]:
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return [*filter(None, texts), *(call["function"]["name"] for call in message.get("tool_calls", ()))]


def is_asked(messages: list[Message]) -> bool:
    return any(message["role"] == "user" for message in messages)


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("name", OURS)
def test_conversations_in_any_order_are_shown_whole(name: str, tools: list[Any] | None) -> None:
    template = OURS[name]
    for seed in range(150):
        messages = Words(seed).conversation()
        if not is_asked(messages):
            continue
        prompt = template.render(messages, tools=tools)
        assert [word for one in messages for word in words_of(one) if word not in prompt] == [], (seed, prompt)


@pytest.mark.parametrize("name", OURS)
def test_the_prompt_of_the_next_turn_begins_as_the_one_before(name: str) -> None:
    template = OURS[name]
    for seed in range(150):
        messages = Words(seed).conversation()
        if not is_asked(messages) or messages[-1]["role"] not in ("user", "tool"):
            continue
        prompt = template.render(messages, add_generation_prompt=False)
        for more in ([user("next")], [system("next")], [system("next"), user("more")]):
            after = template.render([*messages, says("answer"), *more])
            assert after.startswith(prompt), (seed, prompt, after)


LOSES = ("gptoss", "gpt-oss")
"""Templates that leave out the texts of earlier calls by themselves."""
NEVER = ("No user query found", "Cannot put tools in the first user message")
"""What real templates say of conversations without a question."""


@pytest.mark.parametrize(
    "name", REAL or [pytest.param("", marks=pytest.mark.skip("no chat_templates in the real data"))]
)
def test_real_templates_take_conversations_in_any_order(name: str) -> None:
    template = REAL[name]
    if not shows_a_question(template):
        pytest.skip("it shows no plain conversation")
    for seed in range(40):
        messages = Words(seed).conversation()
        for tools in (None, [TOOL]):
            try:
                prompt = template.render(messages, tools=tools)
            except ChatTemplateError as error:
                assert not is_asked(messages) and any(reason in str(error) for reason in NEVER), (seed, error)
                continue
            if not any(part in name for part in LOSES):
                assert [word for one in messages for word in words_of(one) if word not in prompt] == [], (seed, prompt)


def shows_a_question(template: ChatTemplate) -> bool:
    try:
        return "question" in template.render([user("question"), says("x"), user("question")])
    except ChatTemplateError:
        return False
