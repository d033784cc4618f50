"""The reward phase: tokens to texts to rewards, off the trainer where Ray runs."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.data.sample import Prompt
from megarl.recipe.phases_section import RewardPhaseSection
from megarl.recipe.reward_section import JudgeSection
from megarl.reward import sandbox, service
from megarl.reward.process import MASKED, START_TIMEOUT_S, Verdict, VerifierProcess
from megarl.reward.process_tree import SCORED
from megarl.reward.service import both, services_of
from megarl.reward.verifiers import check_answer, load_terms, reads_answers, weighted_sum
from megarl.telemetry.stacks import mark_from_environment, watched_environment

logger = logging.getLogger(__name__)
# Beyond its own deadline a task fetches its payload, decodes it, and may start a new verifier process.
TASK_GRACE_S = 2 * START_TIMEOUT_S
MAX_WORKER_RESTARTS = 2
# The part of the reward that an environment gives, in the metrics.
ENVIRONMENT = "environment"
# By the kind of a term, what it can say of a text besides a number; the metrics count each.
REASONS = {"code": sandbox.REASONS, "http": service.REASONS}


@dataclass(frozen=True, eq=False)
class RewardResult:
    """Rewards of a batch, in sample order.

    `rewards` float32 [n] and each of `parts` float32 [n] (what a term said, before its weight) are NaN where
    `valid` bool [n] is false, so that a masked reward can never be taken for a 0; `failures` says why for
    each masked sample; `task_sequences` is how many sequences each task scored. `busy_s` is how long the
    `num_workers` workers scored, all of them together. `counts` says how often a term gave which reason, as
    `code_num_failed`, and how many samples score 0, or are masked, for which cause, as `num_zero_memory`; `answers` is what
    each text answers, where that was asked for and some term reads it.

    Where these are some of the samples that were scored (megarl/rollout/dynamic_sampling.py), counts and seconds are of
    all of them, and `num_masked_beside` are the masked ones among the others.
    """

    rewards: np.ndarray
    valid: np.ndarray
    parts: dict[str, np.ndarray]
    failures: dict[int, str]
    num_timeouts: int
    task_sequences: tuple[int, ...]
    busy_s: float = 0.0
    num_workers: int = 1
    counts: dict[str, int] = field(default_factory=dict)
    num_masked_beside: int = 0
    answers: list[str | None] | None = None

    def metrics(self) -> dict[str, float]:
        """Means over the valid samples (NaN if there are none) and counts of the masked ones among all that were scored."""
        masked = int((~self.valid).sum()) + self.num_masked_beside
        figures = {
            "reward/mean": _mean(self.rewards[self.valid]),
            "reward/deviation": _std(self.rewards[self.valid]),
        }
        figures |= {f"reward/{name}": _mean(part[self.valid]) for name, part in self.parts.items()}
        figures |= {f"reward/{name}": count for name, count in self.counts.items()}
        figures |= {"reward/busy_s": self.busy_s, "reward/num_workers": self.num_workers}
        return figures | {"reward/num_masked": masked, "reward/num_timeouts": self.num_timeouts}


def add_episodes(scored: RewardResult, episodes: Any) -> RewardResult:
    """With what environments gave, as an EpisodeFacts has it; without episodes as it was. Where an environment failed for
    another cause than the policy's turn there is no reward."""
    if episodes is None:
        return scored
    masked = np.isnan(episodes.rewards)
    failures = {sample: str(why) for sample, why in enumerate(episodes.failures) if masked[sample]}
    counts = scored.counts | {"num_masked_environment": len(failures)}
    for cause in SCORED:
        counts[f"num_zero_{cause}"] = counts.get(f"num_zero_{cause}", 0) + int((episodes.causes == cause).sum())
    for why in [why for why, cause in zip(episodes.failures, episodes.causes, strict=True) if cause][:1]:
        logger.warning("%d episodes ended in an environment's failure; one: %s", int((episodes.causes != "").sum()), why)
    rewards = (scored.rewards + episodes.rewards).astype(np.float32)
    valid = scored.valid & ~masked
    parts = {name: np.where(valid, part, np.nan).astype(np.float32) for name, part in scored.parts.items()}
    parts[ENVIRONMENT] = np.where(valid, episodes.rewards, np.nan).astype(np.float32)
    return replace(scored, rewards=rewards, valid=valid, parts=parts, failures=scored.failures | failures, counts=counts)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _std(values: np.ndarray) -> float:
    return float(values.std()) if len(values) else float("nan")


