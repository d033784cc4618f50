"""Laws of the rollout stream, with engines and rewards that answer when the test says so, and no Ray."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megarl.data.sample import Example, Prompt
from megarl.reward.verifiers import TextScore
from megarl.reward.workers import RewardWorkers
from megarl.rollout import RolloutError, stream
from megarl.rollout.groups import GroupResult, rollout_metrics
from megarl.rollout.stream import Sampling
from tests.scripted_stream import (
    PER_STEP,
    SIZE,
    TASK_S,
    ScriptedPool,
    ScriptedPrompts,
    ScriptedScorer,
    prompt,
    scripted_rewards,
    stream_recipe,
    trainer,
)

pytestmark = pytest.mark.stream

TIMEOUT_S = 20.0


def groups(taken: Any) -> list[int]:
    return taken.rollouts.groups[::SIZE].tolist()


def arrive(pool: ScriptedPool, count: int) -> list[int]:
    """Wait until the first engine has so many more requests; return their groups."""
    return [pool.engines[0].arrivals.get(timeout=TIMEOUT_S).group for _ in range(count)]


def test_without_staleness_a_step_takes_its_groups_whole_and_in_order() -> None:
    pool = ScriptedPool.of(1)
    with trainer(pool) as run, ThreadPoolExecutor(1) as thread:
        for step in range(3):
            run.begin()
            started = arrive(pool, PER_STEP)
            assert started == [PER_STEP * step, PER_STEP * step + 1]
            taking = thread.submit(run.take)
            for group in reversed(started):
                assert not taking.done()
                pool.engines[0].release(group)
            taken = taking.result(TIMEOUT_S)
            assert groups(taken) == started
            assert taken.rewards.rewards.tolist() == [0, 1] * PER_STEP
            assert not pool.engines[0].work and pool.engines[0].arrivals.empty(), "nothing starts while the trainer works"
            run.sync()


def test_with_staleness_engines_work_while_the_trainer_does() -> None:
    pool = ScriptedPool.of(1, delay=lambda request: 0.0 if request.group < PER_STEP else None)
    with trainer(pool, max_staleness=2) as run:
        run.begin()
        assert arrive(pool, 3 * PER_STEP) == list(range(6))
        assert groups(run.take()) == [0, 1]
        pool.engines[0].release(5)  # during the update: its engine must not begin a group that would be too old
        run.stream.prompt_metrics()
        assert {work.request.group for work in pool.engines[0].work.values()} == {2, 3, 4}
        run.sync()
        assert pool.engines[0].arrivals.empty()
        run.begin()
        assert arrive(pool, PER_STEP) == [6, 7]


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("engines", [1, 3])
def test_no_token_is_older_than_the_bound_and_every_group_is_taken_once(staleness: int, engines: int) -> None:
    chance = random.Random(staleness)
    pool = ScriptedPool.of(engines, delay=lambda request: chance.choice([0.0, 0.0, 0.001, 0.004]))
    num_steps, prompts = 25, ScriptedPrompts()
    taken: list[int] = []
    with trainer(pool, prompts=prompts, max_staleness=staleness) as run:
        for version in range(num_steps):
            run.begin()
            batch = run.take().rollouts
            assert (version - batch.first_version <= staleness).all()
            assert len(batch) == PER_STEP * SIZE
            taken += batch.groups[::SIZE].tolist()
            run.sync()
    assert len(set(taken)) == len(taken) == num_steps * PER_STEP
    assert max(taken) < (num_steps + staleness) * PER_STEP
    assert set(range((num_steps - staleness) * PER_STEP)) <= set(taken), "an old group was left behind"
    assert prompts.learned == sorted(prompts.learned), "the curriculum learns in the order of the prompts"


def test_short_groups_overtake_a_long_one_within_the_window_and_the_curriculum_learns_in_order() -> None:
    pool, prompts = ScriptedPool.of(1, delay=lambda request: None if request.group == 0 else 0.0), ScriptedPrompts()
    with trainer(pool, prompts=prompts, max_staleness=4, window=4) as run, ThreadPoolExecutor(1) as thread:
        run.begin()
        assert groups(run.take()) == [1, 2]
        assert prompts.learned == []
        for expected in ([3, 4], [5, 6], [7, 8]):
            run.sync()
            run.begin()
            assert groups(run.take()) == expected, "the first of the window that finished"
        run.sync()
        run.begin()
        taking = thread.submit(run.take)
        assert arrive(pool, 18) == list(range(18)) and not taking.done(), "group 0 would be too old for the next step"
        pool.engines[0].release(0)
        assert groups(taking.result(TIMEOUT_S)) == [0, 9]
        assert prompts.learned == list(range(18)), "of groups that a step took before, too"


def test_weights_are_asked_for_on_the_trainers_thread_when_no_engine_is_left() -> None:
    pool = ScriptedPool.of(2)
    with trainer(pool) as run:
        run.begin()
        for engine in pool.engines:
            engine.arrivals.get(timeout=TIMEOUT_S)
        for engine in pool.engines:
            engine.delay = lambda request: 0.0
            next(iter(engine.work.values())).facts.get_loop().call_soon_threadsafe(engine.die)
        assert groups(run.take()) == [0, 1]
        assert run.resynced == [[0, 1]] and run.threads == {threading.current_thread()}
        assert sorted(pool.restarted) == [0, 1]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("source", ["prompt", "answer", "verifier"])
def test_what_is_wrong_with_a_prompt_ends_the_call_of_the_trainer(source: str, staleness: int) -> None:
    """A prompt that no engine may see, an answer that a verifier cannot compare with, and an error of a verifier."""

    def check(prompts: Sequence[Prompt]) -> None:
        if source == "prompt" and any(prompt.index == 3 for prompt in prompts):
            raise ValueError("prompt 3 is wrong")

    def score(prompt: Prompt, member: int, tokens: GroupResult) -> TextScore:
        if source == "verifier" and prompt.index == 3:
            raise ValueError("prompt 3 is wrong")
        return TextScore({"last_number": 1.0})

    class Answers(ScriptedPrompts):
        def take(self, count: int) -> list[Prompt]:
            answers = {3: "no number"} if source == "answer" else {}
            return [replace(prompt, answer=answers.get(prompt.index, "1")) for prompt in super().take(count)]

    pool = ScriptedPool.of(1, delay=lambda request: 0.0)
    pool.check = check
    rewards = scripted_rewards(stream_recipe(max_staleness=staleness), ScriptedScorer(score), SIZE)
    with trainer(pool, rewards, prompts=Answers(), max_staleness=staleness) as run:
        with pytest.raises(ValueError, match="prompt 3 "):
            for _ in range(2):
                run.begin()
                run.take()
                run.sync()
        assert run.step == 2 or staleness, "without staleness prompt 3 begins in the second step"


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_has_reward_tasks_of_its_own(staleness: int) -> None:
    """Training's groups are scored before and while it runs; each side counts its own tasks."""
    pool = ScriptedPool.of(1, delay=lambda request: 0.0)
    rewards = scripted_rewards(stream_recipe(max_staleness=staleness), ScriptedScorer())
    with trainer(pool, rewards, max_staleness=staleness) as run:
        run.begin()
        run.stream.wait_sampled(run.resync)
        for _ in range(3):
            _, scored = run.stream.sample([prompt(100), prompt(101)], Sampling(3, 0), run.resync)
            assert scored is not None and sum(scored.task_sequences) == 6
            assert scored.busy_s == TASK_S * len(scored.task_sequences)
        taken = run.take()
        assert sum(taken.rewards.task_sequences) == (1 + staleness) * PER_STEP * SIZE


