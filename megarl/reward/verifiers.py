"""What a completion's text is worth: named verifiers, and functions given as `module:function`.

A verifier says how right a text is, from the text and its prompt. It answers or raises; it never guesses
0 for what it could not judge. It keeps no time: whoever calls it does (see `megarl.reward.process`).
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import MAX_PREC, Context, Decimal
from functools import partial
from typing import Any

import jsonschema
import referencing

from megarl.data.sample import Prompt
from megarl.recipe.reward_section import (
    CodeRewardSection,
    FunctionRewardSection,
    HttpRewardSection,
    JudgeSection,
    PatternRewardSection,
    SchemaRewardSection,
    part_names,
)
from megarl.reward.code import Judged, code_verifier, programs_of

Verifier = Callable[[str, Prompt], float | Judged]
# What a text answers, for a vote; None where it answers nothing.
Reader = Callable[[str], str | None]
# Text in front of and behind the lines of a fenced block.
FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n[ \t]*```", re.DOTALL)

# A sign counts only where it cannot be a minus between two things: "5-3" holds 5 and 3, "= -3" holds -3. An exponent has at
# most four digits, so that no text can ask for a number of a billion digits.
NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.)])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,4}(?![\w]))?"
)
# Characters that people and word processors write for a minus sign.
MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63\uff0d", "-"))

EXACT = Context(prec=MAX_PREC)  # the usual one rounds to 28 digits


def numbers(text: str) -> list[Decimal]:
    """The decimal numbers in a text, in order: with thousands separators (1,234.5), without a zero before the point (.5),
    with an exponent (1.5e3), and with a typographic minus. A percent sign is not read: 50% is 50."""
    return [Decimal(match.replace(",", "")) for match in NUMBER.findall(text.translate(MINUS))]


def exact(text: str, prompt: Prompt) -> float:
    """1 where the whole text is the answer, blanks at both ends aside."""
    return float(text.strip() == prompt.answer.strip())


def last_number(text: str, prompt: Prompt) -> float:
    """1 where the last number in the text equals the answer as a number; 0 without any number."""
    found = numbers(text)
    return float(bool(found) and found[-1] == _number_answer(prompt))


def _number_answer(prompt: Prompt) -> Decimal:
    found = numbers(prompt.answer)
    if len(found) != 1:
        raise ValueError(
            f"reward kind last_number: the answer of prompt {prompt.index} ({prompt.question!r}) is "
            f"{prompt.answer!r}; one number is needed, or another reward kind"
        )
    return found[0]


def math_verify(text: str, prompt: Prompt) -> float:
    """1 where math-verify finds the text's expression equal to the answer's.

    Its own time limits are switched off: they are signals, which raise in any thread but the main one, and
    what they interrupt it reports as "not equal", which would be a reward of 0. So is, unless it is told otherwise, whatever
    goes wrong in it. Text in which it can read no expression is its own business: that is a wrong answer.
    """
    import math_verify as library

    gold = _math_answer(prompt)
    found = library.parse(text, parsing_timeout=None, raise_on_error=True)
    return float(library.verify(gold, found, timeout_seconds=None, raise_on_error=True))


def _math_answer(prompt: Prompt) -> list:
    import math_verify as library

    # A gold answer must be an expression; the library's fallback would take any text for one. Bare LaTeX is
    # only recognised between dollar signs.
    strict = {"fallback_mode": "no_fallback", "parsing_timeout": None}
    gold = library.parse(prompt.answer, **strict) or library.parse(f"${prompt.answer}$", **strict)
    if not gold:
        raise ValueError(
            f"reward kind math_verify: the answer of prompt {prompt.index} ({prompt.question!r}) is "
            f"{prompt.answer!r}, in which math-verify finds no expression; repair it, or use another kind"
        )
    return gold


def load_function(target: str) -> Verifier:
    """The function behind `module:function`; raises ValueError naming `reward.target`."""
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"reward.target is {target!r}; it is written module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"reward.target is {target!r}, whose module does not import: {error}; "
            "run from the directory that holds it, or install it"
        ) from error
    function = vars(module).get(function_name)
    if not callable(function):
        raise ValueError(f"reward.target is {target!r}, but {module_name} has no function {function_name!r}")
    return function


def pattern_verifier(pattern: str) -> Verifier:
    """1 where `pattern` is found in the text; with a group named `answer`, where its last match holds the answer there."""
    expression = re.compile(pattern)

    def found(text: str, prompt: Prompt) -> float:
        matches = list(expression.finditer(text))
        if not matches or "answer" not in expression.groupindex:
            return float(bool(matches))
        return float((matches[-1]["answer"] or "").strip() == prompt.answer.strip())

    return found


def schema_verifier(schema: dict[str, Any]) -> Verifier:
    """1 where the text, or its only fenced block, is a JSON document that the schema allows."""
    # With a registry of its own, so that no `$ref` is looked up on the network.
    validator = jsonschema.validators.validator_for(schema)(schema, registry=referencing.Registry())

    def allowed(text: str, prompt: Prompt) -> float:
        blocks = FENCED.findall(text)
        try:
            document = json.loads(blocks[0] if len(blocks) == 1 else text, parse_constant=_no_json)
        except (ValueError, RecursionError):  # no JSON, or nested beyond what anybody reads
            return 0.0
        return float(validator.is_valid(document))  # a schema that refers to itself without end raises: no 0

    return allowed


def _no_json(constant: str) -> None:
    """NaN and the infinities, which Python's parser takes and JSON has not."""
    raise ValueError(f"{constant} is no JSON")


