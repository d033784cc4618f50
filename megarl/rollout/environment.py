"""The interface between megarl and an environment, tool calls included. No torch: each episode has its own process.

A tool call stands in the text of a turn, as the chat templates of many models teach it (Qwen's, Hermes'):
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import inspect
import json
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import jsonschema
import referencing

from megarl.recipe.own_code import load_marked, mark
from megarl.recipe.violation import RecipeError, Violation

# A text, which becomes a message of the role `user`, or messages with the keys `role` and `content`.
Messages = str | Sequence[Mapping[str, str]]
ENVIRONMENT = "megarl.rollout.environment.environment"
Class = TypeVar("Class", bound="type[Environment]")
OPENS, CLOSES = "<tool_call>", "</tool_call>"
# Replaces the message of a MalformedCall that is longer than an observation may be.
SHORT_ERROR = "error: malformed call"


class MalformedCall(ValueError):
    """A tool call that cannot be answered. The policy reads the message, which repeats little of its words: a long call must
    not make the observation too long, since that would be the environment's fault."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call that follows the tool's schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """The policy's text of one turn, without the token that ended it; `call` is the tool call in it, if the environment has
    tools."""

    text: str
    call: ToolCall | None = None


@dataclass(frozen=True)
class Observation:
    """The policy's next input, the reward of the turn, and whether the episode is over; then nobody sees `content`."""

    content: Messages = ""
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True)
class Reply:
    """An environment's answer: messages (None if reset keeps the row's prompt), the turn's reward, and whether the episode
    is over. Or what an agent returned: its reward, which is the sum of `rewards` if it has one for each turn, and its
    metrics. Or the failure: with a `cause`, one of ZERO_CAUSES, if a turn of the policy can be the cause. `malformed`: the
    turn held a tool call that cannot be answered."""

    messages: list[dict[str, str]] | None = None
    reward: float = 0.0
    done: bool = False
    malformed: bool = False
    failure: str = ""
    cause: str = ""
    rewards: tuple[float, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)


class Environment(ABC):
    """One episode: constructed with `environment.options`, then `reset` once and `step` after each turn of the policy.

    It lives in its own process, which is killed at the end with everything that it has started. All randomness must come
    from reset's `seed`, so that a resumed run plays the same episodes; all members of a group have the same seed, and begin
    alike. Whatever is raised ends the episode, by `environment.on_error`.
    """

    tools: ClassVar[Mapping[str, dict[str, Any]]] = {}
    """The JSON schema of each tool's arguments, by the tool's name. A call that breaks it is answered with an error, and
    `step` never sees it."""
    tool_role: ClassVar[str] = "tool"
    """The role of the message with that error; set another role if the model's chat template does not know `tool`."""

    @abstractmethod
    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        """Begin the episode from the data's row, with all its fields. Returns messages that replace the row's own prompt, or
        None to keep that."""

    @abstractmethod
    def step(self, turn: Turn) -> Observation:
        """Answer a turn of the policy."""


def environment(cls: Class) -> Class:
    """Mark a class as an environment. In the recipe: `environment: {target: "my_module:MyClass", options: {...}, ...}`."""
    return mark(cls, ENVIRONMENT)


def load_environment(target: str, options: Mapping[str, Any]) -> type[Environment]:
    """Import the class of `environment.target`, without making an instance. Raises RecipeError if there is no such class, if
    it does not take the options, or if a tool's schema is invalid."""
    cls = load_marked("environment.target", target, ENVIRONMENT, options)
    if not isinstance(cls, type) or not issubclass(cls, Environment):
        raise RecipeError([Violation("environment.target", target, "is no Environment", "a class with that as its base")])
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        rule = f"{target}: {error}"
        raise RecipeError([Violation("environment.options", dict(options), rule, "what its constructor takes")]) from error
    for name, schema in cls.tools.items():
        try:
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except jsonschema.exceptions.SchemaError as error:
            rule = f"the schema of its tool {name!r} is invalid: {error.message}"
            raise RecipeError([Violation("environment.target", target, rule, "a JSON schema of the arguments")]) from error
    return cls


class Fields(dict[str, Any]):
    """A row that names the field that it does not have."""

    def __missing__(self, name: str) -> Any:
        raise LookupError(f"the row has no field {name!r}; it has {', '.join(map(repr, self))}")


def checked_messages(value: Any, name: str) -> list[dict[str, str]]:
    """Return plain messages. Raises TypeError naming `name` for anything else."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence) or not value:
        raise TypeError(f"{name} is {shown(value)}; a text is needed, or a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise TypeError(f"{name}: message {number} is {shown(message)}; role and content, two texts, are needed")
    return [dict(message) for message in value]


def checked_observation(value: Any) -> tuple[list[dict[str, str]], float, bool]:
    """Return messages, reward and whether the episode is over. Raises TypeError or ValueError naming the wrong field."""
    if not isinstance(value, Observation):
        raise TypeError(f"step returned {shown(value)}; an Observation is needed")
    reward = checked_number("Observation.reward", value.reward)
    if not isinstance(value.done, bool):
        raise TypeError(f"Observation.done is {shown(value.done)}; True or False is needed")
    messages = [] if value.done else checked_messages(value.content, "Observation.content")
    return messages, reward, value.done


def checked_number(name: str, value: Any) -> float:
    """Return a finite number. Raises TypeError or ValueError naming `name` for anything else."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {shown(value)}; a number is needed")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; a finite number is needed")
    return float(value)


def shown(value: Any) -> str:
    """Return a value as errors show it."""
    return f"{_shortened(repr(value), 60)} ({type(value).__name__})"


def read_call(text: str, tools: Mapping[str, dict[str, Any]]) -> ToolCall | None:
    """Return the tool call in a text, or None; `tools` holds the JSON schema of each tool's arguments.

    Raises MalformedCall for a second call, no JSON, an unknown tool, or arguments that the schema does not allow.
    """
    _, opened, after = text.partition(OPENS)
    if not opened:
        return None
    inside, closed, rest = after.partition(CLOSES)
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
        raise MalformedCall(f"no tool {_shortened(name)}; there is {', '.join(tools)}")
    if not isinstance(arguments, dict):
        raise MalformedCall('"arguments" must be an object')
    schema = tools[name]
    # An empty registry, so that no `$ref` is looked up on the network.
    validator = jsonschema.validators.validator_for(schema)(schema, registry=referencing.Registry())
    wrong = jsonschema.exceptions.best_match(validator.iter_errors(arguments))
    if wrong is not None:
        # The library's message repeats the arguments.
        where, rule = _shortened(".".join(map(str, wrong.absolute_path)) or "arguments"), wrong.validator or "false"
        raise MalformedCall(f"{name}: {where} must keep to {rule} = {_shortened(json.dumps(wrong.validator_value), 40)}")
    return ToolCall(name, arguments)


def write_call(call: ToolCall) -> str:
    """Return the text of a call as `read_call` reads it, for examples in prompts."""
    return f"{OPENS}{json.dumps({'name': call.name, 'arguments': call.arguments})}{CLOSES}"


def _shortened(text: str, most: int = 20) -> str:
    return text if len(text) <= most else text[:most] + "..."
