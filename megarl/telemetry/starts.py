"""`starts.jsonl` of a run directory: a line for each start of the run, with how the start before it ended."""

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

COMPLETE, REQUEUED, FAILED, HUNG, UNKNOWN = "complete", "requeued", "failed", "hung", "unknown"
LONGEST_REASON = 512  # characters


def record_start(run: Path, hosts: Sequence[str], from_step: int) -> None:
    """Append a line, on rank 0. `hosts` has the host of each rank. The end of the start before moves from `ended.json` into
    the line."""
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


def record_end(run: Path, how: str, said: str, rank: int | None = None, signal: str | None = None) -> None:
    """Keep how this start ended for the next one. The first call stands, except that a rank killed by a signal explains what
    other ranks and nodes report; not after a hang, which kills all ranks."""
    end = run / "ended.json"
    if not run.is_dir() or (end.exists() and (signal is None or said_of_hang(run) is not None)):
        return
    try:
        write_whole(end, json.dumps({"how": how, "said": said[:LONGEST_REASON], "rank": rank, "signal": signal}))
    except OSError as error:  # a full disk: the caller has printed the reason
        print(f"{end} cannot be written: {error}", file=sys.stderr, flush=True)


def started_in(run: Path) -> Path | None:
    """Return the working directory of the run's last start; None without a start."""
    starts = _starts(run)
    return Path(starts[-1]["directory"]) if starts else None


def ended_at(run: Path) -> int:
    """Return when `ended.json` was written, in nanoseconds since 1970; 0 where it is absent."""
    try:
        return (run / "ended.json").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def said_of_hang(run: Path, not_before: int = 0) -> str | None:
    """Return what the watchdog said where it ended the last start; None where the end is no later than `not_before`, a value
    of `ended_at`."""
    end = _read_end(run) if ended_at(run) > not_before else None
    return str(end["said"]) if end is not None and end["how"] == HUNG else None


def starts_summary(run: Path) -> list[str]:
    """Return lines of text that say how often the run was restarted and why; none for a run that was started once."""
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
    """Return the content of `ended.json`; None where it is absent or torn."""
    try:
        content = json.loads((run / "ended.json").read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"how", "said"} <= content.keys() else None
