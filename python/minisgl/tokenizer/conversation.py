"""Rearranges the messages of a conversation so that a chat template shows all of them.

`Shown.of` finds out once what a template shows: it renders small conversations and looks for their words in the prompt,
in order. `arranged` then changes a conversation only where the template would refuse or omit a part of it.

Invariants: the result for a message depends only on the messages before it, on the results of its calls and on a
neighbour that it is joined with, so that the next turn's prompt begins with the previous one; no text is omitted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
Kind = Literal["system", "user", "text", "call", "tool"]
Render = Callable[[list[Message]], str]
"""Returns the prompt of messages that `arranged` returned. Raises `ValueError` if the template refuses them."""

BETWEEN = "\n\n"  # separator of joined texts
RESULT = "Result of the call: "
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields in which chat templates expect an assistant's reasoning; clients use the first."""
TRIAL_TOOL: Message = {
    "type": "function",
    "function": {"name": "trial", "description": "", "parameters": {"type": "object", "properties": {}}},
}
"""Tool of test conversations with tools."""
EMPTY: Message = {"role": "assistant", "content": ""}
UNNAMED = "function"  # name for a call without one
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BETWEEN = re.compile(r"[,:\[{]")
_ALWAYS_CHARS, _MOST_VALUES = 1 << 16, 1 << 16
_BROKEN = "arguments"  # argument name for arguments that are not an object


@dataclass(frozen=True, slots=True)
class CallForm:
    """Format in which a template reads tool calls and their results."""

    as_object: bool = True  # arguments as an object; False: as JSON text
    ids: Literal["given", "nine", "named"] = (
        "given"  # "nine": of nine letters and digits; "named": functions.NAME:NUMBER
    )
    names_results: bool = False  # a result must have its function's name
    has_content: bool = True  # a message with calls must have content, possibly empty


@dataclass(frozen=True, slots=True)
class Shown:
    """Abilities of a chat template. The defaults are those of a template that shows everything."""

    refused: frozenset[tuple[Kind | None, Kind]] = (
        frozenset()
    )  # pairs of kinds that may not be neighbours; None: the beginning
    late_system: bool = True  # shows a system message after others, in its place
    lone_system: bool = True  # shows a single system message; True also if it refuses one with an error
    empty_text: bool = True  # accepts an assistant's message without text
    calls: CallForm | None = CallForm()  # None: shows no calls
    several_calls: bool = True  # shows several calls in one message
    text_beside_calls: bool = True  # shows content in a message with calls
    late_results: bool = True  # shows a result after a text that follows its call
    text_arguments: bool = False  # shows arguments given as text verbatim
    reasoning: str = REASONING[0]  # field for reasoning
    reasoning_beside_text: bool = True  # shows reasoning, content and calls in one message

    @staticmethod
    def of(render: Render) -> Shown:
        """Find out what the template behind `render` shows."""
        trial = _Trial(render)
        if not trial.shows("user", "text", "user"):
            return Shown()  # it does not even show a plain conversation: nothing can be found out
        calls = next((form for form in _call_forms() if trial.with_calls(form).shows("user", "call", "tool")), None)
        refused = frozenset(pair for pair in _pairs(calls) if not trial.shows(*_around(*pair, calls)))
        if ("text", "text") in refused:  # it may count only texts, and miss one later
            others: tuple[Kind | None, ...] = (None, "system", "user", "text")
            refused |= {("text", "call"), *((before, "tool") for before in others)}
            if (None, "text") in refused:
                refused |= {(None, "call"), ("system", "call")}
        if any(trial.shows(*kinds) and trial.omits("system", *kinds) for kinds in _endings(calls)):
            refused |= {(None, "system")}
        return Shown(
            refused=refused,
            late_system=all(trial.shows(*kinds) for kinds in _late_systems(calls)),
            lone_system=not trial.loses("system"),
            empty_text=trial.prompt([_message("user", 0), EMPTY, _message("user", 2)]) is not None
            or ("text", "user") in refused,
            calls=calls,
            late_results=trial.shows("user", "call", "text", "tool"),
            **(_about_calls(trial) if calls else {}),
            **_about_reasoning(trial, calls),
        )


# ------------------------------------------------------------------------------------------------------------ asking


