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


def test_without_dynamic_sampling_a_step_trains_on_all_groups() -> None:
    taken, prompts = sample([1.0] * 6, max_rounds=None)
    assert taken.rollouts.groups[::SIZE].tolist() == [0, 1, 2] and taken.metrics == {} and prompts.num_taken == WANTED


MAX_ROUNDS = 4
rollouts = st.tuples(st.sampled_from([0.0, 1.0, math.nan]), st.sampled_from(["stop", "length"]))
rounds_of_groups = st.lists(
    st.lists(rollouts, min_size=SIZE, max_size=SIZE), min_size=MAX_ROUNDS * WANTED, max_size=MAX_ROUNDS * WANTED
)


@settings(max_examples=60, deadline=None)
@given(rounds_of_groups, st.booleans(), st.integers(1, 3), st.integers(0, 2**16))
def test_the_first_groups_with_a_signal_are_chosen_and_others_fill_up_whoever_answers_first(
    groups: list[list[tuple[float, str]]], masks_overlong: bool, engines: int, seed: int
) -> None:
    """Each chosen sequence keeps its tokens, reward and mask. The curriculum learns from all prompts, in their order."""
    informative = [
        len({reward for reward, reason in group if not (math.isnan(reward) or (masks_overlong and reason == "length"))}) > 1
        for group in groups
    ]
    num_rounds = 1
    while num_rounds < MAX_ROUNDS and sum(informative[: num_rounds * WANTED]) < WANTED:
        num_rounds += 1
    sampled = range(num_rounds * WANTED)
    ranked = sorted(sampled, key=lambda group: (not informative[group], group))
    rewards = [reward for group in groups for reward, _ in group]
    known = [reward for reward in rewards[: len(sampled) * SIZE] if not math.isnan(reward)]
    if not known:
        return  # the step ends the run
    order, reasons = random.Random(seed), [reason for group in groups for _, reason in group]
    taken, prompts = sample(rewards, MAX_ROUNDS, reasons, masks_overlong, delay=lambda: order.randrange(6), engines=engines)

    chosen = sorted(ranked[:WANTED])
    assert taken.rollouts.groups[::SIZE].tolist() == chosen
    assert [group.group for group in taken.rollouts.payload.groups] == chosen, "nobody asks for other tokens"  # type: ignore[attr-defined]
    members = [(group, member) for group in chosen for member in range(SIZE)]
    wanted = np.array([rewards[SIZE * group + member] for group, member in members], np.float32)
    scored = taken.rewards
    np.testing.assert_array_equal(scored.rewards, wanted)
    np.testing.assert_array_equal(scored.parts["digits"], 2 * wanted)
    assert scored.valid.tolist() == [not math.isnan(reward) for reward in wanted]
    assert scored.failures == {n: f"prompt {group}" for n, (group, _) in enumerate(members) if math.isnan(wanted[n])}
    fetched = taken.rollouts.payload.fetch(range(len(members)))
    for number, (group, member) in enumerate(members):
        round_number, place = divmod(group, WANTED)
        tokens = [1000 * round_number + SIZE * place + member] * (member + 1)
        assert fetched[number].completion.token_ids.tolist() == tokens
        assert taken.rollouts.last_version[number] == round_number

    num_informative = sum(informative[: len(sampled)])
    assert taken.metrics == {
        "rollout/rounds": num_rounds, "rollout/extra_prompts": len(sampled) - WANTED,
        "rollout/uninformative_groups": len(sampled) - num_informative,
        "rollout/surplus_groups": max(0, num_informative - WANTED),
        "rollout/filler_groups": max(0, WANTED - num_informative),
        "rollout/discarded_tokens": 3 * (len(sampled) - WANTED), "reward/sampled_mean": pytest.approx(np.mean(known)),
    }  # fmt: skip
    counted, num_masked = scored.metrics(), len(sampled) * SIZE - len(known)
    assert counted["reward/num_masked"] == counted.get("reward/num_timeouts", 0) == num_masked, "of dropped groups, too"
    tasks = num_rounds * [5, 1]
    assert sorted(scored.task_sequences) == sorted(tasks), "all tasks of a round are full but the last one"
    assert scored.busy_s == pytest.approx(len(tasks) * TASK_S)
    assert [index for index, *_ in prompts.learned] == list(sampled) and prompts.num_taken == len(sampled)
