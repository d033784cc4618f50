"""Routers that send tokens where the rollout engine sent them.

A token near the border between two experts may go to one in the engine and to the other in the trainer, and its
log-probability then jumps. Here the choice is the engine's; what each chosen expert counts for is still computed from the
trainer's scores, and its gradient reaches the router.

A router asks the object in its `router_replay` for the chosen experts. megatron-core's own (0.16 and 0.19) keeps all routers
of a process in one list, whatever their role, and must be told whether a pass is a forward pass or recomputation. Here each
router keeps what it replayed without gradients until recomputation asks again: the backward passes of a chunk come in the
order of its forward passes, under every pipeline schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.megatron.batch import PADDING
from megarl.megatron.parallel import Place
from megarl.models import ModelShape
from megarl.platform import current as platform

from megatron.core.transformer.moe.router import TopKRouter  # isort: skip

TopK = Callable[..., tuple[Tensor, Tensor]]


class _Router:
    """What one router chooses by. `column` is its layer's number among those with experts; `counts` are fp64 sums that all
    routers of the role share: tokens, tokens replayed, and of these the ones that the router would have sent elsewhere."""

    def __init__(self, column: int, counts: Tensor) -> None:
        self.column, self.counts = column, counts
        self.expected: Tensor | None = None  # [rows, experts a token], for the next forward pass
        self.again: deque[Tensor] = deque()  # of micro-batches whose layer will be recomputed

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the chosen experts; the name and the arguments are megatron-core's."""
        # scores [rows, experts] -> [rows, experts a token], twice
        assert default_compute_topk is not None
        if self.expected is None and not self.again:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        with torch.no_grad():
            _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recorded = self._take(own)
        chosen = torch.where(recorded >= 0, recorded, own)
        return scores.gather(1, chosen), chosen

    def expect(self, routing: Tensor, recomputed: bool) -> None:
        """Replay `routing` [rows, experts a token] in the next forward pass, which takes gradients if `recomputed`."""
        self.expected, self.recomputed = routing, recomputed

    def _take(self, own: Tensor) -> Tensor:
        """What this pass replays. A training pass without gradients is one whose layer runs again in the backward pass."""
        if self.expected is None:
            return self.again.popleft()
        recorded, self.expected = self.expected.long(), None
        if self.recomputed and not torch.is_grad_enabled():
            self.again.append(recorded)
        assert recorded.shape == own.shape, f"routing {tuple(recorded.shape)}, router {tuple(own.shape)}"
        first = recorded[:, 0]
        other = (recorded.sort(1).values != own.sort(1).values).any(1) & (first >= 0)
        self.counts += torch.stack([(first != PADDING).sum(), (first >= 0).sum(), other.sum()])
        return recorded


class RouterReplay:
    """The routers of a role's stage. `models` are its chunks.

    Memory: a micro-batch's choices, 8 bytes a token, layer and chosen expert until its pass is over (until its backward pass
    under recomputation); activations are thousands of bytes a token and layer.
    """

    def __init__(self, models: Sequence[nn.Module], shape: ModelShape, place: Place) -> None:
        assert shape.experts is not None, "the recipe's rules refuse it for a model without experts"
        layers = [layer for layer in range(shape.num_layers) if shape.has_experts(layer)]
        # Layers with experts, and experts a token: how `pack` lays the choices out.
        self.choices = (len(layers), shape.experts.per_token)
        self._place = place
        self._counts = torch.zeros(3, dtype=torch.float64, device=place.device)
        self._chunks: list[list[_Router]] = []
        for model in models:
            self._chunks.append([])
            for module in model.modules():
                if isinstance(module, TopKRouter):
                    router = _Router(layers.index(module.layer_number - 1), self._counts)
                    module.router_replay = router  # type: ignore[assignment]
                    self._chunks[-1].append(router)

    def expect(self, chunk: int, routing: Tensor) -> None:
        """Replay a micro-batch's `routing` [own slots, layers with experts, experts a token] in the chunk's next pass."""
        layout = self._place.layout
        if layout.sequence_parallel:  # a router sees this tensor rank's slots alone
            routing = routing.chunk(layout.tensor)[self._place.tensor_rank]
        training, routers = torch.is_grad_enabled(), self._chunks[chunk]
        # One transfer for all layers of the chunk: [layers, own slots, experts a token].
        columns = routing[:, [router.column for router in routers]].transpose(0, 1).contiguous()
        (placed,) = platform.upload([columns.numpy()], self._place.device)
        for router, chosen in zip(routers, placed, strict=True):
            router.expect(chosen, training)

    def finish(self) -> None:
        """To be called behind a pipeline run: nothing is left for the next one."""
        for router in (router for chunk in self._chunks for router in chunk):
            assert router.expected is None, f"layer {router.column} did not replay its last choices"
            router.again.clear()  # of a layer whose gradient nobody needed

    def take_figures(self) -> dict[str, Any]:
        """Since the last call, over all tokens and layers: the share that was replayed, and of it the share where the
        trainer's router would have chosen other experts. Collective over all ranks."""
        # Tensor ranks without sequence parallelism count the same tokens, each of them as often: shares stay.
        dist.all_reduce(self._counts)
        tokens, replayed, other = self._counts.tolist()
        self._counts.zero_()
        return {
            "actor/router_replay_share": replayed / max(tokens, 1.0),
            "mismatch/routing_share": other / max(replayed, 1.0),
        }