class _Trial:
    """Renders test conversations of given message kinds; each text in them is a unique word."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._calls = CallForm()

    def with_calls(self, form: CallForm) -> _Trial:
        self._calls = form
        return self

    def shows(self, *kinds: Kind) -> bool:
        return self.shows_all([_message(kind, at) for at, kind in enumerate(kinds)])

    def loses(self, *kinds: Kind) -> bool:
        """Return whether the template renders these messages but omits a part of them."""
        messages = [_message(kind, at) for at, kind in enumerate(kinds)]
        return self.prompt(messages) is not None and not self.shows_all(messages)

    def omits(self, *kinds: Kind) -> bool:
        """Return whether the template renders these messages without the words of the first."""
        messages = [_message(kind, at) for at, kind in enumerate(kinds)]
        text = self.prompt(messages)
        return text is not None and not all(word in text for word in _words(messages[0]))

    def prompt(self, messages: list[Message]) -> str | None:
        """Return the prompt; `None` if the template refuses the messages."""
        try:
            return self._render(_in_form(messages, self._calls))
        except ValueError:
            return None

    def shows_all(self, messages: list[Message]) -> bool:
        """Return whether the template renders these messages with all their words, in the order of the messages."""
        text, start = self.prompt(messages), 0
        if text is None:
            return False
        for message in messages:
            positions = [text.find(word, start) for word in _words(message)]
            if any(at < 0 for at in positions):
                return False
            start = max(positions, default=start)
        return True


def _message(kind: Kind, at: int) -> Message:
    match kind:
        case "call":
            return _calling(_call(at))
        case "tool":
            return _result(_call(at - 1), f"result{at}x")
        case "text":
            return {"role": "assistant", "content": f"answer{at}x"}
        case _:
            return {"role": kind, "content": f"{kind}{at}x"}


def _call(at: int) -> Message:
    function = {"name": f"function{at}x", "arguments": {f"key{at}x": f"value{at}x"}}
    return {"id": f"call_0123456789abcdef{at}", "type": "function", "function": function}


def _calling(*calls: Message, content: str = "", **more: str) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def _result(call: Message, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def _words(message: Message) -> Iterator[str]:
    """Yield the words of a test message that the prompt must contain."""
    yield from (message[name] for name in ("content", *REASONING) if message.get(name))
    for call in message.get("tool_calls", ()):
        yield from (call["function"]["name"], *call["function"]["arguments"].values())


def _call_forms() -> Iterator[CallForm]:
    ids: tuple[Literal["given", "nine", "named"], ...] = ("given", "nine", "named")
    for as_object, names_results, kind, has_content in itertools.product(
        (True, False), (False, True), ids, (True, False)
    ):
        yield CallForm(as_object, kind, names_results, has_content)


def _pairs(calls: CallForm | None) -> Iterator[tuple[Kind | None, Kind]]:
    """Yield the pairs of consecutive kinds to test. System messages are tested only at the beginning."""
    kinds: tuple[Kind, ...] = ("user", "text", "call", "tool") if calls else ("user", "text", "tool")
    yield from ((None, kind) for kind in ("system", *kinds) if kind != "user")
    yield from (("system", kind) for kind in ("system", *kinds) if kind != "user")
    yield from itertools.product(kinds, kinds)


def _around(one: Kind | None, other: Kind, calls: CallForm | None) -> tuple[Kind, ...]:
    """Return a test conversation in which `other` follows `one`, and which is otherwise common."""
    before: dict[Kind | None, tuple[Kind, ...]] = {
        None: (),
        "system": ("system",),
        "user": ("user",),
        "text": ("user", "text"),
        "call": ("user", "call"),
        "tool": ("user", "call" if calls else "text", "tool"),
    }
    behind: tuple[Kind, ...] = ("tool",) if other == "call" else ()
    if one in (None, "system") and other != "user":
        behind += ("user",) if other != "call" else ("text", "user")
    return (*before[one], other, *behind)


def _endings(calls: CallForm | None) -> Iterator[tuple[Kind, ...]]:
    """Yield test conversations that end with each kind: some templates show a system message before some ends only."""
    yield from (("user", "text", "user"), ("user", "text"))
    if calls:
        yield from (("user", "call"), ("user", "call", "tool"), ("user", "call", "tool", "text", "user"))


def _late_systems(calls: CallForm | None) -> Iterator[tuple[Kind, ...]]:
    yield from (("user", "system"), ("user", "system", "user"), ("user", "system", "system", "text", "user"))
    yield from (("system", "user", "text", "system", "user"), ("user", "text", "system", "text", "user"))
    if calls:
        yield ("user", "call", "tool", "system", "text")
        yield ("user", "call", "tool", "system", "call", "tool")


def _about_calls(trial: _Trial) -> dict[str, Any]:
    """Find out what the template shows of messages with calls. Each test has two: the first may be a special case."""
    question = {"role": "user", "content": "question"}
    one, other, third, last = map(_call, range(4))
    broken = {**one, "function": {"name": "name", "arguments": (text := '{"key":  verbatim')}}
    several = [_calling(one, other), _result(one, "first"), _result(other, "second")]
    several += [_calling(third, last), _result(third, "third"), _result(last, "fourth")]
    beside = [_calling(one, content="beside"), _result(one, "first")]
    beside += [_calling(other, content="besides"), _result(other, "second")]
    return {
        "several_calls": trial.shows_all([question, *several]),
        "text_beside_calls": trial.shows_all([question, *beside]),
        "text_arguments": text in (trial.prompt([question, _calling(broken), _result(one, "first")]) or ""),
    }


def _about_reasoning(trial: _Trial, calls: CallForm | None) -> dict[str, Any]:
    question, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
    call = _call(1)
    for name in REASONING:
        thought = {name: "thought"}
        if calls and trial.shows_all([question, _calling(call, **thought), _result(call, "first")]):
            beside = [question, _calling(call, content="beside", **thought), _result(call, "first")]
            return {"reasoning": name, "reasoning_beside_text": trial.shows_all(beside)}
        if any(trial.shows_all([question, {**answer, **thought}, *more]) for more in ([], [question])):
            return {"reasoning": name}
    return {}


# --------------------------------------------------------------------------------------------------------- arranging


def arranged(messages: Sequence[Mapping[str, Any]], shown: Shown) -> list[Message]:
    """Return the messages rearranged for a template with the abilities `shown`. Raises `ValueError`, naming the field,
    for a tool call that no template can show."""
    output = [_with_calls(_with_text(message), shown, at) for at, message in enumerate(messages)]
    output = _with_results(list(_with_systems(output, shown)), shown)
    if not shown.several_calls:
        output = _one_by_one(output)
    output = list(_joined(output, shown))
    output = [_with_reasoning(message, shown) for message in _filled(output, shown)]
    if not shown.empty_text:
        output = [{**message, "content": " "} if message == EMPTY else message for message in output]
    return output if shown.calls is None else _in_form(output, shown.calls)


def _with_text(message: Mapping[str, Any]) -> Message:
    """Return a copy of a message, with an empty text in place of an empty list of parts."""
    return {**message, "content": ""} if message.get("content") == [] else dict(message)


def _kind(message: Message) -> Kind | None:
    """Return the kind of a message, or `None` for an unknown role."""
    if message.get("role") == "assistant":
        return "call" if message.get("tool_calls") else "text"
    return message["role"] if message.get("role") in ("system", "user", "tool") else None


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(
            part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        )
    return content if isinstance(content, str) else ""


def _together(one: Message, other: Message) -> Message:
    """Join two messages: their texts, reasoning and calls."""
    joined = {**other, **one}
    joined["content"] = BETWEEN.join(filter(None, (_text(one.get("content")), _text(other.get("content")))))
    for name in REASONING:
        if texts := [message[name] for message in (one, other) if message.get(name)]:
            joined[name] = BETWEEN.join(texts)
    if calls := [*(one.get("tool_calls") or ()), *(other.get("tool_calls") or ())]:
        joined["tool_calls"] = calls
    return joined


def _with_systems(messages: list[Message], shown: Shown) -> Iterator[Message]:
    """Yield the messages with system messages only where the template shows them, others as the user's."""
    num_leading = sum(1 for _ in itertools.takewhile(lambda one: _kind(one) == "system", messages))
    leading, others = messages[:num_leading], messages[num_leading:]
    if len(leading) > 1 and ("system", "system") in shown.refused:
        leading = [_all_together(leading)]
    has_question = bool(others) and _kind(others[0]) == "user"
    if leading and ((None, "system") in shown.refused or not (has_question or shown.lone_system)):
        text = {**_all_together(leading), "role": "user"}
        if has_question:
            text, others = _together(text, others[0]), others[1:]
        leading = [text]
    yield from leading
    for message in others:
        yield {**message, "role": "user"} if _kind(message) == "system" and not shown.late_system else message


