"""Compute where the time of a step and of a run went, and how fast the run was: ranks, roles, engines, devices, tokens,
FLOPs.

A rank's time is given as seconds by (phase, span) that sum to the rank's step (`StepTimes.by_span`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from megarl.models import ModelShape
from megarl.planner.flops import forward_flops, update_flops
from megarl.planner.placement import EnginePlace
from megarl.recipe import ENGINE_PHASES, UPDATE_PHASES, Recipe, kind_of, role_of
from megarl.schedule import MiniBatch
from megarl.telemetry.clock import UNACCOUNTED, WAIT, StepTimes
from megarl.telemetry.metrics_file import duration

Spans = Mapping[tuple[str, str], float]  # seconds of one rank by (phase, span)
OFFLOAD, BUSY = "offload", "busy"
# The waits that a slower rank causes. Waits for engines and rewards end on all ranks at once.
FOR_RANKS = ("ranks", "pipeline", "gradients", "layers")
# The spans of a pipeline run; `bubble_share` is a part of them.
PIPELINE_RUN = ("forward", "backward", "pipeline", "wait_layers", "wait_pipeline")


# Ranks ------------------------------------------------------------------------------------------------------------------


def causes(spans: Spans, phases: Sequence[str] | None = None) -> defaultdict[str, float]:
    """Return a rank's seconds by cause, of `phases` or of the step: for whom it waited, `offload`, `unaccounted`, `busy`."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for (phase, name), spent in spans.items():
        if phases is None or phase in phases:
            is_busy = not name.startswith(WAIT) and name not in (UNACCOUNTED, OFFLOAD)
            seconds[BUSY if is_busy else name.removeprefix(WAIT)] += spent
    return seconds


def idle_metrics(ranks: Sequence[Spans]) -> dict[str, float]:
    """Return shares of all ranks' time: waits (`idle/share` and its parts `idle/<whom>_share`), offload (`offload/share`),
    and time in no span. `idle/straggler_rank` waited least for other ranks: `idle/straggler_s` seconds less than the median
    rank.
    """
    by_rank = [causes(spans) for spans in ranks]
    seconds = _sum(by_rank)
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


def role_metrics(ranks: Sequence[Spans]) -> dict[str, float]:
    """Return shares of all ranks' time that sum to 1 for each role: `idle/<role>/busy_share`, `.../<cause>_share` (the
    bubble is `pipeline`), and `.../resting_share` for phases of other roles."""
    total = sum(sum(spans.values()) for spans in ranks)
    metrics: dict[str, float] = {}
    for role in dict.fromkeys(map(role_of, engine := _engine_phases(ranks))):
        seconds = _sum([causes(spans, [phase for phase in engine if role_of(phase) == role]) for spans in ranks])
        shares = {cause: seconds[cause] / total for cause in sorted(seconds)}
        shares["resting"] = 1.0 - sum(shares.values())
        metrics |= {f"idle/{role}/{cause}_share": share for cause, share in shares.items()}
    return metrics


def _engine_phases(ranks: Sequence[Spans]) -> list[str]:
    """The engine phases that ran, in the order of a step."""
    ran = sorted({phase for spans in ranks for phase, _ in spans if kind_of(phase) in ENGINE_PHASES})
    return sorted(ran, key=lambda phase: ENGINE_PHASES.index(kind_of(phase)))


def bubble_metrics(ranks: Sequence[Spans]) -> dict[str, float]:
    """Return the measured `idle/<phase>/bubble_share`: the share of a phase's pipeline runs in which stages waited for each
    other. The plan's expectation is `schedule/<phase>/bubble_share`."""
    metrics = {}
    for phase in _engine_phases(ranks):
        seconds = {name: sum(spans.get((phase, name), 0.0) for spans in ranks) for name in PIPELINE_RUN}
        if seconds["wait_pipeline"]:
            metrics[f"idle/{phase}/bubble_share"] = seconds["wait_pipeline"] / sum(seconds.values())
    return metrics


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for key, seconds in part.items():
            total[key] += seconds
    return dict(total)


# Engines, reward workers and devices ------------------------------------------------------------------------------------


