"""The interface between megarl and an agent, and the process that runs one: a coroutine or a command. No torch.

Two processes belong to an episode. The fork server's child (megarl/reward/fork_server.py) starts the agent, keeps the ends
of what it prints, and reads its reward; the agent holds no pipe of megarl's, so that nothing that it writes reaches another
episode. Both end with the episode, and everything that the agent has started.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import math
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megarl.recipe.environment_section import AgentSection, CommandSection
from megarl.recipe.own_code import load_target
from megarl.recipe.violation import RecipeError, Violation
from megarl.reward.fork_server import LIBC, PR_SET_PDEATHSIG
from megarl.reward.outages import is_outage
from megarl.rollout.environment import Fields, Reply, checked_number, shown

# Of what an agent prints, and of the file with its reward, this many bytes at the end are kept.
KEPT_BYTES = 1 << 16
MAX_METRICS = 32
METRIC_NAME = re.compile(r"[A-Za-z]\w{0,63}")
BAD_EXIT = 1


@dataclass(frozen=True)
class Result:
    """What an agent may return in place of a number: the reward of the episode, or one for each answer of the policy, in
    order; and numbers whose means the run's metrics show as `agent/<name>`."""

    reward: float | Sequence[float]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentRun:
    """Run an agent on a row. `url` is that of its session, and `token` its key."""

    row: Mapping[str, Any]
    url: str
    token: str
    seed: int


def checked_result(value: Any) -> Reply:
    """Return the rewards and metrics in what an agent returned, or in JSON. Raises TypeError or ValueError naming what is
    wrong."""
    if isinstance(value, Mapping) and value.keys() - {"reward", "metrics"}:
        raise ValueError(f"its result is {shown(value)}; the keys reward and metrics are allowed")
    if isinstance(value, Mapping):
        value = Result(value.get("reward"), value.get("metrics", {}))  # type: ignore[arg-type]
    result = value if isinstance(value, Result) else Result(value)
    by_turn = isinstance(result.reward, Sequence) and not isinstance(result.reward, str)
    rewards = tuple(checked_number("its reward", reward) for reward in (result.reward if by_turn else [result.reward]))  # type: ignore[union-attr]
    if not isinstance(result.metrics, Mapping) or len(result.metrics) > MAX_METRICS:
        raise TypeError(f"its metrics are {shown(result.metrics)}; at most {MAX_METRICS} numbers by name are needed")
    for name in result.metrics:
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise ValueError(f"its metric {shown(name)} has no name of letters, digits and _")
    metrics = {name: checked_number(f"its {name}", number) for name, number in result.metrics.items()}
    return Reply(reward=math.fsum(rewards), rewards=rewards if by_turn else (), metrics=metrics, done=True)