def _all_together(messages: Sequence[Message]) -> Message:
    found = messages[0]
    for message in messages[1:]:
        found = _together(found, message)
    return found


def _one_by_one(messages: list[Message]) -> list[Message]:
    """Return the messages with one call in each, and each following result directly after its call."""
    output: list[Message] = []
    calls: list[Message] = []
    results: list[Message] = []

    def close() -> None:
        for message in calls:
            output.append(message)
            call_id = message["tool_calls"][0].get("id")
            own = next((one for one in results if one.get("tool_call_id") == call_id), None)
            if own is not None:
                results.remove(own)
                output.append(own)
        output.extend(results)
        calls.clear()
        results.clear()

    for message in messages:
        kind = _kind(message)
        if kind == "tool" and calls:
            results.append(message)
            continue
        if kind != "call" or results:
            close()
        if kind == "call":
            first, *others = message["tool_calls"]
            calls.append({**message, "tool_calls": [first]})
            calls += [{"role": "assistant", "content": "", "tool_calls": [call]} for call in others]
        else:
            output.append(message)
    close()
    return output


def _with_results(messages: list[Message], shown: Shown) -> list[Message]:
    """Return the messages with tool results only where the template shows them; others become texts of the user. A
    result with an unknown call id belongs to the next call without a result."""
    output: list[Message] = []
    waiting: list[Any] = []  # ids of calls without a result
    for message in messages:
        kind, before = _kind(message), _kind(output[-1]) if output else None
        if kind == "call":
            waiting = [*(waiting if before == "call" else ()), *(call.get("id") for call in message["tool_calls"])]
        if kind != "tool":
            output.append(message)
            continue
        if before == "text" and waiting and not shown.late_results and len(output) > 1 and _kind(output[-2]) == "call":
            output[-2:] = [_together(output[-2], output[-1])]
            before = "call"
        call_id, has_call = message.get("tool_call_id"), bool(waiting)
        if waiting:
            call_id = waiting.pop(waiting.index(call_id) if call_id in waiting else 0)
        is_behind_it = has_call and before in ("call", "tool")
        if not is_behind_it and (before, "tool") in shown.refused:
            output.append({"role": "user", "content": RESULT + _text(message.get("content"))})
        else:
            output.append({**message, "tool_call_id": call_id})
    return output


