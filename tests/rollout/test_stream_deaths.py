"""Engines that die or are silent under a stream: what they were to do is done, or the call that waits for it names them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.data.sample import Prompt
from megarl.reward.verifiers import TextScore
from megarl.rollout import EngineDied, EngineSilent
from megarl.rollout.engine import GroupRequest
from megarl.rollout.groups import GroupResult
from megarl.rollout.stream import RolloutStream, Sampling
from tests.rollout_cases import recipe
from tests.scripted_stream import ScriptedPool, ScriptedScorer, scripted_rewards

PROMPTS = [Prompt(index, np.ones(2, np.int32), "", "4", {}) for index in range(6)]


def complete(request: GroupRequest, version: int) -> GroupResult:
    size = len(request.seeds)
    tokens, logprobs = np.full(size, request.group, np.int32), np.zeros(size, np.float32)
    lengths, versions = np.ones(size, np.int32), np.zeros(size, np.int64)
    return GroupResult(request.group, request.prompt_ids, tokens, logprobs, lengths, ("stop",) * size, versions)


def sample(engines: int, deaths: int, max_restarts: int, **arguments: Any) -> tuple[ScriptedPool, list[int]]:
    """Sample the prompts with engines of which some die, `deaths` times in all, when they have all requests; the groups."""
    left = [deaths]

    def complete_or_die(request: GroupRequest, version: int) -> GroupResult:
        if request.group >= len(PROMPTS) - engines and left[0]:
            left[0] -= 1
            raise EngineDied("its process is gone")
        return complete(request, version)

    pool: Any = ScriptedPool.of(engines, complete=complete_or_die, delay=lambda _: 0.0)
    pool.max_restarts, pool.has_published = max_restarts, "resync" in arguments
    stream = RolloutStream(recipe(Path("model")), pool, 0)
    arguments = {name: (lambda given, made=made: made(stream, given)) for name, made in arguments.items()}
    try:
        batch, _ = stream.sample(PROMPTS, Sampling(2, draw=1), **arguments)
        tokens = {s: sample.completion.token_ids.tolist() for s, sample in batch.payload.fetch(range(len(batch))).items()}
        assert tokens == {s: [s // 2] for s in range(len(batch))}
        return pool, batch.groups[::2].tolist()
    finally:
        stream.close()


@pytest.mark.parametrize("engines", [1, 3])
def test_an_engine_that_had_no_weights_but_its_model_s_goes_on_when_it_is_back(engines: int) -> None:
    pool, groups = sample(engines, deaths=2 * engines, max_restarts=2)
    assert groups == [0, 1, 2, 3, 4, 5] and 1 <= sum(engine.restarts for engine in pool.engines) <= 2 * engines


def test_engines_that_all_died_get_the_weights_before_they_go_on() -> None:
    asked: list[list[int]] = []

    def resync(stream: RolloutStream, engines: Sequence[int]) -> None:
        asked.append(list(engines))
        stream.pause()
        stream.resume(3, engines)

    _, groups = sample(1, deaths=2, max_restarts=2, resync=resync)
    assert groups == [0, 1, 2, 3, 4, 5] and asked == [[0], [0]]


def test_the_last_death_ends_the_call_and_no_weights_are_sent() -> None:
    def resync(stream: RolloutStream, engines: Sequence[int]) -> None:
        pytest.fail(f"weights are sent to {engines}, which nobody has started")

    with pytest.raises(EngineDied, match="its process is gone"):
        sample(1, deaths=1, max_restarts=0, resync=resync)


class Prompts:
    def take(self, count: int) -> list[Prompt]:
        return PROMPTS[:count]


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("silent", ["engine", "reward worker"])
def test_who_is_silent_is_named_with_its_phase(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(Path("model"), timeout_s=0.2)
    pool: Any = ScriptedPool.of(1, complete=complete, delay=lambda _: None if silent == "engine" else 0.0)
    rewards = scripted_rewards(made, ScriptedScorer(lambda *_: TextScore({"last_number": 1.0})))
    if silent == "engine":
        said = r"^rollout engine 0: 4 groups of step 7 not finished in phase rollout within rollout.timeout_s = 0.2$"
    else:
        monkeypatch.setattr("megarl.reward.workers.TASK_GRACE_S", 0.2 - made.phases.reward.timeout_s)
        worker = SimpleNamespace(score_task=SimpleNamespace(remote=never))
        rewards._local, rewards._actors = None, [worker]
        said = r"^phase reward: a task of 16 sequences on worker 0 gave no answer within 0 s$"
    stream = RolloutStream(made, pool, 0, Prompts(), rewards)  # type: ignore[arg-type]
    try:
        stream.begin(7)
        with pytest.raises((EngineSilent, TimeoutError), match=said):
            stream.wait_sampled(lambda engines: pytest.fail("no engine died"))
            stream.take()
    finally:
        stream.close()
