"""Run the reward phase: tokens to texts to rewards, off the trainer if Ray runs."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np

from megarl.data.sample import Prompt
from megarl.recipe.phases_section import RewardPhaseSection
from megarl.recipe.reward_section import JudgeSection
from megarl.reward import sandbox, service
from megarl.reward.fork_server import START_TIMEOUT_S, ZERO_CAUSES
from megarl.reward.service import services_of
from megarl.reward.verifier_process import VerifierProcess
from megarl.reward.verifiers import MASK_CAUSES, TextScore, check_answer, load_terms, reads_answers
from megarl.rollout import RolloutError, TokensLost
from megarl.telemetry.stacks import mark_from_environment, watched_environment

logger = logging.getLogger(__name__)
# Beyond its own deadline a task fetches and decodes its tokens, and may load the verifiers again.
TASK_GRACE_S = 2 * START_TIMEOUT_S
MAX_WORKER_RESTARTS = 2
# The part of the reward that an environment gives, in the metrics.
ENVIRONMENT = "environment"
# Reasons that a term can give besides a number, by the term's kind; the metrics count each.
REASONS = {"code": sandbox.REASONS, "http": service.REASONS}


@dataclass(frozen=True, eq=False)
class RewardResult:
    """Rewards of a batch, one a rollout, in their order: the score of its last segment. A sample here is a rollout.

    `rewards` float32 [n] and each of `parts` float32 [n] (a term's score, before its weight) are NaN where `valid` bool [n]
    is false, so that a masked reward can never be taken for a 0. `failures` explains each masked sample. `task_sequences` is
    how many sequences each task scored, and `busy_s` how long the `num_workers` workers scored in total. `counts` holds how
    often a term gave which reason, as `code_num_failed`, and how many samples score 0 or are masked for which cause, as
    `num_zero_memory`. `answers` is what each text answers, if that was asked for and some term reads it.

    If these are some of the samples that were scored (`select`), counts and seconds are of all of them, and
    `num_masked_left_out` is how many of the others are masked.
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
    answers: list[str | None] | None = None
    num_masked_left_out: int = 0

    def select(self, samples: Sequence[int]) -> RewardResult:
        """Return the rewards of some samples; counts and seconds stay those of all."""
        chosen, place = list(samples), {sample: number for number, sample in enumerate(samples)}
        return replace(
            self,
            rewards=self.rewards[chosen],
            valid=self.valid[chosen],
            parts={name: values[chosen] for name, values in self.parts.items()},
            failures={place[sample]: why for sample, why in self.failures.items() if sample in place},
            num_masked_left_out=self.num_masked_left_out + int((~np.delete(self.valid, chosen)).sum()),
        )

    def metrics(self) -> dict[str, float]:
        """Return means over the valid samples (NaN if there are none) and counts over all samples that were scored."""
        means = {"reward/mean": self.rewards} | {f"reward/{name}": part for name, part in self.parts.items()}
        metrics = {name: float(values[self.valid].mean()) if self.valid.any() else np.nan for name, values in means.items()}
        metrics["reward/deviation"] = float(self.rewards[self.valid].std()) if self.valid.any() else np.nan
        metrics |= {"reward/busy_s": self.busy_s, "reward/num_workers": self.num_workers}
        num_masked = self.num_masked_left_out + int((~self.valid).sum())
        metrics |= {"reward/num_masked": num_masked, "reward/num_timeouts": self.num_timeouts}
        return metrics | {f"reward/{name}": count for name, count in self.counts.items()}


def add_episodes(scored: RewardResult, episodes: Any) -> RewardResult:
    """Add the rewards of environments, an EpisodeFacts; without episodes return `scored`. A sample is masked if its
    environment failed for another cause than the policy's turn."""
    if episodes is None:
        return scored
    masked = np.isnan(episodes.rewards)
    failures = {sample: str(why) for sample, why in enumerate(episodes.failures) if masked[sample]}
    counts = scored.counts | {"num_masked_environment": len(failures)}
    for cause in ZERO_CAUSES:
        counts[f"num_zero_{cause}"] = counts.get(f"num_zero_{cause}", 0) + int((episodes.causes == cause).sum())
    for why in [why for why, cause in zip(episodes.failures, episodes.causes, strict=True) if cause][:1]:
        logger.warning("%d episodes ended in an environment's failure; one: %s", int((episodes.causes != "").sum()), why)
    rewards = (scored.rewards + episodes.rewards).astype(np.float32)
    valid = scored.valid & ~masked
    parts = {name: np.where(valid, part, np.nan).astype(np.float32) for name, part in scored.parts.items()}
    parts[ENVIRONMENT] = np.where(valid, episodes.rewards, np.nan).astype(np.float32)
    return replace(scored, rewards=rewards, valid=valid, parts=parts, failures=scored.failures | failures, counts=counts)


@dataclass(frozen=True)
class TaskResult:
    """Scores of a task's texts, in order, the seconds that it took, and the process that scored it."""

    scores: list[TextScore]
    busy_s: float
    process: int


Piece = tuple[Any, list[int]]
"""A payload, and samples of it that answer one prompt."""


class Task(NamedTuple):
    """Samples to score, of one prompt in each piece; in one value, as Ray takes time for each argument of a call. The
    prompts are pickled: Ray's own pickler takes ten times as long."""

    pieces: list[Piece]
    pickled_prompts: bytes
    timeout_s: float
    answers: bool


@dataclass(eq=False)
class _Group:
    """Samples of a payload that are to be scored."""

    payload: Any
    samples: Sequence[int]
    prompt: Prompt
    answers: bool
    result: asyncio.Future[list[TextScore]]
    since: float  # on the loop's clock
    scores: dict[int, TextScore] = field(default_factory=dict)  # by place among the samples


@dataclass
class _Queue:
    """Samples of a training step or of an evaluation that wait: a group, and a place among its samples. With `sends_all`
    tasks may be smaller until nothing waits; `done` are the tasks since the last `join`."""

    waiting: deque[tuple[_Group, int]] = field(default_factory=deque)
    sends_all: bool = False
    done: list[TaskResult] = field(default_factory=list)

    def take(self, size: int) -> list[tuple[_Group, list[int]]]:
        """Take up to `size` samples: the places of each group."""
        taken = [self.waiting.popleft() for _ in range(min(size, len(self.waiting)))]
        self.sends_all &= bool(self.waiting)
        return [(group, [place for _, place in some]) for group, some in groupby(taken, lambda item: item[0])]

    def fail(self, parts: Sequence[tuple[_Group, list[int]]], error: Exception) -> None:
        """Let the groups of a task raise an error. Their samples that wait are scored no more: another task with them would
        fail too, with its other groups."""
        failed = {group for group, _ in parts}
        self.waiting = deque(item for item in self.waiting if item[0] not in failed)
        self.sends_all &= bool(self.waiting)
        for group in failed:
            if not group.result.done():
                group.result.set_exception(error)


class Scorer:
    """Scores tasks with one verifier process and the services, at the same time: in this process, or as a Ray actor."""

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
        self._tokenizer, self._stop_token_ids = load_tokenizer(model_path), frozenset(stop_token_ids)
        self._services = services_of(specs)
        has_verifiers = len(self._services) < len(specs)
        self._verifiers = VerifierProcess(specs, import_path, memory_bytes) if has_verifiers else None

    async def ready(self) -> int:
        """Load the verifiers, and return this process."""
        if self._verifiers is not None:
            await self._verifiers.load()
        return os.getpid()

    async def score_task(self, task: Task) -> TaskResult:
        """Score samples; fetches their tokens from their payloads."""
        begun, texts, prompts = time.perf_counter(), list[str](), list[Prompt]()
        for (payload, samples), prompt in zip(task.pieces, pickle.loads(task.pickled_prompts), strict=True):
            fetched = await asyncio.to_thread(payload.fetch, samples)
            texts += [self.decode(fetched[sample].completion.final_ids.tolist()) for sample in samples]
            prompts += [prompt] * len(samples)
        tasks = [judge.score(texts, prompts, task.timeout_s) for judge in self._services]
        if self._verifiers is not None:
            tasks.insert(0, self._verifiers.score_task(texts, prompts, task.timeout_s, task.answers))
        scores = [TextScore({})] * len(texts)
        for part in await asyncio.gather(*tasks):
            scores = [score.combined(other) for score, other in zip(scores, part, strict=True)]
        return TaskResult(scores, time.perf_counter() - begun, os.getpid())

    def decode(self, ids: list[int]) -> str:
        """Return the sampled text with its special tokens but without the token that ends it, as environments see a turn."""
        return self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._stop_token_ids else ids)

    async def close(self) -> None:
        """Stop the verifier process and close the connections."""
        if self._verifiers is not None:
            self._verifiers.close()
        for judge in self._services:
            await judge.close()


