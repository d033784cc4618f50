"""What an environment is to megarl, and megarl to an environment. No torch: each episode has a process of its own."""

from __future__ import annotations

import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jsonschema

from megarl.recipe.own_code import load_marked, mark
from megarl.recipe.violation import RecipeError, Violation

# A text, which is a message of the role `user`, or messages with the keys `role` and `content`.
Messages = str | Sequence[Mapping[str, str]]
ENVIRONMENT = "megarl.rollout.environment.environment"
Class = TypeVar("Class", bound="type[Environment]")


@dataclass(frozen=True)
class ToolCall:
    """A call that keeps to the tool's schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What the policy said in one turn, without the token that ended it; `call` is the tool call in it, where the
    environment has tools."""

    text: str
    call: ToolCall | None = None


@dataclass(frozen=True)
class Observation:
    """What the policy sees next, what the turn was worth, and whether it was the last; then nobody sees `content`."""

    content: Messages = ""
    reward: float = 0.0
    done: bool = False


class Environment(ABC):
    """One episode: made with `environment.options`, then `reset` once and `step` behind each turn of the policy.

    It is made in a process of its own, which is ended with all that it has started. Everything that is drawn must come from
    reset's `seed`, so that a run that is resumed plays the same episodes; it is the same for all members of a group, which
    begin alike. Whatever is raised ends the episode, by `environment.on_error`.
    """

    tools: ClassVar[Mapping[str, dict[str, Any]]] = {}
    """The JSON schema of the arguments of each tool, by its name. A call that does not keep to it is answered with an error,
    and `step` never sees it."""
    tool_role: ClassVar[str] = "tool"
    """The role of the message that says so; another one where the model's chat template does not know `tool`."""

    @abstractmethod
    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        """Begin: the data's row, with all its fields, gives what is asked. Returns messages that take the place of the row's
        own prompt, or None to leave that."""

    @abstractmethod
    def step(self, turn: Turn) -> Observation:
        """Answer a turn of the policy."""


def environment(found: Class) -> Class:
    """Mark a class as an environment. In the recipe: `environment: {target: "my_module:MyClass", options: {...}, ...}`."""
    return mark(found, ENVIRONMENT)


def load_environment(target: str, options: Mapping[str, Any]) -> type[Environment]:
    """The class of `environment.target`; none is made, which is the affair of an episode's process. Raises RecipeError where
    there is none that takes the options, or whose tools have no right schema."""
    found = load_marked("environment.target", target, ENVIRONMENT, options)
    if not isinstance(found, type) or not issubclass(found, Environment):
        raise RecipeError([Violation("environment.target", target, "is no Environment", "a class with that as its base")])
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        rule = f"{target}: {error}"
        raise RecipeError([Violation("environment.options", dict(options), rule, "what its constructor takes")]) from error
    for name, schema in found.tools.items():
        try:
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except jsonschema.exceptions.SchemaError as error:
            rule = f"the schema of its tool {name!r} is none: {error.message}"
            raise RecipeError([Violation("environment.target", target, rule, "a JSON schema of the arguments")]) from error
    return found


class Fields(dict[str, Any]):
    """A row that says which field it has not."""

    def __missing__(self, name: str) -> Any:
        raise LookupError(f"the row has no field {name!r}; it has {', '.join(map(repr, self))}")


def checked_messages(found: Any, what: str) -> list[dict[str, str]]:
    """Plain messages. Raises TypeError naming `what` for anything else."""
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, Sequence) or not found:
        raise TypeError(f"{what} is {_shown(found)}; a text is needed, or a list of messages")
    for number, message in enumerate(found):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise TypeError(f"{what}: message {number} is {_shown(message)}; role and content, two texts, are needed")
    return [dict(message) for message in found]


def checked_observation(found: Any) -> tuple[list[dict[str, str]], float, bool]:
    """Messages, reward and whether it was the last. Raises TypeError or ValueError naming the wrong field."""
    if not isinstance(found, Observation):
        raise TypeError(f"step returned {_shown(found)}; an Observation is needed")
    if not isinstance(found.reward, numbers.Real):
        raise TypeError(f"Observation.reward is {_shown(found.reward)}; a number is needed")
    if not math.isfinite(found.reward):
        raise ValueError(f"Observation.reward is {found.reward}; a finite number is needed")
    if not isinstance(found.done, bool):
        raise TypeError(f"Observation.done is {_shown(found.done)}; True or False is needed")
    messages = [] if found.done else checked_messages(found.content, "Observation.content")
    return messages, float(found.reward), found.done


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '...'} ({type(value).__name__})"
