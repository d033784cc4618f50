"""An example with a tool: a question of arithmetic, and a calculator that the policy may use before it answers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from megarl.reward.verifiers import numbers
from megarl.rollout.environment import Environment, Messages, Observation, ToolCall, Turn, environment, write_call

MAX_CHARACTERS = 200
# Examples before the question, for a model that was not trained on tool calls.
EXAMPLES = ("27*41", "63*15", "35*86", "74*29")
LONGEST = 10**15  # from here on an integer is rounded to ten digits
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@environment
class Calculator(Environment):
    """Answers calls of the tool `calculator`. A turn without a call is the answer: its last number is compared with the
    row's answer. Each call costs `call_cost`. `examples` is the number of examples (a question, the call, its result and the
    answer) before the row's question."""

    tools = {
        "calculator": {
            "type": "object",
            "properties": {"expression": {"type": "string", "maxLength": MAX_CHARACTERS}},
            "required": ["expression"],
            "additionalProperties": False,
        }
    }

    def __init__(
        self, answer_field: str = "answer", call_cost: float = 0.0, examples: int = 0, question_field: str = "question"
    ) -> None:
        """Raises ValueError for more examples than there are."""
        if not 0 <= examples <= len(EXAMPLES):
            raise ValueError(f"environment.options: examples = {examples}; 0 to {len(EXAMPLES)} are there")
        self._field, self._cost = answer_field, call_cost
        self._examples, self._question_field = EXAMPLES[:examples], question_field

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        """Return the row's question after the examples, or None without examples. Raises ValueError if the answer is no
        number."""
        answers = numbers(str(row[self._field]))
        if len(answers) != 1:
            raise ValueError(f"field {self._field!r} is {row[self._field]!r}; one number is needed")
        self._answer = answers[0]
        if not self._examples:
            return None
        shown = [message for expression in self._examples for message in self._shown(expression)]
        return [*shown, {"role": "user", "content": str(row[self._question_field])}]

    def _shown(self, expression: str) -> list[dict[str, str]]:
        """Return an example, with a question as in reasoning-gym's `basic_arithmetic`."""
        result = _text(calculate(expression))
        return [
            {"role": "user", "content": f"Calculate {expression.replace('*', ' * ')}."},
            {"role": "assistant", "content": write_call(ToolCall("calculator", {"expression": expression}))},
            {"role": self.tool_role, "content": result},
            {"role": "assistant", "content": result},
        ]

    def step(self, turn: Turn) -> Observation:
        """Return the result of a call, or the end with reward 1 for a right answer."""
        if turn.call is None:
            answers = numbers(turn.text)
            return Observation(reward=float(bool(answers) and answers[-1] == self._answer), done=True)
        try:
            result = _text(calculate(turn.call.arguments["expression"]))
        except ZeroDivisionError:
            result = "error: division by zero"
        except OverflowError:
            result = "error: the result is too large"
        except ValueError as error:
            result = f"error: {error}"
        return Observation([{"role": self.tool_role, "content": result}], reward=0.0 - self._cost)


def calculate(expression: str) -> Fraction:
    """Evaluate numbers with + - * / and brackets. Raises ValueError for anything else, and ZeroDivisionError."""
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("cannot read the expression") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_value(left), _value(right))
    raise ValueError("numbers, + - * / and brackets only")


def _text(value: Fraction) -> str:
    """Write a value, exactly if it is a short integer. Raises OverflowError beyond the range of floats."""
    if value.denominator == 1 and abs(value) < LONGEST:
        return str(value.numerator)
    return f"{float(value):.10g}"
