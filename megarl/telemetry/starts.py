"""`starts.jsonl` of a run directory: a line for each start of the run, with how the start before it ended."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMPLETE, REQUEUED, FAILED, HUNG, UNKNOWN = "complete", "requeued", "failed", "hung", "unknown"


def record_start(run: Path, hosts: Sequence[str], from_step: int) -> None:
    """Append a line; rank 0 alone. `hosts`: that of each rank. What ended the start before is taken out of its file."""
    path, end = run / "starts.jsonl", run / "ended.json"
    before: dict[str, Any] | None = None
    if end.is_file():
        before = json.loads(end.read_text(encoding="utf-8"))
        end.unlink()
    elif path.is_file():
        before = {"how": UNKNOWN, "said": "nobody was left to say it: it was killed with its agent, or its node is gone"}
    restarts = os.environ.get("SLURM_RESTART_COUNT")
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hosts": list(dict.fromkeys(hosts)),
        "ranks": len(hosts),
        "from_step": from_step,
        "torchrun_restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "slurm_restart": None if restarts is None else int(restarts),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "before": before,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def record_end(run: Path, how: str, said: str, rank: int | None = None, signal: str | None = None) -> None:
    """Keep for the next start how this one ended. The first word stands, except that a rank killed by a signal explains what
    other ranks and nodes make of it."""
    end = run / "ended.json"
    # Ranks that hang are killed: that explains nothing.
    if not run.is_dir() or (end.exists() and (signal is None or said_of_hang(run) is not None)):
        return
    beside = end.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps({"how": how, "said": said, "rank": rank, "signal": signal}), encoding="utf-8")
    os.replace(beside, end)


def said_of_hang(run: Path, not_before: int = 0) -> str | None:
    """What the watchdog has said, where it has ended the last start; `not_before`: see `ended_at`."""
    if ended_at(run) <= not_before:
        return None
    content = json.loads((run / "ended.json").read_text(encoding="utf-8"))
    return str(content["said"]) if content["how"] == HUNG else None


def ended_at(run: Path) -> int:
    """When somebody said how a start has ended, in nanoseconds of the file system's clock; 0 where nobody did."""
    try:
        return (run / "ended.json").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def starts_summary(run: Path) -> list[str]:
    """How often the run was started again and why, as lines of text; none for a run that was started once."""
    path = run / "starts.jsonl"
    starts = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    reasons = Counter(f"{start['before']['how']}: {start['before']['said']}" for start in starts if start["before"])
    if not reasons:
        return []
    return [f"started {len(starts)} times; the starts before the last ended so:"] + [
        f"  {count} x {reason}" for reason, count in reasons.most_common()
    ]
