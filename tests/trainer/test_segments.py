"""Runs that train on rollouts of several segments, from groups over dumps to weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from megarl.data.sample import Sample
from megarl.recipe import load_recipe
from megarl.rollout import groups
from megarl.rollout.groups import EpisodeFacts, GroupFacts, GroupResult, RolloutBatch, RolloutExecuted, StoredPayload
from megarl.rollout.replay import FilePayload, dump_rollout
from megarl.rollout.session import Segment
from megarl.telemetry.disk import read_lines
from tests.runs import batch_of, fake_rollouts, metrics_of, tiny_recipe, tiny_run, train_on_ranks
from tests.segment_cases import Span, cut

STEPS, PROMPTS, SIZE, LONGEST = 2, 4, 4, 12
AGENT = {"kind": "agent", "target": "tests.agents:run", "max_turns": 1, "max_episode_tokens": LONGEST}
OF_ROLLOUTS: dict[str, Any] = {
    "algorithm__aggregation": "sequence_mean",
    "algorithm__policy_loss": {"kind": "gspo"},
    "algorithm__mismatch": {"correction": "clip", "level": "geometric", "cap": 1.2},
}
MAX_PROMPT = 4 + LONGEST - 2  # a later segment has all before it as its prompt
# One sequence alone fills a micro-batch, and the sequences of a mini-batch do not divide over two ranks or stages.
TIGHT: dict[str, Any] = {"phases__actor_update": {"mini_batch": 8, "micro_batch": {"max_tokens": MAX_PROMPT + LONGEST}}}
PAIRS: dict[str, Any] = {"phases__actor_update": {"mini_batch": 8, "micro_batch": {"sequences": 2}}}


def group_of(samples: Sequence[Sequence[Sample]], number: int) -> GroupResult:
    """A group of rollouts, each a list of segments."""
    rollouts = [[Segment(sample.prompt_ids, sample.completion) for sample in of] for of in samples]
    return GroupResult.of_segments(number, rollouts, [of[-1].completion.finish_reason for of in samples])


def played(count: int, step: int) -> EpisodeFacts:
    """Rewards of each rollout that no text explains."""
    rewards = np.random.default_rng(step).normal(size=count).astype(np.float32)
    ones, none = np.ones(count, int), np.array([""] * count)
    notes = np.array(['{"rewards": [], "metrics": {}, "segments": {}}'] * count)
    return EpisodeFacts(rewards, ones, 0 * ones, ones > 0, none, none, notes)


def spans_of(rollout: int, length: int, first: int) -> list[Span]:
    """Every third rollout is whole, the others fall into two or three segments of unlike histories, after `first` tokens."""
    if rollout % 3 == 0 or length < first + 2:
        return [(0, 0, length)]
    if rollout % 3 == 1:
        return [(0, 0, first), (first, first, length)]
    return [(0, 0, first), (0, first, first + 1), (first, first + 1, length)]


def dump_in_groups(source: Path, into: Path, first: int | None) -> int:
    """Dump the rollouts of `source` as an environment's, split after `first` tokens or whole. Returns how many sequences the
    last step has."""
    for step in range(1, STEPS + 1):
        samples = FilePayload(str(source / f"step-{step:06d}.npz")).fetch(range(PROMPTS * SIZE))
        pieces = []
        for number, sample in sorted(samples.items()):
            length = len(sample.completion.own)
            pieces.append(cut(sample, spans_of(number, length, length if first is None else first)))
        results = [group_of(pieces[first : first + SIZE], samples[first].group) for first in range(0, len(pieces), SIZE)]
        batch = batch_of(results, played(len(pieces), step))
        dump_rollout(into, step, batch)
    return len(batch)


@pytest.mark.layout
@pytest.mark.parametrize(
    ("layout", "data", "ppo", "family", "more"),
    [
        ({}, 2, False, "qwen3", OF_ROLLOUTS),
        ({}, 2, False, "qwen3", TIGHT),
        ({"pipeline": 2, "virtual_pipeline": 2}, 1, False, "qwen3", TIGHT),
        pytest.param({}, 2, True, "qwen3", {}, marks=pytest.mark.nightly),
        pytest.param({"context": 2}, 2, False, "qwen3", PAIRS, marks=pytest.mark.nightly),
        pytest.param({"expert": 2}, 2, False, "qwen3_moe", TIGHT, marks=pytest.mark.nightly),
    ],
    ids=["together", "data", "virtual pipeline", "ppo", "context", "experts"],
)
def test_a_replay_of_split_rollouts_trains_as_one_of_whole_rollouts(
    tmp_path: Path, layout: dict[str, int], data: int, ppo: bool, family: str, more: dict[str, Any]
) -> None:
    """The rollouts share their prompts or run alone, in several mini-batches."""
    tiny_run(tmp_path, family)
    ranks = data * layout.get("pipeline", 1) * layout.get("context", 1)
    first, draw = (LONGEST - 2, lambda _: LONGEST) if more is TIGHT else (2, None)
    source = fake_rollouts(tmp_path, STEPS, PROMPTS, SIZE, LONGEST, draw)
    changes: dict[str, Any] = {
        "actor__layout": layout,
        "environment": AGENT | {"max_segments": 3},
        "reward": [],
        "data__max_prompt_tokens": MAX_PROMPT,
        "telemetry__samples_per_step": PROMPTS * SIZE,
        "phases__actor_update": {"mini_batch": 8, "micro_batch": {"max_tokens": 96}, "share_prompts": True},
        "phases__actor_logprob": {"micro_batch": {"sequences": 3}},
    } | more  # fmt: skip
    for name in ("whole", "split"):
        num_sequences = dump_in_groups(source, tmp_path / name, first if name == "split" else None)
        train_on_ranks(
            tiny_recipe(tmp_path, f"of-{name}", ppo, ranks, 1, 1, STEPS, **changes, rollout__replay=str(tmp_path / name))
        )
    assert num_sequences > PROMPTS * SIZE
    num_passes = data * metrics_of(tmp_path, "of-split")[-1]["schedule/actor_update/micro_batches"]
    assert (num_passes > num_sequences) == (more is TIGHT), "some passes are empty"
    for whole, split in zip(*(metrics_of(tmp_path, f"of-{name}") for name in ("whole", "split")), strict=True):
        assert whole["rollout/segments_max"] == 1 and whole["rollout/num_sealed"] == 0
        assert split["rollout/segments_max"] == 3 and split["rollout/num_sealed"] > 0
        for key in ("reward/mean", "reward/deviation", "rollout/own_length_mean", "rollout/turns_mean"):
            assert split[key] == whole[key], key
        for key in ("actor/grad_norm", "actor/loss", "actor/entropy", "mismatch/logprob_mean"):
            assert split[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key
        assert whole["actor/grad_norm"] > 0
        if ppo:
            assert split["critic/grad_norm"] == pytest.approx(whole["critic/grad_norm"], rel=2e-3)
    tables = [read_lines(tmp_path / "runs" / f"of-{name}" / "samples" / "step-000001.jsonl") for name in ("whole", "split")]
    assert [row["sample"] for row in tables[1]] == list(range(len(tables[1])))
    rewards = {row["rollout"]: row["reward"] for row in tables[0]}
    assert all(row["reward"] == rewards[row["rollout"]] for row in tables[1]) and len(rewards) == PROMPTS * SIZE


def test_rollouts_of_more_segments_than_the_recipe_has_memory_for_are_refused(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    dump_in_groups(fake_rollouts(tmp_path, STEPS, PROMPTS, SIZE, LONGEST), tmp_path / "split", 2)
    changes = {"environment": AGENT | {"max_segments": 2}, "reward": []}
    recipe = load_recipe(tiny_recipe(tmp_path, "few", False, 1, 1, 1, STEPS, **changes))
    with np.load(tmp_path / "split" / "step-000001.npz") as dump:
        columns = {name: dump[name] for name in (*groups.COLUMNS, "finish_reasons")}
    payload: Any = None
    batch = RolloutBatch(payload=payload, executed=RolloutExecuted(PROMPTS, SIZE, 64), **columns)
    with pytest.raises(ValueError, match="has a rollout of 3 segments, and environment.max_segments = 2"):
        groups.refuse_overlong(batch, recipe)
    later = int(np.flatnonzero(np.diff(columns["rollouts"]) == 0)[0]) + 1
    lengths = columns["prompt_lengths"].copy()
    lengths[later] = recipe.data.max_prompt_tokens + 1
    with pytest.raises(ValueError, match=rf"sample {later} .* has a prompt of {lengths[later]} tokens, and data.max_prompt"):
        groups.refuse_overlong(
            RolloutBatch(payload=payload, executed=batch.executed, **columns | {"prompt_lengths": lengths}), recipe
        )
    columns["completion_lengths"] = columns["completion_lengths"].copy()
    columns["completion_lengths"][later] = recipe.max_sequence_tokens - columns["prompt_lengths"][later] + 1
    with pytest.raises(ValueError, match=rf"sample {later} .* has (a completion of )?\d+ tokens, and "):
        groups.refuse_overlong(RolloutBatch(payload=payload, executed=batch.executed, **columns), recipe)


def test_a_stored_payload_finds_each_sequence_of_groups_of_unlike_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And prompts that segments share are stored once."""

    def sample(prompt: list[int], token: int) -> Sample:
        completion = groups.Completion(np.array([token], np.int32), np.zeros(1, np.float32), "stop", np.zeros(1, np.int64))
        return Sample(0, np.array(prompt, np.int32), completion)

    results = [
        group_of([[sample([1, 2], 3), sample([1, 2, 3], 4)], [sample([1, 2], 5)]], 7),
        group_of([[sample([6], 7)], [sample([6], 8), sample([6, 8], 9), sample([6], 10)]], 9),
    ]
    assert [len(result.prompt_ids) for result in results] == [5, 3]
    store = SimpleNamespace(references=SimpleNamespace(remote=lambda batch, positions: [results[at] for at in positions]))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: store)
    monkeypatch.setattr(ray, "get", lambda references, timeout: references)
    facts = [GroupFacts.of(result) for result in results]
    payload = StoredPayload("store", "1", tuple(len(group.lengths) for group in facts), 1.0)
    sequences = payload.fetch([6, 1, 2, 3])
    shown = {
        number: (sequence.group, sequence.prompt_ids.tolist(), sequence.completion.token_ids.tolist())
        for number, sequence in sequences.items()
    }
    assert shown == {6: (9, [6], [10]), 1: (7, [1, 2, 3], [4]), 2: (7, [1, 2], [5]), 3: (9, [6], [7])}
    batch = RolloutBatch.of(facts, payload, RolloutExecuted(2, 2, 4), {})
    assert batch.rollouts.tolist() == [0, 0, 1, 2, 3, 3, 3] and batch.prefixes.tolist() == [0, 1, 0, 2, 2, 3, 2]
    assert batch.last_segments.tolist() == [1, 2, 3, 6] and [group.last_segments for group in facts] == [[1, 2], [0, 3]]
