"""Which boxes move from which rank to which: computed once, replayed at each weight sync."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from megarl.reshard.boxes import Segment


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """A list of copies, as int64 columns [copies]; `name` and the two parameter columns index the tables of
    strings.

    Copy i takes `rows[i]` x `cols[i]` elements at (source_row, source_col) of `source_parameter` on
    `source_rank` to (destination_row, destination_col) of `destination_parameter` on `destination_rank`.
    Copies to one destination rank stand in the order of its segments.
    """

    names: tuple[str, ...]
    source_parameters: tuple[str, ...]
    destination_parameters: tuple[str, ...]
    name: np.ndarray
    source_rank: np.ndarray
    source_parameter: np.ndarray
    source_row: np.ndarray
    source_col: np.ndarray
    destination_rank: np.ndarray
    destination_parameter: np.ndarray
    destination_row: np.ndarray
    destination_col: np.ndarray
    rows: np.ndarray
    cols: np.ndarray

    def __len__(self) -> int:
        return len(self.name)

    @cached_property
    def hash(self) -> str:
        """Hex digest over every column: two ends with the same hash replay the same plan."""
        digest = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name)
            content = value.tobytes() if isinstance(value, np.ndarray) else "\n".join(value).encode()
            digest.update(f"{field.name}:{len(content)}:".encode())
            digest.update(content)
        return digest.hexdigest()

    @cached_property
    def sizes(self) -> np.ndarray:
        """Elements of each copy, int64 [copies]."""
        return self.rows * self.cols

    def to_destination(self, rank: int) -> np.ndarray:
        """Positions of the copies that one destination rank receives, in its order."""
        return np.flatnonzero(self.destination_rank == rank)

    def describe(self, copy: int) -> str:
        """One copy in words, for an error."""
        row, col, name = (
            int(self.destination_row[copy]),
            int(self.destination_col[copy]),
            self.names[self.name[copy]],
        )
        parameter = self.destination_parameters[self.destination_parameter[copy]]
        return (
            f"{name} ({self.rows[copy]} x {self.cols[copy]}) from trainer rank {self.source_rank[copy]} "
            f"to {parameter}[{row}:, {col}:] of tensor rank {self.destination_rank[copy]}"
        )


class _Box:
    """One distinct source box with the segments (replicas) that hold it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.replicas = [segment]

    def intersect(self, other: Segment) -> tuple[int, int, int, int] | None:
        """(row0, row1, col0, col1) of the common rectangle, or None."""
        mine = self.segment
        row0, row1 = max(mine.row0, other.row0), min(mine.row1, other.row1)
        col0, col1 = max(mine.col0, other.col0), min(mine.col1, other.col1)
        return (row0, row1, col0, col1) if row0 < row1 and col0 < col1 else None


def plan_reshard(sources: Sequence[Segment], destinations: Sequence[Segment]) -> ReshardPlan:
    """Cover every destination box exactly once from source boxes.

    Where several source ranks hold a box (data-parallel replicas, norms under tensor parallelism) the rank
    that has the least to send so far is taken, the lowest of several; so both ends get the same plan from the
    same segments. Raises ValueError for a name that only one end knows, for a destination element that no
    source holds, and for source boxes that overlap without being equal.
    """
    boxes = _distinct_boxes(sources)
    wanted = {segment.name for segment in destinations}
    if wanted != boxes.keys():
        only_one_end = sorted(wanted ^ boxes.keys())
        raise ValueError(f"reshard plan: only one end knows {only_one_end[:5]} ({len(only_one_end)} names); both must")
    sent: dict[int, int] = defaultdict(int)  # elements each source rank sends
    copies: list[tuple[Segment, Segment, tuple[int, int, int, int]]] = []
    for destination in sorted(destinations, key=lambda segment: segment.rank):  # stable: keeps each rank's own order
        missing = (destination.row1 - destination.row0) * (destination.col1 - destination.col0)
        for box in boxes[destination.name]:
            common = box.intersect(destination)
            if common is None:
                continue
            size = (common[1] - common[0]) * (common[3] - common[2])
            source = min(box.replicas, key=lambda segment: (sent[segment.rank], segment.rank))
            sent[source.rank] += size
            missing -= size
            copies.append((source, destination, common))
        # distinct source boxes are disjoint, so equal areas mean: every element exactly once
        if missing:
            raise ValueError(f"reshard plan: {missing} elements of {destination} are held by no source")
    return _columns(copies)


def _distinct_boxes(sources: Sequence[Segment]) -> dict[str, list[_Box]]:
    by_name: dict[str, dict[tuple[int, int, int, int], _Box]] = defaultdict(dict)
    for segment in sources:
        key = (segment.row0, segment.row1, segment.col0, segment.col1)
        known = by_name[segment.name].get(key)
        if known is None:
            by_name[segment.name][key] = _Box(segment)
        else:
            known.replicas.append(segment)
    ordered = {}
    for name, distinct in by_name.items():
        boxes = [distinct[key] for key in sorted(distinct)]
        for position, box in enumerate(boxes):
            for other in boxes[position + 1 :]:
                if box.intersect(other.segment):
                    raise ValueError(f"reshard plan: source boxes overlap: {box.segment} and {other.segment}")
        ordered[name] = boxes
    return ordered


def _columns(copies: list[tuple[Segment, Segment, tuple[int, int, int, int]]]) -> ReshardPlan:
    names: dict[str, int] = {}
    source_parameters: dict[str, int] = {}
    destination_parameters: dict[str, int] = {}
    table = np.zeros((11, len(copies)), dtype=np.int64)
    for position, (source, destination, (row0, row1, col0, col1)) in enumerate(copies):
        table[:, position] = (
            names.setdefault(source.name, len(names)),
            source.rank,
            source_parameters.setdefault(source.parameter, len(source_parameters)),
            source.local_row + row0 - source.row0,
            source.local_col + col0 - source.col0,
            destination.rank,
            destination_parameters.setdefault(destination.parameter, len(destination_parameters)),
            destination.local_row + row0 - destination.row0,
            destination.local_col + col0 - destination.col0,
            row1 - row0,
            col1 - col0,
        )
    table.setflags(write=False)
    return ReshardPlan(tuple(names), tuple(source_parameters), tuple(destination_parameters), *table)
