"""Whole supervised runs: the losses, gradients and weights of Hugging Face's model with torch's Adam, under every layout and
cut; exact resume; held-out loss."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.megatron.export import export
from megarl.models import ModelShape
from megarl.models.stored_weights import check_weights
from megarl.telemetry.report import run_page, subtitle
from megarl.telemetry.report_run import read_run
from tests.runs import copy_until, evaluations_of, metrics_of, train_on_ranks
from tests.supervised_cases import LR, STEPS, batches_of, dpo_loss, score_loss, sft_loss, supervised_recipe, supervised_run

pytestmark = pytest.mark.layout
SFT_RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    # Packed in other micro-batches, sharded over four ranks.
    "tp2pp2": (4, {"actor__layout": {"tensor": 2, "pipeline": 2}, "phases__actor_update__micro_batch": {"sequences": 1}}),
    "cp2dp2": (4, {"actor__layout": {"context": 2}}),
}
DPO_RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2dp2": (4, {"actor__layout": {"tensor": 2}, "reference": {"layout": {"pipeline": 2}},
                   "phases__reference_logprob": {"micro_batch": {"sequences": 2}}}),
    "shared": (2, {"phases__actor_update__share_prompts": True, "phases__actor_logprob__share_prompts": True}),
}  # fmt: skip


SCORE_LR = 5e-4
SCORE_RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2dp2": (4, {"actor__layout": {"tensor": 2}}),
    "one": (1, {"phases__actor_update__micro_batch": {"sequences": 3}}),
}


def load(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def check_steps(recipe, names, weights, loss_of, lr=LR):
    """Loss and gradient norm of each step of a run, by their `names`, are those of autograd, which trains `weights`."""
    weights, lines = list(weights), metrics_of(recipe.parent, recipe.stem)
    assert len(lines) == STEPS
    adam = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    for line, batch in zip(lines, batches_of(recipe), strict=True):
        adam.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        assert line[names[0]] == pytest.approx(float(loss.detach()), rel=1e-5), recipe
        assert line[names[1]] == pytest.approx(float(norm), rel=1e-4), recipe
        adam.step()


def exported(folder, run):
    export(folder / "runs" / run, folder / f"{run}-model")
    return load(folder / f"{run}-model")


def furthest(model, expected):
    pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("aggregation", ["token_mean", pytest.param("sequence_mean", marks=pytest.mark.nightly)])
def test_fine_tuning_is_that_of_hugging_face_under_every_layout(tmp_path, aggregation):
    path = supervised_run(tmp_path)
    for name, (ranks, changes) in SFT_RUNS.items():
        recipe = supervised_recipe(tmp_path, name, ranks=ranks, algorithm__aggregation=aggregation, **changes)
        train_on_ranks(recipe)
        model = load(path)
        loss = partial(sft_loss, model, aggregation=aggregation)
        check_steps(recipe, ("actor/loss", "actor/grad_norm"), model.parameters(), loss)
        for line in metrics_of(tmp_path, name):
            assert not [key for key in line if key.startswith(("mismatch/", "reward/", "rollout/"))]
        if name == "cp2dp2" and aggregation != "token_mean":  # an export takes long
            assert furthest(exported(tmp_path, name), model) < LR / 100  # three steps of Adam move weights by up to 3 LR


def test_preference_optimization_is_that_of_autograd_under_every_layout(tmp_path):
    path = supervised_run(tmp_path)
    for name, (ranks, changes) in DPO_RUNS.items():
        recipe = supervised_recipe(tmp_path, name, "dpo", ranks, **changes)
        train_on_ranks(recipe)
        model = load(path)
        loss = partial(dpo_loss, model, load(path), beta=0.3, smoothing=0.1)
        check_steps(recipe, ("preference/loss", "actor/grad_norm"), model.parameters(), loss)


def test_a_reward_model_is_that_of_autograd_under_every_layout_and_exports_as_a_classifier(tmp_path):
    model = supervised_run(tmp_path)
    for name, (ranks, changes) in SCORE_RUNS.items():
        # A low rate: with LR the loss would fall to a tenth, and roundings would be ten times as large beside it.
        recipe = supervised_recipe(tmp_path, name, "reward_model", ranks, actor__optimizer__lr=SCORE_LR, **changes)
        train_on_ranks(recipe)
        reference = load(model)
        # The new head, the same under every layout.
        head = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))[0] * reference.config.initializer_range
        head.requires_grad_(True)
        weights, loss = [*reference.model.parameters(), head], partial(score_loss, reference.model, head)
        check_steps(recipe, ("preference/loss", "reward_model/grad_norm"), weights, loss, SCORE_LR)
    export(tmp_path / "runs" / "one", tmp_path / "scores")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scores", dtype=torch.float32)
    assert classifier.config.num_labels == 1
    assert float((classifier.score.weight[0] - head).abs().max()) < SCORE_LR / 10
    check_weights(tmp_path / "scores", ModelShape.from_directory(tmp_path / "scores"), critic=True, score=True)


def test_a_resumed_run_goes_on_exactly_and_adapters_lower_the_held_out_loss(tmp_path):
    supervised_run(tmp_path)
    source = {"kind": "jsonl", "path": str(tmp_path / "held_out.jsonl"), "prompt_field": "messages"}
    changes: dict[str, Any] = {
        "run__checkpoint_every": 2,
        "actor__lora": {"rank": 4, "alpha": 8.0},
        "actor__optimizer": {"lr": 0.02},
        "evaluation": {"prompts": source, "every": 2},
    }
    whole = supervised_recipe(tmp_path, "whole", run__steps=12, **changes)
    train_on_ranks(whole)
    copy_until(tmp_path, "whole", 4, "cut")
    train_on_ranks(supervised_recipe(tmp_path, "cut", run__steps=12, **changes), resume=True)
    assert metrics_of(tmp_path, "cut") == metrics_of(tmp_path, "whole")
    losses = [line["evaluation/loss"] for line in evaluations_of(tmp_path, "whole")]
    model = load(tmp_path / "model")
    held_out = supervised_recipe(tmp_path, "held", run__steps=1, phases__actor_update__mini_batch=5,
                                 data__prompts=source, data__shuffle=False)  # fmt: skip
    (batch,) = batches_of(held_out)
    assert losses[0] == pytest.approx(float(sft_loss(model, batch).detach()), rel=1e-5)  # 5 rows in a batch of 8
    assert losses[-1] < 0.8 * losses[0]
    page = run_page(report := read_run(tmp_path / "runs" / "whole"))
    assert report.goal == "minus the loss" and report.rewards()[1][-1] > report.rewards()[1][0]
    assert "Minus the loss went from" in page and "rollout engines" not in subtitle(report)