def engine_metrics(busy_s: Sequence[float], step_s: float, rollout_s: float, sync_s: float) -> dict[str, float]:
    """Return how the rollout engines spent a step: means over the engines that sum to 1.

    `busy_s` are the seconds in which each engine had requests; `rollout_s` and `sync_s` are the lengths of these phases.
    `idle/slowest_engine` had requests longest: `idle/slowest_engine_s` seconds longer than the median engine.
    """
    if not busy_s:
        return {}
    parts = [engine_causes(busy, step_s, rollout_s, sync_s) for busy in busy_s]
    slowest = max(range(len(busy_s)), key=busy_s.__getitem__)
    return {
        **{f"idle/engines/{cause}_share": sum(part[cause] for part in parts) / len(parts) / step_s for cause in parts[0]},
        "idle/slowest_engine": slowest,
        "idle/slowest_engine_s": busy_s[slowest] - median(busy_s),
    }


def engine_causes(busy_s: float, step_s: float, rollout_s: float, sync_s: float) -> dict[str, float]:
    """Return one engine's seconds by cause; they sum to the step. An engine without requests waits for other engines in
    phase rollout (`tail`), receives weights, or waits for the trainer (`training`)."""
    busy_s = min(busy_s, step_s)
    tail = min(max(rollout_s - busy_s, 0.0), step_s - busy_s)
    sync = min(sync_s, step_s - busy_s - tail)
    return {BUSY: busy_s, "tail": tail, "weight_sync": sync, "training": step_s - busy_s - tail - sync}


@dataclass(frozen=True)
class Devices:
    """The numbers of the devices: rank r has device r; then follow the devices that only engines use, with their engines in
    `engine_of`. `of_engine` lists each engine's devices."""

    num_ranks: int
    of_engine: tuple[tuple[int, ...], ...]
    engine_of: tuple[int, ...]

    @classmethod
    def of(cls, num_ranks: int, ranks_per_node: int, places: Sequence[EnginePlace], shared: bool) -> Devices:
        """Number the devices. `shared`: on CPUs each worker of an engine counts as a separate device."""
        numbers = {} if shared else {divmod(rank, ranks_per_node): rank for rank in range(num_ranks)}
        engine_of: list[int] = []
        of_engine = []
        for engine, place in enumerate(places):
            devices = []
            for position, device in enumerate(place.devices):
                key = (-1 - engine, position) if shared else (place.node, device)
                if key not in numbers:
                    numbers[key] = num_ranks + len(engine_of)
                    engine_of.append(engine)
                devices.append(numbers[key])
            of_engine.append(tuple(devices))
        return cls(num_ranks, tuple(of_engine), tuple(engine_of))

    def busy_share(self, ranks: Sequence[Spans], busy_s: Sequence[float]) -> float:
        """Return the share of all devices' time in which a rank or an engine computed. `busy_s` are the seconds in which
        each engine had requests. On a rank's device an engine computes while the rank waits for engines."""
        step_s = max(sum(spans.values()) for spans in ranks)
        computed = sum(min(busy_s[engine], step_s) for engine in self.engine_of if busy_s)
        for device, by_cause in enumerate(map(causes, ranks)):
            working = max((s for s, devices in zip(busy_s, self.of_engine, strict=False) if device in devices), default=0.0)
            computed += by_cause[BUSY] + min(working, by_cause["engines"])
        num_devices = self.num_ranks + (len(self.engine_of) if busy_s else 0)
        return computed / (num_devices * step_s)


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
        self, recipe: Recipe, shapes: Mapping[str, ModelShape], devices: Devices, peak_tflops: Callable[[str], float | None]
    ) -> None:
        """`shapes` are by role; `peak_tflops` returns a device's peak at a precision, for a recipe that does not set the
        peak."""
        self._recipe, self._shapes, self._devices = recipe, shapes, devices
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
        line: dict[str, Any] = times.metrics() | idle_metrics(ranks) | role_metrics(ranks) | bubble_metrics(ranks)
        # Engines that sample ahead work during the whole step, and no rank waits for the last engine.
        samples_ahead = self._recipe.rollout.max_staleness > 0
        rollout_s = 0.0 if samples_ahead else phases.get("rollout", 0.0)
        line |= engine_metrics(busy_s, step_s, rollout_s, phases.get("weight_sync", 0.0))
        seconds = dict(phases) | ({"rollout": step_s} if samples_ahead else {})
        if "reward/busy_s" in metrics:
            busy = min(metrics["reward/busy_s"] / metrics["reward/num_workers"] / step_s, 1.0)
            line |= {"idle/reward_workers/busy_share": busy, "idle/reward_workers/resting_share": 1.0 - busy}
        line["idle/device/busy_share"] = self._devices.busy_share(ranks, busy_s)
        per_s = sizes.useful / step_s
        line |= {"tokens/useful": sizes.useful, "tokens/per_s": per_s, "tokens/per_hour": per_s * 3600}
        passed = {phase: metrics.get(f"schedule/{phase}/tokens") for phase in self._recipe.running_phases}
        # The engines also sampled tokens that no update trains on; observations are not sampled.
        untrained = sum(metrics.get(f"rollout/{name}", 0) for name in ("discarded_tokens", "greedy_tokens"))
        passed["rollout"] = sum(map(int, sizes.completions)) + untrained - metrics.get("rollout/observation_tokens", 0)
        line |= {f"tokens/{phase}/per_s": n / seconds[phase] for phase, n in passed.items() if n and phase in phases}
        if any(self._peaks.values()):
            for phase, flops in step_flops(self._recipe, self._shapes, sizes).items():
                num_devices = sum(map(len, self._devices.of_engine)) if phase == "rollout" else self._devices.num_ranks
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


