"""Compute where the time of a step and of a run went, and how fast the run was: ranks, engines, tokens, FLOPs.

A rank's time is given as seconds by (phase, span) that sum to the rank's step (`StepTimes.by_span`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from megarl.models import ModelShape
from megarl.planner.flops import forward_flops, update_flops
from megarl.recipe import ENGINE_PHASES, UPDATE_PHASES, Recipe, kind_of, role_of
from megarl.schedule import MiniBatch
from megarl.telemetry.clock import UNACCOUNTED, WAIT, StepTimes

Spans = Mapping[tuple[str, str], float]  # seconds of one rank by (phase, span)
OFFLOAD, BUSY = "offload", "busy"
# The waits that a slower rank causes. Waits for engines and rewards end on all ranks at once.
FOR_RANKS = ("ranks", "pipeline", "gradients", "layers")
# The spans of a pipeline run; `bubble_share` is a part of them.
PIPELINE_RUN = ("forward", "backward", "pipeline", "wait_layers", "wait_pipeline")


# Ranks ------------------------------------------------------------------------------------------------------------------


def idle_metrics(ranks: Sequence[Spans]) -> dict[str, float]:
    """Return shares of all ranks' time: waits (`idle/share` and its parts `idle/<whom>_share`), offload (`offload/share`),
    and time in no span. `idle/straggler_rank` waited least for other ranks: `idle/straggler_s` seconds less than the median
    rank.
    """
    by_rank: list[dict[str, float]] = []  # seconds by cause: for whom it waited, `offload`, `unaccounted`, `busy`
    for spans in ranks:
        by_rank.append(defaultdict(float))
        for (_, name), spent in spans.items():
            is_busy = not name.startswith(WAIT) and name not in (UNACCOUNTED, OFFLOAD)
            by_rank[-1][BUSY if is_busy else name.removeprefix(WAIT)] += spent
    seconds = {cause: sum(by_cause.get(cause, 0.0) for by_cause in by_rank) for cause in set().union(*by_rank)}
    total = sum(seconds.values())
    seconds.pop(BUSY, None)
    unaccounted, offload = seconds.pop(UNACCOUNTED, 0.0), seconds.pop(OFFLOAD, 0.0)
    waited = [sum(by_cause.get(cause, 0.0) for cause in FOR_RANKS) for by_cause in by_rank]
    straggler = min(range(len(ranks)), key=waited.__getitem__)
    return {
        "idle/share": sum(seconds.values()) / total,
        **{f"idle/{whom}_share": spent / total for whom, spent in sorted(seconds.items())},
        **({"offload/share": offload / total} if offload else {}),
        f"idle/{UNACCOUNTED}_share": unaccounted / total,
        "idle/straggler_rank": straggler,
        "idle/straggler_s": median(waited) - waited[straggler],
    }


def bubble_metrics(ranks: Sequence[Spans]) -> dict[str, float]:
    """Return the measured `idle/<phase>/bubble_share`: the share of a phase's pipeline runs in which stages waited for each
    other. The plan's expectation is `schedule/<phase>/bubble_share`."""
    metrics = {}
    for phase in sorted({phase for spans in ranks for phase, _ in spans if kind_of(phase) in ENGINE_PHASES}):
        seconds = {name: sum(spans.get((phase, name), 0.0) for spans in ranks) for name in PIPELINE_RUN}
        if seconds["wait_pipeline"]:
            metrics[f"idle/{phase}/bubble_share"] = seconds["wait_pipeline"] / sum(seconds.values())
    return metrics


# Engines ---------------------------------------------------------------------------------------------------------------


def engine_metrics(busy_s: Sequence[float], step_s: float, rollout_s: float, sync_s: float) -> dict[str, float]:
    """Return how the rollout engines spent a step: means over the engines that sum to 1. An engine without requests waits
    for other engines in phase rollout (`tail`), receives weights, or waits for the trainer (`training`).

    `busy_s` are the seconds in which each engine had requests; `rollout_s` and `sync_s` are the lengths of these phases.
    `idle/slowest_engine` had requests longest: `idle/slowest_engine_s` seconds longer than the median engine.
    """
    if not busy_s:
        return {}
    causes = dict.fromkeys((BUSY, "tail", "weight_sync", "training"), 0.0)
    for seconds in busy_s:
        busy = min(seconds, step_s)
        tail = min(max(rollout_s - busy, 0.0), step_s - busy)
        sync = min(sync_s, step_s - busy - tail)
        for cause, spent in zip(causes, (busy, tail, sync, step_s - busy - tail - sync), strict=True):
            causes[cause] += spent
    slowest = max(range(len(busy_s)), key=busy_s.__getitem__)
    return {
        **{f"idle/engines/{cause}_share": spent / len(busy_s) / step_s for cause, spent in causes.items()},
        "idle/slowest_engine": slowest,
        "idle/slowest_engine_s": busy_s[slowest] - median(busy_s),
    }


