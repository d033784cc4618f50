"""In which order a worker receives: the layers of its forward pass, each reader beginning with another one.

If all began with the first layer, every reader would ask the ranks of the trainer's first pipeline stage at the same time
and the other stages would have nothing to send. Readers that begin at even distances ask all stages all the time.
"""

from __future__ import annotations

import re

import numpy as np

from megarl.reshard.plan import ReshardPlan

_LAYER = re.compile(r"^model\.layers\.\d+\.")


def copy_order(plan: ReshardPlan, worker: int, reader: int = 0, readers: int = 1) -> np.ndarray:
    """Positions in the plan of the copies to one worker, in the order in which they travel, int64 [copies].

    Of `readers` that take weights at the same time (workers of all engines; workers that share one copy of a node are one)
    this is the `reader`-th, from 0: it begins with the layer in which the first reader / readers of its elements end, and
    goes round. Layers stay whole and in their order, so a layer is complete before the next one comes.
    """
    assert 0 <= reader < readers, f"reader {reader} of {readers}"
    copies = plan.to_destination(worker)
    if len(copies) == 0:
        return copies
    starts = layer_starts(plan, copies)
    sizes = plan.sizes[copies]
    before = (np.cumsum(sizes) - sizes)[starts]
    # In whole numbers, so that both ends round alike.
    first = starts[np.searchsorted(before * readers, int(sizes.sum()) * reader, "right") - 1]
    return np.concatenate([copies[first:], copies[:first]])


def layer_starts(plan: ReshardPlan, copies: np.ndarray) -> np.ndarray:
    """Where in `copies` each layer begins; embedding, and final norm with head, count as layers."""
    numbers: dict[str, int] = {}
    found = (_LAYER.match(parameter) for parameter in plan.destination_parameters)
    layers = np.array([numbers.setdefault(match.group() if match else "", len(numbers)) for match in found])
    layer = layers[plan.destination_parameter[copies]]
    return np.concatenate([[0], np.flatnonzero(np.diff(layer)) + 1])
