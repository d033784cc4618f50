"""The fork server under the event loop that Ray's actors run on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import uvloop

from megarl.reward.fork_server import ChildLimits, ForkServerClient


def load(_: Any) -> Callable[[], Callable[[str], str]]:
    return lambda: lambda question: question[::-1]


def test_long_questions_and_answers_reach_the_other_end() -> None:
    """What is longer than a socket's buffer arrives in pieces."""
    questions = [f"{number}".rjust(300_000) for number in range(8)]

    async def ask() -> list[Any]:
        with closing(ForkServerClient("tests", load, None, ChildLimits(1 << 30), sys.path)) as client:
            return await asyncio.gather(*(client.ask(key, text, 60.0, starts=True) for key, text in enumerate(questions)))

    assert uvloop.run(ask()) == [text[::-1] for text in questions]
