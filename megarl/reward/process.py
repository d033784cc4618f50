"""Verifiers in a process of their own, because only a process can be stopped for sure.

Signal time limits need the main thread and do not interrupt C code, and a user's function may loop, crash or
exit. So the verifiers of one scorer run in a plain child process (a multiprocessing one would import the
trainer's main module again); the parent hands it one text at a time and kills it at the deadline.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from megarl.data.sample import Prompt
from megarl.recipe.reward_sections import JudgeSection
from megarl.reward.verifiers import load_terms, read_answer, score_terms
from megarl.watchdog.stacks import mark_from_environment

START_TIMEOUT_S = 120.0
# Of a task's time, below which no text is begun any more once one was too slow: verifiers would start for nothing.
LEAST_SHARE = 1 / 24
STOP_TIMEOUT_S = 5.0
ORPHAN_POLL_S = 1.0
NEVER = threading.Event()  # a thread that waits for it is seen to wait, and not to be at work


@dataclass(frozen=True)
class Verdict:
    """What became of one text: what each reward term said, or why it has none; `reasons` holds what a term gives besides,
    and `answer` what the text answers, where that was asked."""

    said: dict[str, float] | None
    failure: str = ""
    timed_out: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    answer: str | None = None


class VerifierProcess:
    """A child process with the terms of the recipe's `reward` list loaded.

    `import_path` is where it looks for modules: the trainer's `sys.path`, since a Ray actor has another one.
    Raises ValueError where the terms do not load there, and RuntimeError where the process does not come up.
    """

    def __init__(self, specs: Sequence[JudgeSection], import_path: Sequence[str] | None = None) -> None:
        self._specs = list(specs)
        self._import_path = list(sys.path if import_path is None else import_path)
        self._restart_s = 0.0  # what the text at work has cost
        self._start()

    def score_task(
        self, texts: Sequence[str], prompts: Sequence[Prompt], timeout_s: float, answers: bool = False
    ) -> list[Verdict]:
        """One verdict for each text, in order, within `timeout_s` and restarts of the child; with what each answers, if
        `answers` are asked for.

        A text whose verifier raises, or takes the process down, fails alone. One behind which others wait may take half
        of the time that is left, so that a slow one fails alone too, and four of them leave the others some. At the deadline
        the text at work and all that wait behind it have timed out. A restart takes nothing of the time of the texts behind
        it, until all of a task have taken `START_TIMEOUT_S`.
        """
        deadline, spare_s = time.monotonic() + timeout_s, START_TIMEOUT_S
        verdicts: list[Verdict] = []
        for text, prompt in zip(texts, prompts, strict=True):
            self._restart_s, left_s = 0.0, deadline - time.monotonic()
            others_wait = len(verdicts) + 1 < len(texts)
            verdict = self._score(text, prompt, deadline - left_s / 2 if others_wait else deadline, answers)
            verdicts.append(verdict)
            given_s = min(self._restart_s, spare_s)
            deadline, spare_s = deadline + given_s, spare_s - given_s
            if verdict.timed_out and deadline - time.monotonic() < LEAST_SHARE * timeout_s:
                waiting = Verdict(None, f"timeout: waited behind texts that took all of {timeout_s} s", True)
                verdicts += [waiting] * (len(texts) - len(verdicts))
                break
        return verdicts

    def close(self) -> None:
        """Stop the child."""
        self._connection.close()
        self._child.kill()
        self._child.wait(timeout=STOP_TIMEOUT_S)

    def _score(self, text: str, prompt: Prompt, deadline: float, answers: bool) -> Verdict:
        try:
            self._connection.send((text, prompt, answers))
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                ended = self._child.pid
                self._restart()
                done = f"its verifier process {ended} was ended, and another one started"
                return Verdict(None, f"timeout: prompt {prompt.index} was still being scored; {done}", True)
            return self._connection.recv()
        except (EOFError, ConnectionError):
            try:
                death = f"died with exit status {self._child.wait(timeout=STOP_TIMEOUT_S)}"
            except subprocess.TimeoutExpired:
                death = "hung up"
            ended = self._child.pid
            self._restart()
            done = f"{death} on prompt {prompt.index}; another one was started"
            return Verdict(None, f"crash: the verifier process {ended} {done}")

    def _restart(self) -> None:
        begun = time.monotonic()
        self.close()
        self._start()
        self._restart_s = time.monotonic() - begun

    def _start(self) -> None:
        ours, theirs = _pipe()
        command = [sys.executable, "-m", "megarl.reward.process", str(theirs.fileno())]
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


def _exit_with_parent() -> None:
    """Leave when the parent is gone, also in the middle of a verifier that never returns."""
    parent = os.getppid()
    while os.getppid() == parent:
        NEVER.wait(ORPHAN_POLL_S)
    os._exit(1)


def serve(connection: Connection) -> None:
    """The child: load the terms, then answer texts with verdicts until the parent closes the connection."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
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
        except Exception as error:  # whatever a user's function raises is that text's failure, not the run's
            verdict = Verdict(None, f"crash: {type(error).__name__}: {error} on prompt {prompt.index}")
        connection.send(verdict)


if __name__ == "__main__":
    # Run as a module this file is `__main__`; answers must be of the class that the parent knows.
    from megarl.reward import process

    process.serve(Connection(int(sys.argv[1])))
