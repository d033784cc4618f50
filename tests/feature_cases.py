"""What the ranks run to compare a role with a memory, precision or overlap feature to one without."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch

from megarl.megatron import offload, optimizer
from megarl.megatron import role as engine
from megarl.megatron.checkpoint import load_checkpoint, save_checkpoint
from megarl.megatron.role import Role, RoleSettings, Training
from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.recipe.role_sections import FreezeSection, LoraSection, MemorySection, OptimizerSection
from megarl.schedule import MiniBatch
from tests.engine_cases import objective_of, planned, small_batch, start_places, total_loss

# Buckets so small that the tiny models have several.
BUCKET_WEIGHTS = 4000

Found = TypeVar("Found")


@dataclass(frozen=True)
class Feature:
    """A role's settings beside its layout."""

    memory: Mapping[str, Any] = field(default_factory=dict)
    freeze: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    lora: LoraSection | None = None
    precision: str = "fp32"
    initial_loss_scale: float = 65536.0
    leaves_gathers: bool = False  # nothing waits for the head's weight
    checkpoint: str | None = None  # saved after the second update and loaded into a fresh engine


@dataclass(frozen=True)
class Line:
    """One update: what it gave, and what the weights were behind it."""

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    logprobs: bytes  # of the forward phase before it; of this rank's sequences
    weights: bytes


def build(directory: str, place: Any, feature: Feature, role: str = "actor") -> Role:
    optimizer = OptimizerSection(lr=1e-2, warmup_steps=2, decay="linear", **feature.optimizer)
    return Role(
        role, ModelShape.from_directory(directory), directory, place,
        RoleSettings(feature.precision, 1.0, initial_loss_scale=feature.initial_loss_scale),
        Training(optimizer, steps=10, lora=feature.lora, frozen=FreezeSection(**feature.freeze)),
        memory=MemorySection(**feature.memory),
    )  # fmt: skip


def train_with(
    directory: str, layout: Layout, features: Sequence[Feature], updates: int = 3, role: str = "actor"
) -> list[list[Line]]:
    """A forward phase and an update, `updates` times, with each feature in turn on engines of the same start."""
    return _with_each(layout, features, lambda place, feature: _train(directory, place, feature, updates, role))


def update_in_a_row(
    directory: str, layout: Layout, features: Sequence[Feature], updates: int = 3, role: str = "actor"
) -> list[tuple[list[tuple[float, float]], list[bytes]]]:
    """As `train_with`, but nothing reads weights between the updates: the losses and gradient norms, and what each of this
    rank's weights is at the end."""
    return _with_each(layout, features, lambda place, feature: _update(directory, place, feature, updates, role))


def _with_each(layout: Layout, features: Sequence[Feature], train: Callable[[Any, Feature], Found]) -> list[Found]:
    from megatron.core.distributed import DistributedDataParallelConfig

    (place,) = start_places([layout]).values()
    results, small_buckets = [], partial(DistributedDataParallelConfig, bucket_size=BUCKET_WEIGHTS)
    for feature in features:
        with (
            mock.patch.object(optimizer, "DistributedDataParallelConfig", small_buckets),
            mock.patch.object(offload, "LEAST_ACTIVATION_BYTES", 1),
            mock.patch.object(engine, "finish_gather") if feature.leaves_gathers else nullcontext(),
        ):
            results.append(train(place, feature))
    return results


def _train(directory: str, place: Any, feature: Feature, updates: int, role: str) -> list[Line]:
    trained = build(directory, place, feature, role)
    batch = small_batch(trained.shape.vocab)
    mini_batch = cut(batch, place.layout)
    lines = []
    for number in range(updates):
        if number == 2 and feature.checkpoint is not None:
            path = save_checkpoint(feature.checkpoint, number, {role: trained}, {})
            trained = build(directory, place, feature, role)
            load_checkpoint(path, {role: trained})
        with trained.present():
            results, _ = trained.forward(batch, mini_batch)
        with trained.present(training=True):
            update = trained.update(batch, mini_batch, objective_of(role, 100))
        with trained.present():
            weights = digest(trained.shards().values())
        outputs = results.get("values" if role == "critic" else "logprobs", {})
        state = digest(outputs[sample] for sample in sorted(outputs)), weights
        lines.append(Line(total_loss(update, place), update.grad_norm, update.learning_rate, update.skipped, *state))
    return lines


def _update(
    directory: str, place: Any, feature: Feature, updates: int, role: str
) -> tuple[list[tuple[float, float]], list[bytes]]:
    trained = build(directory, place, feature, role)
    batch = small_batch(trained.shape.vocab)
    mini_batch = cut(batch, place.layout)
    with trained.present(training=True):
        done = [trained.update(batch, mini_batch, objective_of(role, 100)) for _ in range(updates)]
    with trained.present():
        weights = [digest([weight]) for weight in trained.shards().values()]
    return [(total_loss(update, place), update.grad_norm) for update in done], weights


def cut(batch: Any, layout: Layout) -> MiniBatch:
    return planned(batch, layout, max_tokens=40)


def digest(tensors: Any) -> bytes:
    """Equal for tensors that are equal bit for bit. Of copies: a storage that numpy has seen cannot be emptied."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.clone().view(torch.uint8).numpy().tobytes())
    return total.digest()
