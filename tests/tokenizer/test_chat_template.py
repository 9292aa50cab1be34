"""Chat templates: the same text as transformers, errors for the client, the sandbox."""

from __future__ import annotations

import json
import re
import tracemalloc
from datetime import datetime
from functools import cache
from typing import Any

import pytest

from minisgl import _rust
from minisgl.tokenizer import ChatTemplate, ChatTemplateError, rendering
from minisgl.tokenizer.rendering import Work
from tests.helpers.meaning import embedded_model
from tests.helpers.seconds import WAIT_S
from tests.helpers.text import reference_tokenizer, tokenizer_named

CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "What is 2 + 2? 漢字 <b>&amp;'\"</b>"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Four."}
THOUGHT = {"role": "assistant", "content": "<think>\nadd them\n</think>\n\nFour."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": '{"sum": 4}'}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Größe <x>", "parameters": {"type": "object", "properties": {}}},
}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "thought": [USER, THOUGHT, USER],
    "last thought": [USER, THOUGHT],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "add them"}],
    "call": [USER, CALL, RESULT],
    "calls": [SYSTEM, USER, CALL, RESULT, {**CALL, "content": "Again."}, RESULT, RESULT, ANSWER, USER],
    "empty": [{"role": "user", "content": ""}],
    "spaces": [{"role": "user", "content": "  a\n\n"}, {"role": "assistant", "content": "\n b "}],
}


def reference(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """What transformers renders. It drops the keys without a value before it gets here."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    dropped = [{key: value for key, value in message.items() if value is not None} for message in messages]
    rendered, _ = utils.render_jinja_template(conversations=[dropped], chat_template=source, **kwargs)
    return str(rendered[0])


@cache
def smollm2_template() -> str:
    """Of the embedded model, from its file's metadata."""
    return str(_rust.gguf_header(embedded_model())["metadata"]["tokenizer.chat_template"])


# ------------------------------------------------------------------------------------------------------ real templates


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"add_generation_prompt": False}], ids=str)
def test_qwen3_as_transformers(messages: list[Any], tools: list[Any] | None, options: dict[str, Any]) -> None:
    theirs = reference_tokenizer("qwen3")
    options = {"add_generation_prompt": True, "tools": tools, **options}
    tokenizer = tokenizer_named("qwen3")
    text = tokenizer.apply_chat_template(messages, **options)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert tokenizer.encode(text, add_special_tokens=False).tolist() == ids


@pytest.mark.parametrize("name", ["user", "system", "turns", "empty", "spaces"])
@pytest.mark.parametrize("prompt", [True, False])
def test_the_embedded_model_as_transformers(name: str, prompt: bool) -> None:
    source = smollm2_template()
    text = ChatTemplate(source, {}).render(CONVERSATIONS[name], add_generation_prompt=prompt)
    assert text == reference(source, CONVERSATIONS[name], add_generation_prompt=prompt)
    assert "Be brief." in text or "SmolLM" in text


