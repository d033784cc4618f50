"""Chat templates as model families have them, each with what sets it apart, and a tokenizer for all of them."""

from __future__ import annotations

import re
from typing import Any

from tests.data.test_prompts import CHAT, DATED, byte_tokenizer

CALLS = """{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}"""
TOOLS = "{% if tools %}<|system|>Tools: {% for t in tools %}{{ t | tojson }}\n{% endfor %}<|turn_end|>\n{% endif %}"
GENERATE = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = TOOLS + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "<|turn_end|>{% endfor %}" + GENERATE
# Finds the last question: a message of the user that is no answer of a tool.
LAST = """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}"""
# Shows a turn's thoughts only if no question has followed, or never.
THOUGHTS = """{% for m in messages %}<|{{ m.role }}|>{% set text = m.content.split('</think>')[-1] %}
{%- if m.role == 'assistant' and KEEP %}{{ m.content }}{% else %}{{ text }}{% endif %}"""
CLOSE = CALLS + "<|turn_end|>{% endfor %}"

KEEPING: dict[str, str] = {
    "plain": PLAIN,
    "tests": CHAT,
    "dated": DATED.replace("{{ strftime_now('%d %B %Y') }}", "26 November"),
    "new lines between turns": PLAIN.replace("<|turn_end|>{% endfor %}", "<|turn_end|>\n{% endfor %}").replace(
        "<|{{ m.role }}|>", "<|{{ m.role }}|>\n"
    ).replace("<|assistant|>{% endif %}", "<|assistant|>\n{% endif %}"),
    "strips turns": PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}"),
    "tools' answers are the user's": PLAIN.replace("{{ m.role }}", "{{ 'user' if m.role == 'tool' else m.role }}"),
    "answers of tools share a turn": TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}"
    + "<|user|>{% endif %}<r>{{ m.content }}</r>{% if loop.last or loop.nextitem.role != 'tool' %}<|turn_end|>{% endif %}"
    + "{% else %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "<|turn_end|>{% endif %}{% endfor %}" + GENERATE,
    "no end but the next turn": PLAIN.replace("<|turn_end|>{% endfor %}", "{% endfor %}"),
    "closes with a text": PLAIN.replace("<|turn_end|>{% endfor %}", "\n##\n{% endfor %}"),
    "a system message that nobody gave": "{% if messages[0].role != 'system' %}<|system|>Hi.<|turn_end|>{% endif %}" + PLAIN,
}  # fmt: skip
# These show a thought only in the turn that has it.
DROPPING: dict[str, str] = {
    "thoughts of earlier questions": TOOLS + LAST + THOUGHTS.replace("KEEP", "loop.index0 > ns.last") + CLOSE + GENERATE,
    "thoughts of all turns": TOOLS + THOUGHTS.replace("KEEP", "false") + CLOSE + GENERATE,
    "opens thoughts itself": TOOLS + THOUGHTS.replace("KEEP", "false") + CLOSE + GENERATE.replace(
        "<|assistant|>", "<|assistant|><think>\n"
    ),
    "tools stand before the last question": LAST
    + "{% for m in messages %}{% if loop.index0 == ns.last %}<|system|>Tools: {{ tools | tojson }}<|turn_end|>{% endif %}"
    + "<|{{ m.role }}|>{{ m.content }}" + CLOSE + GENERATE,
    "turns lose their header": PLAIN.replace("<|assistant|>", "="),
    "counts the turns": "{{ messages | length }}" + PLAIN,
}  # fmt: skip
TEMPLATES = KEEPING | DROPPING

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def chat_tokenizer(template: str) -> Any:
    """One token a byte, but for the roles and the ends of turns, and for `ab`, which a policy may write as two tokens."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(["ab", "<think>", "</think>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn_end|>", "<|tool|>"]})
    return tokenizer


def squashed(text: str) -> str:
    return re.sub(r"\s", "", text)
