"""A run of a mixture of experts whose actor reuses the choices that a real vLLM engine recorded."""

import numpy as np
import pytest

from tests.runs import fake_rollouts, metrics_of, tiny_recipe, tiny_run, train_on_ranks

pytestmark = [pytest.mark.sync, pytest.mark.slow]
STEPS = 2
# Reused by the forward phase as well, and not by the reference.
CHANGES = {
    "actor__router_replay": True,
    "actor__layout": {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1},
    "actor__memory": {"recompute": "full"},
    "algorithm__kl": {"place": "reward", "coefficient": 0.1, "estimator": "k1"},
    "phases__actor_logprob": {"micro_batch": {"max_tokens": 48}},
    "phases__reference_logprob": {"micro_batch": {"max_tokens": 64}},
}


def test_the_choices_of_the_engine_arrive_at_the_trainer(tmp_path):
    tiny_run(tmp_path, "qwen3_moe")
    recipe = tiny_recipe(tmp_path, "live", False, 2, 2, 1, STEPS, run__dump_rollouts=True, **CHANGES)
    train_on_ranks(recipe)
    live = metrics_of(tmp_path, "live")
    for number, line in enumerate(live, 1):
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
        assert 0 < line["mismatch/logprob_max"] <= 1e-4

    # The dumped choices, on one rank.
    replay = str(tmp_path / "runs" / "live" / "rollouts")
    alone = CHANGES | {"actor__layout": {}, "actor__memory": {}}
    recipe = tiny_recipe(tmp_path, "again", False, 1, 1, 1, STEPS, rollout__replay=replay, **alone)
    train_on_ranks(recipe)
    for line, expected in zip(metrics_of(tmp_path, "again"), live, strict=True):
        for key in ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/router_replay_share"):
            assert line[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-7), (line["step"], key)

    # Dumps without choices.
    replay = str(fake_rollouts(tmp_path, STEPS))
    recipe = tiny_recipe(tmp_path, "without", False, 1, 1, 1, STEPS, rollout__replay=replay, **alone)
    with pytest.raises(AssertionError, match=r"step-000001\.npz does not say which experts.*actor\.router_replay"):
        train_on_ranks(recipe)