# The run ----------------------------------------------------------------------------------------------------------------


def run_totals(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a run's totals from its lines of `metrics.jsonl`, which survive a resume. Raises ValueError without lines.

    - `steps`, `seconds` (of all steps), `start_s` (of all starts), `tokens_per_s` (useful tokens)
    - `phases`: seconds by phase, longest first; `shares`: of all ranks' time by cause; `mfu` by phase
    """
    # NaN is null in a line.
    lines = [{key: value for key, value in line.items() if value is not None} for line in lines if line.get("time/step")]
    if not lines:
        raise ValueError("no step has time/step")
    seconds = sum(line["time/step"] for line in lines)
    times: Counter[str] = Counter()
    shares: dict[str, float] = defaultdict(float)
    flops: dict[str, float] = defaultdict(float)
    for line in lines:
        for key, value in line.items():
            if key.startswith("time/") and key != "time/step":
                times[key.removeprefix("time/")] += value
            elif key.startswith("mfu/"):  # a mean over the phase's time
                flops[key.removeprefix("mfu/")] += value * line.get(f"time/{key.removeprefix('mfu/')}", 0.0)
            elif match := re.fullmatch(r"(?:idle|offload)/((?:\w+_)?share)", key):  # a mean over the steps' time
                name = "offload_share" if key == "offload/share" else match[1]
                shares[name] += value * line["time/step"] / seconds
    return {
        "steps": len(lines),
        "seconds": seconds,
        "start_s": sum(line.get("run/start_s", 0.0) for line in lines),
        "tokens_per_s": sum(line.get("tokens/useful", 0) for line in lines) / seconds,
        "phases": dict(times.most_common()),
        "shares": dict(shares),
        "mfu": {phase: product / times[phase] for phase, product in flops.items() if times[phase]},
    }


def totals_lines(totals: Mapping[str, Any]) -> list[str]:
    """Return the totals of a run as a few lines of text."""
    seconds, rate = totals["seconds"], totals["tokens_per_s"]
    text = f"{totals['steps']} steps in {duration(seconds)}"
    if totals["start_s"]:
        text += f", and {duration(totals['start_s'])} to start"
    if rate:
        text += f"; {rate:,.0f} useful tokens a second, {3600 * rate:,.0f} an hour"
    lines = [text]
    shares = {cause.removesuffix("_share"): share for cause, share in totals["shares"].items()}
    if "share" in shares:
        idle, unaccounted, offload = (shares.pop(name, 0.0) for name in ("share", UNACCOUNTED, OFFLOAD))
        waits = ", ".join(f"{name} {share:.0%}" for name, share in _largest(shares))
        lines.append(f"ranks: {1 - idle - unaccounted - offload:.0%} busy, {idle:.0%} waiting ({waits})")
    phases = {phase: spent / seconds for phase, spent in totals["phases"].items()}
    lines.append("phases: " + ", ".join(f"{phase} {share:.0%}" for phase, share in _largest(phases)))
    if totals["mfu"]:
        lines.append("model FLOPs utilization: " + ", ".join(f"{phase} {mfu:.1%}" for phase, mfu in totals["mfu"].items()))
    return lines


def _largest(shares: Mapping[str, float], most: int = 4) -> list[tuple[str, float]]:
    return sorted(((name, share) for name, share in shares.items() if share >= 0.005), key=lambda item: -item[1])[:most]
