"""What one thread of a worker does with weights of one module that are read in place: find where they belong, and have them
packed once all have come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from megarl.rollout.spare import SpareMemory
from megarl.sync.read import Box
from megarl.sync.transport import NUM_BUCKETS


class Writer(Protocol):
    """Who knows the modules."""

    def is_large(self, owner: str) -> bool:
        """Whether a module lives where it is written, and takes long to copy."""

    def spare(self, thread: int) -> SpareMemory:
        """A thread's own."""

    def address(self, parameter: str) -> int:
        """Where a parameter lives, 0 where nothing but its packed form does."""

    def target(self, parameter: str, thread: int) -> torch.Tensor:
        """Where to write a parameter, [rows, columns]: where it lives, or in the thread's spare memory."""

    def came(self, owner: str, thread: int) -> None:
        """A module has come, or a part of a large one."""


class ModuleWork:
    """Boxes of one module, by the numbers of their pieces: all of them, or one of a large one's.

    Where they go is the same from version to version, as long as no parameter has moved, and is kept: between two copies
    Python's own work is slow, as a copy takes the cache from it. What is kept has hold of the memory, so that nothing else
    can come to lie there.
    """

    def __init__(self, writer: Writer, owner: str, boxes: Sequence[Box], numbers: Sequence[int], leads: bool) -> None:
        self.numbers, self.leads = numbers, leads
        self._writer, self._owner, self._boxes = writer, owner, boxes
        self._places: list[np.ndarray] = []
        self._addresses: dict[str, int] = {}  # none: the places are not known

    @torch.no_grad()  # which is a thread's own
    def places(self, thread: int) -> Sequence[np.ndarray]:
        writer, known = self._writer, self._addresses
        if known and all(writer.address(parameter) == address for parameter, address in known.items()):
            return self._places
        spare, words = writer.spare(thread), {}
        for parameter in dict.fromkeys(box.parameter for box in self._boxes):
            words[parameter] = spare.words(writer.target(parameter, thread))
        lives = not spare.in_use
        self._addresses = {parameter: writer.address(parameter) for parameter in words} if lives else {}
        places = [box.words_within(words[box.parameter]) for box in self._boxes]
        self._places = places if lives else []  # spare memory that somebody refers to is not lent again
        return places

    @torch.no_grad()
    def copied(self, thread: int) -> None:
        self._writer.came(self._owner, thread)


def module_works(
    writer: Writer, boxes: Sequence[Box], num_bytes: Mapping[str, int], num_threads: int, bucket_bytes: int
) -> list[ModuleWork]:
    """What is to be done with all `boxes` of a version: with large modules first, piece by piece, then module by module.
    `num_bytes` are those of every module."""
    by_module: dict[str, list[int]] = {}
    for number, box in enumerate(boxes):
        by_module.setdefault(box.parameter.rpartition(".")[0], []).append(number)
    large = [owner for owner in by_module if writer.is_large(owner)]
    works = [ModuleWork(writer, owner, [boxes[one]], [one], False) for owner in large for one in by_module[owner]]
    others = {owner: num_bytes[owner] for owner in by_module if owner not in large}
    led = _left_to_the_caller(others, num_threads - 1, bucket_bytes)
    return works + [
        ModuleWork(writer, owner, [boxes[one] for one in by_module[owner]], by_module[owner], owner in led)
        for owner in others
    ]


def _left_to_the_caller(num_bytes: Mapping[str, int], num_others: int, bucket_bytes: int) -> set[str]:
    """Modules that other threads than the caller's have no spare memory for. Each thread has room for one. The caller's may
    be the largest; the others share what is left then of the largest layer and of two buckets, which nobody has here: so
    that all is never more than both."""
    layers: dict[str, int] = {}
    for owner, size in num_bytes.items():
        layer = owner.partition(".layers.")[2].partition(".")[0]
        layers[layer] = layers.get(layer, 0) + size
    room = max(layers.values(), default=0) + NUM_BUCKETS * bucket_bytes - max(num_bytes.values(), default=0)
    return {owner for owner, size in num_bytes.items() if size * num_others > room}