def _joined(messages: list[Message], shown: Shown) -> Iterator[Message]:
    """Yield the messages, joining neighbours of the same role that the template refuses."""
    own = ("text", "call")
    apart = {
        "user": ("user", "user") not in shown.refused,
        "assistant": shown.refused.isdisjoint(itertools.product(own, own)),
    }
    last: Message | None = None
    for message in messages:
        role = message.get("role")
        if last is not None and last.get("role") == role and not apart.get(str(role), True):
            last = _together(last, message)
            continue
        if last is not None:
            yield from _split(last, shown)
        last = message
    if last is not None:
        yield from _split(last, shown)


def _split(message: Message, shown: Shown) -> Iterator[Message]:
    """Yield a message, split into its text and its calls if the template shows only one of them."""
    if _kind(message) == "call" and not shown.text_beside_calls and _text(message.get("content")):
        yield {"role": "assistant", "content": message["content"]}
        message = {**message, "content": ""}
    yield message


def _filled(messages: list[Message], shown: Shown) -> Iterator[Message]:
    """Yield the messages, with an empty one inserted between two kinds that the template refuses in sequence."""
    before: Kind | None = None
    for at, message in enumerate(messages):
        kind = _kind(message)
        if kind not in (None, "tool") and (at == 0 or before is not None) and (before, kind) in shown.refused:
            for filler in ("text", "user"):
                if shown.refused.isdisjoint(((before, filler), (filler, kind))):
                    yield {"role": "assistant" if filler == "text" else "user", "content": ""}
                    break
        yield message
        before = kind


# ------------------------------------------------------------------------------------------------- calls and reasoning


def _with_calls(message: Message, shown: Shown, at: int) -> Message:
    """Return a message whose calls have names, ids and arguments; the calls become text if the template shows none."""
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    as_object, as_text = shown.calls is None or shown.calls.as_object, shown.calls is None or shown.text_arguments
    read = [_read_call(call, f"messages.{at}.tool_calls.{i}") for i, call in enumerate(calls)]
    for call in read:
        call["function"]["arguments"] = _arguments(call["function"]["arguments"], as_object, as_text)
    if shown.calls is not None:
        return {**message, "tool_calls": read}
    written = [
        json.dumps({name: call["function"][name] for name in ("name", "arguments")}, ensure_ascii=False)
        for call in read
    ]
    content = "\n".join(filter(None, (_text(message.get("content")), *written)))
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}


