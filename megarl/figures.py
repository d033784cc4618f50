"""The figures of a step, named `area/name`, from what the phases returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.engine.engine import Update
from megarl.engine.parallel import Place, reduce_scalars
from megarl.schedule import Executed, Plan


def rollout_figures(rollouts: Any) -> dict[str, float]:
    """Lengths, truncation and the sizes the engines ran."""
    lengths = rollouts.completion_lengths
    return {
        "rollout/completion_length_mean": float(lengths.mean()),
        "rollout/completion_length_max": int(lengths.max()),
        "rollout/prompt_length_mean": float(rollouts.prompt_lengths.mean()),
        "rollout/truncated_share": float(np.mean([reason == "length" for reason in rollouts.finish_reasons])),
        "rollout/version": int(rollouts.last_version.min()),
        "tokens/prompt": int(rollouts.prompt_lengths.sum()),
        "tokens/completion": int(lengths.sum()),
        "schedule/rollout/prompts": rollouts.executed.prompts,
        "schedule/rollout/max_concurrent": rollouts.executed.max_concurrent,
        **rollouts.metrics,
    }


def forward_figures(phase: str, executed: Executed) -> dict[str, int]:
    """The shapes that data-parallel rank 0's engine executed (all ranks agree with the plan, or the step failed)."""
    return {
        f"schedule/{phase}/micro_batches": len(executed.sequences),
        f"schedule/{phase}/sequences": max(executed.sequences),
        f"schedule/{phase}/max_tokens": max(executed.tokens),
    }


def update_figures(role: str, plan: Plan, updates: Sequence[Update], place: Place) -> dict[str, float]:
    """Losses and norms of a phase's updates: losses and norms as their mean over the updates, the rest per token."""
    per_update = [reduce_scalars({k: v for k, v in u.sums.items() if not k.endswith("_max")}, place, "sum") for u in updates]
    largest = [reduce_scalars({k: v for k, v in u.sums.items() if k.endswith("_max")}, place, "max") for u in updates]
    total = {key: sum(sums[key] for sums in per_update) for key in per_update[0]}
    tokens = total.pop("tokens")
    figures: dict[str, float] = {
        f"{role}/grad_norm": sum(update.grad_norm for update in updates) / len(updates),
        f"{role}/learning_rate": updates[-1].learning_rate,
        f"{role}/clip_fraction": total.pop("clipped_sum") / tokens,
        f"schedule/{plan.phase}/updates": len(updates),
        f"schedule/{plan.phase}/mini_batch": max(len(mini_batch.samples) for mini_batch in plan.mini_batches),
    }
    figures |= forward_figures(
        plan.phase,
        Executed(
            tuple(n for update in updates for n in update.executed.sequences),
            tuple(n for update in updates for n in update.executed.tokens),
        ),
    )
    if plan.phase == "actor_update":
        # Against the log-probabilities before any update: the sampled tokens' under the weights that sampled them.
        figures["mismatch/logprob_max"] = max(one["mismatch_max"] for one in largest)
        figures["mismatch/logprob_mean"] = total.pop("mismatch_sum") / tokens
    for key, value in total.items():
        name = key.removesuffix("_sum")
        figures[f"{role}/{name}"] = value / (tokens if key.endswith("_sum") else len(updates))
    return figures
