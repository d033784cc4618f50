"""Agents by themselves: whatever one does, it has a reward or a failure with its cause, harms no other and leaves nothing.

No test starts processes without an end: the machine may be somebody's, and nothing but a container stops that for sure.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from megarl.recipe.environment_section import AnyEnvironment
from megarl.reward.fork_server import below
from megarl.rollout.agent import AgentRun, Result, checked_result
from megarl.rollout.environment import Reply
from megarl.rollout.environment_workers import AgentClock, EnvironmentWorker
from tests.ports import unused_port
from tests.sink_cases import wait_for

LIMITS = {"max_turns": 3, "max_episode_tokens": 64, "memory_mib": 300, "max_processes": 12}
GOOD = Reply(reward=1.0, done=True)


def section(**changes: Any) -> Any:
    given = LIMITS | ({"kind": "agent", "target": "tests.agents:run"} if "run" not in changes else {"kind": "command"})
    return TypeAdapter(AnyEnvironment).validate_python(given | changes)


class Agents:
    """A worker of its own, with a loop."""

    def __init__(self, **changes: Any) -> None:
        self.section = section(**changes)
        self.worker = EnvironmentWorker(self.section, sys.path)
        self.runner = asyncio.Runner()
        self.url = f"http://127.0.0.1:{unused_port()}/s/1"

    def ask(self, row: Any, *, ends: bool = False) -> Reply:
        """Return what comes of a row; with `ends` the agent is ended as soon as it runs. It must leave no process."""

        async def ask() -> Reply:
            task = asyncio.ensure_future(self.worker.ask("one", AgentRun(row, self.url, "key", 7)))
            if ends:
                await asyncio.to_thread(wait_for, lambda: len(below(self.worker._server.process)) >= 2)
                await self.worker.end("one")
            try:
                return await asyncio.wait_for(task, 60)
            finally:
                await self.worker.end("one")

        reply = self.runner.run(ask())
        wait_for(lambda: not below(self.worker._server.process))
        return reply

    def close(self) -> None:
        self.worker.close()
        self.runner.close()


@pytest.fixture(scope="module")
def agents() -> Iterator[dict[str, Agents]]:
    """By the field of a row that says what to do: a coroutine, and a shell that runs the row's own program."""
    read = 'python -c \'import json, os; print(json.load(open(os.environ["MEGARL_ROW"]))["program"])\''
    instances = {"fault": Agents(), "program": Agents(run=f'eval "$({read})"')}
    yield instances
    for instance in instances.values():
        instance.close()


# What an agent does: the cause, and some words of the failure. BAD_COMMANDS has what any process may do.
FAULTS = {
    "raises": ("error", "exited with status 1: KeyError: 'board'"),
    "exits": ("error", "exited with status 1: SystemExit: 0"), "kills its parent": ("crash", "died with signal 9"),
    "fills memory": ("memory", "environment.memory_mib = 300"), "closes every descriptor": ("error", "exited with status 5"),
    "removes its folder": ("", ""), "is cut off": ("", "ConnectionRefusedError: no service"),
    "finds no endpoint": ("", "APIConnectionError"), "finds no host": ("", "no host"),
    "is refused a turn": ("error", "the rollout has had its 3 turns"), "is refused by a library": ("error", "no turn"),
    "is refused by a service": ("", "RateLimitError"), "finds no service for its reward": ("", "no judge"),
}  # fmt: skip
HABITS = {
    "": GOOD, "writes to every descriptor": GOOD, "starts many threads": GOOD, "writes its reward itself": GOOD,
    "gives rewards by turn": Reply(reward=0.75, rewards=(0.5, 0.0, 0.25), metrics={"guesses": 3.0}, done=True),
}  # fmt: skip
COMMANDS = {
    "echo 0.5": Reply(reward=0.5, done=True),
    "echo thinking; echo 1; echo; echo done >&2": GOOD,
    'echo {\\"reward\\": [1, 2], \\"metrics\\": {\\"tests\\": 4}}':
        Reply(reward=3.0, rewards=(1.0, 2.0), metrics={"tests": 4.0}, done=True),
    "echo 1 > $MEGARL_REWARD; echo garbage": GOOD,
    "head -c 300000 /dev/urandom; echo; echo 1": GOOD,
    "yes | head -c 9000000; echo 1": GOOD,
    "sleep 99 & echo 1": GOOD,
    "(setsid yes > /dev/null &) ; echo 1": GOOD,
    "test \"$OPENAI_BASE_URL $OPENAI_API_KEY\" = \"$ANTHROPIC_BASE_URL/v1 $ANTHROPIC_API_KEY\" && test $MEGARL_SEED = 7"
    " && python -c 'import megarl' && test -z \"$(ls)\" && case $NO_PROXY in *127.0.0.1) echo 1;; esac": GOOD,
    "cat; echo 1": GOOD,
}  # fmt: skip
BAD_COMMANDS = {
    "echo 1; exit 3": ("error", "exited with status 3"),
    "echo no such board >&2; exit 1": ("error", "exited with status 1: no such board"),
    "nobody-has-this": ("error", "exited with status 127: sh"),
    "true": ("error", "'' (str) is the last line of its output, and there is no file $MEGARL_REWARD"),
    "echo well done": ("error", "'well done' (str) is the last line"), "echo 1 2": ("error", "'1 2' (str) is the last line"),
    "echo NaN": ("error", "its reward is nan"), "echo '[[[['": ("error", "is the last line"), "echo true": ("", ""),
    "head -c 200000 /dev/urandom | tr -d '\\n'": ("error", "is the last line"),
    "echo '{\"score\": 1}'": ("error", "the keys reward and metrics are allowed"),
    "echo '{\"metrics\": {}}'": ("error", "its reward is None"),
    "head -c 200000 /dev/zero > $MEGARL_REWARD": ("error", "is the file $MEGARL_REWARD"),
    "mkdir $MEGARL_REWARD; echo x": ("error", "is the last line"),
    "mkfifo $MEGARL_REWARD; echo x": ("error", "is the last line"), "kill -9 $$": ("crash", "died with signal 9"),
    "head -c 400000000 /dev/zero > large && echo 1": ("error", "exited with status 153"),  # SIGXFSZ
    "b() { test $1 = 0 || { b $(($1 - 1)) & b $(($1 - 1)) & }; sleep 99; }; b 5": ("processes", "max_processes = 12"),
    "for i in $(seq 20); do sleep 99 & done; wait": ("processes", "environment.max_processes = 12"),
    f"{sys.executable} -c 'import time; filled = b\"x\" * (600 << 20); time.sleep(99)'": (
        "memory", "environment.memory_mib = 300"
    ),
}  # fmt: skip


