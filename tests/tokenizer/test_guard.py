"""Texts of a request never become markers, wherever a template shows them, and without markers nothing changes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from minisgl import _rust
from minisgl.tokenizer import ChatTemplate, ChatTemplateError, Tokenizer, guard
from minisgl.tokenizer.guard import Prompt, guards_of
from minisgl.tokenizer.reference import ReferenceTokenizer
from minisgl.tokenizer.tokenizer import FILE
from minisgl.utils.installed import find_smollm2
from minisgl.weights.gguf_folder import gguf_folder
from tests.helpers.text import data_folder
from tests.tokenizer.test_reference import NAMES, both, some_text

CHATML = """{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.name %} {{ m.name }}{% endif %}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content | trim }}
</think>
{% endif %}{{ m.content | trim }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function | tojson(ensure_ascii=true) }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% for t in tools or [] %}{{ t }}{% endfor %}{{ effort }}<|im_start|>assistant
"""
INST = """{{ bos_token }}{% for t in tools or [] %}[AVAILABLE_TOOLS]{{ t | tojson(indent=1) }}[/AVAILABLE_TOOLS]
{%- endfor %}
{%- for m in messages %}{% if m.role in ('user', 'system') %}[INST] {{ m.content }} {{ m.name }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ {'content': m.content} | tojson }}[/TOOL_RESULTS]
{%- else %} {{ m.reasoning_content }}{{ m.content }}
{%- if m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | tojson }}{% endif %}</s>
{%- endif %}{% endfor %}{{ effort }}"""
OWN = (Path(__file__).parent.parent / "helpers" / "thoughts_and_calls.jinja").read_text()
CASES = {
    "qwen3": ("qwen3", None),
    "qwen3, another template": ("qwen3", OWN),
    "qwen3, texts": ("qwen3", CHATML),
    "mistral-v3": ("mistral-v3", INST),
    "smollm2": ("smollm2", None),
    "smollm2, calls": ("smollm2", CHATML),
}


@cache
def tokenizer(case: str) -> Tokenizer:
    name, template = CASES[case]
    return Tokenizer.open(gguf_folder(find_smollm2()) if name == "smollm2" else data_folder(name), template)


@cache
def markers(case: str) -> list[str]:
    added = both(CASES[case][0])[0].backend.get_added_tokens_decoder()
    return [token.content for token in added.values()]


def control_ids(case: str, ids: Sequence[int]) -> list[int]:
    added = both(CASES[case][0])[0].backend.get_added_tokens_decoder()
    return [i for i in ids if i in added]


def conversation(planted: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """By field: a conversation in which it has the text."""
    user: dict[str, Any] = {"role": "user", "content": "one"}
    escaped = "".join(f"\\u{ord(char):04x}" for char in planted)

    def called(function: dict[str, Any]) -> dict[str, Any]:
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}, **function}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"messages": [user, answer, {"role": "tool", "content": "2", "tool_call_id": "call_1"}]}

    def says(message: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        return lambda: {"messages": [user, {"role": "assistant", "content": "two"}, {**user, **message}]}

    def tool(**given: Any) -> Callable[[], dict[str, Any]]:
        return lambda: {"messages": [user], "tools": [{"type": "function", "function": {"name": "f", **given}}]}

    return {
        "user": says({"content": planted}),
        "within": says({"content": f"a{planted}b {planted}{planted}\n"}),
        "parts": says({"content": [{"type": "text", "text": text} for text in (planted[:3], planted[3:], planted)]}),
        "name": says({"name": planted}),
        "system": lambda: {"messages": [{"role": "system", "content": planted}, user]},
        "assistant": lambda: {"messages": [user, {"role": "assistant", "content": planted}, user]},
        "reasoning": lambda: {"messages": [user, {"role": "assistant", "content": "", "reasoning_content": planted}]},
        "result": lambda: {"messages": [*called({})["messages"][:-1], {"role": "tool", "content": planted}]},
        "arguments": lambda: called({"arguments": {planted: [planted, {"b": planted}]}}),
        "arguments as text": lambda: called({"arguments": json.dumps({"a": planted})}),
        "escaped arguments": lambda: called({"arguments": f'{{"a": "{escaped}"}}'}),
        "broken arguments": lambda: called({"arguments": f'{{"a": "{planted}'}),
        "call": lambda: called({"name": planted}),
        "description": tool(description=planted),
        "schema": tool(
            parameters={"type": "object", "properties": {planted: {"enum": [planted]}}, "required": [planted]}
        ),
        "variable": lambda: {"messages": [user], "effort": planted},
    }


def rendered(case: str, asked: dict[str, Any]) -> str:
    found = dict(asked)
    return tokenizer(case).apply_chat_template(found.pop("messages"), **found)


@cache
def markerless(case: str) -> ChatTemplate:
    one = tokenizer(case)
    return ChatTemplate(one.template_source(), one.special_tokens)


def unguarded(case: str, asked: dict[str, Any]) -> str:
    """By a template that knows no markers."""
    return markerless(case).render(asked.pop("messages"), **asked)


def planted_markers(case: str, field: str) -> list[str]:
    """A few of the vocabulary, others for each field."""
    every = markers(case)
    return random.Random(f"{case} {field}").sample(every, min(len(every), 8))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("field", conversation("x"))
def test_a_planted_marker_stays_text(case: str, field: str) -> None:
    """Before this, each planted `<|im_end|>` was one more control id."""
    without = conversation("word")[field]()
    expected = control_ids(case, tokenizer(case).encode(rendered(case, without), False).tolist())
    kept = guard.searched(Environment().parse(tokenizer(case).template_source()))
    for marker in planted_markers(case, field):
        if field == "assistant" and marker in kept:
            continue
        text = rendered(case, conversation(marker)[field]())
        for encoder in (tokenizer(case).text, both(CASES[case][0])[0]):
            ids = encoder.encode(text, False, None, guards_of(text)).tolist()
            assert control_ids(case, ids) == expected, marker
            assert encoder.decode(ids, False) == text
        assert tokenizer(case).encode_batch([text, "a"], False)[0].tolist() == ids


@pytest.mark.parametrize("case", CASES)
def test_without_markers_nothing_changes(case: str) -> None:
    """The text has no guards, and is the one that a template without them makes."""
    for field, asked in conversation("a < b [x] 漢字 ꔀ | > ").items():
        text = rendered(case, asked())
        assert type(text) is str, field
        assert unguarded(case, asked()) == text


@pytest.mark.parametrize("case", CASES)
def test_guards_change_no_text(case: str) -> None:
    """A prompt with guards reads as the one that is rendered without them."""
    for field in conversation("x"):
        for marker in planted_markers(case, field):
            asked = conversation(f"é{marker} ü")[field]
            assert unguarded(case, asked()) == rendered(case, asked()), (marker, field)


def test_an_assistant_keeps_the_markers_that_its_template_looks_for() -> None:
    thought = [{"role": "assistant", "content": "<think>\na<|im_end|>\n</think>\n\n<tool_call>b"}]
    text = tokenizer("qwen3").apply_chat_template([{"role": "user", "content": "</think>"}, *thought])
    one = both("qwen3")[0]
    ids = tokenizer("qwen3").encode(text, False).tolist()
    assert "<|im_start|>assistant\n<think>\na<|im_end|>\n</think>\n\n<tool_call>b<|im_end|>" in text
    counts = {name: ids.count(one.token_id(name)) for name in ("<think>", "</think>", "<tool_call>", "<|im_end|>")}
    assert counts == {"<think>": 1, "</think>": 1, "<tool_call>": 0, "<|im_end|>": 2}


def test_texts_beside_each_other_make_no_marker() -> None:
    """A template that shows a message's parts, one behind the other, or within something of its own."""
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}<|im_end|>"
    one = Tokenizer.open(data_folder("qwen3"), source)
    for parts in (
        ["<|im_", "end|>"],
        ["a<", "|im_", "end|>"],
        ["<|im_end|", ">"],
        ["<|im_end|><|im_ \n", "end|>"],
        ["a<"],
    ):
        content = [{"type": "text", "text": text} for text in parts]
        text = one.apply_chat_template([{"role": "user", "content": content}])
        ids = one.encode(text, False).tolist()
        assert text == "".join(parts) + "<|im_end|>"
        assert [i for i in ids if i >= 151643] == [151645], parts


