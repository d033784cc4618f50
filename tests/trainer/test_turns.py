"""Whole runs with an environment: every number of an episode follows from its tokens, failures count for nothing, and a
resume goes on as if nothing had happened."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.sample import Completion, Sample
from megarl.data.tokenizer import load_tokenizer
from megarl.rollout.groups import EpisodeFacts, RolloutBatch, RolloutExecuted
from megarl.rollout.replay import FilePayload, dump_rollout
from megarl.telemetry.disk import read_lines
from tests.runs import metrics_of, tiny_recipe, tiny_run, train_on_ranks

pytestmark = pytest.mark.sync
PROMPTS, SIZE, TURNS, LONGEST = 4, 4, 3, 4
CHANGES: dict[str, Any] = {
    "environment": {"target": "tests.environments:Counting", "max_turns": TURNS, "max_observation_tokens": 4},
    "rollout__max_new_tokens": LONGEST,
    "reward": [],
    "telemetry__samples_per_step": PROMPTS * SIZE,
    "run__dump_rollouts": True,
    "run__checkpoint_every": 1,
}


def questions(folder: Path) -> None:
    """As many prompts as a step has, of which one breaks the environment; and others that are held out."""
    rows = [{"question": f"{a}+{a}", "answer": str(a + a)} for a in range(6)]
    rows[0] |= {"breaks": True}  # type: ignore[dict-item]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:PROMPTS]))
    (folder / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[PROMPTS:]))


def evaluated(folder: Path) -> dict[str, Any]:
    prompts = {"kind": "jsonl", "path": str(folder / "others.jsonl"), "prompt_field": "question", "answer_field": "answer"}
    return {"evaluation": {"prompts": prompts, "completions": 2}}


def check_episode(tokenizer: Any, sample: Sample, row: dict[str, Any]) -> float:
    """An episode's tokens are turns and what `Counting` says to them; returns what it gives in all."""
    completion, reward, at = sample.completion, 0.0, 0
    runs = [(own, len(list(same))) for own, same in itertools.groupby(completion.own.tolist())]
    assert [own for own, _ in runs] == [True, False] * (len(runs) // 2) + [True], "it begins and ends with the policy"
    for own, length in runs:
        ids = completion.token_ids[at : at + length].tolist()
        at += length
        if own:
            text = tokenizer.decode(ids[:-1] if ids[-1] == 1 else ids)
            digits = sum(character.isdigit() for character in text)
            reward, ended = reward + digits, ids[-1] == 1
            assert length <= LONGEST and np.isfinite(completion.logprobs[at - length : at]).all()
        else:
            said = tokenizer.decode(ids)
            assert said == ("" if ended else "<end>") + f"{digits}{row['question']}"[:2] + "="
    return reward


def test_a_run_plays_episodes_and_trains_on_what_the_policy_said(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    questions(tmp_path)
    train_on_ranks(tiny_recipe(tmp_path, "live", False, 1, 1, 1, 2, **CHANGES, **evaluated(tmp_path)))
    run, tokenizer = tmp_path / "runs" / "live", load_tokenizer(str(tmp_path / "model"))
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    for line in metrics_of(tmp_path, "live"):
        file = run / "rollouts" / f"step-{line['step']:06d}.npz"
        samples = FilePayload(str(file)).fetch(range(PROMPTS * SIZE))
        table = read_lines(run / "samples" / f"step-{line['step']:06d}.jsonl")
        rewards = []
        for number, shown in enumerate(table):
            row = next(row for row in rows if shown["prompt"] == f"{row['question']}=")
            reward = check_episode(tokenizer, samples[number], row)
            assert shown["completion"] == tokenizer.decode(samples[number].completion.token_ids.tolist())
            if row.get("breaks"):
                assert shown["valid"] and shown["reward"] == 0.0 and shown["finish_reason"] == "failed", "behind a turn"
                rewards.append(0.0)
            else:
                assert shown["reward"] == reward == shown["parts"]["environment"]
                rewards.append(reward)
        whole = sum(len(sample.completion.token_ids) for sample in samples.values())
        own = sum(int(sample.completion.own.sum()) for sample in samples.values())
        assert line["rollout/observation_tokens"] == whole - own > 0 and line["tokens/completion"] == whole
        assert line["rollout/failed_share"] == 1 / PROMPTS == line["reward/num_zero_error"] / (PROMPTS * SIZE)
        assert line["reward/num_masked"] == 0
        assert line["rollout/turns_mean"] > 1 and line["rollout/turns_max"] == TURNS
        assert line["reward/mean"] == pytest.approx(np.mean(rewards)) and line["actor/grad_norm"] > 0
        # What the trainer says of the policy's tokens is what the engine said when it sampled them, turn by turn.
        assert line["mismatch/logprob_max"] <= 1e-4 and line["rollout/version"] == line["step"] - 1
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert len(evaluations) == 2 and all(one["evaluation/num_masked"] == 0 for one in evaluations)
    assert all(one["evaluation/completion_length_mean"] > LONGEST for one in evaluations), "of more than one turn"


@pytest.mark.nightly
def test_a_resume_plays_the_same_episodes_and_a_replay_gives_the_same_numbers(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    questions(tmp_path)
    changes = CHANGES | {"rollout__engines": 2, "algorithm__advantage": "remax"}
    train_on_ranks(tiny_recipe(tmp_path, "whole", False, 1, 1, 1, 2, **changes))
    train_on_ranks(tiny_recipe(tmp_path, "cut", False, 1, 1, 1, 1, **changes))
    train_on_ranks(tiny_recipe(tmp_path, "cut", False, 1, 1, 1, 2, **changes), resume=True)
    whole = metrics_of(tmp_path, "whole")
    assert metrics_of(tmp_path, "cut") == whole
    rollouts = str(tmp_path / "runs" / "whole" / "rollouts")
    train_on_ranks(tiny_recipe(tmp_path, "again", False, 2, 1, 2, 2, **changes, rollout__replay=rollouts))
    for line, again in zip(whole, metrics_of(tmp_path, "again"), strict=True):
        for key in ("reward/mean", "reward/environment", "reward/num_masked", "rollout/turns_mean", "rollout/failed_share"):
            assert line[key] == again[key]
        assert again["actor/grad_norm"] == pytest.approx(line["actor/grad_norm"], rel=1e-3)


class Written:
    """Samples that a test wrote down."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def fetch(self, sample_ids: Any) -> dict[int, Sample]:
        return {sample: self.samples[sample] for sample in sample_ids}


# What each of two prompts' members were given, turn by turn; None where the environment failed.
GIVEN: list[list[list[float] | None]] = [
    [[0.5, 1.0], [0.5], [0.0, 0.0, 0.0], None],
    [[1.0], [0.0, 0.25], [0.25], [1.5, 1.0]],
]


def written(folder: Path, observed: int) -> str:
    """A step's dump with those rewards: turns of three tokens, and two observed tokens `observed` between them."""
    tokenizer, samples = load_tokenizer(str(folder / "model")), []
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for group, members in enumerate(GIVEN):
        prompt = np.array(tokenizer(f"{lines[group]['question']}=")["input_ids"], np.int32)
        for member, rewards in enumerate(members):
            turns = len(rewards or [0.0])
            own = np.array(([True] * 3 + [False] * 2) * (turns - 1) + [True] * 3)
            tokens = np.where(own, 5 + (np.arange(len(own)) * 7 + member) % 80, observed).astype(np.int32)
            logprobs = np.where(own, -4.0, 0.0).astype(np.float32)
            reason = "failed" if rewards is None else "stop"
            samples.append(Sample(group, prompt, Completion(tokens, logprobs, reason, 0, 0, own=own)))
    flat = [rewards for members in GIVEN for rewards in members]
    facts = EpisodeFacts(
        rewards=np.array([np.nan if one is None else sum(one) for one in flat], np.float32),
        turns=np.array([len(one or [0.0]) for one in flat]),
        malformed=np.zeros(len(flat), int),
        done=np.array([one is not None for one in flat]),
        failures=np.array(["it broke" if one is None else "" for one in flat]),
        causes=np.full(len(flat), ""),
    )
    batch = RolloutBatch(
        payload=Written(samples),
        groups=np.array([sample.group for sample in samples]),
        prompt_lengths=np.array([len(sample.prompt_ids) for sample in samples]),
        completion_lengths=np.array([len(sample.completion.token_ids) for sample in samples]),
        finish_reasons=[sample.completion.finish_reason for sample in samples],
        first_version=np.zeros(len(samples), int),
        last_version=np.zeros(len(samples), int),
        executed=RolloutExecuted(len(GIVEN), SIZE, 64),
        own_lengths=np.array([int(sample.completion.own.sum()) for sample in samples]),
        episodes=facts,
    )
    into = folder / f"written-{observed}"
    dump_rollout(into, 1, batch)
    return str(into)


def test_advantages_of_episodes_are_those_computed_by_hand(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    changes = CHANGES | {
        "run__dump_rollouts": False,
        "telemetry__samples_per_step": 8,
        "data__shuffle": False,
        "algorithm__advantage": "dr_grpo",
        "phases__rollout": {"prompts": 2},
        "phases__actor_update": {"mini_batch": 8, "micro_batch": {"max_tokens": 64}},
    }
    replay = written(tmp_path, observed=40)
    train_on_ranks(tiny_recipe(tmp_path, "hand", False, 2, 1, 2, 1, **changes, rollout__replay=replay))
    # Sums 1.5, 0.5, 0 (and one that counts for nothing), less their mean 2/3; sums 1, 0.25, 0.25, 2.5, less their mean 1.
    wanted = [5 / 6, -1 / 6, -2 / 3, None, 0.0, -0.75, -0.75, 1.5]
    table = read_lines(tmp_path / "runs" / "hand" / "samples" / "step-000001.jsonl")
    assert [row["advantage"] for row in table] == [None if one is None else pytest.approx(one, abs=1e-6) for one in wanted]
    (line,) = metrics_of(tmp_path, "hand")
    assert line["rollout/turns_mean"] == 13 / 8 and line["rollout/failed_share"] == 1 / 8 == 1 - line["rollout/done_share"]
    assert line["rollout/observation_tokens"] == 2 * 5 and line["tokens/completion"] == 3 * 13 + 10
    assert line["reward/mean"] == pytest.approx(6 / 7)
