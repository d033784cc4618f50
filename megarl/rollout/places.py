"""Where the boxes of a version went in a worker's memory: the same as those of the version before, as a rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from megarl.sync.read import Box


class KnownPlaces:
    """Of boxes that are read in place, and are the same from version to version, where each one goes: for a worker whose
    parameters all live where they are written. Between two copies Python's own work is slow, as a copy takes the cache from
    it; so what was found for one version is used for the next one, as long as no parameter has moved.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[Box, np.ndarray]] = {}  # by identity: the boxes are kept, so that it stays theirs
        self._addresses: dict[tuple[str, str], int] = {}
        self.owners: tuple[str, ...] = ()
        """The modules that were written, in their order."""

    def note(self, box: Box, place: np.ndarray) -> None:
        """The box's words belong there."""
        self._places[id(box)] = box, place

    def keep(self, owners: Iterable[str], modules: Mapping[str, torch.nn.Module], parameters: Iterable[str]) -> None:
        """All boxes of a version are noted; these are its parameters, with the module's name in front."""
        self.owners = tuple(owners)
        places = (name.rpartition(".") for name in parameters)
        self._addresses = {(owner, name): _address(modules, owner, name) for owner, _, name in places}

    def of(self, boxes: Sequence[Box], modules: Mapping[str, torch.nn.Module]) -> list[np.ndarray] | None:
        """Where all boxes of a version belong, None where that is not known."""
        moved = any(_address(modules, owner, name) != address for (owner, name), address in self._addresses.items())
        if moved or any(id(box) not in self._places for box in boxes):
            return None
        return [self._places[id(box)][1] for box in boxes]


def _address(modules: Mapping[str, torch.nn.Module], owner: str, name: str) -> int:
    parameter: torch.Tensor = getattr(modules[owner], name)
    return parameter.data_ptr() if parameter.numel() else 0