def _read_call(call: Any, field: str) -> Message:
    """Return a call as a function call, also one of OpenAI's custom calls. Raises `ValueError` for no object."""
    if not isinstance(call, Mapping):
        raise ValueError(f"{field}: must be an object")
    function = call.get("function", call)
    if isinstance(custom := call.get("custom"), Mapping):
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    function = function if isinstance(function, Mapping) else {}
    name = function["name"] if isinstance(function.get("name"), str) else UNNAMED
    rest = {key: value for key, value in call.items() if key not in ("custom", "name", "arguments")}
    return {**rest, "type": "function", "function": {**function, "name": name, "arguments": function.get("arguments")}}


def _hashed(call_id: Any) -> Any:
    """Return a call id in a hashable form, whatever a client sent."""
    return call_id if isinstance(call_id, str | int | float | None) else json.dumps(call_id)


def parsed(text: str) -> Any:
    """Parse JSON text in a message. Returns `text` if it is invalid, or if it has so many values that parsing would
    block the interpreter for long (limits on the request's body do not see inside of texts)."""
    if len(text) > _ALWAYS_CHARS and len(_BETWEEN.findall(_STRING.sub("", text))) > _MOST_VALUES:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _arguments(given: Any, as_object: bool, text_arguments: bool) -> Any:
    """Return a call's arguments in the form that the template reads. Arguments that are not an object are wrapped in
    one, or stay the text that the model wrote if the template shows that."""
    value = given
    if isinstance(given, str):
        value = parsed(given) if given.strip() else None
    if value is None:
        value = {}
    if isinstance(value, dict):
        if as_object:
            return value
        return (
            given
            if isinstance(given, str) and given.strip() and given.strip() != "null"
            else json.dumps(value, ensure_ascii=False)
        )
    text = given if isinstance(given, str) else json.dumps(value, ensure_ascii=False)
    return text if text_arguments or not as_object else {_BROKEN: text}


def _in_form(messages: list[Message], form: CallForm) -> list[Message]:
    """Return the messages with calls and results in the format that the template reads."""
    output: list[Message] = []
    names: dict[Any, str] = {}  # function names by call id
    ids: dict[Any, str] = {}  # template's call ids by the given ones
    for message in messages:
        if message.get("role") == "tool":
            call_id = _hashed(message.get("tool_call_id"))
            own = {"name": names.get(call_id, UNNAMED)} if form.names_results and not message.get("name") else {}
            output.append(
                {**message, **own, **({} if form.ids == "given" else {"tool_call_id": ids.get(call_id, "000000000")})}
            )
            continue
        if not (calls := message.get("tool_calls")):
            output.append(message)
            continue
        formed = []
        for call in calls:
            call_id, function = _hashed(call.get("id")), call["function"]
            names[call_id] = function["name"]
            if form.ids != "given":
                ids[call_id] = _nine(call_id) if form.ids == "nine" else f"functions.{function['name']}:{len(ids)}"
            if not form.as_object and not isinstance(function["arguments"], str):
                function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            formed.append({**call, "function": function, **({"id": ids[call_id]} if call_id in ids else {})})
        left_out = () if form.has_content or message.get("content") else ("content",)
        output.append(
            {**{name: value for name, value in message.items() if name not in left_out}, "tool_calls": formed}
        )
    return output


def _nine(given: Any) -> str:
    """Return an id of nine letters and digits: `given` if it is one, else a hash of it."""
    text = given if isinstance(given, str) else ""
    if len(text) == 9 and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]


def _with_reasoning(message: Message, shown: Shown) -> Message:
    """Return an assistant's message with its reasoning in the field that the template reads."""
    if message.get("role") != "assistant" or shown.reasoning in message or REASONING[0] not in message:
        name = shown.reasoning if shown.reasoning in message else None
    else:
        name = shown.reasoning
        message = {name if key == REASONING[0] else key: value for key, value in message.items()}
    if name and _kind(message) == "call" and not shown.reasoning_beside_text and _text(message.get("content")):
        both = BETWEEN.join((str(message[name]), _text(message["content"])))
        message = {**message, name: both, "content": ""}
    return message
