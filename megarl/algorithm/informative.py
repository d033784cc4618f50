"""Which groups teach something: those whose rewards differ; `algorithm.dynamic_sampling` replaces the others."""

from __future__ import annotations

import torch
from torch import Tensor


def informative_groups(rewards: Tensor, counted: Tensor) -> Tensor:
    """Whether two members of a group that count have unlike rewards; else each advantage of the group is 0.

    rewards [groups, members], counted [groups, members] bool; returns [groups] bool. A reward that does not count is never
    read, so it may be NaN.
    Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2 and the condition of equation 11, for any reward: theirs is
    right or wrong, and leaves out groups that are all right and groups that are all wrong.
    """
    lowest = torch.where(counted, rewards, torch.inf).amin(dim=1)
    highest = torch.where(counted, rewards, -torch.inf).amax(dim=1)
    return highest > lowest


def choose_groups(informative: Tensor, wanted: int) -> list[int]:
    """The first `wanted` informative groups; where there are fewer, the first of the others fill up. In their order.

    informative [groups] bool, of `wanted` groups at least.
    """
    with_signal = torch.nonzero(informative).flatten().tolist()[:wanted]
    without = torch.nonzero(~informative).flatten().tolist()[: wanted - len(with_signal)]
    return sorted(with_signal + without)
