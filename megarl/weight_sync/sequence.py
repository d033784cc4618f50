"""In which order a trainer rank writes the buckets of all streams, and the weights that it holds meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megarl.weight_sync.order import layer_numbers
from megarl.weight_sync.plan import ReshardPlan
from megarl.weight_sync.stream import Piece, Stream


def bucket_sequence(plan: ReshardPlan, streams: Sequence[Stream], by_layer: bool) -> list[tuple[int, int]]:
    """Every bucket, and the number of its stream, in the order in which all ranks write: bucket after bucket over all
    streams; where these go `by_layer` so within each layer, however many buckets each stream has of it."""
    every = [(bucket, number) for number, stream in enumerate(streams) for bucket in range(stream.num_buckets)]
    if not by_layer:
        return sorted(every)
    layers = [layer_numbers(plan, stream.copy[stream.starts[:-1]]).tolist() for stream in streams]
    return sorted(every, key=lambda one: (layers[one[1]][one[0]], *one))


def last_pieces(
    plan: ReshardPlan, streams: Sequence[Stream], sequence: Sequence[tuple[int, int]], rank: int
) -> dict[str, tuple[int, int]]:
    """Of each parameter that a rank sends from, by its local name: the stream that has the last piece, and its number."""
    last: dict[int, tuple[int, int]] = {}
    for bucket, number in sequence:
        part = streams[number].part(bucket, rank)
        if part is not None:
            parameters = plan.source_parameter[streams[number].copy[part.pieces]].tolist()
            last |= {one: (number, piece) for one, piece in zip(parameters, part.pieces.tolist(), strict=True)}
    return {plan.source_parameters[parameter]: place for parameter, place in last.items()}


class Matrices:
    """The local parameters that streams are in the middle of, by name, each [rows, columns].

    What is given may make a parameter anew whenever it is asked for (adapters are merged in), so it is asked once, when its
    first piece is packed for any stream, and let go behind the last one of the last stream. Where streams go by layer, these
    are never more than one layer.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], last: Mapping[str, tuple[int, int]]) -> None:
        """`last` says of each parameter which stream has its last piece, and the number of that (`last_pieces`)."""
        self._parameters, self._last = parameters, last
        self._held: dict[str, torch.Tensor] = {}

    def box(self, piece: Piece) -> torch.Tensor:
        """A view of a piece, [rows, cols]. Nobody may keep it: a merged weight lives as long as its views."""
        matrix = self._held.get(piece.parameter)
        if matrix is None:
            own = self._parameters[piece.parameter].detach()
            matrix = self._held[piece.parameter] = own.view(own.shape[0], -1)  # a vector is one column
        rows = matrix[piece.row : piece.row + piece.rows]
        return rows if rows.shape[1] == piece.cols else rows[:, piece.col : piece.col + piece.cols]

    def packed(self, stream: int, piece: Piece) -> None:
        """A piece's bytes are in a bucket."""
        if (stream, piece.number) == self._last[piece.parameter]:
            del self._held[piece.parameter]
