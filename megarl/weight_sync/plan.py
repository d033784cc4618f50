"""The reshard plan: which boxes move from which trainer rank to which vLLM worker. Computed once, replayed at each sync.

`match_boxes` finds the common rectangles of both sides, `choose_senders` picks one of the ranks that hold each rectangle,
and `engine_plan` does both for one engine. Both ends compute the same plan from the same boxes.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from megarl.models import ModelShape, Weight
from megarl.models.decoder_weights import head
from megarl.models.layout import Layout, RolloutLayout, Segment
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.models.vllm_weights import fixed_tensors
from megarl.weight_sync.boxes import Boxes, megatron_boxes, vllm_boxes

# Compare so many pairs of boxes at once: a large model's comparison stays within a few hundred MB.
_PAIRS = 1 << 21


@dataclass(frozen=True, eq=False)
class Match:
    """Every common rectangle of a destination box with a distinct source box, in the order of the destinations.

    `destination` and `source` [rectangles] are positions of a destination and of a group of replicas: equal source boxes of
    several ranks. Group g is `replicas[starts[g] : starts[g + 1]]`, positions of sources by ascending rank.
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
    """Find the common rectangles of both sides.

    Raises ValueError for a name that only one side knows, for a destination element that no source holds, and for source
    boxes that overlap without being equal."""
    only_one_side = sorted(set(sources.names) ^ set(destinations.names))
    if only_one_side:
        raise ValueError(f"reshard plan: only one end knows {only_one_side[:5]} ({len(only_one_side)} names); both must")
    # Names are compared by their number in the sources' table.
    numbers = {name: number for number, name in enumerate(sources.names)}
    name = np.array([numbers[name] for name in destinations.names], dtype=np.int64)[destinations.name]
    # Equal boxes stand together, by name, rows and columns; within a group by rank.
    keys = (sources.name, sources.row0, sources.row1, sources.col0, sources.col1)
    replicas = np.lexsort((sources.rank, *reversed(keys)))
    sorted_keys = np.stack([key[replicas] for key in keys])
    first = np.flatnonzero(np.any(sorted_keys[:, 1:] != sorted_keys[:, :-1], axis=0)) + 1
    starts = np.concatenate([[0], first, [len(replicas)]]).astype(np.int64)
    distinct = replicas[starts[:-1]]
    for left, right, (row0, row1, col0, col1) in _pairs(sources, distinct, sources, distinct, sources.name[distinct]):
        overlap = np.flatnonzero((row0 < row1) & (col0 < col1) & (left != right))
        if len(overlap):
            a, b = (sources.segment(int(distinct[side[overlap[0]]])) for side in (left, right))
            raise ValueError(f"reshard plan: source boxes overlap: {a} and {b}")
    order = np.argsort(destinations.rank, kind="stable")  # keeps each rank's own order
    parts = []
    for left, group, (row0, row1, col0, col1) in _pairs(destinations, order, sources, distinct, name[order]):
        held = np.flatnonzero((row0 < row1) & (col0 < col1))
        parts.append((order[left[held]], *(column[held] for column in (group, row0, row1, col0, col1))))
    destination, source, row0, row1, col0, col1 = (np.concatenate(column) for column in zip(*parts, strict=True))
    # Distinct source boxes are disjoint, so equal areas mean: every element exactly once.
    covered = np.bincount(destination, (row1 - row0) * (col1 - col0), len(destinations)).astype(np.int64)
    missing = destinations.sizes - covered
    if missing.any():
        box = int(np.flatnonzero(missing)[0])
        raise ValueError(f"reshard plan: {missing[box]} elements of {destinations.segment(box)} are held by no source")
    return Match(sources, destinations, destination, source, row0, row1, col0, col1, replicas, starts)


