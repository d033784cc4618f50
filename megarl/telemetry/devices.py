"""What each device did in a step, and which devices there are: a rank's, shared with engines or not, and engines' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.planner.placement import EnginePlace
from megarl.telemetry.idle import BUSY, Spans, causes, engine_causes

ROLLOUT = "rollout"
DIGITS = 4  # of seconds: a run of a thousand ranks writes as many numbers a step


@dataclass(frozen=True)
class Devices:
    """Devices by number: rank r's is r; those that only engines have come behind, and `engine_of` has their engines.

    `of_engine` has the numbers of each engine's devices.
    """

    num_ranks: int
    of_engine: tuple[tuple[int, ...], ...]
    engine_of: tuple[int, ...]

    @classmethod
    def of(cls, num_ranks: int, ranks_per_node: int, places: Sequence[EnginePlace], shared: bool) -> Devices:
        """`shared`: there are only cores, and then an engine's workers count as devices of their own."""
        numbers: dict[tuple[int, int], int] = {}
        if not shared:
            numbers = {divmod(rank, ranks_per_node): rank for rank in range(num_ranks)}
        engine_of: list[int] = []
        of_engine = []
        for engine, place in enumerate(places):
            own = []
            for position, device in enumerate(place.devices):
                key = (-1 - engine, position) if shared else (place.node, device)
                if key not in numbers:
                    numbers[key] = num_ranks + len(engine_of)
                    engine_of.append(engine)
                own.append(numbers[key])
            of_engine.append(tuple(own))
        return cls(num_ranks, tuple(of_engine), tuple(engine_of))

    def figures(self, ranks: Sequence[Spans], busy_s: Sequence[float], phases: Mapping[str, float]) -> dict[str, object]:
        """`idle/device/busy_share`, the part of all devices' time in which they computed; `idle/device/<cause>_s`, seconds
        of every device, in a list by its number; and `idle/device/engine`, the engines of those behind the ranks'.

        `busy_s` is as of `engine_figures`, `phases` are rank 0's. Where a rank waits for engines while one of them works on
        its device, the device is in `rollout`; on engines' own devices `rollout` is what `busy` is elsewhere.
        """
        step_s = max(sum(spans.values()) for spans in ranks)
        rows = [causes(spans) for spans in ranks]
        for device in range(self.num_ranks):
            working = max((busy for busy, own in zip(busy_s, self.of_engine, strict=False) if device in own), default=0.0)
            waited = rows[device].get("engines", 0.0)
            if working and waited:
                rows[device] |= {ROLLOUT: min(working, waited), "engines": max(waited - working, 0.0)}
        for engine in self.engine_of if busy_s else ():
            parts = engine_causes(busy_s[engine], step_s, phases.get("rollout", 0.0), phases.get("weight_sync", 0.0))
            rows.append({ROLLOUT: parts.pop(BUSY), **parts})
        names = sorted({cause for row in rows for cause, seconds in row.items() if seconds})
        columns = {cause: [round(row.get(cause, 0.0), DIGITS) for row in rows] for cause in names}
        busy = sum(row.get(BUSY, 0.0) + row.get(ROLLOUT, 0.0) for row in rows)
        figures: dict[str, object] = {"idle/device/busy_share": busy / sum(sum(row.values()) for row in rows)}
        figures |= {f"idle/device/{cause}_s": column for cause, column in columns.items()}
        if len(rows) > self.num_ranks:
            figures["idle/device/engine"] = list(self.engine_of)
        return figures
