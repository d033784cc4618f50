"""Supervised runs give the losses and gradients of TRL's trainers on the same batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runs import metrics_of, train_on_ranks
from tests.supervised_cases import LR, MINI_BATCH, STEPS, batches_of, supervised_recipe, supervised_run

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
