"""Chat templates with the features of well-known ones, written for tests; and the real ones of `MINISGL_DATA`."""

from __future__ import annotations

from minisgl import envs
from minisgl.tokenizer import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {"name": "save", "description": "", "parameters": {"type": "object", "properties": {}}},
}

# The system message comes first, once; a user must have asked; arguments are looped over (Qwen3.5).
STRICT = """
{%- if tools %}[tools]{{ tools | tojson }}{% endif -%}
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('nobody asked') }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{%- if not loop.first %}{{ raise_exception('system first') }}{% endif %}[system]{{ m.content }}
{%- elif m.role == 'user' %}[user]{{ m.content }}
{%- elif m.role == 'tool' %}[result]{{ m.content }}
{%- elif m.role == 'assistant' %}[assistant]
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<call {{ call.function.name }}>
{%- for key, value in call.function.arguments | items %}<{{ key }}>{{ value }}{% endfor %}</call>{% endfor -%}
{%- else %}{{ raise_exception('unknown role') }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
# Users and assistants take turns; the system text is a part of the first question; no tools (Gemma 3).
TURNS = """
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}{% set all = messages[1:] %}
{%- else %}{% set first = '' %}{% set all = messages %}{% endif -%}
{%- for m in all -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif -%}
[{{ 'model' if m.role == 'assistant' else m.role }}]{{ first if loop.first }}{{ m.content | trim }}
{%- endfor %}{% if add_generation_prompt %}[model]{% endif %}"""
# The same without any system role (Gemma 2, Mistral 7B v0.1).
BARE = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS
# One call in a message; reasoning is `thinking`, in the place of content; later system messages are left out;
# a result follows its call, whose name it takes (gpt-oss).
CHANNELS = """
{%- set all = messages[1:] if messages[0].role == 'system' else messages -%}
{%- if messages[0].role == 'system' %}[developer]{{ messages[0].content }}{% endif -%}
{%- set last = namespace(name=none) -%}
{%- for m in all -%}
{%- if m.role == 'user' %}[user]{{ m.content }}
{%- elif m.role == 'tool' -%}
{%- if last.name is none %}{{ raise_exception('no call before the result') }}{% endif %}[{{ last.name }}]{{ m.content }}
{%- elif m.role == 'assistant' and 'tool_calls' in m -%}
{%- if m.content and m.thinking %}{{ raise_exception('content or thinking') }}{% endif -%}
{%- set last.name = m.tool_calls[0].function.name -%}
{%- if m.content or m.thinking %}[analysis]{{ m.content or m.thinking }}{% endif -%}
[to {{ last.name }}]{{ m.tool_calls[0].function.arguments | tojson }}
{%- elif m.role == 'assistant' %}{% set last.name = none %}[final]{{ m.content }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
# Turns that do not count calls and results; ids of nine letters; content beside calls is left out (Mistral).
NINE = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set all = messages[1:] %}
{%- else %}{% set all = messages %}{% endif -%}
{%- set turn = namespace(index=0) -%}
{%- for m in all if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (turn.index % 2 == 0) %}{{ raise_exception('take turns') }}{% endif -%}
{%- set turn.index = turn.index + 1 %}{% endfor -%}
{%- for m in all -%}
{%- if m.role == 'user' %}[INST]{{ system + '\\n\\n' if loop.first and system is defined }}{{ m.content }}[/INST]
{%- elif m.role == 'tool' -%}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}[RESULT]{{ m.content }}
{%- elif m.tool_calls %}[CALLS]{% for call in m.tool_calls -%}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif -%}
{{ call.function | tojson }} {{ call.id }}{% endfor -%}
{%- elif m.role == 'assistant' %}{{ m.content }}</s>
{%- else %}{{ raise_exception('unknown role') }}
{%- endif %}{% endfor %}"""
# System messages are collected at the front; arguments are texts; only a first call has its content (DeepSeek R1).
COLLECTED = """
{%- set ns = namespace(system='', begun=false) -%}
{%- for m in messages if m.role == 'system' %}{% set ns.system = ns.system + m.content %}{% endfor -%}
<s>{{ ns.system }}
{%- for m in messages -%}
{%- if m.role == 'user' %}[User]{{ m.content }}
{%- elif m.role == 'tool' %}[output]{{ m.content }}
{%- elif m.role == 'assistant' and m.tool_calls -%}
{%- if not ns.begun %}{{ m.content }}{% endif -%}
{%- set ns.begun = true -%}
{%- for call in m.tool_calls %}{{ '[call]' + call.function.name + '\\n' + call.function.arguments }}{% endfor -%}
{%- elif m.role == 'assistant' %}[Assistant]{{ m.content }}</s>
{%- endif %}{% endfor %}{% if add_generation_prompt %}[Assistant]{% endif %}"""
# All is shown where it stands; arguments that are a text are that text (Qwen3); ids name what is called (Kimi).
OPEN = """
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<call {{ call.id }}>
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}</call>
{%- endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# It looks at the first letter of a text (Command A).
FIRST_LETTER = """
{%- for m in messages %}[{{ m.role }}]{% if not m.content[0].thinking %}{{ m.content }}{% endif %}{% endfor -%}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
# The system text is a part of the last message, if that is a user's (Mistral Nemo).
LAST = NINE.replace("loop.first and system is defined", "loop.last and system is defined")
# Reasoning is left out where an expression in the place of FORGETS is true.
FORGETS = STRICT.replace("if m.reasoning_content %}", "if m.reasoning_content and not (FORGETS) %}")

SOURCES = {
    "strict": STRICT,
    "turns": TURNS,
    "bare": BARE,
    "channels": CHANNELS,
    "nine": NINE,
    "last": LAST,
    "collected": COLLECTED,
    "open": OPEN,
    "first letter": FIRST_LETTER,
}
OURS = {name: ChatTemplate(source, TOKENS) for name, source in SOURCES.items()}


def real_sources() -> dict[str, str]:
    """Return the templates of `chat_templates/*.jinja` in the folder of real data, by name."""
    folder = envs.data_dir()
    return {file.stem: file.read_text() for file in sorted(folder.glob("chat_templates/*.jinja"))} if folder else {}
