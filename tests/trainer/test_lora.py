"""Runs of adapters: a real vLLM engine takes merged weights, or adapters alone, and the layout changes nothing."""

import pytest

from megarl.recipe import load_recipe
from tests.runs import metrics_of, tiny_recipe, tiny_run, train_on_ranks
from tests.tiny_models import save_tiny_reward_model, save_tiny_tokenizer

pytestmark = [pytest.mark.sync, pytest.mark.slow]
STEPS = 3
CHANGES = {
    "algorithm__kl": {"place": "loss", "coefficient": 0.1, "estimator": "k3"},
    "phases__reference_logprob": {"micro_batch": {"max_tokens": 64}},
    "phases__reward_model": {"micro_batch": {"sequences": 3}},
    "actor__lora": {"rank": 2, "alpha": 8.0, "targets": ["qkv", "proj", "fc1", "fc2"]},
    "actor__optimizer": {"lr": 1e-2},
    "reward": [{"kind": "function", "target": "tests.rewards:digits"}, {"kind": "model", "weight": 0.5}],
}


def test_adapters_and_a_reward_model_in_a_run(tmp_path):
    tiny_run(tmp_path, "qwen3", tied=True)
    save_tiny_tokenizer(save_tiny_reward_model(tmp_path / "judge"))
    changes = CHANGES | {"reward_model": {"path": str(tmp_path / "judge")}}
    recipe = tiny_recipe(tmp_path, "whole", False, 2, 2, 1, STEPS, run__dump_rollouts=True, **changes)
    assert load_recipe(recipe).reference_is_base
    train_on_ranks(recipe)
    whole = metrics_of(tmp_path, "whole")
    # The engine samples with what the trainer has, after every update too: the merged weights arrived.
    assert all(0 < line["mismatch/logprob_max"] <= 1e-4 for line in whole)
    assert len({line["actor/entropy"] for line in whole}) == STEPS
    # The reference is the model that the run started from: the policy leaves it with the first update.
    assert abs(whole[0]["actor/kl"]) < 1e-8 and all(line["actor/kl"] > 1e-4 for line in whole[1:])
    for line in whole:
        assert line["schedule/reward_model/sequences"] == 3
        assert line["reward/mean"] == pytest.approx(line["reward/digits"] + 0.5 * line["reward/model_mean"], abs=1e-5)
        assert line["reward/model_mean"] != 0

    # The same rollouts under another layout, which each role has for itself.
    changes |= {
        "rollout__replay": str(tmp_path / "runs" / "whole" / "rollouts"),
        "reference": {"layout": {"tensor": 2}},
        "reward_model": {"path": str(tmp_path / "judge"), "layout": {"tensor": 2, "pipeline": 2}},
    }
    recipe = tiny_recipe(tmp_path, "other", False, 4, 1, 2, STEPS, **changes)
    assert not load_recipe(recipe).reference_is_base
    train_on_ranks(recipe)
    for line, expected in zip(metrics_of(tmp_path, "other"), whole, strict=True):
        for key in ("reward/model_mean", "reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/kl"):
            assert line[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-7), (line["step"], key)


def test_a_run_that_sends_adapters_alone_learns_what_one_with_merged_weights_does(tmp_path):
    tiny_run(tmp_path, "qwen3", tied=True)
    runs = {}
    for send in ("merged", "adapter"):
        lora = {"rank": 2, "alpha": 8.0, "targets": ["qkv", "proj", "fc1", "fc2"], "send": send}
        changes = {"actor__lora": lora, "actor__optimizer": {"lr": 1e-2}}
        train_on_ranks(tiny_recipe(tmp_path, send, False, 2, 2, 1, 2, **changes))
        runs[send] = metrics_of(tmp_path, send)
    for line, merged in zip(runs["adapter"], runs["merged"], strict=True):
        # The engine samples with what the trainer has: after the first update it has other adapters.
        assert 0 < line["mismatch/logprob_max"] <= 1e-4
        for key in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy"):
            assert line[key] == pytest.approx(merged[key], rel=1e-3, abs=1e-6), (line["step"], key)
        assert line["sync/received_bytes"] == line["sync/sent_bytes"] < merged["sync/sent_bytes"]
    assert len({line["actor/entropy"] for line in runs["adapter"]}) == 2
