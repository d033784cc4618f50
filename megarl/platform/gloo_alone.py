"""Gathers and scatters of a buffer in a group of one rank, without gloo.

megatron-core's distributed optimizer gathers parameters and scatters gradients whatever the size of the group: of one rank
its part is the whole buffer, and nothing has to move. gloo copies it onto itself in a thread of its own, with a team of
OpenMP threads of its own. libgomp counts these too; once it manages more threads than there are cores it lets none wait in a
loop, and every small product pays for the kernel to wake the others (torch 2.13; two threads on two cores: passes are 1.1
to 1.3 times slower). Ranks of a larger group whose gathers gloo copies still pay it, where they have several threads.

The functions stand in for those of the same name in `megatron.core.distributed.param_and_grad_buffer`, which binds the
second one anew under `reduce_scatter_with_fp32_accumulation`; megarl never sets that.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor


def install(buffers: ModuleType) -> None:
    """Replace the module's gather and reduce-scatter by ones that do nothing in a group of one."""
    buffers.dist_all_gather_func = _unless_alone(buffers.dist_all_gather_func)  # type: ignore[attr-defined]
    buffers.dist_reduce_scatter_func = _unless_alone(buffers.dist_reduce_scatter_func)  # type: ignore[attr-defined]


def _unless_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    def collective(output: Tensor, own: Tensor, *more: Any, group: Any, **named: Any) -> Any:
        if group.size() > 1:
            return function(output, own, *more, group=group, **named)
        if output.data_ptr() != own.data_ptr():
            output.copy_(own)
        return None  # nothing to wait for

    return collective
