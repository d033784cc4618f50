"""Score a completion's text: named verifiers, tests of code, and functions given as `module:function`.

A verifier returns a number for a text and its prompt, or raises. It never returns 0 for a text that it could not judge. The
caller keeps the time limit (megarl/reward/verifier_process.py).
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import MAX_PREC, Context, Decimal
from functools import partial
from typing import Any, NamedTuple

import jsonschema
import referencing

from megarl.data.sample import Prompt
from megarl.recipe.own_code import load_target
from megarl.recipe.reward_section import (
    CodeRewardSection,
    FunctionRewardSection,
    JudgeSection,
    PatternRewardSection,
    SchemaRewardSection,
    part_names,
)
from megarl.reward.sandbox import Program, SandboxLimits, refusal, run_programs


class ScoreWithReason(NamedTuple):
    """A verifier's score of a text, and the reason, which the metrics count."""

    value: float
    reason: str


Verifier = Callable[[str, Prompt], float | ScoreWithReason]
# Reads the answer out of a text, for a vote; None if the text has none.
Reader = Callable[[str], str | None]

# Language and lines of a fenced block, of any language, so that the end of a block is not taken for the start of a block.
BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"py|python[\d.]*", re.IGNORECASE)
FORMS = (
    "Python code with an assert or a call, a list of such codes, a list of {input, output} objects, or an object with the "
    "lists inputs and outputs"
)
# The lines of a fenced block, with or without text around it.
FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n[ \t]*```", re.DOTALL)

# A sign counts only if it cannot be a minus between two operands: "5-3" holds 5 and 3, "= -3" holds -3. An exponent has at
# most four digits, so that no text can ask for a number of a billion digits.
NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.)])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,4}(?![\w]))?"
)
# Characters that people and word processors write for a minus sign.
MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63\uff0d", "-"))

EXACT = Context(prec=MAX_PREC)  # the default context rounds to 28 digits
# Why a text is masked. `waiting`: other texts left this text, or one before it, less than an equal part of the task's time.
# `verifier`: a verifier also fails on an empty completion, or did not reach its own service. `service`: a service has not
# judged the text. `environment`: the environment failed before the first turn, with its worker, or by an outage.
MASK_CAUSES = ("waiting", "verifier", "service", "environment")


@dataclass(frozen=True)
class TextScore:
    """The score of one text: a number for each part of the reward, or None if the text is masked or was not judged.

    `reasons` holds the reasons that parts give, and `answer` the text's answer, if the caller asked for it. If no verifier
    has judged the text, `cause` is one of ZERO_CAUSES or MASK_CAUSES, and `failure` explains the cause.
    """

    parts: dict[str, float] | None
    failure: str = ""
    timed_out: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    answer: str | None = None
    cause: str = ""

    def combined(self, other: TextScore) -> TextScore:
        """Join two scores of the same text; the result has parts only if both scores have parts."""
        reasons = self.reasons | other.reasons
        if self.parts is None or other.parts is None:
            failed = self if self.parts is None else other
            return TextScore(None, failed.failure, self.timed_out or other.timed_out, reasons, cause=failed.cause)
        answer, failed = other.answer if self.answer is None else self.answer, self if self.cause else other
        failure = failed.failure or self.failure  # of a text that was judged once more, without a cause
        return TextScore(self.parts | other.parts, failure, failed.timed_out, reasons, answer, failed.cause)


def numbers(text: str) -> list[Decimal]:
    """Return the decimal numbers in a text, in order: with thousands separators (1,234.5), without a zero before the point
    (.5), with an exponent (1.5e3), and with a typographic minus. A percent sign does not count: 50% is 50."""
    return [Decimal(match.replace(",", "")) for match in NUMBER.findall(text.translate(MINUS))]


def exact(text: str, prompt: Prompt) -> float:
    """Return 1 if the text equals the answer, without blanks at both ends, else 0."""
    return float(text.strip() == prompt.answer.strip())


def last_number(text: str, prompt: Prompt) -> float:
    """Return 1 if the last number in the text equals the answer as a number, else 0."""
    text_numbers = numbers(text)
    return float(bool(text_numbers) and text_numbers[-1] == _number_answer(prompt))


def _number_answer(prompt: Prompt) -> Decimal:
    answer_numbers = numbers(prompt.answer)
    if len(answer_numbers) != 1:
        raise ValueError(
            f"reward kind last_number: the answer of prompt {prompt.index} ({prompt.question!r}) is "
            f"{prompt.answer!r}; one number is needed, or another reward kind"
        )
    return answer_numbers[0]


def math_verify(text: str, prompt: Prompt) -> float:
    """Return 1 if math-verify finds the text's expression equal to the answer's, else 0; a text without an expression is
    wrong.

    The library's time limits are off: they use signals, which raise in every thread except the main thread, and the library
    reports an interrupted comparison as "not equal", which would be a reward of 0. Errors are raised for the same reason.
    """
    import math_verify as library

    gold = _math_answer(prompt)
    expression = library.parse(text, parsing_timeout=None, raise_on_error=True)
    return float(library.verify(gold, expression, timeout_seconds=None, raise_on_error=True))


def _math_answer(prompt: Prompt) -> list:
    import math_verify as library

    # The answer must be an expression, and the library's fallback would accept any text. The library recognises bare LaTeX
    # only between dollar signs.
    strict = {"fallback_mode": "no_fallback", "parsing_timeout": None}
    gold = library.parse(prompt.answer, **strict) or library.parse(f"${prompt.answer}$", **strict)
    if not gold:
        raise ValueError(
            f"reward kind math_verify: the answer of prompt {prompt.index} ({prompt.question!r}) is "
            f"{prompt.answer!r}, in which math-verify finds no expression; repair it, or use another kind"
        )
    return gold


def load_function(target: str) -> Verifier:
    """Import `module:function`. Raises ValueError naming `reward.target`."""
    function = load_target("reward.target", target)
    if not callable(function):
        raise ValueError(f"reward.target = {target!r}: no function, but {function!r}")
    return function


def pattern_verifier(pattern: str) -> tuple[Verifier, Reader | None]:
    """Return a verifier that gives 1 if `pattern` matches somewhere in the text. With a group `answer`, the group of the
    last match must also equal the prompt's answer, and the reader returns this group."""
    expression = re.compile(pattern)

    def last_answer(text: str) -> str | None:
        matches = list(expression.finditer(text))
        return (matches[-1]["answer"] or "").strip() if matches else None

    if "answer" not in expression.groupindex:
        return lambda text, prompt: float(expression.search(text) is not None), None
    return (lambda text, prompt: float(last_answer(text) == prompt.answer.strip()), lambda text: last_answer(text) or None)


def schema_verifier(schema: dict[str, Any]) -> Verifier:
    """Return a verifier that gives 1 if the text, or its only fenced block, is a JSON document that the schema allows."""
    # The empty registry keeps the library from looking up a `$ref` on the network.
    validator = jsonschema.validators.validator_for(schema)(schema, registry=referencing.Registry())

    def allowed(text: str, prompt: Prompt) -> float:
        blocks = FENCED.findall(text)
        try:
            document = json.loads(blocks[0] if len(blocks) == 1 else text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            return 0.0
        return float(validator.is_valid(document))  # a schema that refers to itself without end raises

    return allowed


def _refuse_constant(constant: str) -> None:
    """Raise ValueError for NaN and the infinities, which Python's parser accepts and JSON lacks."""
    raise ValueError(f"{constant} is no JSON")


def code_verifier(section: CodeRewardSection) -> Callable[[str, Prompt], ScoreWithReason]:
    """Return a verifier that gives 1, 0 or the share of tests passed, with the reason of the first test that did not pass.

    Raises ValueError if this machine has no sandbox. The verifier raises SandboxFault if the sandbox fails.
    """
    if (reason := refusal()) is not None:
        raise ValueError(f"reward kind code: this machine has no sandbox: {reason}")
    limits = SandboxLimits(
        wall_s=section.timeout_s,
        cpu_s=section.cpu_s,
        memory_bytes=section.memory_mib << 20,
        file_bytes=section.files_mib << 20,
        processes=section.processes,
        output_bytes=section.output_kib << 10,
    )

    def judge(text: str, prompt: Prompt) -> ScoreWithReason:
        programs = programs_of(code_of(text), prompt)
        reasons = run_programs(programs, limits, stop_at_failure=section.credit == "all")
        share = reasons.count("passed") / len(programs)
        value = share if section.credit == "share" else float(share == 1.0)
        return ScoreWithReason(value, next((reason for reason in reasons if reason != "passed"), "passed"))

    return judge


def code_of(text: str) -> str:
    """Return the last fenced block of Python, else the last block without a language, else the whole text. Blocks of other
    languages often hold the output of the code."""
    blocks = BLOCK.findall(text)
    python = [lines for language, lines in blocks if PYTHON.fullmatch(language)]
    unnamed = [lines for language, lines in blocks if not language]
    return (python or unnamed or [text])[-1]


def programs_of(code: str, prompt: Prompt) -> list[Program]:
    """Return one program per test in the prompt's answer. Raises ValueError for an answer without tests."""
    try:
        tests: Any = json.loads(prompt.answer)
    except ValueError:
        tests = prompt.answer  # Python code
    if isinstance(tests, dict) and tests.keys() == {"inputs", "outputs"}:
        inputs, outputs = tests["inputs"], tests["outputs"]
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            tests = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    programs = [_program(code, test) for test in (tests if isinstance(tests, list) else [tests])]
    if not programs or None in programs:
        raise ValueError(
            f"reward kind code: the answer of prompt {prompt.index} ({prompt.question!r}) is {prompt.answer!r}, which holds "
            f"no tests; needed is {FORMS}"
        )
    return [program for program in programs if program is not None]


def _program(code: str, test: Any) -> Program | None:
    """Return the program of a test; None for a value that is not a test, and for a test that every code would pass."""
    if isinstance(test, dict) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str):
        return Program(code, test["input"], test["output"])
    if not isinstance(test, str):
        return None
    try:
        parts = list(ast.walk(ast.parse(test)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    return Program(f"{code}\n\n{test}") if any(isinstance(part, ast.Assert | ast.Call) for part in parts) else None


def _last_number(text: str) -> str | None:
    text_numbers = numbers(text)
    return f"{text_numbers[-1].normalize(EXACT) or Decimal(0):f}" if text_numbers else None  # -0 equals 0


def _expression(text: str) -> str | None:
    import math_verify as library

    expressions = library.parse(text, parsing_timeout=None, raise_on_error=True)
    return str(expressions[0]) if expressions else None


READERS: dict[str, Reader] = {
    "exact": lambda text: text.strip() or None,
    "last_number": _last_number,
    "math_verify": _expression,
}
VERIFIERS: dict[str, Verifier] = {"exact": exact, "last_number": last_number, "math_verify": math_verify}
# Checks of a prompt's answer that run before any text is scored. math_verify has no check: its parser has no time limit, so
# it may only run under a deadline.
ANSWER_CHECKS: dict[str, Callable[[Prompt], Any]] = {"last_number": _number_answer, "code": partial(programs_of, "")}


@dataclass(frozen=True)
class Term:
    """One summand of the reward, named as in the metrics."""

    name: str
    kind: str
    weight: float
    verifier: Verifier | None  # None for a service, which scores many texts at a time (megarl/reward/service.py)
    reader: Reader | None = None


def load_terms(specs: Sequence[JudgeSection]) -> list[Term]:
    """Load the terms of the recipe's `reward` list; a repeated name gets its position added.

    Raises ValueError for a function that does not load, and for code if this machine has no sandbox.
    """
    terms = []
    for name, spec in zip(part_names(specs), specs, strict=True):
        verifier, reader = VERIFIERS.get(spec.kind), READERS.get(spec.kind)
        if isinstance(spec, FunctionRewardSection):
            verifier = load_function(spec.target)
        elif isinstance(spec, PatternRewardSection):
            verifier, reader = pattern_verifier(spec.pattern)
        elif isinstance(spec, SchemaRewardSection):
            verifier = schema_verifier(spec.json_schema)
        elif isinstance(spec, CodeRewardSection):
            verifier = code_verifier(spec)
        terms.append(Term(name, spec.kind, spec.weight, verifier, reader))
    return terms


def check_answer(terms: Sequence[Term], prompt: Prompt) -> None:
    """Check a prompt's answer. Raises ValueError if a term cannot compare texts with it."""
    for term in terms:
        if term.kind in ANSWER_CHECKS:
            ANSWER_CHECKS[term.kind](prompt)


def score_terms(terms: Sequence[Term], text: str, prompt: Prompt) -> tuple[dict[str, float], dict[str, str]]:
    """Return the score of each term, before weighting, and the reasons of the terms that give reasons. Raises the errors of
    verifiers, and ValueError for a score that is not a finite number."""
    parts: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for term in terms:
        if term.verifier is None:
            continue
        score = term.verifier(text, prompt)
        if isinstance(score, ScoreWithReason):
            reasons[term.name] = score.reason
            score = score.value
        value = float(score)
        if not math.isfinite(value):
            raise ValueError(f"reward {term.name} gave {value} for prompt {prompt.index}; a finite number is needed")
        parts[term.name] = value
    return parts, reasons


def reads_answers(terms: Sequence[Term]) -> bool:
    """Return whether some term reads answers out of texts, so that a vote on answers is possible."""
    return any(term.reader is not None for term in terms)


def read_answer(terms: Sequence[Term], text: str) -> str | None:
    """Return a text's answer, read by the first term that reads answers; None if the text has no answer."""
    reader = next((term.reader for term in terms if term.reader is not None), None)
    return None if reader is None else reader(text)