def test_argument_strings_are_parsed_for_the_template() -> None:
    """OpenAI's clients send arguments as a JSON string; models have seen the object."""
    function = {"name": "add", "arguments": '{"a": 2, "b": "é"}'}
    sent = {**CALL, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    tokenizer = tokenizer_named("qwen3")
    assert tokenizer.apply_chat_template([USER, sent]) == tokenizer.apply_chat_template([USER, CALL])
    function["arguments"] = "not json"
    assert '"arguments": not json' in tokenizer.apply_chat_template([USER, sent])


# --------------------------------------------------------------------------------------------------------- environment

LANGUAGE = {
    "trimmed blocks": "  {% if true %}\n  a\n  {% endif %}\n  b\n",
    "json": "{{ messages | tojson }} {{ messages | tojson(indent=2) }}",
    "json sorted": "{{ {'b': 1, 'a': 'é<&>'} | tojson(sort_keys=true) }}",
    "json separators": "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}"
    "{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}|{{ x }}|"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro f(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages[::-1] %}{{ f(m) }}{% endfor %}",
    "methods": "{{ messages[0].content.split(' ')[0].strip().title() }}{{ messages[0].items() | list | length }}",
    "undefined": "{{ nothing }}{{ messages[0].nothing }}{{ tools is none }}{{ documents is none }}{{ x is defined }}",
    "no escaping": "{{ messages[0].content }}",
    "dict": "{{ dict(a=1).a }}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
}


@pytest.mark.parametrize("source", LANGUAGE.values(), ids=LANGUAGE)
def test_the_language_is_that_of_transformers(source: str) -> None:
    messages = CONVERSATIONS["turns"]
    assert ChatTemplate(source, {}).render(messages) == reference(source, messages, add_generation_prompt=True)


def test_strftime_now_gives_today() -> None:
    before = datetime.now().strftime("%d %B %Y")
    text = ChatTemplate("{{ strftime_now('%d %B %Y') }}", {}).render([USER])
    assert text in (before, datetime.now().strftime("%d %B %Y"))


def test_special_tokens_are_variables_that_a_caller_may_set() -> None:
    template = ChatTemplate("{{ bos_token }}{{ extra }}{{ messages | length }}", {"bos_token": "<s>"})
    assert template.render([USER], extra="!") == "<s>!1"
    assert template.render([USER], bos_token="<t>") == "<t>1"
    assert template.render([USER], documents=["x"]) == "<s>1"


def test_keys_without_a_value_are_missing() -> None:
    source = "{% for m in messages %}{{ m.content is defined }}{{ m.tool_calls is defined }}{% endfor %}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": None, "tool_calls": None}]) == "FalseFalse"


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, CALL, dict(ANSWER)]
    before = json.dumps(messages)
    for source in (CHATML, PARTS["loop"]):
        ChatTemplate(source, {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


# ------------------------------------------------------------------------------------------------------- content parts

PARTS = {
    "loop": "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}",
    "item": "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}",
    "variable": "{% for m in messages %}{% set c = m.content %}{% set d = c %}"
    "{% for part in d %}[{{ part.text }}]{% endfor %}{% endfor %}",
    "macro": "{% macro show(parts) %}{% for part in parts %}[{{ part.text }}]{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "macro keyword": "{% macro show(parts) %}{% for part in parts %}[{{ part.text }}]{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(parts=m.content) }}{% endfor %}",
    "condition": "{% for m in messages %}{% set c = m.content if m.content else [] %}"
    "{% for part in c %}[{{ part.text }}]{% endfor %}{% endfor %}",
}
STRINGS = {
    "chatml": CHATML,
    "other loop": "{% for m in messages %}{% for t in m.tool_calls %}{% endfor %}{{ m.content }}{% endfor %}",
    "split": "{% for m in messages %}{% for word in m.content.split(' ') %}{{ word }} {% endfor %}{% endfor %}",
    "other variable": "{% set c = messages %}{% for m in c %}{{ m.content }}{% endfor %}",
}
TWO_PARTS = [{"role": "user", "content": [{"type": "text", "text": "one two"}, {"type": "text", "text": "three"}]}]


@pytest.mark.parametrize("source", PARTS.values(), ids=PARTS)
def test_a_template_that_loops_over_content_gets_the_parts(source: str) -> None:
    template = ChatTemplate(source, {})
    assert template.render(TWO_PARTS) == "[one two][three]"
    assert template.render([{"role": "user", "content": "one"}]) == "[one]"


def test_a_template_that_tells_strings_from_parts_gets_what_was_sent() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source, {}).render(TWO_PARTS) == "[one two][three]"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "one"}]) == "one"


@pytest.mark.parametrize("source", STRINGS.values(), ids=STRINGS)
def test_any_other_template_gets_one_string(source: str) -> None:
    text = ChatTemplate(source, {}).render(TWO_PARTS, add_generation_prompt=False)
    assert (
        text.split()
        == ChatTemplate(source, {})
        .render([{"role": "user", "content": "one two\nthree"}], add_generation_prompt=False)
        .split()
    )
    assert "one two" in text and "{" not in text


def test_a_part_without_text_is_refused_where_strings_are_wanted() -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(ChatTemplateError, match="parts of type text only"):
        ChatTemplate(CHATML, {}).render(messages)


# ------------------------------------------------------------------------------------------------------- continuation


