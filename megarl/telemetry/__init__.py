"""Where the time goes, what a step gave, and how to look at it."""

from megarl.telemetry.clock import PhaseClock
from megarl.telemetry.metrics import MetricsWriter, read_metrics
from megarl.telemetry.progress import ProgressLine

__all__ = ["MetricsWriter", "PhaseClock", "ProgressLine", "read_metrics"]