ENDLESS = ("hangs in C", "ignores signals", "stops its parent")
ENDLESS_COMMANDS = ("sleep 99", "trap '' TERM INT HUP; sleep 99", "kill -STOP $$", "yes", "yes >&2")


def rows_of(**tables: Iterable[str]) -> list[tuple[str, str]]:
    """The field and the text of each row."""
    return [(field, text) for field, table in tables.items() for text in table]


@pytest.mark.parametrize(("field", "text"), rows_of(fault=HABITS, program=COMMANDS))
def test_an_agent_gives_its_reward_and_may_print_and_write_and_leave_what_it_likes(
    agents: dict[str, Agents], field: str, text: str
) -> None:
    """A command gives the reward in a file or in its last line."""
    assert agents[field].ask({field: text}) == (HABITS | COMMANDS)[text]


@pytest.mark.parametrize(("field", "text"), rows_of(fault=FAULTS, program=BAD_COMMANDS))
def test_a_fault_has_a_cause(agents: dict[str, Agents], field: str, text: str) -> None:
    cause, words = (FAULTS | BAD_COMMANDS)[text]
    reply = agents[field].ask({field: text})
    assert (reply.cause, words in reply.failure) == (cause, True), reply


@pytest.mark.parametrize(("field", "text"), rows_of(fault=ENDLESS, program=ENDLESS_COMMANDS))
def test_one_that_never_stops_is_ended_with_all_its_processes(agents: dict[str, Agents], field: str, text: str) -> None:
    assert agents[field].ask({field: text}, ends=True).failure.endswith("was ended")
    assert agents["fault"].ask({"fault": ""}) == GOOD, "after all these the next one is well"


def test_the_row_names_a_field_that_it_lacks(agents: dict[str, Agents]) -> None:
    assert "the row has no field 'fault'; it has 'question'" in agents["fault"].ask({"question": 1}).failure


def test_agents_run_beside_each_other_in_folders_that_go_with_them() -> None:
    program = 'touch here; test "$(ls)" = here && cat $MEGARL_ROW > $MEGARL_REWARD; pwd >&2; exit $(cat $MEGARL_ROW)'
    shell_agents = Agents(run=program)
    rows: list[Any] = [0, 1, *[0] * 6]

    async def run_all() -> list[Reply]:
        return await asyncio.gather(
            *(shell_agents.worker.ask(n, AgentRun(row, shell_agents.url, "key", 1)) for n, row in enumerate(rows))
        )

    replies = shell_agents.runner.run(run_all())
    assert [reply.failure != "" for reply in replies] == [bool(row) for row in rows]
    work = Path(replies[1].failure.split(": ")[1])
    assert len(list(work.parents[1].iterdir())) <= 8
    shell_agents.close()
    assert work.name == "work" and not work.parents[1].exists()


@pytest.mark.parametrize(("value", "message"), [
    (1j, "its reward is 1j (complex); a number is needed"),
    (Result(1.0, {"a name with blanks": 1.0}), "its metric 'a name with blanks' (str) has no name of letters"),
    (Result(1.0, {f"m{number}": 1.0 for number in range(99)}), "at most 32 numbers by name are needed"),
    (Result([0.5, "much"]), "its reward is 'much' (str); a number is needed"),  # type: ignore[list-item]
])  # fmt: skip
def test_what_is_no_result_is_named(value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        checked_result(value)


def test_a_command_line_that_sh_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"environment.run.*[Uu]nterminated"):
        EnvironmentWorker(section(run="echo 'x"), sys.path)


def test_the_clock_of_an_agent_stands_still_while_the_policy_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = AgentClock(section(timeout_s=10.0, idle_s=4.0))
    now = 200.0  # it waited for its worker
    clock.begin()
    assert (clock.left_s(), clock.passed()) == (4.0, "")
    now += 3
    with clock.stopped():
        now += 1000
        with clock.stopped():
            now += 1000
        now += 1000
        assert clock.passed() == "" and clock.left_s() == 4.0
    assert (clock.left_s(), clock.passed()) == (4.0, "")
    now += 3.5
    with clock.stopped():
        now += 1
    now += 3
    assert clock.left_s() == 0.5 and clock.passed() == ""
    now += 0.5
    assert clock.passed() == "it took longer than environment.timeout_s = 10"
    other = AgentClock(section(timeout_s=10.0, idle_s=4.0))
    now += 4
    assert other.passed() == "it asked nothing for environment.idle_s = 4"