class Scorer:
    """Scores tasks with one verifier process, and asks services beside it: here in `local` mode, or inside a Ray actor."""

    def __init__(
        self,
        specs: Sequence[JudgeSection],
        model_path: str,
        stop_token_ids: Sequence[int],
        import_path: Sequence[str],
        memory_bytes: int,
    ) -> None:
        from megarl.data.tokenizer import load_tokenizer

        mark_from_environment()
        self._tokenizer, self._stops = load_tokenizer(model_path), frozenset(stop_token_ids)
        self._services = services_of(specs)
        has_verifiers = len(self._services) < len(specs)
        self._verifiers = VerifierProcess(specs, import_path, memory_bytes) if has_verifiers else None
        self._busy_s = 0.0

    def ready(self) -> int:
        """Answers once the scorer is up, with its process."""
        return os.getpid()

    def score_task(
        self, payload: Any, samples: Sequence[int], prompts: Sequence[Prompt], timeout_s: float, answers: bool
    ) -> list[Verdict]:
        """Verdicts on `samples` (prompts[i] belongs to samples[i]); fetches their tokens from the payload."""
        begun = time.perf_counter()
        fetched = payload.fetch(list(samples))
        texts = [self._text(fetched[sample].completion.final_ids.tolist()) for sample in samples]
        asked = [one.ask(texts, prompts, timeout_s) for one in self._services]
        verdicts = [Verdict({})] * len(texts)
        if self._verifiers is not None:
            verdicts = self._verifiers.score_task(texts, prompts, timeout_s, answers)
        for one in asked:
            verdicts = list(map(both, verdicts, one.wait()))
        self._busy_s += time.perf_counter() - begun
        return verdicts

    def _text(self, ids: list[int]) -> str:
        """What was sampled, special tokens too, but for the token that ends it: as environments see a turn."""
        return self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._stops else ids)

    def take_busy_s(self) -> float:
        """Seconds that it scored for since the last call."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def close(self) -> None:
        """Stop the verifier process."""
        if self._verifiers is not None:
            self._verifiers.close()
        for one in self._services:
            one.close()


class RewardWorkers:
    """Scores whole batches, cut into tasks of `phases.reward.sequences`.

    `specs` is the recipe's `reward` list, `section` its `phases.reward`; `stop_token_ids` are those that end a
    completion, as the engines have them. With `local` the scorer lives in
    this process (its verifiers do not); otherwise in `section.workers` Ray actors of the connected cluster, which
    fetch and decode the tokens there. Raises ValueError for reward terms that do not load.
    """

    def __init__(
        self,
        specs: Sequence[JudgeSection],
        model_path: str,
        stop_token_ids: Sequence[int],
        section: RewardPhaseSection,
        local: bool,
    ) -> None:
        self._terms = load_terms(specs)
        self._sequences = section.sequences
        self._timeout_s = section.timeout_s
        arguments = (list(specs), model_path, tuple(stop_token_ids), sys.path, section.memory_mib << 20)
        self._local = Scorer(*arguments) if local else None
        self._actors, self._processes = ([], []) if local else _start_actors(arguments, section.workers)

    def score(
        self, payload: Any, prompts: Sequence[Prompt], num_sequences: int, group_size: int, answers: bool = False
    ) -> RewardResult:
        """Rewards of samples 0 … num_sequences - 1; sample s answers prompts[s // group_size]. With `answers`, what they
        answer as well.

        Raises ValueError for an answer that a verifier cannot judge by, TimeoutError when a worker is silent.
        """
        for prompt in prompts:
            check_answer(self._terms, prompt)
        tasks = [
            range(first, min(first + self._sequences, num_sequences)) for first in range(0, num_sequences, self._sequences)
        ]
        arguments = [
            (payload, list(task), [prompts[sample // group_size] for sample in task], self._timeout_s, answers)
            for task in tasks
        ]
        if self._local is not None:
            scored = [self._local.score_task(*argument) for argument in arguments]
        else:
            scored = self._score_remotely(arguments)
        verdicts = [verdict for task in scored for verdict in task]
        busy_s = self._local.take_busy_s() if self._local is not None else self._busy_remotely()
        result = self._result(verdicts, tuple(len(task) for task in scored))
        if answers and reads_answers(self._terms):
            result = replace(result, answers=[verdict.answer for verdict in verdicts])
        return replace(result, busy_s=busy_s, num_workers=max(1, len(self._actors)))

    def close(self) -> None:
        """Stop every scorer."""
        if self._local is not None:
            self._local.close()
        if self._actors:
            import ray

            for actor in self._actors:
                ray.kill(actor)
            self._actors = []

    def _score_remotely(self, arguments: list[tuple]) -> list[list[Verdict]]:
        import ray

        references = [
            self._actors[i % len(self._actors)].score_task.remote(*argument) for i, argument in enumerate(arguments)
        ]
        rounds = -(-len(references) // len(self._actors))
        deadline_s = rounds * (self._timeout_s + TASK_GRACE_S)
        try:
            verdicts = ray.get(references, timeout=deadline_s)
            self._say_replaced(ray.get([actor.ready.remote() for actor in self._actors], timeout=TASK_GRACE_S))
            return verdicts
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(
                f"phase reward: {len(references)} tasks on {len(self._actors)} workers gave no answer "
                f"within {deadline_s:.0f} s"
            ) from error

    def _say_replaced(self, processes: list[int]) -> None:
        """Ray starts a worker again without a word, and gives it its tasks once more."""
        for number, (before, now) in enumerate(zip(self._processes, processes, strict=True)):
            if now != before:
                logger.warning(
                    "phase reward: the process %d of reward worker %d was lost; process %d took its place and did its tasks "
                    "(at most %d times)", before, number, now, MAX_WORKER_RESTARTS,
                )  # fmt: skip
        self._processes = processes

    def _busy_remotely(self) -> float:
        import ray

        # They have answered just now. One that was started again in between has forgotten what it did, and a figure is no
        # reason to end a run.
        asked = [actor.take_busy_s.remote() for actor in self._actors]
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=TASK_GRACE_S)
        busy_s = 0.0
        for answer in done:
            with suppress(ray.exceptions.RayError):
                busy_s += ray.get(answer)
        return busy_s

    def _result(self, verdicts: list[Verdict], task_sequences: tuple[int, ...]) -> RewardResult:
        num = len(verdicts)
        rewards = np.full(num, np.nan, dtype=np.float32)
        parts = {term.name: np.full(num, np.nan, dtype=np.float32) for term in self._terms}
        failures: dict[int, str] = {}
        for sample, verdict in enumerate(verdicts):
            if verdict.said is None:
                failures[sample] = verdict.failure
                continue
            rewards[sample] = weighted_sum(self._terms, verdict.said)
            for name, value in verdict.said.items():
                parts[name][sample] = value
        num_timeouts = sum(verdict.timed_out for verdict in verdicts)
        counts = {
            f"{term.name}_num_{reason}": sum(verdict.reasons.get(term.name) == reason for verdict in verdicts)
            for term in self._terms
            for reason in REASONS.get(term.kind, ())
        }
        counts |= {f"num_zero_{one}": sum(verdict.cause == one for verdict in verdicts) for one in SCORED}
        counts |= {f"num_masked_{one}": sum(verdict.cause == one for verdict in verdicts) for one in MASKED}
        for what, has_cause in (("scored 0", True), ("judged once more", False)):
            judged = [one for one, verdict in enumerate(verdicts) if verdict.said is not None and verdict.failure]
            chosen = [one for one in judged if bool(verdicts[one].cause) == has_cause]
            for sample in chosen[:1]:
                said = verdicts[sample].failure
                logger.warning("phase reward: %d completions %s; sample %d: %s", len(chosen), what, sample, said)
        valid = ~np.isnan(rewards)
        return RewardResult(rewards, valid, parts, failures, num_timeouts, task_sequences, counts=counts)


def _start_actors(arguments: tuple[Any, ...], workers: int) -> tuple[list[Any], list[int]]:
    """Ray actors and their processes, which have answered once, so that a reward that does not load shows when the run
    starts."""
    import ray

    # No CPU is reserved: on a small machine the engines hold them all, and scoring waits for engines anyway.
    remote = ray.remote(num_cpus=0, max_restarts=MAX_WORKER_RESTARTS, max_task_retries=MAX_WORKER_RESTARTS)(Scorer)
    named = [{"env_vars": watched_environment(f"reward-worker-{number}")} for number in range(workers)]
    actors = [remote.options(runtime_env=one).remote(*arguments) for one in named]
    try:
        return actors, ray.get([actor.ready.remote() for actor in actors], timeout=TASK_GRACE_S)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"phase reward: no worker was up within {TASK_GRACE_S:.0f} s") from error