def test_with_staleness_groups_that_end_soon_after_each_other_share_a_reward_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are sampled meanwhile."""
    monkeypatch.setattr(stream, "FILL_S", 10 * stream.FILL_S)  # a busy machine
    pool = ScriptedPool.of(1, delay=lambda request: {0: 0.0, 1: 0.05}.get(request.group))
    rewards = scripted_rewards(stream_recipe(max_staleness=1), ScriptedScorer(), 4 * SIZE)
    with trainer(pool, rewards, max_staleness=1) as run:
        run.begin()
        taken = run.take()
        assert groups(taken) == [0, 1] and {work.request.group for work in pool.engines[0].work.values()} == {2, 3}
        assert taken.rewards.task_sequences == (2 * SIZE,)


def test_a_reward_task_waits_for_as_long_as_its_own_groups_have_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups 0 and 1 fill a task; group 2, which came before the first one's time was over, waits for group 3."""
    monkeypatch.setattr(stream, "FILL_S", limit_s := 10 * stream.FILL_S)
    ends = {0: 0.0, 1: 0.6, 2: 0.8, 3: 1.3}
    pool = ScriptedPool.of(1, delay=lambda request: limit_s * ends[request.group] if request.group in ends else None)
    rewards = scripted_rewards(stream_recipe(max_staleness=1), ScriptedScorer(), 2 * SIZE)
    with trainer(pool, rewards, max_staleness=1) as run:
        for numbers in ([0, 1], [2, 3]):
            run.begin()
            taken = run.take()
            assert groups(taken) == numbers and taken.rewards.task_sequences == (2 * SIZE,)