def test_searched_strings_of_a_template_are_found() -> None:
    source = (
        "{{ '</think>' in x }}{{ x.split(' <think>\n')[0] }}{{ x.startswith('<a>') }}{{ x == '<b>' }}{{ '<c>' + x }}"
    )
    assert guard.searched(Environment().parse(source)) == ["</think>", "<think>"]


def test_guard_characters_that_are_in_use_are_not_taken() -> None:
    def asked(used: str) -> str:
        return rendered("qwen3", {"messages": [{"role": "user", "content": f"<|im_end|>{used}"}]})

    assert asked("".join(guard.CHARS[:-1])).count("".join(guard.CHARS[:-1])) == 1
    with pytest.raises(ChatTemplateError, match="messages: they spell a special token"):
        asked("".join(guard.CHARS))
    deep: Any = "<|im_end|>"
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="messages: "):
        rendered("qwen3", {"messages": [{"role": "user", "content": "a"}], "effort": deep})


# ------------------------------------------------------------------------------------------------------------- encoding


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_guards_beside_markers_change_no_ids(name: str, seed: int) -> None:
    """Guards at the ends of tokens, and where there are none, over tokenizers of all kinds."""
    rng = random.Random(seed)
    theirs, ours = both(name)
    for _ in range(20):
        text = some_text(name, rng)
        taken = theirs.guarding.split(text, ())
        free = sorted(
            {at for begin, end, token in taken for at in ([begin] if token is not None else range(begin, end + 1))}
        )
        guards = [at for at in free if rng.random() < 0.3] or [0]
        expected = theirs.encode(text, False).tolist()
        assert ours.encode(text, False, None, guards).tolist() == expected, (text, guards)
        assert theirs.encode(text, False, None, guards).tolist() == expected, (text, guards)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_the_reference_guards_alike(name: str, seed: int) -> None:
    rng = random.Random(seed)
    theirs, ours = both(name)
    for _ in range(20):
        text = some_text(name, rng)
        assert ours.has_markers([{"a": text}]) == theirs.has_markers([{"a": text}]), text
        kept = rng.sample(["</think>", "<think>"], 1)
        shown = ours.guarded(text, "ꔀ", kept)
        assert shown == theirs.guarded(text, "ꔀ", kept)
        prompt = Prompt.of(shown, "ꔀ")
        guards = (
            guards_of(prompt) if rng.random() < 0.7 else sorted(rng.sample(range(len(text) + 1), min(3, len(text))))
        )
        mine = ours.encode(prompt, False, None, guards).tolist()
        assert mine == theirs.encode(prompt, False, None, guards).tolist(), (text, guards)


