"""The exit statuses of a run, and `starts.jsonl`: a line for each start, with the end of the start before."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.telemetry.disk import LineFile, read_lines, write_whole

COMPLETE = 0
FAILED = 1
BAD_INPUT = 2
"""The recipe, the command or the run directory is wrong. Do not requeue: a new start ends in the same way."""
REQUEUE = 75
"""The run ended early with everything saved; a new start resumes it (sysexits' EX_TEMPFAIL)."""
HUNG = 76
"""A process hung: the watchdog wrote all stacks into the run directory and ended the run."""

# How starts.jsonl names the statuses; UNKNOWN stands for a start that could not record its end.
NAMES = {COMPLETE: "complete", FAILED: "failed", REQUEUE: "requeued", HUNG: "hung"}
UNKNOWN = "unknown"
MAX_REASON_LENGTH = 512  # characters


class Preempted(Exception):
    """The run left on request; `status` says whether it may be started again."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def record_start(run: Path, hosts: Sequence[str], from_step: int) -> None:
    """Append a line, on rank 0. `hosts` has the host of each rank. The end of the last start moves from `ended.json` to the
    line."""
    path, end = run / "starts.jsonl", run / "ended.json"
    before = _read_end(run)
    end.unlink(missing_ok=True)
    if before is None and path.is_file():
        before = {"how": UNKNOWN, "said": "nobody was left to say it: it was killed with its agent, or its node is gone"}
    restarts = os.environ.get("SLURM_RESTART_COUNT")
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hosts": list(dict.fromkeys(hosts)),
        "ranks": len(hosts),
        "directory": os.getcwd(),
        "from_step": from_step,
        "torchrun_restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "slurm_restart": None if restarts is None else int(restarts),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "before": before,
    }
    lines = LineFile(path)
    lines.append(json.dumps(line))
    lines.close()


def record_end(run: Path, status: int, reason: str, rank: int | None = None, signal: str | None = None) -> None:
    """Record how this start ended, for the next start. The first call counts. An exception is a rank that a signal killed,
    because it explains the reports of other ranks and nodes; after a hang, which kills all ranks, the first call counts
    again."""
    end = run / "ended.json"
    if not run.is_dir() or (end.exists() and (signal is None or hang_reason(run) is not None)):
        return
    content = {"how": NAMES[status], "said": reason[:MAX_REASON_LENGTH], "rank": rank, "signal": signal}
    try:
        write_whole(end, json.dumps(content))
    except OSError as error:  # a full disk: the caller has printed the reason
        print(f"{end} cannot be written: {error}", file=sys.stderr, flush=True)


def ended_at(run: Path) -> int:
    """Return when `ended.json` was written, in nanoseconds since 1970; 0 if the file is absent."""
    try:
        return (run / "ended.json").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def hang_reason(run: Path, not_before: int = 0) -> str | None:
    """Return the watchdog's reason if the watchdog ended the last start later than `not_before` (see `ended_at`)."""
    end = _read_end(run) if ended_at(run) > not_before else None
    return str(end["said"]) if end is not None and end["how"] == NAMES[HUNG] else None


def starts_summary(run: Path) -> list[str]:
    """Return lines of text that say how often and why the run was restarted; none for a run with one start."""
    starts = _starts(run)
    reasons = Counter(f"{start['before']['how']}: {start['before']['said']}" for start in starts if start["before"])
    if not reasons:
        return []
    return [f"started {len(starts)} times; the starts before the last ended so:"] + [
        f"  {count} x {reason}" for reason, count in reasons.most_common()
    ]


def _starts(run: Path) -> list[dict[str, Any]]:
    path = run / "starts.jsonl"
    return [line for line in read_lines(path) if "before" in line] if path.is_file() else []


def _read_end(run: Path) -> dict[str, Any] | None:
    """Return the content of `ended.json`; None if the file is absent or torn."""
    try:
        content = json.loads((run / "ended.json").read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"how", "said"} <= content.keys() else None
