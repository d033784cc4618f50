"""Supervised runs give the losses and gradients of TRL's trainers on the same batches."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.models.layout import Layout
from tests.distillation_cases import judged_batch, learn, settings_of
from tests.ranks import run_ranks
from tests.runs import metrics_of, train_on_ranks
from tests.supervised_cases import LR, MINI_BATCH, STEPS, batches_of, supervised_recipe, supervised_run
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.layout, pytest.mark.nightly]


def steps_of_trl(trainer_class: Any, config_class: Any, model: Path, rows: list[dict[str, Any]], **settings: Any) -> Any:
    """Loss and gradient norm of each step of a TRL trainer that reads the rows in their order."""
    from datasets import Dataset

    class Recording(trainer_class):  # type: ignore[misc]
        losses: list[float] = []

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            loss = super().training_step(*arguments, **named)
            self.losses.append(float(loss))
            return loss

    size = settings["per_device_train_batch_size"] * settings.get("gradient_accumulation_steps", 1)
    assert len(rows) == STEPS * size
    config = config_class(
        output_dir=str(model.parent / "trl"), use_cpu=True, bf16=False, max_steps=STEPS, save_strategy="no",
        learning_rate=LR, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, logging_steps=1,
        gradient_checkpointing=False, train_sampling_strategy="sequential", report_to="none", disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = Recording(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), args=config,
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    trainer.train()
    parts = settings.get("gradient_accumulation_steps", 1)
    losses = [sum(trainer.losses[step * parts : (step + 1) * parts]) for step in range(STEPS)]
    return list(zip(losses, [line["grad_norm"] for line in trainer.state.log_history[:STEPS]], strict=True))


def test_fine_tuning_is_that_of_trl(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    model = supervised_run(tmp_path)
    recipe = supervised_recipe(tmp_path, "sft")
    train_on_ranks(recipe)
    rows = [
        {"input_ids": example.token_ids.tolist(), "completion_mask": example.trained.astype(int).tolist()}
        for batch in batches_of(recipe)
        for example in batch
    ]
    expected = steps_of_trl(SFTTrainer, SFTConfig, model, rows, per_device_train_batch_size=2,
                            gradient_accumulation_steps=MINI_BATCH // 2, completion_only_loss=True)  # fmt: skip
    for line, (loss, norm) in zip(metrics_of(tmp_path, "sft"), expected, strict=True):
        assert line["actor/loss"] == pytest.approx(loss, rel=1e-5)
        assert line["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_preference_optimization_is_that_of_trl(tmp_path: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    model = supervised_run(tmp_path)
    train_on_ranks(supervised_recipe(tmp_path, "dpo", "dpo", data__shuffle=False, algorithm={"dpo": {"beta": 0.3}}))
    pairs = MINI_BATCH // 2
    lines = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()][: STEPS * pairs]
    rows = [
        {"prompt": [{"role": "user", "content": line["question"]}]}
        | {side: [{"role": "assistant", "content": line[side]}] for side in ("chosen", "rejected")}
        for line in lines
    ]
    expected = steps_of_trl(DPOTrainer, DPOConfig, model, rows, per_device_train_batch_size=pairs, beta=0.3)
    for line, (loss, norm) in zip(metrics_of(tmp_path, "dpo"), expected, strict=True):
        assert line["preference/loss"] == pytest.approx(loss, rel=1e-5)
        assert line["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("mixture", [0.2, 0.5])
def test_distillation_is_that_of_trl(tmp_path: Path, mixture: float) -> None:
    """An update on completions of both the policy and the data, where TRL sees labels alone."""
    from trl.experimental.gkd import GKDTrainer

    student, teacher = (save_tiny_model(tmp_path / f"model-{seed}", seed=seed, layers=2) for seed in (1, 2))
    loss = {"place": "loss", "over": "vocabulary", "divergence": "jensen_shannon", "mixture": mixture, "data_share": 0.25}
    ((learned,),) = run_ranks(learn, 1, student, {"one": teacher}, (Layout(), Layout()), 40, [settings_of(**loss)])
    samples = judged_batch({"one": teacher}, from_data=True).samples.values()
    rows = [torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion.token_ids])).long() for sample in samples]
    labels = [row.clone() for row in rows]
    for label, sample in zip(labels, samples, strict=True):
        label[: len(sample.prompt_ids)] = -100
    padded = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    inputs = {
        "input_ids": padded(rows),
        "labels": padded(labels, padding_value=-100),
        "attention_mask": padded([torch.ones_like(row) for row in rows]),
    }
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (student, teacher)]
    trainer: Any = SimpleNamespace(
        teacher_model=models[1], beta=mixture, generalized_jsd_loss=GKDTrainer.generalized_jsd_loss
    )
    expected = GKDTrainer.compute_loss(trainer, models[0], inputs)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in models[0].parameters() if weight.grad is not None])
    assert (learned.loss, learned.grad_norm) == pytest.approx((expected.item(), norm.item()), rel=1e-5)