def load_agent(target: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the coroutine of `environment.target`. Raises RecipeError if there is none, or if it does not take a row, a
    client and the options."""
    function = load_target("environment.target", target)
    if not inspect.iscoroutinefunction(function):
        raise RecipeError([Violation("environment.target", target, "is no coroutine", "async def run(row, client)")])
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        way_out = "what it takes after row and client"
        rule = f"{target}: {error}"
        raise RecipeError([Violation("environment.options", dict(options), rule, way_out)]) from error
    return function


# In the fork server, and in an episode's process -------------------------------------------------------------------------


def load_agents(section: AgentSection | CommandSection) -> Callable[[], Callable[[AgentRun | None], Reply]]:
    """In the fork server: import what all agents share, and make the folder of their folders. Raises RecipeError."""
    if section.kind == "agent":
        asyncio.run(_warm_up())
        start: Callable[[AgentRun], None] = partial(
            _run_coroutine, load_agent(section.target, section.options), section.options
        )
    else:
        checked = subprocess.run(["sh", "-nc", section.run], capture_output=True, encoding="utf-8", check=False)
        if checked.returncode:
            raise RecipeError([Violation("environment.run", section.run, checked.stderr.strip(), "a command line of sh")])
        start = partial(_run_command, section.run)
    folder = Path(tempfile.mkdtemp(prefix="megarl-agents-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.path[:] = map(os.path.abspath, sys.path)  # an agent has another working directory
    return partial(_AgentProcess, start, folder, section.memory_mib << 20, section.kind == "command")


class _AgentProcess:
    """Starts an agent, and waits for its end."""

    def __init__(self, start: Callable[[AgentRun], None], folder: Path, file_bytes: int, writes_row: bool) -> None:
        self._start, self._file_bytes = start, file_bytes
        for other in folder.iterdir():  # of episodes that were killed
            if not Path(f"/proc/{other.name}").exists():
                shutil.rmtree(other, ignore_errors=True)
        self._folder = folder / str(os.getpid())
        (self._folder / "work").mkdir(parents=True)
        self._reward = self._folder / "reward"
        # A coroutine has the row as an argument, and a file would show the answer to what the policy runs.
        self._row = self._folder / "row.json" if writes_row else None

    def __call__(self, question: AgentRun | None) -> Reply:
        if question is None:  # whether a process starts
            return Reply()
        if self._row is not None:
            self._row.write_text(json.dumps(question.row, default=str), encoding="utf-8")
        streams = [os.pipe(), os.pipe()]
        process = os.fork()
        if process == 0:
            self._be_the_agent(question, [writing for _, writing in streams])
        for _, writing in streams:
            os.close(writing)
        output, errors = _watch(process, [reading for reading, _ in streams])
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        last_words = next((f": {line}" for line in reversed(errors.splitlines()) if line.strip()), "")[:400]
        if status < 0:
            return Reply(failure=f"died with signal {-status}{last_words}", cause="crash")
        if status:
            is_masked = status == BAD_EXIT and (self._folder / "outage").exists()
            return Reply(failure=f"exited with status {status}{last_words}", cause="" if is_masked else "error")
        try:
            return checked_result(self._read_result(output))
        except (OSError, TypeError, ValueError, RecursionError) as error:
            return Reply(failure=str(error), cause="error")

    def _be_the_agent(self, question: AgentRun, streams: Sequence[int]) -> NoReturn:
        """Run the user's code, in the process of the agent."""
        status = BAD_EXIT
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # an agent never outlives its fork server
            signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block some, and a mask survives exec
            for number, stream in enumerate(streams, start=1):
                os.dup2(stream, number)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._file_bytes, self._file_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.environ.update(self._environment(question))
            os.chdir(self._folder / "work")
            self._start(question)
            status = 0
        except BaseException as error:  # whatever the user's code raises, SystemExit too, leaves it without a reward
            traceback.print_exc()
            if is_outage(error, endpoint=question.url):
                (self._folder / "outage").touch()
        finally:
            with suppress(BaseException):  # a closed output must not keep the process
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _environment(self, question: AgentRun) -> dict[str, str]:
        host = re.sub(r"^\w+://|:\d+/.*|/.*", "", question.url)
        unproxied = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), host)))
        return {
            "OPENAI_BASE_URL": f"{question.url}/v1",
            "OPENAI_API_KEY": question.token,
            "ANTHROPIC_BASE_URL": question.url,
            "ANTHROPIC_API_KEY": question.token,
            "MEGARL_REWARD": str(self._reward),
            "MEGARL_SEED": str(question.seed),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PATH": os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))),
            "TMPDIR": str(self._folder / "work"),
            "NO_PROXY": unproxied,
            "no_proxy": unproxied,
        } | ({} if self._row is None else {"MEGARL_ROW": str(self._row)})

    def _read_result(self, output: str) -> Any:
        """Return what the file of the reward holds, or else the last line that the agent printed. Raises ValueError if that
        is no JSON."""
        if self._reward.is_file():
            with self._reward.open("rb") as file:
                text, where = file.read(KEPT_BYTES).decode("utf-8", "replace"), "the file $MEGARL_REWARD"
        else:
            lines = [line for line in output.splitlines() if line.strip()]
            text, where = (lines or [""])[-1], "the last line of its output, and there is no file $MEGARL_REWARD"
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError(f"{shown(text)} is {where}; a number is needed, or JSON with reward and metrics") from None


def _run_command(command: str, question: AgentRun) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, which survives exec
        signal.signal(number, signal.SIG_DFL)
    os.execv("/bin/sh", ["sh", "-c", command])


def _run_coroutine(function: Callable[..., Any], options: Mapping[str, Any], question: AgentRun) -> None:
    async def run() -> Any:
        async with _client() as client:
            return await function(Fields(question.row), client, **options)

    random.seed(question.seed)
    reply = checked_result(asyncio.run(run()))
    result = {"reward": reply.rewards or reply.reward, "metrics": reply.metrics}
    Path(os.environ["MEGARL_REWARD"]).write_text(json.dumps(result), encoding="utf-8")


def _client(**options: Any) -> Any:
    """Return a client of the endpoint. It has no time limit, since a request that is held while weights change is no failure
    and rank 0 ends an episode; and it reads no certificates, since the endpoint has none."""
    import openai

    return openai.AsyncOpenAI(
        timeout=None, http_client=openai.DefaultAsyncHttpxClient(verify=False, timeout=None), **options
    )


async def _warm_up() -> None:
    """Import what a client imports up to its first request, once for all agents: that takes longer than an agent."""
    import openai

    async with _client(base_url="http://127.0.0.1:9", api_key="none", max_retries=0) as client:
        with suppress(openai.OpenAIError):
            await client.with_options(timeout=5).chat.completions.create(model="policy", messages=[])


def _watch(process: int, streams: list[int]) -> list[str]:
    """Wait for the end of a process; return the ends of its streams, which what it has started may hold open."""
    ends = dict.fromkeys(streams, b"")
    for stream in streams:
        os.set_blocking(stream, False)
    ended, waiting = os.pidfd_open(process), list(streams)
    is_over = False
    while not is_over:
        is_over = ended in select.select([ended, *waiting], [], [])[0]
        for stream in list(waiting):
            with suppress(BlockingIOError):
                text = os.read(stream, KEPT_BYTES)  # no pipe holds more
                ends[stream] = (ends[stream] + text)[-KEPT_BYTES:]
                if not text:
                    waiting.remove(stream)
    for stream in (ended, *streams):
        os.close(stream)
    return [end.decode("utf-8", "replace") for end in ends.values()]
