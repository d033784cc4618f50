"""A check as one JSON document for machines: bytes, seconds and operations as plain numbers, shares between 0 and 1."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megarl.planner.advice import Advice
from megarl.planner.forecast import Forecast, PhaseForecast
from megarl.planner.measured import Measured
from megarl.planner.memory import Memory
from megarl.planner.suggest import Suggestion
from megarl.recipe import Recipe, Violation


def illegal(path: str, violations: list[Violation]) -> dict[str, Any]:
    """The entry of a recipe that cannot run."""
    shown = [{"key": one.key, "value": one.shown_value, "rule": one.rule, "nearest": one.nearest} for one in violations]
    return {"recipe": path, "legal": False, "violations": shown}


def planned(
    path: str, recipe: Recipe, found: Forecast, advice: list[Advice], earlier: Measured | None = None
) -> dict[str, Any]:
    """The entry of a legal recipe: its phases, its memory and the advice, and what an `earlier` run measured."""
    job, lengths = found.job, found.job.lengths
    return {
        "recipe": path,
        "legal": True,
        "name": recipe.run.name,
        "running_phases": list(recipe.running_phases),
        "warmup_phases": list(recipe.warmup_phases) if recipe.critic_warmup_steps else [],
        "lengths": {
            "origin": lengths.origin,
            "sequences": len(lengths.totals),
            "tokens": sum(lengths.totals),
            "longest": max(lengths.totals),
            "completion_tokens": sum(lengths.completions),
        },
        "phases": {phase.phase: _phase(found, phase) for phase in found.phases},
        "rollout": {"flops": found.rollout_flops, "waves": found.waves},
        "measured": None if earlier is None else _measured(recipe, found, earlier),
        "device": {
            "memory_bytes": job.device_bytes,
            "usable_bytes": job.usable_bytes,
            "tflops": job.tflops,
            "peak_bytes": found.device_peak,
            "fits": found.fits,
            "engine_bytes": job.engine_bytes,
            "worst_memory": {phase: memory(held) for phase, held in found.worst_memory.items()},
            "engine_rank": None if job.engines is None else memory(job.engines.memory),
            "engine_share": job.engine_share,
            "safe_memory_utilization": found.safe_utilization,
        },
        "warnings": [asdict(one) for one in advice],
    }


def _measured(recipe: Recipe, found: Forecast, earlier: Measured) -> dict[str, Any]:
    """Seconds of this recipe's phases by those of the run, and the run's peak beside its estimate."""
    seconds = {phase.phase: phase.seconds for phase in found.phases}
    others = {name: earlier.other_seconds(found, name) for name in recipe.running_phases if name not in seconds}
    return {
        "run": str(earlier.directory),
        "steps": earlier.num_steps,
        "seconds": others | seconds,
        "peak_bytes": earlier.peak_bytes,
        "estimated_bytes": earlier.estimated_bytes,
    }


def suggested(suggestions: list[Suggestion]) -> list[dict[str, Any]]:
    """Suggestions as keys, values and reasons."""
    return [asdict(one) for one in suggestions]


def memory(held: Memory) -> dict[str, int]:
    """Bytes by what they hold, and their sum."""
    return asdict(held) | {"total": held.total}


def _phase(found: Forecast, phase: PhaseForecast) -> dict[str, Any]:
    schedule, layout = phase.schedule, phase.role.layout
    engines = Memory(engine=found.job.beside_bytes)
    return {
        "role": phase.role.name,
        "layout": asdict(layout),
        "schedule": asdict(schedule),
        "mini_batches": phase.num_mini_batches,
        **asdict(phase.quality),
        "memory": memory(phase.memory + engines),
        "worst_memory": memory(phase.worst_memory + engines),
        "largest_max_tokens": phase.largest_cap,
        "flops": phase.flops,
        "seconds": phase.seconds,
    }
