"""What `telemetry` of the recipe adds to metrics and traces: samples, profiles, memory snapshots and sinks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.recipe import Recipe
from megarl.recipe.telemetry_section import ProfileSection
from megarl.telemetry.clock import PhaseClock
from megarl.telemetry.disk import write_whole
from megarl.telemetry.sinks import Row, Sinks, open_sinks


class Records:
    """The records of one rank; `platform` is megarl.platform.current."""

    def __init__(self, sinks: Sinks | None, section: ProfileSection | None, run: Path, rank: int, clock: PhaseClock,
                 platform: Any) -> None:  # fmt: skip
        self._sinks, self._clock, self._platform = sinks, clock, platform
        self._profiled = section if section is not None and rank in section.ranks else None
        self._run, self._rank = run, rank
        self._profile: Any = None  # of the last step, not yet written

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the body, step `number`, if the recipe says so, with phases and spans as ranges. Enter between phases."""
        section = self._profiled
        if section is None or number not in section.steps:
            yield
        elif section.kind == "nsight":
            self._platform.start_capture()
            try:
                with self._clock.showing(self._platform.device_ranges()):
                    yield
            finally:
                self._platform.stop_capture()
        else:
            profile = torch.profiler.profile(activities=self._platform.profile_activities)
            with profile, self._clock.showing(self._platform.torch_ranges()):
                yield
            self._profile = profile

    def metrics(self) -> dict[str, int]:
        """Return the number of calls to sinks that failed since the last step."""
        return {} if self._sinks is None else self._sinks.metrics()

    def write(self, number: int, line: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Write the last step's profile; on rank 0 pass its metrics and samples to the sinks."""
        if self._sinks is not None:
            self._sinks.write(number, line, rows)
        if self._profile is not None:
            folder = self._run / "profile"
            folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(folder / f"step-{number:06d}-rank-{self._rank:05d}.json.gz"))
            self._profile = None


@contextmanager
def recorded(recipe: Recipe, run: Path, rank: int, done: int, clock: PhaseClock, platform: Any) -> Iterator[Records]:
    """Open the records of a rank that continues after step `done`, and close them at the end of the context."""
    if rank == 0:  # repeated steps write their samples again
        for path in (run / "samples").glob("step-*.jsonl"):
            if path.stem > f"step-{done:06d}":
                path.unlink()
    with ExitStack() as stack:
        if recipe.telemetry.memory_snapshot:
            stack.enter_context(snapshot_on_out_of_memory(run, rank, platform))
        sinks = stack.enter_context(open_sinks(recipe, run, done)) if rank == 0 else None
        yield Records(sinks, recipe.telemetry.profile, run, rank, clock, platform)


# Samples ----------------------------------------------------------------------------------------------------------------


class SampleTable:
    """Writes `samples/step-000012.jsonl` on rank 0: some prompts and completions of a step with rewards. `rows` are the last
    step's."""

    def __init__(self, run: Path, num_samples: int, decode: Callable[[Sequence[int]], str]) -> None:
        """Keep `num_samples` rollouts of each step, spread evenly over its groups; `decode` turns token ids into text."""
        self._folder, self._num_samples, self._decode = run / "samples", num_samples, decode
        self.rows: list[dict[str, Any]] = []

    def write(self, step: int, rollouts: Any, scored: Any, batch: Any) -> None:
        """Write a step's table from a RolloutBatch, a RewardResult, and a batch with rewards, `valid` and advantages; a row
        for each segment of a rollout."""
        total = int(batch.rollouts[-1]) + 1
        num = min(self._num_samples, total)
        wanted = {number * total // num for number in range(num)}
        chosen = [sample for sample, rollout in enumerate(batch.rollouts.tolist()) if rollout in wanted]
        fetched = rollouts.payload.fetch(chosen)
        self.rows = [self._row(step, sample, fetched[sample], rollouts, scored, batch) for sample in chosen]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows)
        write_whole(self._folder / f"step-{step:06d}.jsonl", text)

    def _row(self, step: int, sample: int, rollout: Any, rollouts: Any, scored: Any, batch: Any) -> dict[str, Any]:
        """Return a row. Masked rewards and values that are not finite are null; `advantage` is the mean over the completion;
        `version` and `first_version` sampled its last and its first token. `turns` divides the completion into what the
        policy sampled (`own`) and what it observed; `turn_rewards` has the rewards of all turns of the rollout, if any."""
        completion, number = rollout.completion, int(batch.rollouts[sample])
        is_valid = bool(batch.valid[sample])
        advantages = batch.fields["advantages"][sample]
        notes = {} if rollouts.episodes is None else json.loads(rollouts.episodes.notes[number])
        return {
            "step": step,
            "sample": sample,
            "rollout": number,
            "group": int(rollout.group),
            "prompt": self._decode(rollout.prompt_ids.tolist()),
            "completion": self._decode(completion.token_ids.tolist()),
            "reward": _finite(batch.rewards[sample]) if is_valid and batch.sampled else None,  # rows of data have none
            "parts": {name: _finite(rewards[number]) for name, rewards in scored.parts.items()},
            "advantage": _finite(advantages.mean()) if is_valid and len(advantages) else None,
            "valid": is_valid,
            "reason": scored.failures.get(number),
            "prompt_tokens": len(rollout.prompt_ids),
            "completion_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "version": completion.last_version,
            "first_version": completion.first_version,
            "turns": self._turns(completion),
            "turn_rewards": notes.get("rewards", []),
        }

    def _turns(self, completion: Any) -> list[dict[str, Any]]:
        ends = [*(np.flatnonzero(np.diff(completion.own)) + 1).tolist(), len(completion.own)]
        return [
            {
                "own": bool(completion.own[first]),
                "tokens": end - first,
                "text": self._decode(completion.token_ids[first:end].tolist()),
                "versions": completion.versions[[first, end - 1]].tolist(),
            }
            for first, end in itertools.pairwise([0, *ends])
            if end > first
        ]


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(float(value)) else None


# Memory -----------------------------------------------------------------------------------------------------------------


@contextmanager
def snapshot_on_out_of_memory(run: Path, rank: int, platform: Any) -> Iterator[None]:
    """Record the GPU allocator's history within this context. At an out-of-memory error write it to
    `memory/rank-00000.pickle`, and add the path to the error as a note. Nothing on a CPU."""
    platform.record_allocations()
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if platform.is_out_of_memory(error):
            path = run / "memory" / f"rank-{rank:05d}.pickle"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if platform.write_allocations(path) is not None:
                    error.add_note(f"what held the memory of rank {rank} is in {path}, for pytorch.org/memory_viz")
            except (OSError, RuntimeError) as failure:  # must not hide the out-of-memory error
                error.add_note(f"no memory snapshot of rank {rank}: {failure}")
        raise
