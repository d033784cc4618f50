"""In which steps a phase's end waits for the device."""

from __future__ import annotations

from collections.abc import Callable

from megarl.recipe.telemetry_section import TelemetrySection
from megarl.telemetry.clock import span

# The host has nothing left to do in the phase, the device has.
DEVICE = "device"


class DeviceSync:
    """Fits `PhaseClock(on_end=...)`: waits until the device has finished, where the recipe says so. `settle`, the phase in
    which a run starts included, is what waits (`platform.synchronize`); what it takes is span `device`."""

    def __init__(self, settings: TelemetrySection, settle: Callable[[], None]) -> None:
        self._settings, self._settle = settings, settle
        self.is_on = settings.device_sync != "never"

    def begin(self, step: int) -> None:
        """Step `step` begins: decide for it."""
        if self._settings.device_sync == "sampled":
            self.is_on = step % self._settings.device_sync_every == 0

    def __call__(self) -> None:
        if self.is_on:
            with span(DEVICE):
                self._settle()
