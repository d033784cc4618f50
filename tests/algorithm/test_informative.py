"""Groups with a signal, against plain Python; and the batch that a step makes of several rounds of rollouts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithm import group_advantages
from megarl.algorithm.advantage import choose_groups, informative_groups
from megarl.data.sample import Completion, Sample
from megarl.reward.workers import RewardResult
from megarl.rollout.dynamic_sampling import SampledRounds
from megarl.rollout.groups import RolloutBatch, RolloutExecuted

members = st.tuples(st.sampled_from([0.0, 0.25, 1.0, math.nan]), st.booleans())


@given(st.integers(1, 4).flatmap(lambda size: st.lists(st.lists(members, min_size=size, max_size=size), min_size=1)))
def test_a_group_has_a_signal_where_members_that_count_differ(groups: list[list[tuple[float, bool]]]) -> None:
    kept = [[(reward, ok and not math.isnan(reward)) for reward, ok in group] for group in groups]
    rewards = torch.tensor([[reward for reward, _ in group] for group in kept])
    counted = torch.tensor([[ok for _, ok in group] for group in kept])
    found = informative_groups(rewards, counted).tolist()
    assert found == [len({reward for reward, ok in group if ok}) > 1 for group in kept]
    # What it is about: a group without one has no gradient, and a group with one has.
    ids = torch.arange(len(kept)).repeat_interleave(len(kept[0]))
    advantages = group_advantages(rewards.flatten(), ids, counted.flatten()).reshape(rewards.shape)
    assert found == [bool(one.any()) for one in advantages]


@given(st.lists(st.booleans(), min_size=1), st.data())
def test_the_first_groups_with_a_signal_are_chosen_and_others_fill_up(informative: list[bool], data: st.DataObject) -> None:
    wanted = data.draw(st.integers(1, len(informative)))
    found = choose_groups(torch.tensor(informative), wanted)
    ranked = sorted(range(len(informative)), key=lambda group: (not informative[group], group))
    assert found == sorted(ranked[:wanted]) and len(found) == wanted


SIZE, WANTED = 2, 3


class InMemory:
    """The tokens of a round: token number 1000 * round + sample, as often as the sample's number in the group plus one."""

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, 0

    def fetch(self, sample_ids: Any) -> dict[int, Sample]:
        self.asked += 1
        return {s: self._sample(s) for s in sample_ids}

    def _sample(self, s: int) -> Sample:
        tokens = np.full(1 + s % SIZE, 1000 * self.number + s, np.int32)
        logprobs, versions = np.zeros(len(tokens), np.float32), np.full(len(tokens), self.number)
        return Sample(s // SIZE, np.ones(2, np.int32), Completion(tokens, logprobs, "stop", versions))


def a_round(number: int, rewards: list[float], reasons: list[str] | None = None) -> tuple[RolloutBatch, RewardResult]:
    samples, scores = len(rewards), np.array(rewards, np.float32)
    rollouts = RolloutBatch(
        payload=InMemory(number),
        groups=np.repeat(np.arange(WANTED) + number * WANTED, SIZE),
        prompt_lengths=np.full(samples, 2),
        completion_lengths=1 + np.arange(samples) % SIZE,
        finish_reasons=reasons or ["stop"] * samples,
        first_version=np.zeros(samples, int),
        last_version=np.full(samples, number),
        executed=RolloutExecuted(WANTED, SIZE, 8),
        metrics={"rollout/num_restarts": number},
    )
    valid = ~np.isnan(scores)
    failures = {s: f"round {number}" for s in np.flatnonzero(~valid).tolist()}
    scored = RewardResult(scores, valid, {"mine": 2 * scores}, failures, len(failures), (4, 2), 0.5, 1)
    return rollouts, scored


def settings(max_rounds: int | None, mask: bool = False) -> Any:
    sampling = None if max_rounds is None else SimpleNamespace(max_rounds=max_rounds)
    algorithm = SimpleNamespace(dynamic_sampling=sampling, group_size=SIZE, overlong=SimpleNamespace(mask=mask))
    return SimpleNamespace(algorithm=algorithm, phases=SimpleNamespace(rollout=SimpleNamespace(prompts=WANTED)))


def test_groups_without_a_signal_are_replaced_by_those_of_a_further_round() -> None:
    rounds = SampledRounds(settings(max_rounds=5))
    rounds.add(*a_round(0, [1.0, 1.0, 0.0, 1.0, math.nan, 1.0]))  # the second group alone
    assert not rounds.complete
    rounds.add(*a_round(1, [0.0, 1.0, 1.0, 0.0, 0.5, 0.0]))  # all three, one too many
    assert rounds.complete
    rollouts, scored, figures = rounds.chosen()
    assert rollouts.groups.tolist() == [1, 1, 3, 3, 4, 4]
    assert scored.rewards.tolist() == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0] and scored.parts["mine"].tolist() == [0, 2, 0, 2, 2, 0]
    assert rollouts.last_version.tolist() == [0, 0, 1, 1, 1, 1]
    assert (len(rollouts), rollouts.executed.prompts) == (WANTED * SIZE, WANTED)
    assert scored.failures == {} and scored.busy_s == 1.0
    counted = scored.metrics()
    assert counted["reward/num_masked"] == counted["reward/num_timeouts"] == 1, "of a group that was dropped"
    assert scored.task_sequences == (4, 2, 4, 2)
    fetched = rollouts.payload.fetch([5, 0, 2])
    assert {s: one.completion.token_ids.tolist() for s, one in fetched.items()} == {5: [1003] * 2, 0: [2], 2: [1000]}
    assert rollouts.payload.fetch([0]).keys() == {0}
    first, second = rollouts.payload.payloads  # type: ignore[attr-defined]
    assert (first.asked, second.asked) == (2, 1), "only who has some of them is asked"
    assert figures == {
        "rollout/rounds": 2,
        "rollout/extra_prompts": 3,
        "rollout/uninformative_groups": 2,
        "rollout/surplus_groups": 1,
        "rollout/filler_groups": 0,
        "rollout/discarded_tokens": 9,
        "reward/sampled_mean": pytest.approx(6.5 / 11),
    }


def test_behind_the_last_round_others_fill_up_and_keep_their_masks() -> None:
    rounds = SampledRounds(settings(max_rounds=2))
    rounds.add(*a_round(0, [1.0, 1.0, 0.0, math.nan, 0.0, 0.0]))
    rounds.add(*a_round(1, [1.0, math.nan, 0.0, 1.0, 1.0, 1.0]))
    assert rounds.complete
    rollouts, scored, figures = rounds.chosen()
    assert rollouts.groups.tolist() == [0, 0, 1, 1, 4, 4]
    assert scored.valid.tolist() == [True, True, True, False, True, True] and scored.failures == {3: "round 0"}
    counted = scored.metrics()
    assert counted["reward/num_masked"] == counted["reward/num_timeouts"] == 2, "one is in the batch, one was dropped"
    assert (figures["rollout/filler_groups"], figures["rollout/surplus_groups"]) == (2, 0)
    assert figures["rollout/uninformative_groups"] == 5


def test_completions_that_overlong_masks_give_no_signal() -> None:
    reasons = ["stop", "length", "stop", "stop", "stop", "length"]
    for mask, informative in ((True, 1), (False, 3)):
        rounds = SampledRounds(settings(max_rounds=2, mask=mask))
        rounds.add(*a_round(0, [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], reasons))
        assert rounds.complete == (informative == WANTED)
