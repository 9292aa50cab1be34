"""A model that thinks and calls tools: a tokenizer with or without tokens of its own for the markers, a chat template
after Qwen3's, and the bytes by which a prompt orders the markers of a scripted engine."""

from __future__ import annotations

from tokenizers import AddedToken

from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.echo import echo_tokenizer

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
BYTES = "\x01\x02\x03\x04"
"""In the text of an order they stand for `MARKERS`: a marker itself in a prompt may be a token."""

TEMPLATE = r"""
{%- set thinks = enable_thinking is not defined or enable_thinking %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\nYou may call one or more functions.\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\n<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '</user><|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
            {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' + ('' if thinks else '<think>\n\n</think>\n\n') }}
{%- endif %}"""


def thinking_tokenizer(*, has_tokens: bool) -> Tokenizer:
    """The echo engine's. With tokens for the markers, those around calls are plain ones, as Qwen3's."""
    backend = echo_tokenizer()
    names = ("<|im_start|>", "<|im_end|>", *MARKERS) if has_tokens else ("<|im_start|>", "<|im_end|>")
    backend.add_tokens([AddedToken(text, normalized=False, special=text[1] == "|") for text in names])
    return Tokenizer(backend, {"default": TEMPLATE}, {})


def marked_ids(tokenizer: Tokenizer) -> dict[int, list[int]]:
    """What the engine says for each of `BYTES`."""
    return {ord(byte): tokenizer.encode(text, False).tolist() for byte, text in zip(BYTES, MARKERS, strict=True)}
