"""Whole runs with an environment, an agent or a command: every number of an episode follows from its tokens, failures count
for nothing, each rollout has its reward or its mask, and a resume plays the groups that are left. The run with an
environment is that of test_faults.py, whose engine dies."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import yaml

from megarl.data.sample import Sample
from megarl.data.tokenizer import load_tokenizer
from megarl.rollout.replay import FilePayload
from megarl.telemetry.disk import read_lines
from tests.learning_cases import LAST, rewards_of
from tests.runs import evaluations_of, metrics_of, tiny_recipe, tiny_run, train_on_ranks

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
    return {"evaluation": {"prompts": prompts, "completions": 2, "every": 2}}


def check_episode(tokenizer: Any, sample: Sample, row: dict[str, Any]) -> float:
    """An episode's tokens are turns and what `Counting` says to them; returns what it gives in all."""
    completion, reward, at = sample.completion, 0.0, 0
    runs = [(is_own, len(list(same))) for is_own, same in itertools.groupby(completion.own.tolist())]
    assert [is_own for is_own, _ in runs] == [True, False] * (len(runs) // 2) + [True], "it begins and ends with the policy"
    for is_own, length in runs:
        ids = completion.token_ids[at : at + length].tolist()
        at += length
        if is_own:
            text = tokenizer.decode(ids[:-1] if ids[-1] == 1 else ids)
            digits = sum(character.isdigit() for character in text)
            reward, ended = reward + digits, ids[-1] == 1
            assert length <= LONGEST and np.isfinite(completion.logprobs[at - length : at]).all()
        else:
            observation = tokenizer.decode(ids)
            assert observation == ("" if ended else "<end>") + f"{digits}{row['question']}"[:2] + "="
    return reward


def check_run(folder: Path, name: str) -> None:
    """The run trained on what the policy said in its episodes, and was evaluated twice."""
    run, tokenizer = folder / "runs" / name, load_tokenizer(str(folder / "model"))
    rows = read_lines(folder / "prompts.jsonl")
    for line in metrics_of(folder, name):
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
        num_own = sum(int(sample.completion.own.sum()) for sample in samples.values())
        assert line["rollout/observation_tokens"] == whole - num_own > 0 and line["tokens/completion"] == whole
        assert line["rollout/failed_share"] == 1 / PROMPTS == line["reward/num_zero_error"] / (PROMPTS * SIZE)
        assert line["reward/num_masked"] == 0
        assert line["rollout/turns_mean"] > 1 and line["rollout/turns_max"] == TURNS
        assert line["reward/mean"] == pytest.approx(np.mean(rewards)) and line["actor/grad_norm"] > 0
        # What the trainer says of the policy's tokens is what the engine said when it sampled them, turn by turn.
        assert line["mismatch/logprob_max"] <= 1e-4 and line["rollout/version"] == line["step"] - 1
    evaluations = evaluations_of(folder, name)
    assert len(evaluations) == 2 and all(evaluation["evaluation/num_masked"] == 0 for evaluation in evaluations)
    assert all(evaluation["evaluation/completion_length_mean"] > LONGEST for evaluation in evaluations), (
        "of more than one turn"
    )


@pytest.mark.nightly
def test_a_resume_plays_the_groups_that_are_left_and_a_replay_gives_the_same_numbers(tmp_path: Path) -> None:
    """Which turns an engine computes together depends on who answers first, and so does the rounding of log-probabilities:
    two runs play the same groups, and every number follows from what was sampled."""
    tiny_run(tmp_path)
    questions(tmp_path)
    changes = CHANGES | {"rollout__engines": 2, "algorithm__advantage": "remax"}
    train_on_ranks(tiny_recipe(tmp_path, "whole", False, 1, 1, 1, 2, **changes))
    train_on_ranks(tiny_recipe(tmp_path, "cut", False, 1, 1, 1, 1, **changes))
    train_on_ranks(tiny_recipe(tmp_path, "cut", False, 1, 1, 1, 2, **changes), resume=True)
    played = {}
    for name in ("whole", "cut"):
        run = tmp_path / "runs" / name
        tables = [read_lines(run / "samples" / f"step-{step:06d}.jsonl") for step in (1, 2)]
        played[name] = [[(row["group"], row["sample"], row["prompt"]) for row in table] for table in tables]
        again = f"{name}-again"
        train_on_ranks(tiny_recipe(tmp_path, again, False, 2, 1, 2, 2, **changes, rollout__replay=str(run / "rollouts")))
        for line, replayed in zip(metrics_of(tmp_path, name), metrics_of(tmp_path, again), strict=True):
            assert line["rollout/version"] == line["step"] - 1 and line["mismatch/logprob_max"] <= 1e-4
            for key in ("reward/mean", "reward/environment", "reward/num_masked", "rollout/turns_mean"):
                assert line[key] == replayed[key], key
            assert line["rollout/failed_share"] == replayed["rollout/failed_share"]
            assert replayed["actor/grad_norm"] == pytest.approx(line["actor/grad_norm"], rel=1e-3)
    assert played["cut"] == played["whole"]
    for table in played["whole"]:
        assert len({group for group, *_ in table}) == PROMPTS and len(table) == PROMPTS * SIZE == len(set(table))


RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MEMBERS = 2
LIMITS: dict[str, Any] = {"max_turns": 4, "max_episode_tokens": 60, "max_segments": 2}
PROGRAM = """
import json, openai, os
row, chat, said = json.load(open(os.environ["MEGARL_ROW"])), [], []
if row["answer"] == "2":
    raise OSError("no board")
for text in (row["question"], "ok"):
    chat.append({"role": "user", "content": text})
    message = openai.OpenAI().chat.completions.create(model="policy", messages=chat).choices[0].message
    chat.append({"role": "assistant", "content": message.content})
print("thinking")
print(len(chat) / 4)
"""
KINDS = {"agent": {"kind": "agent", "target": "tests.agents:talk"}, "command": {"kind": "command", "run": "python $PROGRAM"}}


# In CI a command's rewards and faults: tests/rollout/test_agent.py.
@pytest.mark.parametrize("kind", ["agent", pytest.param("command", marks=pytest.mark.nightly)])
def test_a_run_trains_on_what_an_agent_asked(tmp_path: Path, kind: str) -> None:
    """On two data-parallel ranks."""
    (tmp_path / "program.py").write_text(PROGRAM)
    tiny_run(tmp_path)
    rows = [{"question": f"{a}+{a}", "answer": str(a + a)} for a in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = json.loads(json.dumps(KINDS[kind] | LIMITS).replace("$PROGRAM", str(tmp_path / "program.py")))
    changes = {
        "environment": environment, "rollout__max_new_tokens": 4, "data__max_prompt_tokens": 24, "reward": [],
        "telemetry__samples_per_step": PROMPTS * MEMBERS, "phases__rollout": {"prompts": PROMPTS, "max_concurrent": 8},
        "algorithm__group_size": MEMBERS,
        "phases__actor_update": {"mini_batch": PROMPTS * MEMBERS, "micro_batch": {"max_tokens": 128}},
    }  # fmt: skip
    train_on_ranks(tiny_recipe(tmp_path, kind, False, 2, 1, 1, 2, **changes))
    for line in metrics_of(tmp_path, kind):
        table = read_lines(tmp_path / "runs" / kind / "samples" / f"step-{line['step']:06d}.jsonl")
        assert line["reward/num_masked_environment"] == MEMBERS == sum(not row["valid"] for row in table), "it never asked"
        assert line["rollout/failed_share"] == 1 / PROMPTS and line["rollout/turns_max"] == 2
        assert {row["reward"] for row in table if row["valid"]} == {1.0}
        assert line["mismatch/logprob_max"] <= 1e-4 and line["rollout/version"] == line["step"] - 1
        for row in table:
            if row["valid"]:
                assert [turn["own"] for turn in row["turns"]] == [True, False, True]
                assert "".join(turn["text"] for turn in row["turns"]) == row["completion"]
                assert "ok=" in row["turns"][1]["text"] and row["prompt"].endswith("=")
            else:
                assert "no board" in row["reason"]
        if kind == "agent":
            assert line["agent/messages"] == 4


@pytest.mark.learning
@pytest.mark.nightly
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["calculator", "game", "scratchpad"])
def test_the_reward_of_an_example_rises_within_a_quarter_of_an_hour(tmp_path: Path, name: str, seed: int) -> None:
    recipe = yaml.safe_load((RECIPES / f"agent-{name}.yaml").read_text())
    recipe["run"] |= {"dir": str(tmp_path), "seed": seed}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train_on_ranks(tmp_path / "recipe.yaml", deadline_s=900)
    lines = (tmp_path / recipe["run"]["name"] / "metrics.jsonl").read_text().splitlines()
    rewards = rewards_of([json.loads(line) for line in lines])
    print(f"{name}, seed {seed}:", *(f"{reward:.2f}" for reward in rewards[::5]))
    assert fmean(rewards[-LAST:]) >= fmean(rewards[:LAST]) + 0.3, rewards
