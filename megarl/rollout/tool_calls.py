"""Tool calls in the text of a turn: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as the chat templates of
many models teach it (Qwen's, Hermes'); what stands around it is the model's own affair."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import referencing

from megarl.rollout.environment import ToolCall

OPENS, CLOSES = "<tool_call>", "</tool_call>"
# In the place of a MalformedCall that is longer than an observation may be.
SHORT_ERROR = "error: malformed call"


class MalformedCall(ValueError):
    """A call that cannot be answered; the message is for the policy, and repeats little of its words: that it says much
    is no fault of the environment, whose observations must not be long."""


def read_call(text: str, tools: Mapping[str, dict[str, Any]]) -> ToolCall | None:
    """The call in a text, or None for a text without one; `tools` has the JSON schema of each tool's arguments.

    Raises MalformedCall for more than one call, no JSON, an unknown tool, or arguments that its schema does not allow.
    """
    _, opened, behind = text.partition(OPENS)
    if not opened:
        return None
    inside, closed, rest = behind.partition(CLOSES)
    if not closed:
        raise MalformedCall(f"the call has no {CLOSES}")
    if OPENS in rest:
        raise MalformedCall("one call at a time")
    try:
        call = json.loads(inside)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"no JSON between {OPENS} and {CLOSES}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise MalformedCall('an object with "name" and "arguments" is needed')
    name, arguments = call["name"], call.get("arguments", {})
    if name not in tools:
        raise MalformedCall(f"no tool {_cut(name)}; there is {', '.join(tools)}")
    if not isinstance(arguments, dict):
        raise MalformedCall('"arguments" must be an object')
    schema = tools[name]
    # With a registry of its own, so that no `$ref` is looked up on the network.
    validator = jsonschema.validators.validator_for(schema)(schema, registry=referencing.Registry())
    wrong = jsonschema.exceptions.best_match(validator.iter_errors(arguments))
    if wrong is not None:
        # Its own message repeats the arguments.
        where, rule = _cut(".".join(map(str, wrong.absolute_path)) or "arguments"), wrong.validator or "false"
        raise MalformedCall(f"{name}: {where} must keep to {rule} = {_cut(json.dumps(wrong.validator_value), 40)}")
    return ToolCall(name, arguments)


def write_call(call: ToolCall) -> str:
    """The text of a call, as `read_call` reads it; for examples in prompts."""
    return f"{OPENS}{json.dumps({'name': call.name, 'arguments': call.arguments})}{CLOSES}"


def _cut(text: str, most: int = 20) -> str:
    return text if len(text) <= most else text[:most] + "..."
