"""What the ranks of the engine tests run: build engines on a tiny model, return plain numbers."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl import platform
from megarl.data.sample import Completion, Sample
from megarl.engine.batch import Batch
from megarl.engine.engine import Engine, share_results
from megarl.engine.parallel import Place, start_parallel
from megarl.recipe.sections import OptimizerSection
from megarl.reshard.boxes import Layout, ModelShape
from megarl.schedule import Schedule, plan_phase


def start(layout: tuple[int, int, int]) -> Place:
    platform.current.start_process_group(int(os.environ["LOCAL_RANK"]), 120.0)
    return start_parallel(Layout(*layout), seed=1, timeout_s=120.0, local_rank=0)


def random_batch(vocab: int, lengths: list[tuple[int, int]], seed: int = 0) -> Batch:
    """Sequences of random tokens; `lengths` are (prompt, completion)."""
    generator = np.random.default_rng(seed)
    samples = {}
    for index, (prompt, completion) in enumerate(lengths):
        tokens = generator.integers(2, vocab, prompt + completion).astype(np.int32)
        sampled = Completion(tokens[prompt:], np.zeros(completion, np.float32), "stop", 0, 0)
        samples[index] = Sample(index, tokens[:prompt], sampled)
    count = len(lengths)
    return Batch(
        prompt_lengths=np.array([prompt for prompt, _ in lengths]),
        completion_lengths=np.array([completion for _, completion in lengths]),
        groups=np.arange(count),
        rewards=np.zeros(count, np.float32),
        valid=np.ones(count, bool),
        samples=samples,
    )


def engine(
    directory: str, place: Place, role: str = "actor", lr: float | None = None, precision: str = "fp32", **more: Any
) -> Engine:
    # A warm-up and a decay, so that a schedule in the wrong place shows.
    optimizer = None if lr is None else OptimizerSection(lr=lr, warmup_steps=2, decay="linear")
    shape = ModelShape.from_directory(directory)
    return Engine(role, shape, directory, place, precision, 1.0, False, optimizer=optimizer, steps=10, **more)


def full_logits(directory: str, layout: tuple[int, int, int], lengths: list[tuple[int, int]]) -> Any:
    """Logits [tokens, vocabulary] of one packed micro-batch with every sequence, on the last stage; else None."""
    place = start(layout)
    actor = engine(directory, place)
    batch = random_batch(actor.shape.vocab, lengths)
    found: list[torch.Tensor] = []

    def keep(micro: Any, output: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = [torch.empty_like(output) for _ in range(place.layout.tensor)]
        dist.all_gather(parts, output.contiguous(), group=actor.head.group)
        found.append(torch.cat(parts, -1)[0, :, : actor.shape.vocab])
        return {}

    actor._outputs = keep  # type: ignore[method-assign]
    plan = plan_phase(Schedule("actor_logprob", sequences=len(lengths)), batch.lengths.tolist(), place.layout.data, 0)
    actor.forward(batch, plan.mini_batches[0])
    return found[0].numpy() if found else None


def train(
    directory: str, layout: tuple[int, int, int], role: str, steps: int, max_tokens: int, precision: str = "fp32"
) -> Any:
    """Forward, then `steps` updates towards fixed targets: per-token outputs, loss sums and gradient norms."""
    place = start(layout)
    trained = engine(directory, place, role, lr=1e-2, precision=precision)
    lengths = [(3 + index % 5, 2 + (index * 7) % 11) for index in range(12)]
    batch = random_batch(trained.shape.vocab, lengths)
    plan = plan_phase(
        Schedule(f"{role}_update", max_tokens=max_tokens, mini_batch=12), batch.lengths.tolist(), place.layout.data, 0
    )
    mini_batch = plan.mini_batches[0]
    weight = 1.0 / float(batch.completion_lengths.sum())

    def objective(micro: Any, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if role == "critic":
            loss = (outputs["values"] - 1.0).square().sum() * weight
        else:
            loss = -(outputs["logprobs"] + 0.1 * outputs["entropy"]).sum() * weight
        return loss, {"loss": loss.detach()}

    figures = []
    for _ in range(steps):
        results, _ = trained.forward(batch, mini_batch)
        name = "values" if role == "critic" else "logprobs"
        shared = share_results(results.get(name, {}), mini_batch, batch, place)
        update = trained.update(batch, mini_batch, objective)
        losses = [0.0] * place.layout.ranks
        dist.all_gather_object(losses, update.sums.get("loss", 0.0) if place.is_source else 0.0)
        figures.append((sum(losses), update.grad_norm, torch.cat(shared).numpy()))
    return figures


def train_with_checkpoints(
    directory: str,
    layout: tuple[int, int, int],
    folder: str,
    updates: int,
    save_at: int | None,
    resume: bool,
    lr: float = 1e-2,
) -> Any:
    """Actor and critic side by side: losses and gradient norms of `updates` updates, the weights' sum at the end."""
    from megarl.engine.checkpoint import load_checkpoint, save_checkpoint
    from megarl.telemetry.run_directory import latest_checkpoint

    place = start(layout)
    roles = {role: engine(directory, place, role, lr=lr) for role in ("actor", "critic")}
    batch = random_batch(roles["actor"].shape.vocab, [(3 + index % 5, 2 + (index * 7) % 11) for index in range(8)])
    schedule = Schedule("update", max_tokens=40, mini_batch=8)
    mini_batch = plan_phase(schedule, batch.lengths.tolist(), place.layout.data, 0).mini_batches[0]
    done, figures = 0, []
    if resume:
        latest = latest_checkpoint(folder)
        assert latest is not None
        done = load_checkpoint(latest, roles)["updates"]
    for update in range(done, updates):
        for role, trained in roles.items():

            def objective(micro: Any, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                loss = sum(((output - 0.5) ** 2).sum() for output in outputs.values()) / 100
                return loss, {"loss": loss.detach()}  # type: ignore[union-attr, return-value]

            result = trained.update(batch, mini_batch, objective)
            losses = [0.0] * place.layout.ranks
            dist.all_gather_object(losses, result.sums.get("loss", 0.0) if place.is_source else 0.0)
            figures.append((update, role, sum(losses), result.grad_norm, result.learning_rate))
        if save_at == update + 1:
            save_checkpoint(folder, update + 1, roles, {"updates": update + 1})
    return figures
