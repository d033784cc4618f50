"""The reshard plan: which boxes move from which trainer rank to which vLLM worker. Computed once, replayed at each sync.

`plan_reshard` finds the common rectangles of both sides and picks one of the ranks that hold each rectangle. Both ends
compute the same plan from the same boxes.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from megarl.models import ModelShape, Weight
from megarl.models.layout import Box, Layout, RolloutLayout
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.models.vllm_weights import fixed_tensors
from megarl.models.weight_table import head
from megarl.weight_sync.boxes import Boxes, megatron_columns, vllm_columns

# Compare this many pairs of boxes at once, so that the comparison for a large model stays within a few hundred MB.
_PAIRS = 1 << 21


def _pairs(
    left: Boxes, left_boxes: np.ndarray, right: Boxes, right_boxes: np.ndarray, name: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]]:
    """Pair the boxes of the same name: positions in `left_boxes` and `right_boxes`, and the corners of the intersection.

    `name` are the names of `left_boxes` as numbers of the right table; `right_boxes` are sorted by name.
    Pairs come in the order of `left_boxes` and then of `right_boxes`, a few million at a time.
    """
    right_name = right.name[right_boxes]
    first, last = np.searchsorted(right_name, name, "left"), np.searchsorted(right_name, name, "right")
    ends = np.cumsum(last - first)
    begin = 0
    while begin < len(left_boxes):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _PAIRS, "right")))
        counts = last[begin:end] - first[begin:end]
        i = np.repeat(np.arange(begin, end), counts)
        j = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first[begin:end], counts)
        a, b = left_boxes[i], right_boxes[j]
        low = [np.maximum(getattr(left, corner)[a], getattr(right, corner)[b]) for corner in ("row0", "col0")]
        high = [np.minimum(getattr(left, corner)[a], getattr(right, corner)[b]) for corner in ("row1", "col1")]
        yield i, j, (low[0], high[0], low[1], high[1])
        begin = end


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """A list of copies, as int64 columns [copies]; `name` and the two parameter columns index the tables of strings.

    Copy i takes `rows[i]` x `cols[i]` elements at (source_row, source_col) of `source_parameter` on
    `source_rank` to (destination_row, destination_col) of `destination_parameter` on `destination_rank`.
    Copies to one destination rank stand in the order of its boxes.
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
        """Return a hex digest over every column: two ends with the same hash replay the same plan."""
        digest = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name)
            content = value.tobytes() if isinstance(value, np.ndarray) else "\n".join(value).encode()
            digest.update(f"{field.name}:{len(content)}:".encode())
            digest.update(content)
        return digest.hexdigest()

    @cached_property
    def sizes(self) -> np.ndarray:
        """Return the elements of each copy, int64 [copies]."""
        return self.rows * self.cols

    def to_destination(self, rank: int) -> np.ndarray:
        """Return the positions of the copies that one destination rank receives, in its order."""
        return np.flatnonzero(self.destination_rank == rank)

    def describe(self, copy: int) -> str:
        """Describe one copy for an error message."""
        parameter = self.destination_parameters[self.destination_parameter[copy]]
        return (
            f"{self.names[self.name[copy]]} ({self.rows[copy]} x {self.cols[copy]}) from trainer rank "
            f"{self.source_rank[copy]} to {parameter}[{self.destination_row[copy]}:, {self.destination_col[copy]}:] "
            f"of worker {self.destination_rank[copy]}"
        )


def plan_reshard(sources: Boxes | Iterable[Box], destinations: Boxes | Iterable[Box]) -> ReshardPlan:
    """Cover every destination box exactly once from source boxes. Deterministic.

    Equal source boxes of several ranks are replicas (data parallelism, norms under tensor parallelism): the replica with the
    fewest elements to send so far sends, then the lowest rank. Rectangles with few replicas are assigned first, and large
    rectangles before small ones.

    Raises ValueError for a name that only one side knows, for a destination element that no source holds, and for source
    boxes that overlap without being equal.
    """
    sources, destinations = (end if isinstance(end, Boxes) else Boxes.of(end) for end in (sources, destinations))
    only_one_side = sorted(set(sources.names) ^ set(destinations.names))
    if only_one_side:
        raise ValueError(f"reshard plan: only one end knows {only_one_side[:5]} ({len(only_one_side)} names); both must")
    # Groups of replicas, by name, rows and columns: group g is replicas[starts[g] : starts[g + 1]], by ascending rank.
    keys = (sources.name, sources.row0, sources.row1, sources.col0, sources.col1)
    replicas = np.lexsort((sources.rank, *reversed(keys)))
    sorted_keys = np.stack([key[replicas] for key in keys])
    first = np.flatnonzero(np.any(sorted_keys[:, 1:] != sorted_keys[:, :-1], axis=0)) + 1
    starts = np.concatenate([[0], first, [len(replicas)]]).astype(np.int64)
    distinct = replicas[starts[:-1]]
    for left, right, (row0, row1, col0, col1) in _pairs(sources, distinct, sources, distinct, sources.name[distinct]):
        overlap = np.flatnonzero((row0 < row1) & (col0 < col1) & (left != right))
        if len(overlap):
            a, b = (sources.box(int(distinct[side[overlap[0]]])) for side in (left, right))
            raise ValueError(f"reshard plan: source boxes overlap: {a} and {b}")
    receiver, group, row0, row1, col0, col1 = _rectangles(sources, distinct, destinations)
    sender = _choose_senders(sources.rank, replicas, starts, group, (row1 - row0) * (col1 - col0))
    columns = (
        sources.name[sender],
        sources.rank[sender],
        sources.parameter[sender],
        sources.local_row[sender] + row0 - sources.row0[sender],
        sources.local_col[sender] + col0 - sources.col0[sender],
        destinations.rank[receiver],
        destinations.parameter[receiver],
        destinations.local_row[receiver] + row0 - destinations.row0[receiver],
        destinations.local_col[receiver] + col0 - destinations.col0[receiver],
        row1 - row0,
        col1 - col0,
    )
    return ReshardPlan(sources.names, sources.parameters, destinations.parameters, *columns)