def test_a_stream_that_gives_nothing_for_longer_than_any_part_may_take_ends_the_run_and_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "TASK_GRACE_S", 0.0)
    monkeypatch.setattr(RewardWorkers, "score_group", never)
    pool = ScriptedPool.of(1, delay=lambda request: 0.0)
    with trainer(pool, timeout_s=0.05, phases__reward__timeout_s=0.05) as run:
        run.begin()
        with pytest.raises(RolloutError, match=r"step 1 waits for groups.* \[0, 1\] of 2 for rewards"):
            run.take()
    with trainer(pool, max_staleness=1, timeout_s=0.05, phases__reward__timeout_s=0.05) as run:
        run.begin()
        run.stream.pause()
        with pytest.raises(RolloutError, match=r"the stream is paused; groups .* wait for completions"):
            run.take()


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("staleness", [0, 2])
def test_answers_of_the_data_are_taken_once_and_no_engine_gets_their_prompts(staleness: int) -> None:
    pool, num_steps = ScriptedPool.of(2, delay=lambda request: 0.001), 20
    taken: dict[int, list[list[int]]] = {}
    answer = Example(np.array([3, 4, 9, 8, 1], np.int32), np.arange(5) > 1)
    prompts = ScriptedPrompts(examples=(answer,))
    with (
        mock.patch.object(stream, "takes_answer", lambda recipe, index: index % 3 == 0),
        mock.patch.object(stream.ray, "put", lambda result: result),
        trainer(pool, prompts=prompts, max_staleness=staleness) as run,
    ):
        for _ in range(num_steps):
            run.begin()
            batch = run.take().rollouts
            for sequence, sample in batch.payload.fetch(range(len(batch))).items():
                taken.setdefault(sample.group, []).append(sample.completion.token_ids.tolist())
                is_answer = sample.group % 3 == 0
                assert np.isnan(sample.completion.logprobs).all() == is_answer != (sequence in batch.sampled)
            assert rollout_metrics(batch).get("rollout/data_share", 0) == (batch.groups % 3 == 0).mean()
            run.sync()
    assert all(tokens == SIZE * [[9, 8, 1] if group % 3 == 0 else [7, 1]] for group, tokens in taken.items())
    assert len(taken) == num_steps * PER_STEP
    sent = [group for engine in pool.engines for batch in engine.groups for group in batch]
    assert len(sent) == len(set(sent)) and all(group % 3 for group in sent)
