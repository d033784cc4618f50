"""Who sends: of the ranks that hold a box, the one on the same node, then the one with the least to send."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from megarl.weight_sync.match import Match


def choose_senders(
    match: Match, source_nodes: Sequence[int] | None, destination_nodes: Sequence[int] | None, turn: int
) -> np.ndarray:
    """The position of the source that sends each rectangle of `match`, int64 [rectangles].

    `source_nodes` and `destination_nodes` give the node of each rank and of each worker; None for all on one. Where holders
    of a box are on its worker's node, one of these sends. Of several the one with the least elements to send so far is
    taken, then the lowest rank, counted from the `turn`-th: engines with another turn burden other ranks with what cannot be
    shared evenly. Rectangles that few ranks hold are dealt first, and large ones before small ones. Deterministic.
    """
    sizes = (match.row1 - match.row0) * (match.col1 - match.col0)
    held = _sets(match)
    nodes = None
    if source_nodes is not None and destination_nodes is not None:
        nodes = np.asarray(source_nodes, dtype=np.int64)
        preferred = np.asarray(destination_nodes, dtype=np.int64)[match.destinations.rank[match.destination]]
    else:
        preferred = np.zeros(len(sizes), dtype=np.int64)
    chosen = np.empty(len(sizes), dtype=np.int64)  # which of its group
    load: dict[int, int] = {}
    for rectangles, node in _deals(match, held, sizes, preferred):
        ranks = match.sources.rank[_group(match, int(match.source[rectangles[0]]))]
        candidates = np.arange(len(ranks))
        if nodes is not None and (near := np.flatnonzero(nodes[ranks] == node)).size:
            candidates = near
        own = ranks[candidates].tolist()
        picks, totals = _share(sizes[rectangles], [load.get(rank, 0) for rank in own], turn)
        chosen[rectangles] = candidates[picks]
        load |= dict(zip(own, totals, strict=True))
    return match.replicas[match.starts[match.source] + chosen]


def _share(sizes: np.ndarray, loads: list[int], turn: int) -> tuple[np.ndarray, list[int]]:
    """(which sender takes each size, what each has to send then): one after the other to the one with the least."""
    if len(loads) == 1:
        return np.zeros(len(sizes), dtype=np.int64), [loads[0] + int(sizes.sum())]
    heap = [(load, (sender - turn) % len(loads), sender) for sender, load in enumerate(loads)]
    heapq.heapify(heap)
    picks, totals = [], list(loads)
    for size in sizes.tolist():
        load, order, sender = heap[0]
        heapq.heapreplace(heap, (load + size, order, sender))
        totals[sender] = load + size
        picks.append(sender)
    return np.array(picks, dtype=np.int64), totals


def _group(match: Match, group: int) -> np.ndarray:
    return match.replicas[match.starts[group] : match.starts[group + 1]]


def _sets(match: Match) -> np.ndarray:
    """A number for the set of ranks that hold each group, int64 [groups]; groups of the same ranks share it."""
    ranks, bounds = match.sources.rank[match.replicas], match.starts.tolist()
    numbers: dict[bytes, int] = {}
    keys = (ranks[start:stop].tobytes() for start, stop in zip(bounds, bounds[1:], strict=False))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _deals(match: Match, held: np.ndarray, sizes: np.ndarray, preferred: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Rectangles that the same ranks hold and that the same node wants, with that node; the largest rectangle first."""
    holders, wanted = held[match.source], preferred
    replicas = np.diff(match.starts)[match.source]
    order = np.lexsort((-sizes, wanted, holders, replicas))
    changed = (np.diff(holders[order]) != 0) | (np.diff(wanted[order]) != 0)
    for rectangles in np.split(order, np.flatnonzero(changed) + 1):
        if len(rectangles):
            yield rectangles, int(wanted[rectangles[0]])
