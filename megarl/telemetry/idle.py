"""Where the ranks' time went in a step, over all ranks: busy, waiting and for whom, and which rank others waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from megarl.telemetry.clock import REST, WAIT

# Waits that a slower rank causes. Those for engines and rewards end for all ranks at once.
FOR_RANKS = tuple(WAIT + whom for whom in ("ranks", "pipeline", "gradients"))


def idle_figures(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """From seconds by span of each rank, in rank order (`StepTimes.totals`), which sum to its step:

    `idle/share`, the part of all ranks' time in which they waited, and `idle/<whom>_share`, its parts;
    `idle/unaccounted_share`, the part that no span has; `idle/straggler_rank`, the rank that waited least for other ranks,
    and `idle/straggler_s`, how many seconds less than the median rank.
    """
    total = sum(sum(spans.values()) for spans in ranks)
    waits: dict[str, float] = {}
    for spans in ranks:
        for name, seconds in spans.items():
            if name.startswith(WAIT):
                whom = name.removeprefix(WAIT)
                waits[whom] = waits.get(whom, 0.0) + seconds
    for_ranks = [sum(spans.get(name, 0.0) for name in FOR_RANKS) for spans in ranks]
    straggler = min(range(len(ranks)), key=for_ranks.__getitem__)
    return {
        "idle/share": sum(waits.values()) / total,
        **{f"idle/{whom}_share": seconds / total for whom, seconds in sorted(waits.items())},
        f"idle/{REST}_share": sum(spans[REST] for spans in ranks) / total,
        "idle/straggler_rank": straggler,
        "idle/straggler_s": median(for_ranks) - for_ranks[straggler],
    }
