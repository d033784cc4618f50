"""Score texts with the recipe's verifiers in a child process, within a deadline for each task.

A text that causes a failure scores 0; a text that cannot be the cause is masked. If a verifier raises, dies or passes a
limit of memory or processes, it judges the same text once more, because the text may not be the cause. If it fails again, or
does not answer in time, it judges an empty completion of the same prompt. If it can score the empty completion, the text was
the cause, and each verifier gives 0. If a verifier does not reach its own service, no text is the cause.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from megarl.data.sample import Prompt
from megarl.recipe.reward_section import CodeRewardSection, HttpRewardSection, JudgeSection, part_names
from megarl.reward.fork_server import START_TIMEOUT_S, ZERO_CAUSES, ChildDeath, ChildLimits, ForkServerClient
from megarl.reward.outages import is_outage
from megarl.reward.sandbox import SandboxFault, refusal
from megarl.reward.verifiers import Term, TextScore, load_terms, read_answer, score_terms

# A slow text scores 0 only if it had this share of its equal part of the task's time. The rest allows for a busy machine.
FULL_SHARE = 0.9
EMPTY_TIMEOUT_S = 5.0  # for an empty completion
MAX_PROCESSES = 256
KEY = "verifiers"  # of the server's only child

Question = tuple[str, Prompt, bool]  # text, its prompt, whether to read the text's answer


class VerifierProcess:
    """A child process with the terms of the recipe's `reward` list, except services.

    `memory_bytes` limits the memory of all its processes together, in addition to the memory of a sandbox.
    """

    def __init__(
        self, specs: Sequence[JudgeSection], import_path: Sequence[str] | None = None, memory_bytes: int = 4 << 30
    ) -> None:
        sandboxes = [part.memory_mib + part.files_mib for part in specs if isinstance(part, CodeRewardSection)]
        self._limits = ChildLimits(memory_bytes + (max(sandboxes, default=0) << 20), MAX_PROCESSES)
        self._names = [
            name for name, part in zip(part_names(specs), specs, strict=True) if not isinstance(part, HttpRewardSection)
        ]
        self._server = ForkServerClient(
            KEY, prepare_verifiers, list(specs), self._limits, sys.path if import_path is None else import_path
        )
        self._is_loaded = False

    async def load(self) -> None:
        """Start the child and load the terms there. Raises ValueError if they do not load, RuntimeError if it dies."""
        reply = await self._server.ask(KEY, None, START_TIMEOUT_S, starts=True)
        self._is_loaded = reply is None
        if reply is None:
            return
        self.close()
        if not isinstance(reply, ChildDeath):
            raise ValueError(reply)
        if reply.cause in ("memory", "processes"):
            raise ValueError(f"phase reward: loading the verifiers took more than {self._limit(reply.cause)}")
        raise RuntimeError(f"phase reward: the verifiers were not loaded: their process {reply.description}")

    async def score_task(
        self, texts: Sequence[str], prompts: Sequence[Prompt], timeout_s: float, answers: bool = False
    ) -> list[TextScore]:
        """Score each text, in order, within `timeout_s` and the time to load the verifiers again; with `answers`, also read
        the answer of each text.

        A text that other texts wait for may take half of the remaining time, so that a slow text fails alone, and a few slow
        texts leave time for other texts. If a text is late that had less than its equal part of `timeout_s`, it is masked
        together with the texts after it. Loading the verifiers again and judging an empty completion do not count against
        the other texts' time, up to START_TIMEOUT_S for the task.
        """
        left_s, end = timeout_s, time.monotonic() + timeout_s + START_TIMEOUT_S
        scores_empty: dict[int, bool] = {}  # by prompt
        scores: list[TextScore] = []
        for text, prompt in zip(texts, prompts, strict=True):
            left_s = max(0.0, min(left_s, end - time.monotonic()))
            num_left = len(texts) - len(scores)
            given_s = left_s / 2 if num_left > 1 else left_s
            score, used_s = await self._score(text, prompt, given_s, answers)
            left_s -= used_s
            share_s = timeout_s / len(texts)
            if score.cause == "wall_time" and given_s < FULL_SHARE * share_s:
                failure = f"timeout: waited behind slow texts: left {given_s:.3g} s, less than its part of {share_s:.3g} s"
                return scores + [TextScore(None, failure, True, cause="waiting")] * num_left
            if score.cause in ZERO_CAUSES:
                if prompt.index not in scores_empty:
                    empty, _ = await self._ask("", prompt, EMPTY_TIMEOUT_S, False)
                    scores_empty[prompt.index] = not empty.cause
                if scores_empty[prompt.index]:
                    score = replace(score, parts=dict.fromkeys(self._names, 0.0))
                else:
                    score = replace(score, failure=f"{score.failure}; an empty completion failed too", cause="verifier")
            scores.append(score)
        return scores

    def close(self) -> None:
        """Stop the child and all processes that the verifiers have started."""
        self._server.close()

    async def _score(self, text: str, prompt: Prompt, given_s: float, answers: bool) -> tuple[TextScore, float]:
        """Score a text, and once more if it fails in time. Return the seconds that it used of `given_s` as well."""
        first, used_s = await self._ask(text, prompt, given_s, answers)
        if first.cause in ("", "wall_time"):
            return first, used_s
        score, again_s = await self._ask(text, prompt, max(0.0, given_s - used_s), answers)
        if score.cause == "wall_time" and first.cause in ("error", "verifier"):  # a service that hangs is down as well
            failure = f"{first.failure}; asked once more it was not done in time"
            return replace(score, failure=failure, cause="verifier"), used_s + again_s
        return replace(score, failure=score.failure or first.failure), used_s + again_s

    async def _ask(self, text: str, prompt: Prompt, timeout_s: float, answers: bool) -> tuple[TextScore, float]:
        """Ask the child once; return the seconds as well, without those to load the verifiers. Without an answer, the score
        has a cause and no parts."""
        if not self._is_loaded:
            await self.load()
        begun = time.monotonic()
        score = await self._server.ask(KEY, (text, prompt, answers), timeout_s)
        used_s = time.monotonic() - begun
        if not isinstance(score, ChildDeath):
            return score, used_s
        self._is_loaded = False
        cause = score.cause or "crash"
        how = f"{score.description} {self._limit(cause)}" if cause in ("memory", "processes") else score.description
        failure = f"{'timeout' if cause == 'wall_time' else cause}: the verifiers' process {how} on prompt {prompt.index}"
        return TextScore(None, f"{failure}; another process takes its place", cause == "wall_time", cause=cause), used_s

    def _limit(self, cause: str) -> str:
        memory = f"{self._limits.memory_bytes >> 20} MiB of memory (phases.reward.memory_mib)"
        return memory if cause == "memory" else f"{MAX_PROCESSES} processes"


def prepare_verifiers(specs: Sequence[JudgeSection]) -> Callable[[], Callable[[Question | None], TextScore | str | None]]:
    """Import, in the server, the libraries that each child needs, so that a new child starts fast. Do not import the user's
    module here: it may start threads or load a model, and its memory counts."""
    kinds = {spec.kind for spec in specs}
    if "math_verify" in kinds:
        import math_verify  # noqa: F401

        # The library warns that its time limits are off. They should be off: this file keeps the deadlines.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
    if "code" in kinds:
        refusal()  # the answer is cached
    return partial(_LoadedVerifiers, specs)


class _LoadedVerifiers:
    """Loads the terms at the first question, then scores one text per question, in the child."""

    def __init__(self, specs: Sequence[JudgeSection]) -> None:
        self._specs = specs
        self._terms: list[Term] = []

    def __call__(self, question: Question | None) -> TextScore | str | None:
        if question is None:
            try:
                self._terms = load_terms(self._specs)
            except ValueError as error:
                return str(error)
            return None
        text, prompt, answers = question
        try:
            parts, reasons = score_terms(self._terms, text, prompt)
            return TextScore(parts, reasons=reasons, answer=read_answer(self._terms, text) if answers else None)
        except SandboxFault as fault:
            return TextScore(None, f"verifier: {fault}, on prompt {prompt.index}", cause="verifier")
        except Exception as error:  # any error of a user's function is a failure of this text, not of the run
            cause = "verifier" if is_outage(error) else "error"
            failure = f"{cause}: {type(error).__name__}: {error} on prompt {prompt.index}"
            return TextScore(None, failure, cause=cause)
