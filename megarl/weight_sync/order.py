"""In which order a worker receives: the layers of its forward pass, each reader beginning with another one.

If all began with the first layer, every reader would ask the ranks of the trainer's first pipeline stage at the same time
and the other stages would have nothing to send. Readers that begin at even distances ask all stages all the time.

Where adapters are merged into weights as these are sent, all begin with the first layer nevertheless: else a rank would be
in the middle of as many layers as there are readers, with merged weights of each, and would merge each once a reader.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import gcd

import numpy as np

from megarl.weight_sync.plan import ReshardPlan

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def copy_order(plan: ReshardPlan, worker: int, reader: int = 0, readers: int = 1) -> np.ndarray:
    """Positions in the plan of the copies to one worker, in the order in which they travel, int64 [copies].

    Of `readers` that take weights at the same time (workers of all engines; workers that share one copy of a node are one)
    this is the `reader`-th, from 0: it begins with the layer in which the first `start_share` of its elements ends, and goes
    round. Layers stay whole and in their order, so a layer is complete before the next one comes.
    """
    copies = plan.to_destination(worker)
    if len(copies) == 0:
        return copies
    starts = layer_starts(plan, copies)
    sizes = plan.sizes[copies]
    before = (np.cumsum(sizes) - sizes)[starts]
    # In whole numbers, which both ends round alike.
    share = start_share(reader, readers)
    first = starts[np.searchsorted(before * share.denominator, int(sizes.sum()) * share.numerator, "right") - 1]
    return np.concatenate([copies[first:], copies[:first]])


def start_share(reader: int, readers: int) -> Fraction:
    """Where a reader begins, as a share of all it receives: each at another multiple of 1 / readers, the first at 0.

    The next reader begins the golden section of a round further on. So readers whose numbers follow each other, or lie a
    fixed distance apart, are spread as evenly as all of them: they are often those that ask the same ranks.
    """
    assert 0 <= reader < readers, f"reader {reader} of {readers}"
    golden = (5**0.5 - 1) / 2
    step = min((step for step in range(1, readers + 1) if gcd(step, readers) == 1), key=lambda s: abs(s - golden * readers))
    return Fraction(reader * step % readers, readers)


def layer_numbers(plan: ReshardPlan, copies: np.ndarray) -> np.ndarray:
    """By position in `copies`, which stand in the order of the forward pass, the number of the layer, int64 [copies]; what
    stands before all layers has -1, and what stands behind them the number of the last one."""
    found = (_LAYER.match(parameter) for parameter in plan.destination_parameters)
    numbers = np.array([int(match.group(1)) if match else -1 for match in found], dtype=np.int64)
    return np.maximum.accumulate(numbers[plan.destination_parameter[copies]])


def layer_starts(plan: ReshardPlan, copies: np.ndarray) -> np.ndarray:
    """Where in `copies` each layer begins; embedding, and final norm with head, count as layers."""
    numbers: dict[str, int] = {}
    found = (_LAYER.match(parameter) for parameter in plan.destination_parameters)
    layers = np.array([numbers.setdefault(match.group() if match else "", len(numbers)) for match in found])
    layer = layers[plan.destination_parameter[copies]]
    return np.concatenate([[0], np.flatnonzero(np.diff(layer)) + 1])
