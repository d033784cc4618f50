"""What the ranks of the engine tests run: build engines on a tiny model, return plain numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict

from megarl import platform
from megarl.data.sample import Completion, Sample
from megarl.megatron.batch import Batch
from megarl.megatron.checkpoint import load_checkpoint, save_checkpoint
from megarl.megatron.parallel import Place, reduce_scalars, start_control, start_parallel
from megarl.megatron.role import Objective, Role, RoleSettings, Training, Update, over_context, share_results
from megarl.megatron.weights import view_of
from megarl.models import ModelShape
from megarl.models.layout import Box, Layout
from megarl.models.megatron_weights import checkpoint_sizes, parameter_sizes, rank_boxes
from megarl.recipe.role_sections import OptimizerSection
from megarl.schedule import MiniBatch, Schedule, compare, plan_phase
from megarl.telemetry.run_directory import latest_checkpoint

# Adam divides by a gradient's own size: with its usual epsilon of 1e-8 it makes whole updates of elements that are but
# rounding, which differs with the layout and the CPU. With this one all cases stay five times below what they allow.
EPSILON = 1e-3


def start(layout: Layout) -> Place:
    return start_places([layout])[layout]


def start_places(layouts: Iterable[Layout]) -> dict[Layout, Place]:
    platform.current.start_process_group(int(os.environ["LOCAL_RANK"]), 120.0)
    start_control(120.0)
    return start_parallel(layouts, seed=1, timeout_s=120.0, local_rank=0)


def random_batch(vocab: int, lengths: list[tuple[int, int]], seed: int = 0) -> Batch:
    """Sequences of random tokens; `lengths` are (prompt, completion)."""
    generator = np.random.default_rng(seed)
    samples = {}
    for index, (prompt, completion) in enumerate(lengths):
        tokens = generator.integers(2, vocab, prompt + completion).astype(np.int32)
        sampled = Completion(tokens[prompt:], np.zeros(completion, np.float32), "stop", np.zeros(completion, np.int64))
        samples[index] = Sample(index, tokens[:prompt], sampled)
    count = len(lengths)
    return Batch(
        prompt_lengths=np.array([prompt for prompt, _ in lengths]),
        completion_lengths=np.array([completion for _, completion in lengths]), groups=np.arange(count),
        rewards=np.zeros(count, np.float32), valid=np.ones(count, bool), samples=samples,
    )  # fmt: skip


def in_groups(batch: Batch, size: int) -> Batch:
    """The batch with every `size` sequences, whose prompts are of one length, as completions of the first one's prompt."""
    for number, sample in batch.samples.items():
        batch.samples[number] = replace(sample, prompt_ids=batch.samples[number // size * size].prompt_ids)
    return replace(batch, groups=np.arange(len(batch.lengths)) // size)


def engine(
    directory: str, place: Place, role: str = "actor", lr: float | None = None, precision: str = "fp32", **more: Any
) -> Role:
    # A warm-up and a decay, so that a schedule in the wrong place shows.
    optimizer = None if lr is None else OptimizerSection(lr=lr, epsilon=EPSILON, warmup_steps=2, decay="linear")
    shape = ModelShape.from_directory(directory)
    settings = {name: more.pop(name) for name in ("megatron", "max_sequence_tokens", "compile") if name in more}
    trained = {name: more.pop(name) for name in ("lora", "frozen") if name in more}
    training = None if optimizer is None else Training(optimizer, steps=10, **trained)
    return Role(role, shape, directory, place, RoleSettings(precision, 1.0, **settings), training, **more)


def save_weights(role: Role, folder: str) -> None:
    """Write the model that all ranks hold together."""
    place, layout = role.place, role.place.layout
    boxes = rank_boxes(role.shape, layout, place.rank)
    shards = role.shards()
    sizes = {name: (len(shard), shard.numel() // len(shard)) for name, shard in shards.items()}
    assert sizes == parameter_sizes(role.shape, layout, place.rank), "megatron-core's parameters are not the table's"
    save_boxes(Path(folder), role.shape, boxes, shards)


def save_boxes(folder: Path, shape: ModelShape, boxes: Iterable[Box], shards: Mapping[str, torch.Tensor]) -> None:
    """Rank 0 writes the checkpoint tensors that the boxes of all ranks make up, replicas included. Collective."""
    local_boxes = [(box, view_of(shards[box.parameter], box).float()) for box in boxes]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local_boxes)
    if dist.get_rank() == 0:
        tensors = {name: torch.full(size, torch.nan) for name, size in checkpoint_sizes(shape).items()}
        for box, content in chain.from_iterable(gathered):
            tensors[box.name][box.row0 : box.row1, box.col0 : box.col1] = content
        whole = {name: tensor if tensor.shape[1] > 1 else tensor.squeeze(1) for name, tensor in tensors.items()}
        save_torch_state_dict(whole, folder, max_shard_size=30_000)
    dist.barrier()


def full_logits(
    directory: str, layouts: list[Layout], lengths: list[tuple[int, int]], folders: list[str]
) -> list[dict[int, np.ndarray]]:
    """Under each layout: logits [tokens, vocabulary] of this data-parallel rank's sequences by their number, on the last
    stage.

    All in one packed micro-batch, or in as many as a virtual pipeline needs. The weights are saved to the layout's folder.
    """
    places = start_places(layouts)
    return [
        _full_logits(directory, places[layout], lengths, folder) for layout, folder in zip(layouts, folders, strict=True)
    ]


def _full_logits(directory: str, place: Place, lengths: list[tuple[int, int]], folder: str) -> dict[int, np.ndarray]:
    actor = engine(directory, place)
    save_weights(actor, folder)
    batch = random_batch(actor.shape.vocab, lengths)
    logits: dict[int, np.ndarray] = {}

    def keep(micro: Any, rows: torch.Tensor, entropy: bool) -> dict[str, torch.Tensor]:
        whole = over_context(rows.squeeze(1) @ actor.models[-1].head_weight.t(), micro, place)
        parts = [torch.empty_like(whole) for _ in range(place.layout.tensor)]
        dist.all_gather(parts, whole.contiguous(), group=actor.head.group)
        rows = torch.cat(parts, -1)[:, : actor.shape.vocab].split(micro.own_lengths)
        logits.update(zip(micro.samples, (part.numpy() for part in rows), strict=True))
        return {}

    actor._outputs = keep  # type: ignore[assignment, method-assign]
    actor.forward(batch, planned(batch, place.layout, sequences=len(lengths) // place.layout.micro_batch_step))
    return logits


def planned(batch: Batch, layout: Layout, **schedule: Any) -> MiniBatch:
    """The batch as a single mini-batch, cut as the schedule says."""
    whole = Schedule("phase", mini_batch=len(batch.lengths), **schedule)
    (mini_batch,) = plan_phase(whole, batch.lengths.tolist(), layout, 0).mini_batches
    return mini_batch


def objective_of(role: str, num_tokens: int) -> Objective:
    """Moves a role towards fixed targets: log-probabilities and entropy up, values to 1."""

    def objective(micro: Any, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if role == "critic":
            loss = (outputs["values"] - 1.0).square().sum() / num_tokens
        else:
            loss = -(outputs["logprobs"] + 0.1 * outputs["entropy"]).sum() / num_tokens
        return loss, {"loss": loss.detach()}

    return objective


def keeping_entropy(objective: Objective, results: dict[str, dict[int, torch.Tensor]]) -> Objective:
    """The objective; it also puts the entropy of each sample, which an update alone computes, into `results`."""

    def keep(micro: Any, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if "entropy" in outputs:
            parts = outputs["entropy"].detach().split(micro.own_lengths)
            results.setdefault("entropy", {}).update(zip(micro.samples, parts, strict=True))
        return objective(micro, outputs)

    return keep


def total_loss(update: Update, place: Place) -> float:
    return reduce_scalars({"loss": update.sums["loss"]} if place.is_source else {}, place, "sum")["loss"]


def small_batch(vocab: int, count: int = 12) -> Batch:
    return random_batch(vocab, [(3 + index % 5, 2 + (index * 7) % 11) for index in range(count)])


@dataclass(frozen=True)
class UpdateMetrics:
    """Of one update: its loss and gradient norm, and the per-token outputs before it, in sample order."""

    loss: float
    grad_norm: float
    outputs: dict[str, np.ndarray]  # logprobs and entropy, or values; each [completion tokens]


def train(
    directory: str, layouts: Mapping[str, Layout], steps: int, max_tokens: int, precision: str = "fp32"
) -> dict[str, list[UpdateMetrics]]:
    """`train_roles` under the layouts of some roles."""
    places = start_places(layouts.values())
    return train_roles(directory, {role: places[layout] for role, layout in layouts.items()}, steps, max_tokens, precision)


def train_roles(
    directory: str, places: Mapping[str, Place], steps: int, max_tokens: int, precision: str
) -> dict[str, list[UpdateMetrics]]:
    """Every role in turn: forward, then an update, `steps` times."""
    roles = {role: engine(directory, place, role, lr=1e-2, precision=precision) for role, place in places.items()}
    batch = small_batch(next(iter(roles.values())).shape.vocab)
    metrics: dict[str, list[UpdateMetrics]] = {role: [] for role in roles}
    for _ in range(steps):
        for role, trained in roles.items():
            metrics[role].append(measure(trained, batch, max_tokens))
    return metrics


def measure(trained: Role, batch: Batch, max_tokens: int) -> UpdateMetrics:
    """A forward phase and an update; what ran is compared with the plan."""
    place = trained.place
    mini_batch = planned(batch, place.layout, max_tokens=max_tokens)
    results, executed = trained.forward(batch, mini_batch)
    compare(mini_batch, place.data_rank, executed)
    objective = objective_of(trained.role, int(batch.completion_lengths.sum()))
    update = trained.update(batch, mini_batch, keeping_entropy(objective, results))
    compare(mini_batch, place.data_rank, update.executed)
    outputs = {
        name: torch.cat(share_results(results.get(name, {}), mini_batch, batch, place)).numpy()
        for name in (("values",) if trained.role == "critic" else ("logprobs", "entropy"))
    }
    return UpdateMetrics(total_loss(update, place), update.grad_norm, outputs)


def gradients_of(
    directory: str, layout: Layout, lengths: list[tuple[int, int]], mini_batches: list[MiniBatch]
) -> list[tuple[float, np.ndarray]]:
    """Of each mini-batch, all under the same weights: loss, and this rank's part of the gradient. What ran is compared."""
    place = start(layout)
    trained = engine(directory, place, lr=1e-2)
    batch = random_batch(trained.shape.vocab, lengths)
    parts: list[np.ndarray] = []

    def read_gradients() -> tuple[bool, float, None]:
        """In place of the optimizer's step. Reduced, a rank holds its own share of each bucket only."""
        buckets = [bucket for chunk in trained.chunks for buffer in chunk.buffers for bucket in buffer.buckets]
        number = place.context_rank + layout.context * place.data_rank
        shares = [bucket.grad_data.chunk(layout.data * layout.context)[number] for bucket in buckets]
        parts.append(torch.cat(shares).clone().numpy())
        return True, 0.0, None

    trained.optimizer.step = read_gradients
    results = []
    for mini_batch in mini_batches:
        update = trained.update(batch, mini_batch, objective_of("actor", int(batch.completion_lengths.sum())))
        compare(mini_batch, place.data_rank, update.executed)
        results.append((total_loss(update, place), parts[-1]))
    return results


def train_with_checkpoints(
    directory: str,
    layouts: Mapping[str, Layout],
    folder: str,
    updates: int,
    save_at: int | None,
    resume: bool,
    lr: float = 1e-2,
) -> list[tuple[int, str, float, float, float]]:
    """Actor and critic side by side: update, role, loss, gradient norm and learning rate of each of `updates` updates."""
    places = start_places(layouts.values())
    roles = {role: engine(directory, places[layout], role, lr=lr) for role, layout in layouts.items()}
    batch = small_batch(roles["actor"].shape.vocab, 8)
    done, metrics = 0, []
    if resume:
        latest = latest_checkpoint(Path(folder))
        assert latest is not None
        done = load_checkpoint(latest, roles)["updates"]
    for number in range(done, updates):
        for role, trained in roles.items():
            update = trained.update(batch, planned(batch, trained.place.layout, max_tokens=40), objective_of(role, 100))
            metrics.append((number, role, total_loss(update, trained.place), update.grad_norm, update.learning_rate))
        if save_at == number + 1:
            save_checkpoint(folder, number + 1, roles, {"updates": number + 1})
    return metrics
