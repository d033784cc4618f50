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
# Holds the room of `ended.json` from the start on: the disk may be full when there is something to say.
RESERVE, RESERVE_BYTES = ".ended.reserve", 4096


def record_start(run: Path, hosts: Sequence[str], from_step: int) -> None:
    """Append a line; rank 0 alone. `hosts`: that of each rank. What ended the start before is taken out of its file."""
    path, end = run / "starts.jsonl", run / "ended.json"
    before = _ended(run)
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
    write_whole(run / RESERVE, " " * RESERVE_BYTES)


def started_in(run: Path) -> Path | None:
    """The working directory of the run's last start; None where no start has written it down."""
    found = [line["directory"] for line in _starts(run) if "directory" in line]
    return Path(found[-1]) if found else None


def record_end(run: Path, how: str, said: str, rank: int | None = None, signal: str | None = None) -> None:
    """Keep for the next start how this one ended. The first word stands, except that a rank killed by a signal explains what
    other ranks and nodes make of it."""
    end = run / "ended.json"
    # Ranks that hang are killed: that explains nothing.
    if not run.is_dir() or (end.exists() and (signal is None or said_of_hang(run) is not None)):
        return
    text = json.dumps({"how": how, "said": said[: RESERVE_BYTES // 8], "rank": rank, "signal": signal})
    try:
        write_whole(end, text)
    except OSError:
        _write_in_place(run, text)


def _write_in_place(run: Path, text: str) -> None:
    """Write `ended.json` over the room that was reserved for it. Where that fails too, nothing is lost but the word."""
    end, reserve = run / "ended.json", run / RESERVE
    place = end if end.exists() else reserve
    try:
        with place.open("r+b", buffering=0) as file:
            file.write(text.encode().ljust(RESERVE_BYTES))
        os.replace(place, end)
    except OSError as error:
        print(f"{end} cannot be written: {error}", file=sys.stderr, flush=True)


def said_of_hang(run: Path, not_before: int = 0) -> str | None:
    """What the watchdog has said, where it has ended the last start; `not_before`: see `ended_at`."""
    if ended_at(run) <= not_before:
        return None
    content = _ended(run)
    return str(content["said"]) if content is not None and content["how"] == HUNG else None


def ended_at(run: Path) -> int:
    """When somebody said how a start has ended, in nanoseconds of the file system's clock; 0 where nobody did."""
    try:
        return (run / "ended.json").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def starts_summary(run: Path) -> list[str]:
    """How often the run was started again and why, as lines of text; none for a run that was started once."""
    starts = _starts(run)
    reasons = Counter(f"{start['before']['how']}: {start['before']['said']}" for start in starts if start["before"])
    if not reasons:
        return []
    return [f"started {len(starts)} times; the starts before the last ended so:"] + [
        f"  {count} x {reason}" for reason, count in reasons.most_common()
    ]


def _starts(run: Path) -> list[dict[str, Any]]:
    """The lines of `starts.jsonl` that are whole."""
    path = run / "starts.jsonl"
    return [line for line in read_lines(path) if "before" in line] if path.is_file() else []


def _ended(run: Path) -> dict[str, Any] | None:
    """What `ended.json` says; None where it is absent or torn."""
    try:
        content = json.loads((run / "ended.json").read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"how", "said"} <= content.keys() else None