# One step ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Prompt and completion tokens of each sequence of a step, whether the sequence is unmasked, and the mini-batches that
    ran in all epochs, by phase."""

    prompts: Sequence[int]
    completions: Sequence[int]
    valid: Sequence[bool]
    ran: Mapping[str, Sequence[MiniBatch]] = field(default_factory=dict)

    @property
    def useful(self) -> int:
        """Tokens of the unmasked sequences, without padding."""
        counted = zip(self.prompts, self.completions, self.valid, strict=True)
        return sum(int(prompt) + int(completion) for prompt, completion, valid in counted if valid)


class TimeMetrics:
    """Computes the time, token and utilization metrics of each step; on rank 0, which gets the clocks of all ranks."""

    def __init__(
        self,
        recipe: Recipe,
        shapes: Mapping[str, ModelShape],
        engine_devices: int,
        peak_tflops: Callable[[str], float | None],
    ) -> None:
        """`shapes` are by role; `engine_devices` is how many devices all engines have; `peak_tflops` returns a device's peak
        at a precision, for a recipe that does not set the peak."""
        self._recipe, self._shapes, self._engine_devices = recipe, shapes, engine_devices
        given = recipe.telemetry.peak_tflops
        trained = "fp8" if recipe.trainer.fp8 is not None else recipe.trainer.precision
        sampled = "fp8" if recipe.rollout.quantization == "fp8" else recipe.rollout_precision
        self._peaks: dict[str, float | None] = dict.fromkeys(recipe.engine_phases, given or peak_tflops(trained))
        self._peaks["rollout"] = given or peak_tflops(sampled)

    def of(
        self, times: StepTimes, ranks: Sequence[Spans], sizes: Sizes, busy_s: Sequence[float], metrics: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a step's metrics. `times` are rank 0's times, `ranks` the spans of each rank, `busy_s` the seconds in which
        each engine had requests, and `metrics` the metrics of the step itself."""
        phases, step_s = times.phases, times.seconds
        line: dict[str, Any] = times.metrics() | idle_metrics(ranks) | bubble_metrics(ranks)
        # Engines that sample ahead work during the whole step, and no rank waits for the last engine.
        samples_ahead = self._recipe.rollout.max_staleness > 0
        rollout_s = 0.0 if samples_ahead else phases.get("rollout", 0.0)
        line |= engine_metrics(busy_s, step_s, rollout_s, phases.get("weight_sync", 0.0))
        seconds = dict(phases) | ({"rollout": step_s} if samples_ahead else {})
        per_s = sizes.useful / step_s
        line |= {"tokens/useful": sizes.useful, "tokens/per_s": per_s, "tokens/per_hour": per_s * 3600}
        if any(self._peaks.values()):
            for phase, flops in step_flops(self._recipe, self._shapes, sizes).items():
                num_devices = self._engine_devices if phase == "rollout" else self._recipe.trainer.ranks
                if (peak := self._peaks[phase]) is not None and phases.get(phase) and num_devices:
                    line[f"mfu/{phase}"] = flops / (seconds[phase] * num_devices * peak * 1e12)
        return line


def step_flops(recipe: Recipe, shapes: Mapping[str, ModelShape], sizes: Sizes) -> dict[str, float]:
    """Return the floating-point operations that each phase needs, over all devices. `shapes` are by role.

    For engines each token counts once, even if they recompute or share a prompt. In a phase that shares prompts, a prompt
    counts once for all its sequences in a micro-batch.
    """
    pairs = list(zip(map(int, sizes.prompts), map(int, sizes.completions), strict=True))
    flops = {"rollout": sum(forward_flops(shapes["actor"], sum(pair), pair[1]) for pair in pairs)}
    for phase, mini_batches in sizes.ran.items():
        operations = _phase_flops(recipe, shapes, phase)
        each = [operations(sum(pair), pair[1]) for pair in pairs]
        passed = sum(each[sample] for mini_batch in mini_batches for sample in mini_batch.samples)
        micro_batches = [micro for mini_batch in mini_batches for rank in mini_batch.micro_batches for micro in rank]
        flops[phase] = passed - sum(
            operations(length, 0) for micro in micro_batches for length in micro.spared(sizes.prompts)
        )
    return flops


def _phase_flops(recipe: Recipe, shapes: Mapping[str, ModelShape], phase: str) -> Callable[[int, int], float]:
    """Return the operations of a phase as a function of a sequence's tokens and the tokens that pass the head."""
    role = role_of(phase)
    shape, has_value_head = shapes[role], (recipe.trained_role if role == "actor" else role) in ("critic", "reward_model")
    if phase not in UPDATE_PHASES:
        return partial(forward_flops, shape, critic=has_value_head)
    section = recipe.actor if role == "actor" else recipe.critic
    freeze = None if section is None else section.freeze
    lora = recipe.actor.lora if role == "actor" else None
    return partial(update_flops, shape, critic=has_value_head, lora=lora, freeze=freeze)
