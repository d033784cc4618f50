"""The fork server under the event loop that Ray's actors run on, and what its children can do to their answers."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest
import uvloop

from megarl.reward import fork_server
from megarl.reward.fork_server import ZERO_CAUSES, ChildDeath, ChildLimits, ForkServerClient, below, passed_limit

MIB = 1 << 20


def load(_: Any) -> Callable[[], Callable[[str], str]]:
    return lambda: answer


def answer(question: str) -> str:
    if question == "sockets of a program":
        read_end, write_end = os.pipe()
        os.set_inheritable(write_end, True)
        os.system(f"ls -l /proc/self/fd >&{write_end}")
        return os.read(read_end, 1 << 16).decode()
    if question == "large":
        return "x" * (100 * MIB)
    if question == "half":
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        pipe = next(int(entry) for entry in os.listdir("/proc/self/fd") if is_socket(int(entry)))
        os.write(pipe, (1000).to_bytes(4, "big") + b"x" * 10)
        threading.Event().wait()
    if question == "wait":
        threading.Event().wait()
    return question[::-1]


def is_socket(descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except FileNotFoundError:
        return False


def play(ask: Callable[[ForkServerClient], Awaitable[Any]], limits: ChildLimits) -> Any:
    async def run() -> Any:
        with closing(ForkServerClient("tests", load, None, limits, sys.path)) as client:
            return await ask(client)

    return uvloop.run(run())


def test_long_questions_and_answers_reach_the_other_end() -> None:
    """What is longer than a socket's buffer arrives in pieces."""
    questions = [f"{number}".rjust(300_000) for number in range(8)]

    async def ask(client: ForkServerClient) -> list[Any]:
        return await asyncio.gather(*(client.ask(key, text, 60.0, starts=True) for key, text in enumerate(questions)))

    assert play(ask, ChildLimits(1 << 30)) == [text[::-1] for text in questions]


def test_a_program_that_a_child_starts_cannot_answer_for_it() -> None:
    listing = play(lambda client: client.ask(0, "sockets of a program", 60.0, starts=True), ChildLimits(1 << 30))
    assert "pipe:" in listing and "socket:" not in listing


def test_a_child_that_dies_in_the_middle_of_an_answer_is_the_cause() -> None:
    async def ask(client: ForkServerClient) -> list[Any]:
        server = client.process
        replies = [await client.ask(0, question, 60.0, starts=True) for question in ("half", "large", "abc")]
        assert client.process == server
        return replies

    half, large, small = play(ask, ChildLimits(150 * MIB))
    assert isinstance(half, ChildDeath) and half.cause == "crash"
    assert large.cause in ZERO_CAUSES if isinstance(large, ChildDeath) else large == "x" * (100 * MIB)
    assert small == "cba"


def test_a_child_that_dies_before_it_reads_a_question_was_idle() -> None:
    async def ask(client: ForkServerClient) -> list[Any]:
        replies = []
        for stops in (signal.SIGSTOP, signal.SIGCONT):  # a stopped child reads nothing; one that runs waits for ever
            await client.ask(0, "abc", 60.0, starts=True)
            [child] = below(client.process)
            os.kill(child, stops)
            waiting = asyncio.create_task(client.ask(0, "wait", 60.0))
            await asyncio.sleep(1.0)
            os.kill(child, signal.SIGKILL)
            replies.append(await waiting)
        return replies

    before, after = play(ask, ChildLimits(1 << 30))
    assert (before.was_idle, after.was_idle) == (True, False) and before.cause == after.cause == "crash"


def test_a_server_without_free_descriptors_refuses_children_and_keeps_the_others() -> None:
    async def ask(client: ForkServerClient) -> None:
        server = client.process
        resource.prlimit(server, resource.RLIMIT_NOFILE, (2 * fork_server.RESERVED_DESCRIPTORS,) * 2)
        replies = [await client.ask(key, "abc", 60.0, starts=True) for key in range(20)]
        started = [key for key, reply in enumerate(replies) if reply == "cba"]
        refused = [reply for reply in replies if reply != "cba"]
        assert started == list(range(len(started))) and 8 <= len(started) < 16
        assert {reply.cause for reply in refused} == {""}
        assert all("could not be forked: [Errno 24]" in reply.description for reply in refused)
        resource.prlimit(server, resource.RLIMIT_NOFILE, (4, 4))  # below those that are open
        assert (await client.ask(20, "abc", 60.0, starts=True)).cause == ""
        assert [await client.ask(key, "abcd", 60.0) for key in started] == ["dcba"] * len(started)
        assert client.process == server

    play(ask, ChildLimits(1 << 30))


@pytest.mark.parametrize("server_sizes", [[100, 50], [50, 100]])
def test_inherited_pages_do_not_count_while_other_children_start_or_end(
    monkeypatch: pytest.MonkeyPatch, server_sizes: list[int]
) -> None:
    parts = iter(server_sizes)

    def sizes(path: str) -> dict[str, int]:
        if path.endswith("/status"):
            return {"RssAnon": 120 * MIB}
        if path.startswith("/proc/1/"):
            return {"Pss_Anon": next(parts) * MIB}
        return {"Pss_Anon": 120 * MIB, "Private_Dirty": 20 * MIB}

    monkeypatch.setattr(fork_server, "sizes", sizes)
    monkeypatch.setattr(fork_server, "below", lambda process: [])
    assert passed_limit(2, ChildLimits(60 * MIB), server=1) == ""
