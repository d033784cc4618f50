"""The metrics of a role's phase: planned and executed shapes, losses and norms."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithm.control import moved_too_far
from megarl.megatron.batch import Batch
from megarl.megatron.parallel import Place, gather_to_all, reduce_scalars
from megarl.megatron.role import Update
from megarl.recipe.algorithm_section import EarlyStopSection
from megarl.schedule import Cost, Executed, MiniBatch, Plan, PlanMismatch, compare, quality


def prove(
    plan: Plan, place: Place, batch: Batch, cost: Cost, executed: list[Executed]
) -> tuple[tuple[MiniBatch, ...], dict[str, float]]:
    """Compare what every data-parallel rank executed with the plan. Return the mini-batches that ran; and as metrics the
    planned and executed shapes, and the quality of the plan. Raises PlanMismatch. Collective.

    Micro-batches are counted on one rank (all have as many); tokens and slots are summed over the data-parallel ranks."""
    everywhere = gather_to_all(executed)
    ranks = [everywhere[place.source_of(data_rank)] for data_rank in range(place.layout.data)]
    # An early stop skips the last mini-batches on every rank.
    mini_batches = plan.mini_batches[: len(executed)]
    for data_rank, ran in enumerate(ranks):
        if len(ran) != len(mini_batches):
            raise PlanMismatch(
                f"phase {plan.phase}: data-parallel rank {data_rank} executed {len(ran)} of {len(plan.mini_batches)} "
                f"mini-batches, and rank {place.rank} {len(mini_batches)}"
            )
        for mini_batch, of_batch in zip(mini_batches, ran, strict=True):
            compare(mini_batch, data_rank, of_batch)
    planned = [micro for mini_batch in plan.mini_batches for rank in mini_batch.micro_batches for micro in rank]
    shapes = [shape for rank in ranks for ran in rank for shape in ran]
    worth = quality(plan, batch.lengths.tolist(), cost, batch.prompt_lengths.tolist())
    metrics: dict[str, float] = {
        "planned_micro_batches": len(planned) // plan.layout.data,
        "micro_batches": max(sum(map(len, rank)) for rank in ranks),
        "planned_tokens": sum(micro.tokens for micro in planned),
        "tokens": sum(shape.tokens for shape in shapes),
        "planned_slots": sum(micro.slots for micro in planned),
        "slots": sum(shape.slots for shape in shapes),
        "planned_max_tokens": max(micro.slots for micro in planned),
        "max_tokens": max(shape.slots for shape in shapes),
        "sequences": max(shape.sequences for shape in shapes),
        "useful_share": worth.useful_share,
        "imbalance": worth.imbalance,
        "bubble_share": worth.bubble_share,
        "efficiency": worth.efficiency,
    }
    return mini_batches, {f"schedule/{plan.phase}/{name}": value for name, value in metrics.items()}


def stops_early(section: EarlyStopSection | None, update: Update, place: Place) -> bool:
    """Return whether `algorithm.early_stop` ends the updates; the same on every rank. Collective with a section."""
    if section is None or update.refused is not None:
        return False
    sums = {name: value for name, value in update.sums.items() if name in ("moved_kl_sum", "tokens")}
    total = reduce_scalars(sums, place, "sum")
    return moved_too_far(section, total["moved_kl_sum"], total["tokens"])


def update_metrics(role: str, plan: Plan, updates: Sequence[Update], place: Place) -> dict[str, float]:
    """Return losses and norms as means over the updates of a phase, and everything else per token. Collective.

    Refused updates have no losses and do not count. If all tokens of the others are masked only the norms are returned: a
    KL of 0 would steer `algorithm.kl.adaptive`."""
    counts: dict[str, float] = {
        f"{role}/skipped_updates": sum(update.skipped for update in updates),
        f"{role}/learning_rate": updates[-1].learning_rate,
        f"schedule/{plan.phase}/updates": len(updates),
        f"schedule/{plan.phase}/mini_batch": max(len(mini_batch.samples) for mini_batch in plan.mini_batches),
    }
    first_counts = updates[0].refused is None
    updates = [update for update in updates if update.refused is None]
    if not updates:
        return counts
    per_update = [reduce_scalars({k: v for k, v in u.sums.items() if not k.endswith("_max")}, place, "sum") for u in updates]
    largest = [reduce_scalars({k: v for k, v in u.sums.items() if k.endswith("_max")}, place, "max") for u in updates]
    total = {key: sum(sums[key] for sums in per_update) for key in per_update[0]}
    tokens = total.pop("tokens")
    taken = [update for update in updates if not update.skipped]
    metrics = counts | {f"{role}/grad_norm": sum(update.grad_norm for update in taken) / max(len(taken), 1)}
    if not tokens:
        return metrics
    metrics[f"{role}/clip_fraction"] = total.pop("clipped_sum") / tokens
    if plan.phase == "actor_update" and role == "actor":
        # The trainer's log-probabilities before any update, compared with the engine's.
        if "mismatch_sum" in total:
            metrics["mismatch/logprob_max"] = max(sums["mismatch_max"] for sums in largest)
            metrics["mismatch/logprob_mean"] = total.pop("mismatch_sum") / tokens
        if "mismatch_weight_sum" in total:
            metrics["mismatch/weight_max"] = max(sums["mismatch_weight_max"] for sums in largest)
            metrics["mismatch/weight_mean"] = total.pop("mismatch_weight_sum") / tokens
            metrics["mismatch/beyond_cap_share"] = total.pop("mismatch_beyond_sum") / tokens
        if "mismatch_corrected_sum" in total:
            metrics["mismatch/corrected_share"] = total.pop("mismatch_corrected_sum") / tokens
            squares = total.pop("mismatch_weight_square_sum")  # 0 if every token is masked
            mean = metrics["mismatch/weight_mean"]
            metrics["mismatch/effective_sample_share"] = mean * mean * tokens / squares if squares else 0.0
        if "staleness_sum" in total:
            metrics["staleness/mean"] = total.pop("staleness_sum") / tokens
            metrics["staleness/max"] = max(sums["staleness_max"] for sums in largest)
        for key in [key for key in total if key.endswith("/tokens")]:
            staleness, count = key.removesuffix("/tokens"), total.pop(key)
            metrics[f"{staleness}/token_share"] = count / tokens
            metrics[f"{staleness}/logprob_mean"] = total.pop(f"{staleness}/logprob") / max(count, 1.0)
            metrics[f"{staleness}/corrected_share"] = total.pop(f"{staleness}/corrected") / max(count, 1.0)
        total.pop("ratio_drift_sum")
        # Only of the first update: later the ratio differs from 1 because the policy learns.
        if first_counts and per_update[0]["tokens"]:
            metrics["actor/ratio_drift_max"] = largest[0]["ratio_drift_max"]
            metrics["actor/ratio_drift_mean"] = per_update[0]["ratio_drift_sum"] / per_update[0]["tokens"]
    for key, value in total.items():
        name = key.removesuffix("_sum")
        metrics[f"{role}/{name}"] = value / (tokens if key.endswith("_sum") else len(updates))
    return metrics
