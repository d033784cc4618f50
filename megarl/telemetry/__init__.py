"""Clock, metrics, traces, sinks, progress and reports of a run."""