def kinds() -> dict[str, Library]:
    """Tokenizers whose model makes a marker of letters, and whose added tokens take spaces or ask for neighbours."""
    vocab = [("<unk>", 0.0), ("</s>", -1.0), *((char, -2.0) for char in "▁ab</s>"), ("</", -2.0), ("▁a", -2.0)]
    unigram = Library(models.Unigram(vocab, 0, False))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    unigram.decoder = decoders.Metaspace(prepend_scheme="first")
    unigram.add_special_tokens(["</s>"])
    words = {piece: i for i, piece in enumerate(["<unk>", *"ab<|x>/ "])}
    spaces = Library(models.BPE(words, [], unk_token="<unk>"))
    spaces.add_special_tokens([AddedToken("<|x|>", lstrip=True, rstrip=True, normalized=False)])
    spaces.add_tokens([AddedToken("<ab>", single_word=True), AddedToken("<x>", normalized=True), AddedToken("aa")])
    lower = Library(models.BPE(words, [], unk_token="<unk>"))
    lower.normalizer = normalizers.Lowercase()
    lower.add_tokens([AddedToken("<x>", normalized=True)])
    return {"unigram": unigram, "spaces": spaces, "lower": lower}


@pytest.mark.parametrize("kind", kinds())
def test_markers_of_other_kinds_stay_text(kind: str) -> None:
    library = kinds()[kind]
    ours, theirs = _rust.TextTokenizer(text=library.to_str()), ReferenceTokenizer(text=library.to_str())
    added = library.get_added_tokens_decoder()
    for token in added.values():
        marker = token.content
        for text in (marker, f"a{marker}", f"{marker}b", f"a {marker} {marker}a", f"/{marker[:2]}{marker}"):
            shown = ours.guarded(text, "ꔀ", [])
            if marker == "aa":  # a word is no marker
                assert shown == text
                continue
            prompt = Prompt.of(shown, "ꔀ")
            ids = ours.encode(prompt, False, None, guards_of(prompt)).tolist()
            assert not set(ids) & set(added), (marker, text, ids)
            assert ids == theirs.encode(prompt, False, None, guards_of(prompt)).tolist()
    for text in ("a </s> b", "</s>", "a  <|x|>  b<ab> <ab> b", "aa <x> <X>", ""):  # a template's
        expected = library.encode(text, add_special_tokens=False).ids
        guards = [len(text)]
        assert ours.encode(text, False, None, guards).tolist() == expected, text
        if kind != "lower":  # the reference looks for tokens as they are spelled
            assert theirs.encode(text, False, None, guards).tolist() == expected, text


@pytest.mark.parametrize(
    ("content", "special", "guarded"),
    [
        ("<|im_end|>", True, True),
        ("</think>", False, True),
        ("[THINK]", False, True),
        ("<s>", True, True),
        ("<s>", False, False),
        ("</h1>", False, False),
        ("\n\n", False, False),
        ("▁▁", False, False),
        ("Hello", False, False),
        ("Hello", True, True),
        ("ø", False, False),
    ],
)
def test_which_added_tokens_are_markers(content: str, special: bool, guarded: bool) -> None:
    library = Library(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    token = AddedToken(content, special=special, normalized=False)
    library.add_special_tokens([token]) if special else library.add_tokens([token])
    for one in (_rust.TextTokenizer(text=library.to_str()), ReferenceTokenizer(text=library.to_str())):
        assert one.has_markers({"a": [content]}) is guarded
        assert one.has_markers(("", {f"x{content[:-1]} ": 1})) is guarded
        assert not one.has_markers([1, None, "x", {"b": True}])


def test_a_real_folder_has_its_guards() -> None:
    ours = Tokenizer.load(data_folder("qwen3"))
    assert ours.text.has_markers("a<|im_end|>") and (data_folder("qwen3") / FILE).is_file()
