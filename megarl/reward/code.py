"""Score a completion's code by the tests that it passes in a sandbox."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from megarl.data.sample import Prompt
from megarl.recipe.reward_section import CodeRewardSection
from megarl.reward.sandbox import Program, SandboxLimits, refusal, run_programs

# Language and lines of a fenced block, of any language: the end of a block must not be taken for the start of another.
BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"py|python[\d.]*", re.IGNORECASE)
FORMS = (
    "Python code with an assert or a call, a list of such codes, a list of {input, output} objects, or an object with the "
    "lists inputs and outputs"
)


class ScoreWithReason(NamedTuple):
    """A verifier's score of a text, and the reason, which the metrics count."""

    value: float
    reason: str


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
    """Return the last fenced block of Python, or else the last block without a language (other languages often hold what the
    code prints), or else the whole text."""
    blocks = BLOCK.findall(text)
    python = [lines for language, lines in blocks if PYTHON.fullmatch(language)]
    unnamed = [lines for language, lines in blocks if not language]
    return (python or unnamed or [text])[-1]


def programs_of(code: str, prompt: Prompt) -> list[Program]:
    """Return one program per test in the prompt's answer. Raises ValueError for an answer that holds no tests."""
    try:
        tests: Any = json.loads(prompt.answer)
    except ValueError:
        tests = prompt.answer  # then it is Python code
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
    """Return None for a value that is no test, or a test that every code would pass."""
    if isinstance(test, dict) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str):
        return Program(code, test["input"], test["output"])
    if not isinstance(test, str):
        return None
    try:
        parts = list(ast.walk(ast.parse(test)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    return Program(f"{code}\n\n{test}") if any(isinstance(part, ast.Assert | ast.Call) for part in parts) else None
