"""Groups with a signal, against plain Python; and the batch that a step makes of several rounds of rollouts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithm.advantage import group_advantages, informative_groups
from megarl.data.sample import Prompt
from megarl.recipe import Recipe
from megarl.reward.verifiers import TextScore
from megarl.rollout.engine import GroupRequest
from megarl.rollout.groups import GroupResult
from megarl.rollout.stream import RolloutStream
from megarl.rollout.taken import Taken
from tests.rollout_cases import recipe as pool_recipe
from tests.scripted_stream import TASK_S, ScriptedPool, ScriptedScorer, scripted_rewards

members = st.tuples(st.sampled_from([0.0, 0.25, 1.0, math.nan]), st.booleans())


@given(st.integers(1, 4).flatmap(lambda size: st.lists(st.lists(members, min_size=size, max_size=size), min_size=1)))
def test_a_group_has_a_signal_where_members_that_count_differ(groups: list[list[tuple[float, bool]]]) -> None:
    scored_groups = [[(reward, ok and not math.isnan(reward)) for reward, ok in group] for group in groups]
    rewards = torch.tensor([[reward for reward, _ in group] for group in scored_groups])
    counted = torch.tensor([[ok for _, ok in group] for group in scored_groups])
    informative = informative_groups(rewards, counted).tolist()
    assert informative == [len({reward for reward, ok in group if ok}) > 1 for group in scored_groups]
    # What it is about: a group without one has no gradient, and a group with one has.
    ids = torch.arange(len(scored_groups)).repeat_interleave(len(scored_groups[0]))
    advantages = group_advantages(rewards.flatten(), ids, counted.flatten()).reshape(rewards.shape)
    assert informative == [bool(row.any()) for row in advantages]


SIZE, WANTED = 2, 3


class Prompts:
    """Numbers the prompts that a stream takes, and keeps what it learns."""

    def __init__(self) -> None:
        self.num_taken, self.learned = 0, []  # type: ignore[var-annotated]

    def take(self, count: int) -> list[Prompt]:
        first, self.num_taken = self.num_taken, self.num_taken + count
        return [Prompt(index, np.ones(2, np.int32), "", "", {}) for index in range(first, first + count)]

    def learn(self, prompts: list[Prompt], rewards: np.ndarray, valid: np.ndarray) -> None:
        self.learned += [(prompt.index, rewards.tolist(), valid.tolist()) for prompt in prompts]


def complete(request: GroupRequest, reasons: list[str]) -> GroupResult:
    """Member m of prompt p has m + 1 tokens, each 1000 * round + the sample's number in its round. The version is the
    number of the round."""
    number, place = divmod(request.group, WANTED)
    tokens = [1000 * number + SIZE * place + member for member in range(SIZE) for _ in range(member + 1)]
    first = SIZE * request.group
    return GroupResult(
        request.group, request.prompt_ids, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32),
        np.arange(1, SIZE + 1), tuple((reasons or ["stop"] * (first + SIZE))[first : first + SIZE]),
        np.full(len(tokens), number),
    )  # fmt: skip


def score(rewards: list[float]) -> Callable[[Prompt, int, Any], TextScore]:
    """Sample s has the s-th reward, half of which is the weight of its only part; nan is masked after a timeout."""

    def score_sample(prompt: Prompt, member: int, _: Any) -> TextScore:
        reward = rewards[SIZE * prompt.index + member]
        if math.isnan(reward):
            return TextScore(None, f"prompt {prompt.index}", timed_out=True)
        return TextScore({"digits": 2 * reward})

    return score_sample


def sampling_recipe(max_rounds: int | None, mask: bool = False) -> Recipe:
    return pool_recipe(
        Path("model"),
        ("algorithm.group_size", SIZE),
        ("algorithm.dynamic_sampling", None if max_rounds is None else {"max_rounds": max_rounds}),
        ("algorithm.overlong", {"mask": mask, "buffer": 1}),
        ("reward", [{"kind": "function", "target": "tests.rewards:digits", "weight": 0.5}]),
        ("phases.rollout", {"prompts": WANTED}), ("phases.reward", {"sequences": 5}),
        ("phases.actor_update", {"mini_batch": WANTED * SIZE, "micro_batch": {"sequences": 1}}),
    )  # fmt: skip


def sample(
    rewards: list[float],
    max_rounds: int | None,
    reasons: list[str] | None = None,
    mask: bool = False,
    delay: Callable[[], int] = lambda: 0,
    engines: int = 1,
) -> tuple[Taken, Prompts]:
    """Let a stream sample one step with scripted engines and rewards."""
    recipe, prompts = sampling_recipe(max_rounds, mask), Prompts()
    pool: Any = ScriptedPool.of(
        engines, complete=lambda request, _: complete(request, reasons or []), delay=lambda _: 0.001 * delay()
    )
    workers = scripted_rewards(recipe, ScriptedScorer(score(rewards)))
    stream = RolloutStream(recipe, pool, 0, prompts, workers)  # type: ignore[arg-type]
    try:
        stream.begin(1)
        taken = None
        while taken is None:
            stream.wait_sampled(lambda engines: pytest.fail(f"engines {engines} have lost their weights"))
            taken = stream.take()
        return taken, prompts
    finally:
        stream.close()
        workers.close()


def test_groups_without_a_signal_are_replaced_by_those_of_a_further_round() -> None:
    first = [1.0, 1.0, 0.0, 1.0, math.nan, 1.0]  # the second group alone
    second = [0.0, 1.0, 1.0, 0.0, 0.5, 0.0]  # all three, one too many
    taken, _ = sample(first + second, max_rounds=5)
    rollouts, scored = taken.rollouts, taken.rewards
    assert rollouts.groups.tolist() == [1, 1, 3, 3, 4, 4]
    assert scored.rewards.tolist() == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert scored.parts["digits"].tolist() == [0, 2, 0, 2, 2, 0]
    assert rollouts.last_version.tolist() == [0, 0, 1, 1, 1, 1]
    assert (len(rollouts), rollouts.executed.prompts) == (WANTED * SIZE, WANTED)
    assert scored.failures == {} and scored.busy_s == 4 * TASK_S
    counted = scored.metrics()
    assert counted["reward/num_masked"] == counted["reward/num_timeouts"] == 1, "of a group that was dropped"
    assert sorted(scored.task_sequences) == [1, 1, 5, 5], "of two rounds"
    fetched = rollouts.payload.fetch([5, 0, 2])
    assert {s: rollout.completion.token_ids.tolist() for s, rollout in fetched.items()} == {5: [1003] * 2, 0: [2], 2: [1000]}
    assert [group.group for group in rollouts.payload.groups] == [1, 3, 4], "nobody asks for other tokens"  # type: ignore[attr-defined]
    assert taken.metrics == {
        "rollout/rounds": 2, "rollout/extra_prompts": 3, "rollout/uninformative_groups": 2, "rollout/surplus_groups": 1,
        "rollout/filler_groups": 0, "rollout/discarded_tokens": 9, "reward/sampled_mean": pytest.approx(6.5 / 11),
    }  # fmt: skip


def test_behind_the_last_round_others_fill_up_and_keep_their_masks() -> None:
    rewards = [1.0, 1.0, 0.0, math.nan, 0.0, 0.0] + [1.0, math.nan, 0.0, 1.0, 1.0, 1.0]
    taken, prompts = sample(rewards, max_rounds=2)
    scored, metrics = taken.rewards, taken.metrics
    assert prompts.num_taken == 2 * WANTED
    assert taken.rollouts.groups.tolist() == [0, 0, 1, 1, 4, 4]
    assert scored.valid.tolist() == [True, True, True, False, True, True] and scored.failures == {3: "prompt 1"}
    counted = scored.metrics()
    assert counted["reward/num_masked"] == counted["reward/num_timeouts"] == 2, "one is in the batch, one was dropped"
    assert (metrics["rollout/filler_groups"], metrics["rollout/surplus_groups"]) == (2, 0)
    assert metrics["rollout/uninformative_groups"] == 5


def test_completions_that_overlong_masks_give_no_signal() -> None:
    reasons = ["stop", "length", "stop", "stop", "stop", "length"] + 6 * ["stop"]
    for mask, rounds in ((True, 2), (False, 1)):
        taken, _ = sample(2 * [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], max_rounds=2, reasons=reasons, mask=mask)
        assert taken.metrics["rollout/rounds"] == rounds
        assert taken.rollouts.groups[::SIZE].tolist() == ([1, 3, 4] if mask else [0, 1, 2])


def test_without_dynamic_sampling_a_step_trains_on_all_groups() -> None:
    taken, prompts = sample([1.0] * 6, max_rounds=None)
    assert taken.rollouts.groups[::SIZE].tolist() == [0, 1, 2] and taken.metrics == {} and prompts.num_taken == WANTED


MAX_ROUNDS = 4
rewards = st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=SIZE, max_size=SIZE)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(rewards, min_size=MAX_ROUNDS * WANTED, max_size=MAX_ROUNDS * WANTED), st.integers(1, 3), st.integers(0, 2**16)
)
def test_the_first_groups_with_a_signal_are_chosen_and_others_fill_up_whoever_answers_first(
    groups: list[list[float]], engines: int, seed: int
) -> None:
    informative = [len({reward for reward in group if not math.isnan(reward)}) > 1 for group in groups]
    rounds = 1
    while rounds < MAX_ROUNDS and sum(informative[: rounds * WANTED]) < WANTED:
        rounds += 1
    sampled = range(rounds * WANTED)
    ranked = sorted(sampled, key=lambda group: (not informative[group], group))
    flat = [reward for group in groups for reward in group]
    if all(math.isnan(reward) for reward in flat[: rounds * WANTED * SIZE]):
        return  # the step ends the run
    order = random.Random(seed)
    taken, prompts = sample(flat, MAX_ROUNDS, delay=lambda: order.randrange(6), engines=engines)
    expected = sorted(ranked[:WANTED])
    assert taken.rollouts.groups[::SIZE].tolist() == expected
    wanted = [flat[SIZE * group + member] for group in expected for member in range(SIZE)]
    np.testing.assert_array_equal(taken.rewards.rewards, np.array(wanted, np.float32))
    assert taken.metrics["rollout/rounds"] == rounds and prompts.num_taken == rounds * WANTED
    assert taken.metrics["rollout/filler_groups"] == sum(not informative[group] for group in expected)
    tasks = rounds * [5, 1]
    assert sorted(taken.rewards.task_sequences) == sorted(tasks), "all tasks of a round are full but the last one"
    assert [index for index, *_ in prompts.learned] == list(sampled), "the curriculum learns in the order of the prompts"
