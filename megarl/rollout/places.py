"""Where the boxes of a version went in a worker's memory: the same as those of the version before, as a rule."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from megarl.sync.read import Box


class KnownPlaces:
    """Where each box goes that is read in place, and is the same from version to version: of parameters that live where they
    are written. Between two copies Python's own work is slow, as a copy takes the cache from it; so what was found for one
    version is used for the next one, as long as no parameter has moved.
    """

    def __init__(self) -> None:
        # By the identity of a box's words, not kept alive: they are views of all that a rank has shared.
        self._places: dict[int, tuple[weakref.ref[np.ndarray], np.ndarray]] = {}
        self._addresses: dict[str, int] = {}
        self.owners: tuple[str, ...] = ()
        """The modules of which all was written where it lives, in their order."""

    def note(self, box: Box, place: np.ndarray, parameter: torch.Tensor) -> None:
        """The box's words belong there, in this parameter. Where that lies is taken down as it is written, before vLLM
        packs: one that is put elsewhere then has moved."""
        assert box.words is not None, "what is read in place has words"
        self._places[id(box.words)] = weakref.ref(box.words), place
        self._addresses.setdefault(box.parameter, parameter.data_ptr())

    def keep(self, owners: Iterable[str]) -> None:
        """A version has come whole, and these modules were written where they live, some of them named twice."""
        self.owners = tuple(dict.fromkeys(owners))

    def of(self, boxes: Sequence[Box], modules: Mapping[str, torch.nn.Module]) -> list[np.ndarray | None]:
        """Where each box of a version belongs, None where that is not known."""
        moved = any(_address(modules, parameter) != address for parameter, address in self._addresses.items())
        return [None if moved else self._place(box) for box in boxes]

    def _place(self, box: Box) -> np.ndarray | None:
        words, place = self._places.get(id(box.words), (lambda: None, None))
        return place if words() is box.words else None


def _address(modules: Mapping[str, torch.nn.Module], parameter: str) -> int:
    owner, _, name = parameter.rpartition(".")
    live: torch.Tensor = getattr(modules[owner], name)
    return live.data_ptr() if live.numel() else 0
