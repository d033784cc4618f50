"""Whole runs with an agent or a command: what is trained was sampled, and each rollout has its reward or its mask."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from megarl.telemetry.disk import read_lines
from tests.learning_cases import LAST, rewards_of
from tests.runs import metrics_of, tiny_recipe, tiny_run, train_on_ranks

pytestmark = pytest.mark.sync
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PROMPTS, SIZE = 4, 2
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
def test_a_run_trains_on_what_an_agent_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    tiny_run(tmp_path)
    rows = [{"question": f"{a}+{a}", "answer": str(a + a)} for a in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = json.loads(json.dumps(KINDS[kind] | LIMITS).replace("$PROGRAM", str(tmp_path / "program.py")))
    changes = {
        "environment": environment,
        "rollout__max_new_tokens": 4,
        "data__max_prompt_tokens": 24,
        "reward": [],
        "telemetry__samples_per_step": PROMPTS * SIZE,
        "phases__rollout": {"prompts": PROMPTS, "max_concurrent": 8},
        "algorithm__group_size": SIZE,
        "phases__actor_update": {"mini_batch": PROMPTS * SIZE, "micro_batch": {"max_tokens": 128}},
    }
    train_on_ranks(tiny_recipe(tmp_path, kind, False, 1, 1, 1, 2, **changes))
    for line in metrics_of(tmp_path, kind):
        table = read_lines(tmp_path / "runs" / kind / "samples" / f"step-{line['step']:06d}.jsonl")
        assert line["reward/num_masked_environment"] == SIZE == sum(not row["valid"] for row in table), "it never asked"
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
