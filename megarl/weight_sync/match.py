"""Which boxes of one side lie on which of the other: the geometry of a reshard plan, before anybody chose who sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megarl.weight_sync.columns import Boxes

# Pairs of boxes that are compared at once, so that the comparison of a large model stays within a few hundred MB.
_PAIRS = 1 << 21


@dataclass(frozen=True, eq=False)
class Match:
    """Every common rectangle of a destination box with a distinct source box, in the order of the destinations.

    `destination` and `source` [rectangles] are positions of a destination and of a group of replicas: source boxes that are
    equal, of several ranks. Group g is `replicas[starts[g] : starts[g + 1]]`, positions of sources by ascending rank.
    """

    sources: Boxes
    destinations: Boxes
    destination: np.ndarray
    source: np.ndarray
    row0: np.ndarray
    row1: np.ndarray
    col0: np.ndarray
    col1: np.ndarray
    replicas: np.ndarray
    starts: np.ndarray


def match_boxes(sources: Boxes, destinations: Boxes) -> Match:
    """Raises ValueError for a name that only one end knows, for a destination element that no source holds, and for source
    boxes that overlap without being equal."""
    known, wanted = set(sources.names), set(destinations.names)
    if known != wanted:
        only_one_end = sorted(known ^ wanted)
        raise ValueError(f"reshard plan: only one end knows {only_one_end[:5]} ({len(only_one_end)} names); both must")
    # Names are compared by their number in the sources' table.
    numbers = {name: number for number, name in enumerate(sources.names)}
    name = np.array([numbers[name] for name in destinations.names], dtype=np.int64)[destinations.name]
    replicas, starts = _replicas(sources)
    distinct = replicas[starts[:-1]]
    _refuse_overlaps(sources, distinct)
    order = np.argsort(destinations.rank, kind="stable")  # keeps each rank's own order
    parts = list(_common(sources, distinct, destinations, order, name))
    destination, source, row0, row1, col0, col1 = (np.concatenate(column) for column in zip(*parts, strict=True))
    # Distinct source boxes are disjoint, so equal areas mean: every element exactly once.
    covered = np.bincount(destination, (row1 - row0) * (col1 - col0), len(destinations)).astype(np.int64)
    missing = destinations.sizes - covered
    if missing.any():
        first = int(np.flatnonzero(missing)[0])
        raise ValueError(f"reshard plan: {missing[first]} elements of {destinations.segment(first)} are held by no source")
    return Match(sources, destinations, destination, source, row0, row1, col0, col1, replicas, starts)


def _replicas(sources: Boxes) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the sources, equal boxes together, and where each group of equal ones starts, and the end.

    Groups stand in the order of name, rows and columns, and a group's boxes in the order of their ranks.
    """
    keys = (sources.name, sources.row0, sources.row1, sources.col0, sources.col1)
    order = np.lexsort((sources.rank, *reversed(keys)))
    sorted_keys = np.stack([key[order] for key in keys])
    first = np.flatnonzero(np.any(sorted_keys[:, 1:] != sorted_keys[:, :-1], axis=0)) + 1
    return order, np.concatenate([[0], first, [len(order)]]).astype(np.int64)


def _refuse_overlaps(sources: Boxes, distinct: np.ndarray) -> None:
    for one, other, corners in _pairs(sources, distinct, sources, distinct, sources.name[distinct]):
        overlap = (corners[0] < corners[1]) & (corners[2] < corners[3]) & (one != other)
        if overlap.any():
            first = int(np.flatnonzero(overlap)[0])
            mine, its = (sources.segment(int(distinct[number[first]])) for number in (one, other))
            raise ValueError(f"reshard plan: source boxes overlap: {mine} and {its}")


def _common(
    sources: Boxes, distinct: np.ndarray, destinations: Boxes, order: np.ndarray, name: np.ndarray
) -> Iterator[tuple[np.ndarray, ...]]:
    """(destination, group of sources, row0, row1, col0, col1) of the rectangles that are not empty."""
    for one, group, (row0, row1, col0, col1) in _pairs(destinations, order, sources, distinct, name[order]):
        held = np.flatnonzero((row0 < row1) & (col0 < col1))
        yield (order[one[held]], *(column[held] for column in (group, row0, row1, col0, col1)))


def _pairs(
    left: Boxes, mine: np.ndarray, right: Boxes, its: np.ndarray, name: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]]:
    """Pairs of numbers into `mine` and `its` (positions of boxes) of the same name, and the corners they have in common.

    `name` are the names of `mine`, as numbers of the table of `right`; `its` stand in the order of their names. Pairs come
    in the order of `mine` and then of `its`, a few million at a time.
    """
    its_name = right.name[its]
    first, last = np.searchsorted(its_name, name, "left"), np.searchsorted(its_name, name, "right")
    ends = np.cumsum(last - first)
    begin = 0
    while begin < len(mine):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _PAIRS, "right")))
        counts = last[begin:end] - first[begin:end]
        one = np.repeat(np.arange(begin, end), counts)
        within = np.arange(len(one)) - np.repeat(np.cumsum(counts) - counts, counts)
        other = np.repeat(first[begin:end], counts) + within
        a, b = mine[one], its[other]
        low = [np.maximum(getattr(left, corner)[a], getattr(right, corner)[b]) for corner in ("row0", "col0")]
        high = [np.minimum(getattr(left, corner)[a], getattr(right, corner)[b]) for corner in ("row1", "col1")]
        yield one, other, (low[0], high[0], low[1], high[1])
        begin = end