@pytest.mark.parametrize("ending", ["The answer", "The answer ", "The answer is\n", "", " "])
@pytest.mark.parametrize("strip", ["", " | trim"])
def test_the_prompt_can_end_within_the_last_message(ending: str, strip: str) -> None:
    source = CHATML.replace("message['content']", "message['content']" + strip)
    messages = [USER, {"role": "assistant", "content": ending}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = ChatTemplate(source, {}).render(messages, **options)
    assert text == reference(source, messages, **options)
    assert text.rstrip().endswith("<|assistant|>" + (ending.strip() if strip else ending).rstrip())


def test_the_last_text_part_is_continued() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    text = ChatTemplate(PARTS["loop"], {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "[a"


@pytest.mark.parametrize("content", [None, [{"type": "image"}], 5])
def test_nothing_to_continue_is_an_error(content: Any) -> None:
    messages = [{"role": "assistant", "content": content}]
    with pytest.raises(ChatTemplateError, match="no text to continue"):
        ChatTemplate(PARTS["loop"], {}).render(messages, add_generation_prompt=False, continue_final_message=True)


def test_a_template_may_leave_out_the_last_message() -> None:
    with pytest.raises(ChatTemplateError, match="leaves out the end"):
        ChatTemplate("fixed", {}).render([ANSWER], add_generation_prompt=False, continue_final_message=True)


def test_a_new_turn_and_the_old_one_exclude_each_other() -> None:
    with pytest.raises(ChatTemplateError, match="continue_final_message"):
        ChatTemplate(CHATML, {}).render([ANSWER], continue_final_message=True)


# -------------------------------------------------------------------------------------------------------------- errors

REFUSED = {
    "raise": ("{{ raise_exception('only user turns: ' + messages[0].role) }}", "only user turns: user"),
    "undefined attribute": ("{{ messages[5].role }}", "list object has no element 5"),
    "type": ("{{ messages[0].content + 1 }}", "concatenate"),
    "divide": ("{{ 1 // 0 }}", "zero"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "range": ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
    "change": ("{{ messages.append(1) }}", "unsafe"),
    "bad call": ("{{ strftime_now(3) }}", "str"),
}


@pytest.mark.parametrize(("source", "text"), REFUSED.values(), ids=REFUSED)
def test_what_a_template_refuses_is_for_the_client(source: str, text: str) -> None:
    with pytest.raises(ChatTemplateError, match=text) as caught:
        ChatTemplate(source, {}).render([USER])
    assert re.match("messages: the chat template (refuses|fails on) them: ", str(caught.value))


def test_no_messages_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="messages: must not be empty"):
        ChatTemplate(CHATML, {}).render([])


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ ''['__class__'] }}{{ (''|attr('__class__')).__mro__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ lipsum.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__}'.format(messages) }}{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ ''.format_map({}).__class__ }}",
    "{% set f = '{a.__class__.__mro__}'.format_map %}{{ f({'a': 1}) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ dict.mro() }}",
    "{{ namespace.__init__.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_has_no_way_out(source: str) -> None:
    """Refused, or undefined and empty; nothing of the interpreter is ever shown or changed."""
    messages = [dict(USER)]
    try:
        text = ChatTemplate(source, {}).render(messages)
    except ChatTemplateError:
        text = ""
    assert not any(word in text for word in ("<class", "class '", "module", "function", "os"))
    assert messages == [USER]


@pytest.mark.parametrize("loop", ["x", "{{ messages }}", ""])
def test_a_template_that_runs_away_is_stopped(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that writes nothing but empty pieces."""
    monkeypatch.setattr(rendering, "MAX_RENDERED", 2**16)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}" + loop + "{{ '' }}{% endfor %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="too long a prompt"):
        ChatTemplate(source, {}).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{% set a = m(n - 1) %}{% set b = m(n - 1) %}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% macro m() %}{{ caller() }}{% endmacro %}{% for i in range(999) %}{% for j in range(999) %}{% call m() %}"
        "{% endcall %}{% endfor %}{% endfor %}",
    ],
)
def test_an_endless_loop_in_a_template_is_stopped(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="too many loop iterations"):
        ChatTemplate(source, {}).render([USER], Work(20_000, WAIT_S))


def test_a_template_whose_turns_take_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of them: each sorts a hundred thousand values."""
    monkeypatch.setattr("minisgl.tokenizer.chat_template.TRIAL_WORK", Work(1 << 14, 0.05))
    source = "{% set all = range(99999) | list %}{% for i in range(99999) %}{% set x = all | sort %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="too long over them"):
        ChatTemplate(source, {}).render([USER], Work(99_999, 0.05))


def test_counting_iterations_does_not_change_the_prompt() -> None:
    source = (
        "{% macro m(x) %}[{{ x }}]{% endmacro %}{% for i in range(9) if i % 2 %}{{ loop.index }}/{{ loop.length }}"
        "{{ m(i) }}{% if loop.last %}.{% endif %}{% else %}none{% endfor %}{% for i in [] %}{% else %}empty{% endfor %}"
    )
    assert ChatTemplate(source, {}).render([USER]) == "1/4[1]2/4[3]3/4[5]4/4[7].empty"


@pytest.mark.parametrize("shown", ["{{ %s }}", "{%% set x = %s %%}", "{{ x ~ %s }}", "{{ (%s) | trim }}"])
def test_constants_of_a_branch_not_taken_are_not_computed(shown: str) -> None:
    size = 2**22
    text = "'a'" + " * 2" * 22
    tracemalloc.start()
    try:
        template = ChatTemplate("{% if nothing %}" + shown % text + "{% endif %}x", {})
        assert template.render([{"role": "user", "content": "a"}]) == "x"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size / 2


LOOP = "{% for p in m.content %}{{ p.text }}{% endfor %}"
FIRST_PART_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% elif m.role == 'user' %}"
    + LOOP
    + "{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}"
)
REPR = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' and m.content is not string %}"
    + LOOP
    + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [FIRST_PART_ONLY, REPR], ids=["first part only", "notation of Python"])
@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_no_part_of_a_message_is_lost(source: str, role: str) -> None:
    """Templates that loop over the parts of users show one part of others, or their form."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    talk: list[Any] = [{"role": role, "content": parts}, {"role": "user", "content": "r"}]
    talk = [{"role": "user", "content": "q"}, *talk]
    text = ChatTemplate(source, {}).render(talk)
    assert "one" in text and "two" in text and "{" not in text


def test_a_template_that_needs_descriptions_gets_them() -> None:
    """gpt-oss's fails on a tool without one; others see their tools as they were given."""
    source = "{% for t in tools %}{{ t.function.description + '!' }}{{ t.function.parameters|length }}{% endfor %}"
    tool = {"type": "function", "function": {"name": "save"}}
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "q"}], tools=[tool]) == "!2"
    plain = "{% for t in tools %}{{ t.function|length }}{% endfor %}"
    assert ChatTemplate(plain, {}).render([{"role": "user", "content": "q"}], tools=[tool]) == "1"