def _pairs(
    left: Boxes, left_boxes: np.ndarray, right: Boxes, right_boxes: np.ndarray, name: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]]:
    """Pair the boxes of the same name: numbers into `left_boxes` and `right_boxes`, and the corners of the intersection.

    `name` are the names of `left_boxes` as numbers of the right table; `right_boxes` stand in the order of their names.
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


def choose_senders(
    match: Match, source_nodes: Sequence[int] | None, destination_nodes: Sequence[int] | None, turn: int
) -> np.ndarray:
    """Choose which source sends each rectangle of `match`: its position, int64 [rectangles]. Deterministic.

    `source_nodes` and `destination_nodes` give the node of each rank and of each worker; None means one node. A holder on
    the worker's node is preferred, then the holder with the fewest elements to send so far, then the lowest rank, counted
    from the `turn`-th: other engines have another turn, so what cannot be shared evenly burdens other ranks. Rectangles that
    few ranks hold are assigned first, and large ones before small ones.
    """
    sizes = (match.row1 - match.row0) * (match.col1 - match.col0)
    ranks = match.sources.rank[match.replicas]
    groups = [ranks[start:stop] for start, stop in pairwise(match.starts.tolist())]
    numbers: dict[bytes, int] = {}  # groups of the same ranks share a number
    holders = np.array([numbers.setdefault(group.tobytes(), len(numbers)) for group in groups], dtype=np.int64)
    holders = holders[match.source]
    nodes, wanted = None, np.zeros(len(sizes), dtype=np.int64)
    if source_nodes is not None and destination_nodes is not None:
        nodes = np.asarray(source_nodes, dtype=np.int64)
        wanted = np.asarray(destination_nodes, dtype=np.int64)[match.destinations.rank[match.destination]]
    order = np.lexsort((-sizes, wanted, holders, np.diff(match.starts)[match.source]))
    changed = (np.diff(holders[order]) != 0) | (np.diff(wanted[order]) != 0)
    chosen = np.empty(len(sizes), dtype=np.int64)  # number within the group
    load: dict[int, int] = {}
    for rectangles in np.split(order, np.flatnonzero(changed) + 1) if len(order) else ():
        group = groups[match.source[rectangles[0]]]
        candidates = np.arange(len(group))
        if nodes is not None and (near := np.flatnonzero(nodes[group] == wanted[rectangles[0]])).size:
            candidates = near
        candidate_ranks = group[candidates].tolist()
        picks, totals = _share(sizes[rectangles], [load.get(rank, 0) for rank in candidate_ranks], turn)
        chosen[rectangles] = candidates[picks]
        load |= dict(zip(candidate_ranks, totals, strict=True))
    return match.replicas[match.starts[match.source] + chosen]


def _share(sizes: np.ndarray, loads: list[int], turn: int) -> tuple[np.ndarray, list[int]]:
    """Give each size in turn to the sender with the least load; (the sender of each size, the new loads)."""
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
        """Describe one copy for an error message."""
        parameter = self.destination_parameters[self.destination_parameter[copy]]
        return (
            f"{self.names[self.name[copy]]} ({self.rows[copy]} x {self.cols[copy]}) from trainer rank "
            f"{self.source_rank[copy]} to {parameter}[{self.destination_row[copy]}:, {self.destination_col[copy]}:] "
            f"of worker {self.destination_rank[copy]}"
        )


def plan_reshard(
    sources: Boxes | Iterable[Segment],
    destinations: Boxes | Iterable[Segment],
    source_nodes: Sequence[int] | None = None,
    destination_nodes: Sequence[int] | None = None,
    turn: int = 0,
) -> ReshardPlan:
    """Cover every destination box exactly once from source boxes.

    Where several source ranks hold a box (data-parallel replicas, norms under tensor parallelism) `choose_senders` decides
    which rank sends; the last three arguments are its. Raises ValueError as `match_boxes` does.
    """
    ends = (end if isinstance(end, Boxes) else Boxes.of(end) for end in (sources, destinations))
    return plan_match(match_boxes(*ends), source_nodes, destination_nodes, turn)


def plan_match(
    match: Match, source_nodes: Sequence[int] | None = None, destination_nodes: Sequence[int] | None = None, turn: int = 0
) -> ReshardPlan:
    """Plan one engine: equal engines share the match, and each has its own senders."""
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


def engine_plan(
    shape: ModelShape,
    layout: Layout,
    rollout: RolloutLayout,
    engine: int = 0,
    source_nodes: Sequence[int] | None = None,
    worker_nodes: Sequence[int] | None = None,
) -> ReshardPlan:
    """Plan one engine by its number; the trainer ranks and the engine's workers compute the same plan.

    `source_nodes` [trainer ranks] and `worker_nodes` [workers of this engine] number the machines, None for no preference.
    No engine's plan depends on another engine. Raises ValueError for a rollout layout that does not cut the model.
    """
    return plan_match(engine_match(shape, layout, rollout), source_nodes, worker_nodes, turn=engine)


# All engines of a run share one match; the second entry serves tests and benchmarks that compare two.
@lru_cache(maxsize=2)
def engine_match(shape: ModelShape, layout: Layout, rollout: RolloutLayout) -> Match:
    """Match both sides for all engines: everything but who sends.

    Tensors that no update moves are left out, and so is what no engine has: a critic's value head, and layers for
    multi-token prediction, which are in no weight table.
    """
    return match_boxes(_sent_boxes(shape, layout), vllm_boxes(shape, rollout, lambda weight: not weight.fixed))


def checkpoint_plan(shape: ModelShape, layout: Layout, rollout: RolloutLayout) -> ReshardPlan:
    """Plan checkpoint mode: every worker gets all of every tensor, in a parameter of the checkpoint's own name.

    It needs no table of vLLM's parameters, and moves the whole model to each worker.
    """
    fixed = fixed_tensors(shape)
    wholes = [
        Segment(name, 0, rows, 0, columns, worker, name, 0, 0)
        for worker in range(rollout.workers)
        for name, (rows, columns) in checkpoint_sizes(shape).items()
        if name not in fixed
    ]
    return plan_reshard(_sent_boxes(shape, layout), wholes)


def _sent_boxes(shape: ModelShape, layout: Layout) -> Boxes:
    """The boxes that trainer ranks may send: no tensor that no update moves. Under a pipeline the last stage keeps a copy of
    a tied embedding; only the first stage sends it."""

    def is_sent(weight: Weight) -> bool:
        copied = shape.tied and weight.megatron.parameter == head(shape).megatron.parameter
        return not weight.fixed and not copied

    return megatron_boxes(shape, layout, is_sent)


def sync_plan(shape: ModelShape, layout: Layout, rollout: RolloutLayout, mode: str) -> ReshardPlan:
    """The plan of a sync in a mode; both ends compute it and compare `plan.hash`."""
    return {"reshard": engine_plan, "checkpoint": checkpoint_plan}[mode](shape, layout, rollout)
