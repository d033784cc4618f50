"""What the ranks of the adapter tests run, and LoRA by hand on a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from megarl.megatron.checkpoint import load_checkpoint, save_checkpoint
from megarl.megatron.lora import MODULES, Adapter
from megarl.megatron.role import Role, share_results
from megarl.models.layout import Layout
from megarl.recipe.role_sections import LoraSection
from megarl.schedule import compare
from megarl.telemetry.run_directory import latest_checkpoint
from tests.engine_cases import engine, objective_of, planned, small_batch, start, total_loss

LORA = LoraSection(rank=3, alpha=6.0)
# Parts of the fused layers, by the names of Hugging Face.
PARTS = {"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "proj": ("self_attn.o_proj",),
         "fc1": ("mlp.gate_proj", "mlp.up_proj"), "fc2": ("mlp.down_proj",)}  # fmt: skip


@dataclass
class Trained:
    """`metrics` are of each update: loss, gradient norm, learning rate, log-probabilities before it."""

    metrics: list[tuple[float, float, float, np.ndarray]]
    base: np.ndarray  # log-probabilities without adapters, after the last update
    adapted: np.ndarray  # with them
    initial: dict[str, np.ndarray]  # A of each adapter of this rank, before the first update
    num_trained: int  # elements in this rank's gradient buffers
    base_gradients: int  # weights of the base model that ask for a gradient or have one


def adapters_of(weights: Mapping[str, torch.Tensor], lora: LoraSection, std: float, seed: int) -> dict[str, Adapter]:
    """Random adapters of the linear layers among a rank's weights."""
    targets = {f"{path}.weight": target for target, (path, _) in MODULES.items()}
    adapters, generator = {}, torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        if (target := targets.get(name.partition(".layers.")[2].partition(".")[2])) is not None:
            adapters[name] = Adapter(weight, target, lora, False, None)
            for factor in (adapters[name].a, adapters[name].b):
                nn.init.normal_(factor, std=std, generator=generator)
    return adapters


def train_lora(
    directory: str,
    layout: Layout,
    steps: int,
    max_tokens: int,
    folder: str | None = None,
    save_at: int | None = None,
    resume: bool = False,
    lora: LoraSection = LORA,
    lr: float = 1e-2,
) -> Trained:
    """Forward, then an update, until `steps` are done; saves after `save_at`, or resumes."""
    place = start(layout)
    actor = engine(directory, place, lr=lr, lora=lora)
    batch = small_batch(actor.shape.vocab)
    mini_batch = planned(batch, layout, max_tokens=max_tokens)

    def logprobs(adapted: bool = True) -> np.ndarray:
        results, executed = actor.forward(batch, mini_batch, adapted)
        compare(mini_batch, place.data_rank, executed)
        return torch.cat(share_results(results.get("logprobs", {}), mini_batch, batch, place)).numpy()

    initial = {name: adapter.a.detach().float().numpy().copy() for name, adapter in actor.adapters.items()}
    done = 0
    if resume:
        latest = latest_checkpoint(Path(str(folder)))
        assert latest is not None
        done = load_checkpoint(latest, {"actor": actor})["updates"]
    metrics = []
    for number in range(done, steps):
        before = logprobs()
        update = actor.update(batch, mini_batch, objective_of("actor", int(batch.completion_lengths.sum())))
        metrics.append((total_loss(update, place), update.grad_norm, update.learning_rate, before))
        if save_at == number + 1:
            save_checkpoint(str(folder), number + 1, {"actor": actor}, {"updates": number + 1})
    num_trained = sum(parameter.numel() for chunk in actor.chunks for buffer in chunk.buffers for parameter in buffer.params)
    return Trained(metrics, logprobs(adapted=False), logprobs(), initial, num_trained, _base_gradients(actor))


def _base_gradients(actor: Role) -> int:
    parameters = [
        parameter for model in actor.models for name, parameter in model.named_parameters() if "adapter" not in name
    ]
    assert parameters
    return sum(
        parameter.requires_grad or parameter.grad is not None or hasattr(parameter, "main_grad") for parameter in parameters
    )


class HandMade(nn.Module):
    """A linear layer with an adapter, in the words of the paper."""

    def __init__(self, base: Any, a: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.base, self.a, self.scale = base, a, scale
        self.b = nn.Parameter(torch.zeros(base.weight.shape[0], a.shape[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


def hand_made_lora(model: Any, initial: dict[str, np.ndarray], lora: LoraSection) -> list[nn.Parameter]:
    """Adapt a Hugging Face model with the given A of each layer's targets; returns what is trained."""
    model.requires_grad_(False)
    trained = []
    for place, values in initial.items():
        _, _, layer, path = place.split(".", 3)
        target = {"self_attention.linear_qkv": "qkv", "self_attention.linear_proj": "proj", "mlp.linear_fc1": "fc1",
                  "mlp.linear_fc2": "fc2"}[path]  # fmt: skip
        a = nn.Parameter(torch.from_numpy(values))
        trained.append(a)
        for part in PARTS[target]:
            owner, name = part.split(".")
            module = getattr(model.model.layers[int(layer)], owner)
            adapted = HandMade(getattr(module, name), a, lora.alpha / lora.rank)
            setattr(module, name, adapted)
            trained.append(adapted.b)
    return trained
