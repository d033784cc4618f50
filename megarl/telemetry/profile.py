"""Profiles of single steps: a Chrome trace of torch's profiler for each, or what Nsight Systems captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megarl.recipe.telemetry_section import ProfileSection
from megarl.telemetry.clock import PhaseClock

FOLDER = "profile"


class StepProfiler:
    """Profiles the steps and ranks that the recipe names, with the phases and spans of `clock` as ranges; costs nothing
    in others."""

    def __init__(self, section: ProfileSection | None, run: Path, rank: int, clock: PhaseClock, platform: Any) -> None:
        """`platform` is megarl.platform.current, which knows the device."""
        self._section = section if section is not None and rank in section.ranks else None
        self._folder, self._rank, self._clock, self._platform = run / FOLDER, rank, clock, platform
        self._done: tuple[int, Any] | None = None  # a step and its profile, not yet written

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The body is this step, if it is one to profile. No phase may be running."""
        section = self._section
        if section is None or number not in section.steps:
            yield
            return
        if section.kind == "nsight":
            with self._captured():
                yield
            return
        profile = torch.profiler.profile(activities=self._platform.profile_activities)
        with profile, self._clock.showing(self._platform.torch_ranges()):
            yield
        self._done = number, profile

    @contextmanager
    def _captured(self) -> Iterator[None]:
        self._platform.start_capture()
        try:
            with self._clock.showing(self._platform.device_ranges()):
                yield
        finally:
            self._platform.stop_capture()

    def write(self) -> None:
        """Write the profile of the step that has just ended, if it has one."""
        if self._done is None:
            return
        number, profile = self._done
        self._done = None
        self._folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._folder / f"step-{number:06d}-rank-{self._rank:05d}.json.gz"))
