"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """`fail` is what stops a run or makes it wrong, `warn` what makes it slower or less safe."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One check's answer: what was found and, unless it is well, what to do about it."""

    check: str
    verdict: Verdict
    found: str
    fix: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Verdict.OK, found)


def warn(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Verdict.WARN, found, fix)


def fail(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Verdict.FAIL, found, fix)
