"""A PPO run of four ranks gives the same metrics under every layout, given the same rollouts."""

from typing import Any

import pytest

from tests.runs import fake_rollouts, metrics_of, tiny_recipe, tiny_run, train_on_ranks

pytestmark = pytest.mark.layout
STEPS = 3
EXACT = ("reward/mean", "tokens/completion", "sync/version")
# Not the clip fractions: a ratio on the edge of the clip may fall to either side.
CLOSE = ("actor/loss", "actor/policy_loss", "actor/grad_norm", "actor/entropy", "critic/loss", "critic/grad_norm",
         "critic/value_mean", "mismatch/logprob_mean", "mismatch/logprob_max")  # fmt: skip


# Ranks, tensor and pipeline of the actor, and what else a recipe says.
RUNS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "one": (1, 1, 1, {}),
    "tp2pp2": (4, 2, 2, {}),
    "tp2": (2, 2, 1, {}),
    "pp2": (2, 1, 2, {}),
    "dp2": (2, 1, 1, {}),
    # Three roles with three layouts on the same four ranks, and a pipeline that is drained after every micro-batch.
    "mixed": (4, 2, 2, {"actor__layout__sequence_parallel": True, "critic__layout": {"tensor": 1, "pipeline": 2},
                        "reference": {"layout": {"tensor": 1, "pipeline": 1}}}),
    # Interleaved stages whose ranks share sequences, beside a critic and a reference that do neither alike.
    "interleaved": (4, 1, 2, {"actor__layout": {"pipeline": 2, "virtual_pipeline": 2, "context": 2},
                              "critic__layout": {"tensor": 2}, "reference": {"layout": {"context": 2}}}),
}  # fmt: skip


# Those that are part of another layout here.
PLAIN = {"tp2pp2", "tp2", "pp2", "dp2"}


@pytest.mark.parametrize(
    "names",
    [pytest.param(RUNS.keys() - PLAIN, id="combined"), pytest.param(PLAIN | {"one"}, id="plain", marks=pytest.mark.nightly)],
)
def test_four_rank_ppo_does_not_depend_on_the_layout(tmp_path, names):
    tiny_run(tmp_path, "qwen3")
    replay = fake_rollouts(tmp_path, STEPS)
    metrics = {}
    for name in sorted(names):
        ranks, tensor, pipeline, more = RUNS[name]
        run = name.replace(" ", "-")
        recipe = tiny_recipe(tmp_path, run, True, ranks, tensor, pipeline, STEPS, rollout__replay=str(replay), **more)
        train_on_ranks(recipe)
        metrics[name] = metrics_of(tmp_path, run)
        assert len(metrics[name]) == STEPS
    for name, lines in metrics.items():
        for line, expected in zip(lines, metrics["one"], strict=True):
            for key in EXACT:
                assert line[key] == expected[key], (name, key)
            for key in CLOSE:
                assert line[key] == pytest.approx(expected[key], rel=1e-4), (name, line["step"], key)
    losses = [line["critic/loss"] for line in metrics["one"]]
    assert len(set(losses)) == STEPS, "the updates move the weights"
    # Each phase is planned for its own role's layout: 16 sequences, the critic's by 2 and the reference's by 4.
    data_ranks = {"mixed": (2, 4), "interleaved": (2, 2)}
    for name in metrics.keys() & data_ranks.keys():
        of_critic, of_reference = data_ranks[name]
        assert metrics[name][0]["schedule/critic_update/micro_batches"] == 2 * 8 // 2 // of_critic
        assert metrics[name][0]["schedule/reference_logprob/micro_batches"] == 4 // of_reference