def _whole(text: str) -> str | None:
    return text.strip() or None


def _last_number(text: str) -> str | None:
    found = numbers(text)
    return f"{found[-1].normalize(EXACT) or Decimal(0):f}" if found else None  # there is a -0, which equals 0


def _expression(text: str) -> str | None:
    import math_verify as library

    found = library.parse(text, parsing_timeout=None, raise_on_error=True)
    return str(found[0]) if found else None


def _named_answer(pattern: str) -> Reader | None:
    expression = re.compile(pattern)
    if "answer" not in expression.groupindex:
        return None

    def read(text: str) -> str | None:
        matches = list(expression.finditer(text))
        return ((matches[-1]["answer"] or "").strip() or None) if matches else None

    return read


READERS: dict[str, Reader] = {"exact": _whole, "last_number": _last_number, "math_verify": _expression}
VERIFIERS: dict[str, Verifier] = {"exact": exact, "last_number": last_number, "math_verify": math_verify}
# What a kind needs of an answer, to be asked before anything is scored. math_verify is not here: parsing has
# no time limit of its own, so it may only run where a deadline is kept.
ANSWER_CHECKS: dict[str, Callable[[Prompt], Any]] = {"last_number": _number_answer, "code": partial(programs_of, "")}


@dataclass(frozen=True)
class Term:
    """One summand of the reward, named as in the metrics."""

    name: str
    kind: str
    weight: float
    verifier: Verifier | None  # None where a service is asked for many texts at a time: megarl/reward/service.py
    reader: Reader | None = None


def load_terms(specs: Sequence[JudgeSection]) -> list[Term]:
    """The terms of the recipe's `reward` list; a repeated name gets its position added.

    Raises ValueError for a function that does not load, and for code where there is no sandbox.
    """
    return [
        Term(name, spec.kind, spec.weight, _verifier(spec), _reader(spec))
        for name, spec in zip(part_names(specs), specs, strict=True)
    ]


def _verifier(spec: JudgeSection) -> Verifier | None:
    """What says how right a text is."""
    if isinstance(spec, HttpRewardSection):
        return None
    if isinstance(spec, FunctionRewardSection):
        return load_function(spec.target)
    if isinstance(spec, PatternRewardSection):
        return pattern_verifier(spec.pattern)
    if isinstance(spec, SchemaRewardSection):
        return schema_verifier(spec.json_schema)
    if isinstance(spec, CodeRewardSection):
        return code_verifier(spec)
    return VERIFIERS[spec.kind]


def _reader(spec: JudgeSection) -> Reader | None:
    """What reads the answer out of a text, where a part of the reward has one."""
    return _named_answer(spec.pattern) if isinstance(spec, PatternRewardSection) else READERS.get(spec.kind)


def check_answer(terms: Sequence[Term], prompt: Prompt) -> None:
    """Raises ValueError for a prompt whose answer a term could not judge anything by."""
    for term in terms:
        if term.kind in ANSWER_CHECKS:
            ANSWER_CHECKS[term.kind](prompt)


def score_terms(terms: Sequence[Term], text: str, prompt: Prompt) -> tuple[dict[str, float], dict[str, str]]:
    """What each term says, before weighting, and the reasons of those that give one. Raises what a verifier raises, and
    ValueError for no number."""
    said: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for term in terms:
        if term.verifier is None:
            continue
        found = term.verifier(text, prompt)
        if isinstance(found, Judged):
            reasons[term.name] = found.reason
            found = found.value
        value = float(found)
        if not math.isfinite(value):
            raise ValueError(f"reward {term.name} said {value} for prompt {prompt.index}; a finite number is needed")
        said[term.name] = value
    return said, reasons


def reads_answers(terms: Sequence[Term]) -> bool:
    """Whether some term says what a text answers, so that answers can be voted on."""
    return any(term.reader is not None for term in terms)


def read_answer(terms: Sequence[Term], text: str) -> str | None:
    """What a text answers, by the first term that reads it; None where it answers nothing."""
    reader = next((term.reader for term in terms if term.reader is not None), None)
    return None if reader is None else reader(text)


def weighted_sum(terms: Sequence[Term], said: dict[str, float]) -> float:
    """The reward: sum of weight * what the term says."""
    return sum(term.weight * said[term.name] for term in terms)


def score(specs: Sequence[JudgeSection], text: str, prompt: Prompt) -> float:
    """The reward of one text under the recipe's `reward` list, in this process and without a time limit."""
    terms = load_terms(specs)
    return weighted_sum(terms, score_terms(terms, text, prompt)[0])