def _rectangles(sources: Boxes, distinct: np.ndarray, destinations: Boxes) -> list[np.ndarray]:
    """Return the common rectangles of destinations and `distinct` sources, by destination rank: position of the destination,
    position in `distinct`, and corners, int64 [rectangles]."""
    # Names are compared by their number in the sources' table.
    numbers = {name: number for number, name in enumerate(sources.names)}
    name = np.array([numbers[name] for name in destinations.names], dtype=np.int64)[destinations.name]
    order = np.argsort(destinations.rank, kind="stable")  # keeps each rank's own order
    parts = []
    for left, group, (row0, row1, col0, col1) in _pairs(destinations, order, sources, distinct, name[order]):
        held = np.flatnonzero((row0 < row1) & (col0 < col1))
        parts.append((order[left[held]], *(column[held] for column in (group, row0, row1, col0, col1))))
    destination, group, row0, row1, col0, col1 = (np.concatenate(column) for column in zip(*parts, strict=True))
    # Distinct source boxes are disjoint, so equal areas mean: every element exactly once.
    covered = np.bincount(destination, (row1 - row0) * (col1 - col0), len(destinations)).astype(np.int64)
    missing = destinations.sizes - covered
    if missing.any():
        box = int(np.flatnonzero(missing)[0])
        raise ValueError(f"reshard plan: {missing[box]} elements of {destinations.box(box)} are held by no source")
    return [destination, group, row0, row1, col0, col1]


def _choose_senders(
    rank: np.ndarray, replicas: np.ndarray, starts: np.ndarray, group: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """Choose the source that sends each rectangle of `sizes` elements from its `group` of replicas, int64 [rectangles]."""
    groups = [rank[replicas[start:stop]] for start, stop in pairwise(starts.tolist())]
    numbers: dict[bytes, int] = {}  # groups of the same ranks share a number
    holders = np.array([numbers.setdefault(ranks.tobytes(), len(numbers)) for ranks in groups], dtype=np.int64)[group]
    order = np.lexsort((-sizes, holders, np.diff(starts)[group]))
    chosen = np.empty(len(sizes), dtype=np.int64)  # number within the group
    loads: dict[int, int] = {}
    for rectangles in np.split(order, np.flatnonzero(np.diff(holders[order])) + 1):
        ranks = groups[group[rectangles[0]]].tolist()
        heap = [(loads.get(rank, 0), number) for number, rank in enumerate(ranks)]
        heapq.heapify(heap)
        for rectangle, size in zip(rectangles.tolist(), sizes[rectangles].tolist(), strict=True):
            load, number = heap[0]
            heapq.heapreplace(heap, (load + size, number))
            chosen[rectangle] = number
        loads |= {ranks[number]: load for load, number in heap}
    return replicas[starts[group] + chosen]


# The ends of a sync that share a process share the plan; the second entry serves tests and benchmarks that compare two.
@lru_cache(maxsize=2)
def sync_plan(shape: ModelShape, layout: Layout, rollout: RolloutLayout, mode: str = "reshard") -> ReshardPlan:
    """Plan the sync to an engine; all engines have the same plan. Both ends compute it and compare `plan.hash`.

    In mode "checkpoint" every worker gets all of every tensor, in a parameter of the checkpoint's own name. That needs no
    table of vLLM's parameters, and moves the whole model to each worker.

    Tensors that no update moves are left out, and so is what no engine has: a critic's value head, and layers for
    multi-token prediction, which are in no weight table. Raises ValueError for a rollout layout that does not cut the model.
    """

    def is_sent(weight: Weight) -> bool:
        """With pipeline stages the last stage has a copy of a tied embedding; only the first stage sends it."""
        copied = shape.tied and weight.megatron.parameter == head(shape).megatron.parameter
        return not weight.fixed and not copied

    sources = megatron_columns(shape, layout, is_sent)
    if mode == "reshard":
        return plan_reshard(sources, vllm_columns(shape, rollout, lambda weight: not weight.fixed))
    sent = {name: size for name, size in checkpoint_sizes(shape).items() if name not in fixed_tensors(shape)}
    wholes = [
        Box(name, 0, rows, 0, columns, worker, name, 0, 0)
        for worker in range(rollout.workers)
        for name, (rows, columns) in sent.items()
    ]
    return plan_reshard(sources, wholes)
