"""Which boxes move from which rank to which: computed once, replayed at each weight sync."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from megarl.models.layout import Segment
from megarl.weight_sync.columns import Boxes
from megarl.weight_sync.match import Match, match_boxes
from megarl.weight_sync.senders import choose_senders


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """A list of copies, as int64 columns [copies]; `name` and the two parameter columns index the tables of strings.

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
            f"to {parameter}[{row}:, {col}:] of worker {self.destination_rank[copy]}"
        )


def plan_reshard(
    sources: Boxes | Iterable[Segment],
    destinations: Boxes | Iterable[Segment],
    source_nodes: Sequence[int] | None = None,
    destination_nodes: Sequence[int] | None = None,
    turn: int = 0,
) -> ReshardPlan:
    """Cover every destination box exactly once from source boxes; both ends get the same plan from the same boxes.

    Where several source ranks hold a box (data-parallel replicas, norms under tensor parallelism) `choose_senders` says
    which one sends; the last three arguments are its. Raises ValueError as `match_boxes` does.
    """
    ends = (end if isinstance(end, Boxes) else Boxes.of(end) for end in (sources, destinations))
    return plan_match(match_boxes(*ends), source_nodes, destination_nodes, turn)


def plan_match(
    match: Match, source_nodes: Sequence[int] | None = None, destination_nodes: Sequence[int] | None = None, turn: int = 0
) -> ReshardPlan:
    """The plan of one of several engines that are alike: they share the match, and each has its own senders."""
    sources, destinations = match.sources, match.destinations
    sender, receiver = choose_senders(match, source_nodes, destination_nodes, turn), match.destination
    columns = (
        sources.name[sender],
        sources.rank[sender],
        sources.parameter[sender],
        sources.local_row[sender] + match.row0 - sources.row0[sender],
        sources.local_col[sender] + match.col0 - sources.col0[sender],
        destinations.rank[receiver],
        destinations.parameter[receiver],
        destinations.local_row[receiver] + match.row0 - destinations.row0[receiver],
        destinations.local_col[receiver] + match.col0 - destinations.col0[receiver],
        match.row1 - match.row0,
        match.col1 - match.col0,
    )
    for column in columns:
        column.setflags(write=False)
    return ReshardPlan(sources.names, sources.parameters, destinations.parameters, *columns)