class RewardWorkers:
    """Scores samples in tasks of `phases.reward.sequences`, as they arrive or a whole batch.

    `specs` is the recipe's `reward` list, `section` its `phases.reward`; `stop_token_ids` end a completion, as in the
    engines. With `local` the scorer lives in this process (its verifiers do not); otherwise in `section.workers` Ray actors
    of the connected cluster, which fetch and decode the tokens there. Raises ValueError for reward terms that do not load.
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
        self._section = section
        arguments = (list(specs), model_path, tuple(stop_token_ids), sys.path, section.memory_mib << 20)
        self._runner = asyncio.Runner()
        self._actors: list[Any] = []
        self._local: Scorer | None = None
        if local:
            self._local = Scorer(*arguments)
            self._processes = [self._runner.run(self._local.ready())]
            self._score: list[Callable[[Task], Awaitable[TaskResult]]] = [self._local.score_task]
        else:
            self._actors, self._processes = _start_actors(arguments, section.workers)
            self._score = [actor.score_task.remote for actor in self._actors]
        self._idle = list(range(len(self._score)))
        self._evaluation, self._training = self._queues = _Queue(), _Queue()
        self._running: set[asyncio.Task[None]] = set()

    def score_together(
        self, batches: Sequence[tuple[Any, Sequence[int], int]], prompts: Sequence[Prompt]
    ) -> list[RewardResult]:
        """Score batches (payload, samples, group size) of the same prompts: the s-th sample answers prompts[s // size]. The
        batches share tasks as they do in a stream: the first result has all tasks. Not to be called in an event loop. Raises
        as `score_group`."""

        async def score_all() -> list[list[TextScore]]:
            groups = [
                [self.score_group(payload, samples[n * size : (n + 1) * size], prompt) for n, prompt in enumerate(prompts)]
                for payload, samples, size in batches
            ]
            self.send_all()
            await asyncio.gather(*chain.from_iterable(groups))
            return [[score for group in of_batch for score in group.result()] for of_batch in groups]

        return [self.join(of_batch) for of_batch in self._runner.run(score_all())]

    def score_group(
        self, payload: Any, samples: Sequence[int], prompt: Prompt, answers: bool = False, is_evaluation: bool = False
    ) -> asyncio.Future[list[TextScore]]:
        """Score some completions of a prompt, in an event loop. A task begins when enough samples wait, or after `send_all`;
        evaluations go first and share no task with others.

        Raises ValueError for a prompt's answer that a verifier cannot compare with. The result raises TimeoutError if a
        worker is silent, RolloutError if one is gone for good, TokensLost if tokens are, and what a worker raises.
        """
        check_answer(self._terms, prompt)
        loop = asyncio.get_running_loop()
        group = _Group(payload, samples, prompt, answers, loop.create_future(), loop.time())
        queue = self._evaluation if is_evaluation else self._training
        queue.waiting.extend((group, place) for place in range(len(samples)))
        self._send()
        return group.result

    def send_all(self, is_evaluation: bool = False) -> None:
        """Score all samples that wait, even if they do not fill a task."""
        queue = self._evaluation if is_evaluation else self._training
        queue.sends_all = bool(queue.waiting)
        self._send()

    def waiting_since(self, is_evaluation: bool = False) -> float | None:
        """Return when the sample came, on the loop's clock, that has waited longest for a task; None if none waits."""
        queue = self._evaluation if is_evaluation else self._training
        return queue.waiting[0][0].since if queue.waiting else None

    def join(self, scores: list[TextScore], answers: bool = False, is_evaluation: bool = False) -> RewardResult:
        """Return the rewards of samples in order, with the tasks that ended since the last call."""
        queue = self._evaluation if is_evaluation else self._training
        tasks, queue.done = queue.done, []
        rewards, parts = self.rewards(scores)
        failures = {sample: score.failure for sample, score in enumerate(scores) if score.parts is None}
        num_timeouts = sum(score.timed_out for score in scores)
        counts = {
            f"{term.name}_num_{reason}": sum(score.reasons.get(term.name) == reason for score in scores)
            for term in self._terms
            for reason in REASONS.get(term.kind, ())
        }
        causes = Counter(score.cause for score in scores)
        counts |= {f"num_zero_{cause}": causes[cause] for cause in ZERO_CAUSES}
        counts |= {f"num_masked_{cause}": causes[cause] for cause in MASK_CAUSES}
        judged = [sample for sample, score in enumerate(scores) if score.failure and score.parts is not None]
        for outcome, has_cause in (("scored 0", True), ("judged once more", False)):
            chosen = [sample for sample in judged if bool(scores[sample].cause) == has_cause]
            for sample in chosen[:1]:
                failure = scores[sample].failure
                logger.warning("phase reward: %d completions %s; sample %d: %s", len(chosen), outcome, sample, failure)
        sizes = tuple(sorted((len(task.scores) for task in tasks), reverse=True))
        busy_s, num_workers = sum(task.busy_s for task in tasks), len(self._score)
        read = [score.answer for score in scores] if answers and reads_answers(self._terms) else None
        valid = ~np.isnan(rewards)
        return RewardResult(rewards, valid, parts, failures, num_timeouts, sizes, busy_s, num_workers, counts, answers=read)

    def rewards(self, scores: Sequence[TextScore]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the reward of each sample, the sum of weight * part, and its parts by name: float32 [n], NaN if masked."""
        masked = dict.fromkeys((term.name for term in self._terms), np.nan)
        parts = {name: np.array([(score.parts or masked)[name] for score in scores]) for name in masked}
        rewards = sum((term.weight * parts[term.name] for term in self._terms), np.zeros(len(scores)))
        rewards[[score.parts is None for score in scores]] = np.nan
        return rewards.astype(np.float32), {name: values.astype(np.float32) for name, values in parts.items()}

    def close(self) -> None:
        """Stop every scorer."""
        if self._local is not None:
            self._runner.run(self._local.close())
        self._runner.close()
        for actor in self._actors:
            import ray

            ray.kill(actor)
        self._actors = []

    def _send(self) -> None:
        """Give each idle worker a task."""
        size = self._section.sequences
        for queue in self._queues:
            while self._idle and queue.waiting and (queue.sends_all or len(queue.waiting) >= size):
                task = asyncio.get_running_loop().create_task(self._run(self._idle.pop(0), queue, queue.take(size)))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _run(self, worker: int, queue: _Queue, parts: list[tuple[_Group, list[int]]]) -> None:
        pieces = [(group.payload, [group.samples[place] for place in places]) for group, places in parts]
        timeout_s = self._section.timeout_s
        prompts = pickle.dumps([group.prompt for group, _ in parts])
        task = Task(pieces, prompts, timeout_s, any(group.answers for group, _ in parts))
        num, deadline_s = sum(len(places) for _, places in parts), timeout_s + TASK_GRACE_S
        name = f"phase reward: a task of {num} sequences on worker {worker}"
        try:
            async with asyncio.timeout(deadline_s):
                result = await self._score[worker](task)
            self._note_process(worker, result.process)
        except TimeoutError:
            queue.fail(parts, TimeoutError(f"{name} gave no answer within {deadline_s:.0f} s"))
        except Exception as error:  # whoever waits for the scores raises it
            queue.fail(parts, _named(name, error))
        else:
            queue.done.append(result)
            scores = iter(result.scores)
            for group, places in parts:
                group.scores.update(zip(places, scores, strict=False))
                if len(group.scores) == len(group.samples) and not group.result.done():
                    group.result.set_result([group.scores[place] for place in range(len(group.scores))])
        self._idle.append(worker)
        self._send()

    def _note_process(self, worker: int, process: int) -> None:
        """Warn of a worker that Ray started again, without a word, and gave its task once more."""
        before, self._processes[worker] = self._processes[worker], process
        if process != before:
            logger.warning(
                "phase reward: the process %d of reward worker %d was lost; process %d took its place and did its tasks "
                "(at most %d times)", before, worker, process, MAX_WORKER_RESTARTS,
            )  # fmt: skip


def _named(task: str, error: Exception) -> Exception:
    """Return what to raise for an error of a task: what Ray says of lost workers and objects names no phase."""
    import ray

    resume = f"a resume goes on from the last checkpoint; cause: {error}"
    if isinstance(error, ray.exceptions.ObjectLostError):
        return TokensLost(f"{task} finds no tokens: they were lost with the node of their engine; {resume}")
    if isinstance(error, ray.exceptions.RayActorError):
        return RolloutError(
            f"{task} has no worker any more, which was lost {MAX_WORKER_RESTARTS} times before; the log of its machine says "
            f"why, most often for want of memory; {resume}"
        )
    return error


def _start_actors(arguments: tuple[Any, ...], workers: int) -> tuple[list[Any], list[int]]:
    """Start Ray actors and return them with their processes, once each is ready: a reward that does not load shows when the
    run starts."""
    import ray

    # No CPU is reserved: on a small machine the engines hold them all, and scoring waits for engines anyway. One task at a
    # time: a task's deadline begins when it does.
    remote = ray.remote(
        num_cpus=0, max_restarts=MAX_WORKER_RESTARTS, max_task_retries=MAX_WORKER_RESTARTS, max_concurrency=1
    )(Scorer)
    environments = [{"env_vars": watched_environment(f"reward-worker-{number}")} for number in range(workers)]
    actors = [remote.options(runtime_env=environment).remote(*arguments) for environment in environments]
    try:
        return actors, ray.get([actor.ready.remote() for actor in actors], timeout=TASK_GRACE_S)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"phase reward: no worker was up within {TASK_GRACE_S:.0f} s") from error
