"""Verifiers in a process of their own, because only a process can be stopped for sure.

Signal time limits need the main thread and do not interrupt C code, and a user's function may loop, crash, exit or take all
memory. So the verifiers of one scorer run below a plain child process, the keeper (a multiprocessing one would import the
trainer's main module again), which ends them with all that they have started: at their limits, when they have ended, when
the scorer says so at a deadline, or when that is gone. The scorer hands the verifiers one text at a time.

What a text causes is scored, and what it cannot have caused is masked. A verifier that dies or raises is asked about the
same text once more: the cause may have been something else. Where it fails again, or passes a limit, it is asked about an
empty completion of the same prompt: if it judges that, the text was the cause, and each verifier says 0. A verifier whose
own service is not reached is no text's fault: the text is masked.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import NoReturn

from megarl.data.sample import Prompt
from megarl.recipe.reward_section import CodeRewardSection, HttpRewardSection, JudgeSection, part_names
from megarl.reward.process_tree import LIBC, PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, SCORED, below, end_all, is_over
from megarl.reward.sandbox import SandboxFault
from megarl.reward.verifiers import load_terms, read_answer, score_terms
from megarl.telemetry.stacks import mark_from_environment

START_TIMEOUT_S = 120.0
# Of a task's time, below which no text is begun any more once one was too slow: verifiers would start for nothing.
LEAST_SHARE = 1 / 24
# Of a text's equal part of a task's time, what it must have had to be scored as too slow; a busy machine takes the rest.
FULL_SHARE = 0.9
STOP_TIMEOUT_S = 5.0
EMPTY_TIMEOUT_S = 5.0  # for a verdict on an empty completion
# Why a completion is masked: it was `waiting` behind others until the task's deadline, or was left less than its equal part
# of the task's time; a `verifier` fails on an empty completion too, or has not reached a service of its own; a `service` has
# not judged it; or an `environment` failed before the first turn, or with its worker.
MASKED = ("waiting", "verifier", "service", "environment")
LOOK_S = 0.05  # how often a keeper looks what the verifiers hold
MOST_PROCESSES = 256
# Exit statuses of a keeper that has ended the verifiers at a limit.
OVER = {86: "memory", 87: "processes"}
# Libraries that ask services, by name, as only the user's function may have them: where their errors hold a status, and by
# library and class which say that a service was not reached.
LIBRARIES = {"httpx", "requests", "urllib", "aiohttp", "openai", "anthropic"}
STATUS = ("status_code", "status", "code")
UNREACHED = {
    ("httpx", "TransportError"), ("requests", "ConnectionError"), ("requests", "Timeout"),
    ("aiohttp", "ClientConnectionError"), ("openai", "APIConnectionError"), ("anthropic", "APIConnectionError"),
}  # fmt: skip
NO_ROUTE = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)


@dataclass(frozen=True)
class Verdict:
    """What became of one text: what each reward term said, or why it has none; `reasons` holds what a term gives besides,
    and `answer` what the text answers, where that was asked. `cause` is one of SCORED or of MASKED where no verifier has
    judged it, and `failure` says more."""

    said: dict[str, float] | None
    failure: str = ""
    timed_out: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    answer: str | None = None
    cause: str = ""


class VerifierProcess:
    """A child process with the terms of the recipe's `reward` list loaded.

    `import_path` is where it looks for modules: the trainer's `sys.path`, since a Ray actor has another one. `memory_bytes`
    is what all its processes may hold together, beside what a sandbox may.
    Raises ValueError where the terms do not load there, and RuntimeError where the process does not come up.
    """

    def __init__(
        self, specs: Sequence[JudgeSection], import_path: Sequence[str] | None = None, memory_bytes: int = 4 << 30
    ) -> None:
        self._specs = list(specs)
        own = [part for part in specs if isinstance(part, CodeRewardSection)]
        self._memory_bytes = memory_bytes + (max((part.memory_mib + part.files_mib for part in own), default=0) << 20)
        self._names = [
            name for name, part in zip(part_names(specs), specs, strict=True) if not isinstance(part, HttpRewardSection)
        ]
        self._judges_empty: dict[int, bool] = {}  # by prompt, of the task at work
        self._import_path = list(sys.path if import_path is None else import_path)
        self._restart_s = 0.0  # what the text at work has cost
        self._start()

    def score_task(
        self, texts: Sequence[str], prompts: Sequence[Prompt], timeout_s: float, answers: bool = False
    ) -> list[Verdict]:
        """One verdict for each text, in order, within `timeout_s` and restarts of the child; with what each answers, if
        `answers` are asked for.

        A text whose verifier raises, or takes the process down, fails alone: it says 0, or is masked. A text behind which
        others wait may take half of the time that is left, so that a slow one fails alone too, and four of them leave the
        others some. A text that is not judged in less than its equal part of `timeout_s` is masked, and so are at the
        deadline all that wait behind the text at work. A restart takes nothing of the time of the texts behind it, until
        all of a task have taken `START_TIMEOUT_S`.
        """
        deadline, spare_s = time.monotonic() + timeout_s, START_TIMEOUT_S
        self._judges_empty = {}
        verdicts: list[Verdict] = []
        for text, prompt in zip(texts, prompts, strict=True):
            self._restart_s, left_s = 0.0, deadline - time.monotonic()
            others_wait = len(verdicts) + 1 < len(texts)
            verdict = self._score(
                text, prompt, deadline - left_s / 2 if others_wait else deadline, timeout_s / len(texts), answers
            )
            verdicts.append(verdict)
            given_s = min(self._restart_s, spare_s)
            deadline, spare_s = deadline + given_s, spare_s - given_s
            if verdict.timed_out and deadline - time.monotonic() < LEAST_SHARE * timeout_s:
                said = f"timeout: waited behind texts that took all of {timeout_s} s"
                waiting = Verdict(None, said, True, cause="waiting")
                verdicts += [waiting] * (len(texts) - len(verdicts))
                break
        return verdicts

    def close(self) -> None:
        """Stop the child, and with it all that the verifiers have started."""
        self._connection.close()
        self._child.terminate()
        try:
            self._child.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(timeout=STOP_TIMEOUT_S)

    def _score(self, text: str, prompt: Prompt, deadline: float, share_s: float, answers: bool) -> Verdict:
        given_s = max(0.0, deadline - time.monotonic())
        verdict = first = self._ask(text, prompt, given_s, answers)
        if first.cause in ("crash", "error", "verifier"):
            again = self._ask(text, prompt, max(0.0, deadline + self._restart_s - time.monotonic()), answers)
            verdict = replace(again, failure=again.failure or first.failure)
        if verdict.cause == "wall_time" and first.cause in ("error", "verifier"):  # a service that hangs is down as well
            return replace(verdict, failure=f"{first.failure}; asked once more it was not done in time", cause="verifier")
        if verdict.cause == "wall_time" and given_s < FULL_SHARE * share_s:
            said = f"timeout: prompt {prompt.index} was left {given_s:.3g} s, less than its part of {share_s:.3g} s"
            return replace(verdict, failure=said, cause="waiting")
        if verdict.cause not in SCORED:
            return verdict
        begun = time.monotonic()
        if prompt.index not in self._judges_empty:
            self._judges_empty[prompt.index] = not self._ask("", prompt, EMPTY_TIMEOUT_S, False).cause
        self._restart_s += time.monotonic() - begun
        if self._judges_empty[prompt.index]:
            return replace(verdict, said=dict.fromkeys(self._names, 0.0))
        return replace(verdict, failure=f"{verdict.failure}; so it did on an empty completion", cause="verifier")

    def _ask(self, text: str, prompt: Prompt, timeout_s: float, answers: bool) -> Verdict:
        """What the verifiers say within `timeout_s`, or with a cause why they say nothing."""
        try:
            self._connection.send((text, prompt, answers))
            if self._connection.poll(timeout_s):
                return self._connection.recv()
            ended, cause, said = self._child.pid, "wall_time", f"timeout: prompt {prompt.index} was still being scored; its "
            said += f"verifier process {ended} was ended, and another one started"
        except (EOFError, ConnectionError):
            ended = self._child.pid
            try:
                status: int | None = self._child.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = None
            cause = OVER.get(status or 0, "crash")
            died = "hung up" if status is None else f"died with exit status {status}"
            death = died if cause == "crash" else f"passed its limit of {self._limit(cause)}"
            said = f"{cause}: the verifier process {ended} {death} on prompt {prompt.index}; another one was started"
        self._restart()
        return Verdict(None, said, cause == "wall_time", cause=cause)

    def _limit(self, cause: str) -> str:
        memory = f"memory, {self._memory_bytes >> 20} MiB (phases.reward.memory_mib)"
        return memory if cause == "memory" else f"{MOST_PROCESSES} processes"

    def _restart(self) -> None:
        begun = time.monotonic()
        self.close()
        self._start()
        self._restart_s += time.monotonic() - begun

    def _start(self) -> None:
        ours, theirs = _pipe()
        command = [sys.executable, "-m", "megarl.reward.process", str(theirs.fileno()), str(self._memory_bytes)]
        self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._connection = ours
        try:
            # Specs travel as bytes: what they need to unpickle may lie on the path that goes before them.
            ours.send((self._import_path, pickle.dumps(self._specs)))
            if not ours.poll(START_TIMEOUT_S):
                raise TimeoutError
            refusal = ours.recv()
        except (EOFError, ConnectionError, TimeoutError) as error:
            self.close()
            if limit := OVER.get(self._child.returncode):
                raise ValueError(f"phase reward: loading the verifiers took more than {self._limit(limit)}") from error
            raise RuntimeError(
                f"phase reward: the verifier process did not start within {START_TIMEOUT_S} s "
                f"(exit status {self._child.returncode}); its own words are above"
            ) from error
        if refusal is not None:
            self.close()
            raise ValueError(refusal)


def _pipe() -> tuple[Connection, Connection]:
    from multiprocessing import Pipe

    return Pipe(duplex=True)


def keep(connection: Connection, memory_bytes: int) -> NoReturn:
    """The keeper: fork the verifiers, and end all below them when they end, are over a limit, or nobody needs them."""
    parent, keeper, signals = os.getppid(), os.getpid(), {signal.SIGTERM, signal.SIGCHLD}
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what the verifiers start stays below this process, whoever leaves it
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    if (verifiers := os.fork()) == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        if os.getppid() == keeper:  # else it died before that was set
            serve(connection)
        sys.stdout.flush()
        os._exit(0)
    connection.close()
    ending, status = 0, None
    while status is None and ending == 0:
        came = signal.sigtimedwait(signals, LOOK_S)
        if os.getppid() != parent or (came is not None and came.si_signo == signal.SIGTERM):
            break
        with suppress(ChildProcessError):
            while status is None and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == verifiers else None
        processes = below(keeper)
        over = "processes" if len(processes) > MOST_PROCESSES else "memory" if is_over(processes, memory_bytes) else ""
        ending = next((code for code, limit in OVER.items() if limit == over), 0)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            end_all(keeper)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            signal.sigtimedwait(signals, LOOK_S)
    code = os.waitstatus_to_exitcode(status) if status is not None else ending
    if code < 0:  # of the same signal
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(keeper, -code)
    os._exit(code if code >= 0 else 1)


def serve(connection: Connection) -> None:
    """The child: load the terms, then answer texts with verdicts until the parent closes the connection."""
    mark_from_environment("verifiers")
    # math-verify warns once that its time limits are off, which is the point.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    path, specs = connection.recv()
    sys.path[:] = path
    try:
        terms = load_terms(pickle.loads(specs))
    except ValueError as error:
        connection.send(str(error))
        return
    connection.send(None)
    while True:
        try:
            text, prompt, answers = connection.recv()
        except EOFError:
            return
        try:
            said, reasons = score_terms(terms, text, prompt)
            verdict = Verdict(said, reasons=reasons, answer=read_answer(terms, text) if answers else None)
        except SandboxFault as fault:
            verdict = Verdict(None, f"verifier: {fault}, on prompt {prompt.index}", cause="verifier")
        except Exception as error:  # whatever a user's function raises is that text's failure, not the run's
            cause = "verifier" if is_unreached(error) else "error"
            failure = f"{cause}: {type(error).__name__}: {error} on prompt {prompt.index}"
            verdict = Verdict(None, failure, cause=cause)
        connection.send(verdict)


def is_unreached(error: BaseException | None) -> bool:
    """Whether a service was not reached, or answered that it cannot judge now (status 429 or 5xx); true as well of what was
    raised because of such an error. What a completion can cause is none: a missing file, a URL that is no URL, a program
    that closes its pipe."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if _is_of_transport(error):
            return True
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _is_of_transport(error: BaseException) -> bool:
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(error).__mro__}
    if LIBRARIES.intersection(library for library, _ in bases):
        told = (
            getattr(getattr(error, "response", None), "status_code", None),
            *(getattr(error, key, None) for key in STATUS),
        )
        if status := next((one for one in told if isinstance(one, int)), 0):
            return status == 429 or status >= 500
    if ("urllib", "URLError") in bases:
        reason = getattr(error, "reason", None)
        return isinstance(reason, OSError) and reason.filename is None
    if isinstance(error, OSError) and error.errno in NO_ROUTE or bases & UNREACHED:
        return True
    return isinstance(error, ConnectionError | TimeoutError | socket.gaierror) and not isinstance(error, BrokenPipeError)


if __name__ == "__main__":
    # Run as a module this file is `__main__`; answers must be of the class that the parent knows.
    from megarl.reward import process

    process.keep(Connection(int(sys.argv[1])), int(sys.argv[2]))
