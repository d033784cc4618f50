"""A PPO run of four ranks gives the same figures under every layout, given the same rollouts."""

import pytest

from tests.runs import fake_rollouts, figures, megarl, tiny_recipe, tiny_run

pytestmark = pytest.mark.layout
STEPS = 3
EXACT = ("reward/mean", "tokens/completion", "sync/version")
# Not the clip fractions: a ratio on the edge of the clip may fall to either side.
CLOSE = ("actor/loss", "actor/policy_loss", "actor/grad_norm", "actor/entropy", "critic/loss", "critic/grad_norm",
         "critic/value_mean", "mismatch/logprob_mean", "mismatch/logprob_max")  # fmt: skip


def test_four_rank_ppo_does_not_depend_on_the_layout(tmp_path):
    tiny_run(tmp_path, "qwen3")
    replay = fake_rollouts(tmp_path, STEPS)
    found = {}
    for name, (ranks, tensor, pipeline) in {
        "tp2pp2": (4, 2, 2),
        "one": (1, 1, 1),
        "tp2": (2, 2, 1),
        "pp2": (2, 1, 2),
        "dp2": (2, 1, 1),
    }.items():
        recipe = tiny_recipe(tmp_path, name, True, ranks, tensor, pipeline, STEPS, rollout__replay=str(replay))
        megarl("train", str(recipe))
        found[name] = figures(tmp_path, name)
        assert len(found[name]) == STEPS
    for name, lines in found.items():
        for line, expected in zip(lines, found["one"], strict=True):
            for key in EXACT:
                assert line[key] == expected[key], (name, key)
            for key in CLOSE:
                assert line[key] == pytest.approx(expected[key], rel=1e-4), (name, line["step"], key)
    losses = [line["critic/loss"] for line in found["one"]]
    assert len(set(losses)) == STEPS, "the updates move the weights"
