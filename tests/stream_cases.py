"""Engines and rewards that answer in this process, for a real `RolloutStream` without Ray and vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megarl.data.sample import Prompt, Sample
from megarl.recipe.recipe import Recipe
from megarl.reward.verifiers import TextScore
from megarl.reward.workers import RewardWorkers, TaskResult
from megarl.rollout.engine import GroupRequest
from megarl.rollout.groups import GroupFacts, GroupResult, RolloutBatch, RolloutExecuted
from megarl.rollout.handle import EngineHandle

TASK_S = 0.25  # that each task of rewards says it took


@dataclass
class Tokens:
    """In the place of Ray's reference of a group's tokens."""

    result: GroupResult

    def __await__(self) -> Generator[Any, None, GroupResult]:
        yield from ()
        return self.result


class InMemory:
    """In the place of a payload in Ray's object store."""

    def __init__(self, groups: Sequence[GroupResult]) -> None:
        self.groups, self.size = groups, len(groups[0].lengths)

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        return {s: self.groups[s // self.size].sample(s % self.size) for s in sample_ids}


class ScriptedEngine(EngineHandle):
    """Answers each group after `delay()` rounds of the event loop."""

    def __init__(self, index: int, complete: Callable[[GroupRequest], GroupResult], delay: Callable[[], int]) -> None:
        super().__init__(SimpleNamespace(index=index), 60.0, 1)  # type: ignore[arg-type]
        self._complete, self._delay = complete, delay
        self._requests: dict[int, GroupRequest] = {}

    def call(self, method: str, *arguments: Any, num_returns: int = 1) -> Any:
        if method == "submit":
            self._requests |= {request.position: request for request in arguments[0]}
            return asyncio.sleep(0)
        assert method == "result"
        result = self._complete(self._requests.pop(arguments[0]))
        return self._facts(result), Tokens(result)

    async def _facts(self, result: GroupResult) -> GroupFacts:
        for _ in range(self._delay()):
            await asyncio.sleep(0)
        return GroupFacts.of(result)


class ScriptedPool:
    """What a stream needs of an `EnginePool`."""

    def __init__(
        self,
        complete: Callable[[GroupRequest], GroupResult],
        engines: int = 1,
        delay: Callable[[], int] = lambda: 0,
        max_concurrent: int = 64,
        max_restarts: int = 0,
    ) -> None:
        self.engines = [ScriptedEngine(index, complete, delay) for index in range(engines)]
        self._max_concurrent, self.max_restarts = max_concurrent, max_restarts

    def check(self, prompts: Sequence[Prompt]) -> None:
        """All prompts are legal."""

    def restart(self, engine: EngineHandle, phase: str, cause: Exception) -> None:
        if self.max_restarts <= engine.restarts:
            raise cause
        engine.restarts += 1

    async def store_batch(self, facts: Sequence[GroupFacts], tokens: Sequence[Tokens]) -> RolloutBatch:
        executed = RolloutExecuted(len(facts), len(facts[0].lengths), self._max_concurrent)
        return RolloutBatch.of(facts, InMemory([reference.result for reference in tokens]), executed, {})


class ScriptedScorer:
    """In the place of `Scorer`: scores member `sample` of a prompt by `score(prompt, sample, tokens)`."""

    def __init__(self, score: Callable[[Prompt, int, Any], TextScore]) -> None:
        self._score = score
        self.num_scored = 0

    async def ready(self) -> int:
        return 0

    async def score_task(self, texts: Sequence[Any], timeout_s: float, answers: bool) -> TaskResult:
        await asyncio.sleep(0)
        self.num_scored += len(texts)
        scores = [self._score(text.prompt, text.sample, text.payload.tokens) for text in texts]
        return TaskResult(scores, TASK_S, 0)

    async def close(self) -> None:
        """There is nothing to end."""


def scripted_rewards(recipe: Recipe, scorer: ScriptedScorer) -> RewardWorkers:
    """`RewardWorkers` with a scorer of a test, in this process."""
    with mock.patch("megarl.reward.workers.Scorer", lambda *_: scorer):
        return RewardWorkers(recipe.verifiers, "model", (), recipe.phases.reward, local=True)
