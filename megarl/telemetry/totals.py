"""A run as a whole, from the lines of its `metrics.jsonl`: they survive a resume, so that no second store is needed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from megarl.telemetry.idle import FOR_RANKS

Line = Mapping[str, Any]
_SHARE = re.compile(r"idle/(?:(\w+)/)?(\w+_share|share)$")
_DEVICE = re.compile(r"idle/device/(\w+)_s$")


def run_totals(lines: Sequence[Line]) -> dict[str, Any]:
    """What a run came to, of its lines in order; a figure that no line has is left out. Raises ValueError without lines.

    - `steps`, `seconds` (all steps'), `start_s` (all starts'), `tokens` (useful ones), `tokens_per_s`, `tokens_per_hour`
    - `phases`: seconds by phase, the longest first
    - `shares`: of all ranks' time, by cause; `roles`: the same by role, engines and reward workers; `bubbles` by phase
    - `mfu` by phase
    - `devices`: of each, `rank` or `engine` and its seconds by cause; only steps with as many devices as the last one count
    - `stragglers`: of each rank how many seconds less than the median rank it waited for others, `ahead_s`, and in how
      many steps it was the one that waited least; who was waited for longest comes first
    """
    # What was no finite number is null there.
    lines = [{key: value for key, value in line.items() if value is not None} for line in lines if line.get("time/step")]
    if not lines:
        raise ValueError("no step has time/step")
    seconds = sum(line["time/step"] for line in lines)
    totals: dict[str, Any] = {"steps": len(lines), "seconds": seconds}
    totals["start_s"] = sum(line.get("run/start_s", 0.0) for line in lines)
    counted = [line for line in lines if line.get("tokens/useful") is not None]
    if counted:
        totals["tokens"] = sum(line["tokens/useful"] for line in counted)
        totals["tokens_per_s"] = totals["tokens"] / sum(line["time/step"] for line in counted)
        totals["tokens_per_hour"] = totals["tokens_per_s"] * 3600
    times: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith("time/") and key != "time/step":
                times[key.removeprefix("time/")] = times.get(key.removeprefix("time/"), 0.0) + value
    totals["phases"] = dict(sorted(times.items(), key=lambda one: -one[1]))
    return totals | _shares(lines, seconds) | _devices(lines)


def _shares(lines: Sequence[Line], seconds: float) -> dict[str, Any]:
    """Shares of the run's time are means by the length of the steps; those of a phase, by the phase's."""
    shares: dict[str, float] = {}
    roles: dict[str, dict[str, float]] = {}
    weighted: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for key, value in line.items():
            found = _SHARE.match(key)
            if key.startswith("mfu/") or (found and found[2] == "bubble_share"):
                phase_s = line.get(f"time/{key.split('/')[1]}", 0.0)
                weighted.setdefault(key, []).append((value, phase_s))
            elif key == "offload/share":
                shares["offload_share"] = shares.get("offload_share", 0.0) + value * line["time/step"] / seconds
            elif found:
                into = shares if found[1] is None else roles.setdefault(found[1], {})
                into[found[2]] = into.get(found[2], 0.0) + value * line["time/step"] / seconds
    means = {
        key: sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
        for key, pairs in weighted.items()
        if sum(weight for _, weight in pairs)
    }
    bubbles = {key.split("/")[1]: value for key, value in means.items() if key.startswith("idle/")}
    mfu = {key.split("/")[1]: value for key, value in means.items() if key.startswith("mfu/")}
    return {"shares": shares, "roles": roles, "bubbles": bubbles, "mfu": mfu}


def _devices(lines: Sequence[Line]) -> dict[str, Any]:
    last = next((line for line in reversed(lines) if "idle/device/busy_s" in line), None)
    if last is None:
        return {"devices": [], "stragglers": []}
    engines = last.get("idle/device/engine", [])
    count = len(last["idle/device/busy_s"])
    ranks = range(count - len(engines))
    rows: list[dict[str, Any]] = [{"rank": rank} for rank in ranks] + [{"engine": engine} for engine in engines]
    ahead, least = [0.0 for _ in ranks], [0 for _ in ranks]
    for line in lines:
        columns = {found[1]: value for key, value in line.items() if (found := _DEVICE.match(key))}
        if len(columns.get("busy", ())) != count or line.get("idle/device/engine", []) != engines:
            continue
        for cause, column in columns.items():
            for row, spent in zip(rows, column, strict=True):
                row[cause] = row.get(cause, 0.0) + spent
        waited = [sum(columns[cause][rank] for cause in FOR_RANKS if cause in columns) for rank in ranks]
        middle = median(waited)
        for rank in ranks:
            ahead[rank] += max(middle - waited[rank], 0.0)
        least[waited.index(min(waited))] += 1
    order = sorted(ranks, key=lambda rank: (-ahead[rank], rank))
    stragglers = [{"rank": rank, "ahead_s": ahead[rank], "steps": least[rank]} for rank in order]
    return {"devices": rows, "stragglers": stragglers}


def totals_lines(totals: Mapping[str, Any]) -> list[str]:
    """The same as a few lines of text, for the end of a run."""
    seconds = totals["seconds"]
    text = f"{totals['steps']} steps in {_span(seconds)}"
    if totals["start_s"]:
        text += f", and {_span(totals['start_s'])} to start"
    if "tokens" in totals:
        text += f"; {totals['tokens_per_s']:,.0f} useful tokens a second, {totals['tokens_per_hour']:,.0f} an hour"
    lines = [text]
    shares = totals["shares"]
    if "share" in shares:
        whom = {cause.removesuffix("_share"): share for cause, share in shares.items() if cause != "share"}
        rest, moved = whom.pop("unaccounted", 0.0), whom.pop("offload", 0.0)
        parts = ", ".join(f"{name} {share:.0%}" for name, share in _largest(whom, 4))
        lines.append(f"ranks: {1 - shares['share'] - rest - moved:.0%} busy, {shares['share']:.0%} waiting ({parts})")
    longest = ", ".join(f"{phase} {spent / seconds:.0%}" for phase, spent in _largest(totals["phases"], 4))
    lines.append(f"phases: {longest}")
    if totals["mfu"]:
        lines.append("model FLOPs utilisation: " + ", ".join(f"{phase} {mfu:.1%}" for phase, mfu in totals["mfu"].items()))
    late = [one for one in totals["stragglers"] if one["ahead_s"] > 0.01 * seconds][:3]
    if late:
        ranks = ", ".join(f"rank {one['rank']} by {_span(one['ahead_s'])}" for one in late)
        lines.append(f"waited for beyond the median rank: {ranks}")
    return lines


def _largest(shares: Mapping[str, float], most: int) -> list[tuple[str, float]]:
    return sorted(((name, share) for name, share in shares.items() if share >= 0.005), key=lambda one: -one[1])[:most]


def _span(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
