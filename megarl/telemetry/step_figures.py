"""The figures of time of a step: from what every rank's clock says, and what engines and reward workers did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.models import ModelShape
from megarl.recipe import ENGINE_PHASES, Recipe
from megarl.schedule import MiniBatch
from megarl.telemetry.clock import StepTimes
from megarl.telemetry.devices import Devices
from megarl.telemetry.idle import Spans, bubble_figures, engine_figures, idle_figures, role_figures, worker_figures
from megarl.telemetry.operations import step_flops


@dataclass(frozen=True)
class Sizes:
    """Tokens of each sequence of a step, and whether it counts: a masked one does not; and by engine phase the mini-batches
    that ran."""

    prompts: Sequence[int]
    completions: Sequence[int]
    valid: Sequence[bool]
    ran: dict[str, Sequence[MiniBatch]] = field(default_factory=dict)

    @property
    def useful(self) -> int:
        """Tokens of the sequences that count, without any padding."""
        counted = zip(self.prompts, self.completions, self.valid, strict=True)
        return sum(int(prompt) + int(completion) for prompt, completion, valid in counted if valid)


class StepFigures:
    """Those of one run; used on rank 0, which has the clocks of all ranks."""

    def __init__(
        self,
        recipe: Recipe,
        shapes: Mapping[str, ModelShape],
        devices: Devices,
        peak_tflops: Callable[[str], float | None],
    ) -> None:
        """`shapes` by role; `peak_tflops` says what a device can compute in a precision, if the recipe does not."""
        self._recipe, self._shapes, self._devices = recipe, shapes, devices
        given = recipe.telemetry.peak_tflops
        trained = "fp8" if recipe.trainer.fp8 is not None else recipe.trainer.precision
        sampled = "fp8" if recipe.rollout.quantization == "fp8" else recipe.rollout_precision
        self._peaks = {phase: given or peak_tflops(trained) for phase in ENGINE_PHASES}
        self._peaks["rollout"] = given or peak_tflops(sampled)

    def of(
        self,
        times: StepTimes,
        ranks: Sequence[Spans],
        sizes: Sizes,
        busy_s: Sequence[float],
        figures: Mapping[str, Any],
    ) -> dict[str, Any]:
        """`times` are rank 0's, `ranks` as of `idle.py`, `busy_s` is the time in which each engine had requests in flight,
        and `figures` are those of the pipeline."""
        phases = times.phases
        found: dict[str, Any] = times.figures() | idle_figures(ranks) | role_figures(ranks) | bubble_figures(ranks)
        found |= engine_figures(busy_s, times.seconds, phases.get("rollout", 0.0), phases.get("weight_sync", 0.0))
        if "reward/busy_s" in figures:
            found |= worker_figures(figures["reward/busy_s"], figures["reward/num_workers"], times.seconds)
        found |= self._devices.figures(ranks, busy_s, phases)
        return found | self._token_figures(times, sizes, figures) | self._utilisation(phases, sizes)

    def _token_figures(self, times: StepTimes, sizes: Sizes, figures: Mapping[str, Any]) -> dict[str, float]:
        per_s = sizes.useful / times.seconds
        found = {"tokens/useful": sizes.useful, "tokens/per_s": per_s, "tokens/per_hour": per_s * 3600}
        done = {phase: figures.get(f"schedule/{phase}/tokens") for phase in ENGINE_PHASES}
        # With what engines sampled and nobody trains on.
        beside = sum(figures.get(f"rollout/{name}", 0) for name in ("discarded_tokens", "greedy_tokens"))
        done["rollout"] = sum(map(int, sizes.completions)) + beside - figures.get("rollout/observation_tokens", 0)
        rates = {phase: tokens / times.phases[phase] for phase, tokens in done.items() if tokens and phase in times.phases}
        return found | {f"tokens/{phase}/per_s": rate for phase, rate in rates.items()}

    def _utilisation(self, phases: Mapping[str, float], sizes: Sizes) -> dict[str, float]:
        """`mfu/<phase>`: operations that a phase needs, as part of what its devices could have done in its time."""
        if not any(self._peaks.values()):
            return {}
        flops = step_flops(self._recipe, self._shapes, sizes.prompts, sizes.completions, sizes.ran)
        figures = {}
        for phase, needed in flops.items():
            peak = self._peaks[phase]
            own = sum(map(len, self._devices.of_engine)) if phase == "rollout" else self._devices.num_ranks
            if peak is not None and phases.get(phase) and own:
                figures[f"mfu/{phase}"] = needed / (phases[phase] * own * peak * 1e12)
        return figures
