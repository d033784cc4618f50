"""What one thread of a worker does with weights of one module that are read in place: find where they belong, and have them
packed once all have come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

import numpy as np
import torch

from megarl.weight_sync.copies import Works
from megarl.weight_sync.read import Box
from megarl.weight_sync.spare import SpareMemory, apart_bytes
from megarl.weight_sync.transport import NUM_BUCKETS


class Writer(Protocol):
    """Who knows the modules."""

    def is_large(self, owner: str) -> bool:
        """Whether a module lives where it is written, and takes long to copy."""

    def address(self, parameter: str) -> int:
        """Where a parameter lives, 0 where nothing but its packed form does."""

    def target(self, parameter: str, dtype: torch.dtype, spare: SpareMemory) -> torch.Tensor:
        """Where to write a parameter, [rows, columns]: where it lives, or in spare memory."""

    def complete(self, owner: str, spare: SpareMemory) -> None:
        """A module has come, or a part of a large one."""


class ModuleWork:
    """Boxes of one module, by the numbers of their pieces: all of them, or one of a large one's.

    Where they go is the same from version to version, as long as no parameter has moved, and is kept: between two copies
    Python's own work is slow, as a copy takes the cache from it. What is kept has hold of the memory, so that nothing else
    can come to lie there.
    """

    def __init__(
        self, writer: Writer, owner: str, boxes: Sequence[Box], numbers: Sequence[int], spares: Sequence[SpareMemory]
    ) -> None:
        """Each thread has spare memory of its own."""
        self.numbers = numbers
        self._writer, self._owner, self._spares = writer, owner, spares
        self._boxes = [boxes[number] for number in numbers]
        self._places: list[np.ndarray] = []
        self._addresses: dict[str, int] = {}  # none: the places are not known

    def places(self, thread: int) -> Sequence[np.ndarray]:
        writer, known, spare = self._writer, self._addresses, self._spares[thread]
        if known and all(writer.address(parameter) == address for parameter, address in known.items()):
            return self._places
        self._places, self._addresses = [], {}
        words = {}
        for parameter, dtype in {box.parameter: box.content.dtype for box in self._boxes}.items():
            words[parameter] = spare.words(writer.target(parameter, dtype, spare))
        places = [box.words_within(words[box.parameter]) for box in self._boxes]
        if not spare.in_use:  # else somebody who refers to it keeps it from being lent again
            self._places, self._addresses = places, {parameter: writer.address(parameter) for parameter in words}
        return places

    def copied(self, thread: int) -> None:
        self._writer.complete(self._owner, self._spares[thread])


def module_works(
    writer: Writer,
    boxes: Sequence[Box],
    sizes: Mapping[str, tuple[int, int]],
    spares: Sequence[SpareMemory],
    bucket_bytes: int,
) -> Works:
    """What is to be done with all `boxes` of a version, in their order, by which ranks see how far a worker is: module by
    module, and with large ones piece by piece. `sizes` are [rows, columns] of every parameter."""
    by_module: dict[str, list[int]] = {}
    for number, box in enumerate(boxes):
        by_module.setdefault(box.parameter.rpartition(".")[0], []).append(number)
    works: list[ModuleWork] = []
    matrices: dict[str, list[tuple[int, int]]] = {}
    for owner, numbers in by_module.items():
        if writer.is_large(owner):
            works += [ModuleWork(writer, owner, boxes, [number], spares) for number in numbers]
        else:
            works.append(ModuleWork(writer, owner, boxes, numbers, spares))
            itemsizes = {boxes[number].parameter: boxes[number].content.itemsize for number in numbers}
            matrices[owner] = [(sizes[name][0], sizes[name][1] * itemsize) for name, itemsize in itemsizes.items()]
    return Works(works, min(len(spares), most_threads(matrices, bucket_bytes)))


def most_threads(matrices: Mapping[str, Sequence[tuple[int, int]]], bucket_bytes: int) -> int:
    """How many may have spare memory for one module each, so that all of it is no more than the largest layer and two
    buckets, which nobody has here. `matrices` are the parameters of each module, by their rows and the bytes of one: the
    first of one module has the same spare memory as that of the next, and so on."""
    layers: dict[str, int] = {}
    for owner, each in matrices.items():
        layer = owner.partition(".layers.")[2].partition(".")[0]
        layers[layer] = layers.get(layer, 0) + sum(rows * row_bytes for rows, row_bytes in each)
    spare = [[rows * apart_bytes(row_bytes) for rows, row_bytes in each] for each in matrices.values()]
    of_a_thread = sum(map(max, zip_longest(*spare, fillvalue=0)))
    room = max(layers.values(), default=0) + NUM_BUCKETS * bucket_bytes
    return max(1, room // max(1, of_a_thread))
