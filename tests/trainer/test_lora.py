"""Runs of adapters: a real vLLM engine takes merged weights, or adapters alone, and the layout changes nothing. The run of a
mixture of experts has a reward model, and its actor reuses the experts that the engine recorded."""

import numpy as np
import pytest

from megarl.recipe import load_recipe
from tests.runs import metrics_of, tiny_recipe, tiny_run, train_on_ranks
from tests.tiny_models import save_tiny_reward_model, save_tiny_tokenizer

pytestmark = [pytest.mark.sync, pytest.mark.slow]
STEPS = 3
CHANGES = {
    # The actor's forward phase reuses experts as well, the reference does not.
    "actor__router_replay": True,
    "actor__lora": {"rank": 2, "alpha": 8.0, "targets": ["qkv", "proj"]},
    "actor__optimizer": {"lr": 1e-2},
    "algorithm__kl": {"place": "reward", "coefficient": 0.1, "estimator": "k1"},
    "phases__actor_logprob": {"micro_batch": {"max_tokens": 48}},
    "phases__reference_logprob": {"micro_batch": {"max_tokens": 64}},
    "phases__reward_model": {"micro_batch": {"sequences": 3}},
    "reward": [{"kind": "function", "target": "tests.rewards:digits"}, {"kind": "model", "weight": 0.5}],
}
LIVE = {
    "actor__layout": {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1},
    "actor__memory": {"recompute": "full"},
    "run__dump_rollouts": True,
}


def test_adapters_recorded_experts_and_a_reward_model_in_a_run(tmp_path):
    tiny_run(tmp_path, "qwen3_moe", tied=True)
    judge = str(save_tiny_reward_model(tmp_path / "judge"))
    save_tiny_tokenizer(tmp_path / "judge")
    scores = {"reward_model": {"path": judge, "layout": {"tensor": 2}}}
    recipe = tiny_recipe(tmp_path, "live", False, 2, 2, 1, STEPS, **CHANGES, **LIVE, **scores)
    assert load_recipe(recipe).reference_is_base
    train_on_ranks(recipe)
    live = metrics_of(tmp_path, "live")
    assert len({line["actor/entropy"] for line in live}) == STEPS
    # The reference is the model that the run started from: the policy leaves it with the first update.
    assert abs(live[0]["actor/kl"]) < 1e-6 and all(abs(line["actor/kl"]) > 1e-4 for line in live[1:])
    for number, line in enumerate(live, 1):
        # The engine samples with what the trainer has, after every update too: the merged weights arrived.
        assert 0 < line["mismatch/logprob_max"] <= 1e-4
        assert line["schedule/reward_model/sequences"] == 3
        assert line["reward/mean"] == pytest.approx(line["reward/digits"] + 0.5 * line["reward/model_mean"], abs=1e-5)
        assert line["reward/model_mean"] != 0
        with np.load(tmp_path / "runs" / "live" / "rollouts" / f"step-{number:06d}.npz") as dump:
            lengths = dump["prompt_lengths"] + dump["completion_lengths"]
            routing = dump["routing"]
        # Three of four layers have experts, 2 of 8 for each token.
        assert routing.shape == (lengths.sum() - len(lengths), 3, 2) and routing.dtype == np.uint8
        assert (routing < 8).all() and (routing[..., 0] != routing[..., 1]).all()
        assert line["actor/router_replay_share"] == pytest.approx(1 - len(lengths) / lengths.sum())
        # In fp32 the trainer's routers would have chosen so themselves, if all rows are those of their tokens and layers;
        # by chance they would 1 time in 28.
        assert line["mismatch/routing_share"] < 0.02

    # The same rollouts and experts under another layout, which each role has for itself.
    others = {
        "rollout__replay": str(tmp_path / "runs" / "live" / "rollouts"),
        "reference": {"layout": {"tensor": 2, "sequence_parallel": True}},
        "reward_model": {"path": judge, "layout": {"tensor": 2, "pipeline": 2}},
    }
    recipe = tiny_recipe(tmp_path, "other", False, 4, 1, 2, STEPS, **CHANGES, **others)
    assert not load_recipe(recipe).reference_is_base
    train_on_ranks(recipe)
    for line, expected in zip(metrics_of(tmp_path, "other"), live, strict=True):
        for key in ("reward/model_mean", "reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/kl",
                    "actor/router_replay_share"):  # fmt: skip
            assert line[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-7), (line["step"], key)


@pytest.mark.nightly
def test_a_run_that_sends_adapters_alone_samples_with_what_it_trains(tmp_path):
    """What the engine does with adapters is that of merged weights: tests/weight_sync/test_adapter.py."""
    model = tiny_run(tmp_path, "qwen3", tied=True)
    lora = {"rank": 2, "alpha": 8.0, "targets": ["qkv", "proj", "fc1", "fc2"], "send": "adapter"}
    changes = {"actor__lora": lora, "actor__optimizer": {"lr": 1e-2}}
    train_on_ranks(tiny_recipe(tmp_path, "adapter", False, 2, 2, 1, 2, **changes))
    lines = metrics_of(tmp_path, "adapter")
    for line in lines:
        # After the first update the engine has other adapters.
        assert 0 < line["mismatch/logprob_max"] <= 1e-4
        assert line["sync/received_bytes"] == line["sync/sent_bytes"] < (model / "model.safetensors").stat().st_size
    assert len({line["actor/entropy"] for line in lines}) == 2
