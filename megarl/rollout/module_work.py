"""What one thread of a worker does with one module's weights, which are read in place: find where they belong, and have them
packed once all have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from megarl.rollout.spare import SpareMemory
from megarl.sync.read import Box


class Writer(Protocol):
    """Who knows the modules."""

    def spare(self, thread: int) -> SpareMemory:
        """A thread's own."""

    def address(self, parameter: str) -> int:
        """Where a parameter lives, 0 where nothing but its packed form does."""

    def target(self, parameter: str, thread: int) -> torch.Tensor:
        """Where to write a parameter, [rows, columns]: where it lives, or in the thread's spare memory."""

    def came(self, owner: str, thread: int) -> None:
        """A part of a module has come."""


class ModuleWork:
    """Boxes of one module, by the numbers of their pieces: all of them, or one of those that are large and live where they are
    written.

    Where these go is the same from version to version, as long as no parameter has moved, and kept: between two copies
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
