"""Router replay: routers send tokens to the experts that the rollout engine chose.

Otherwise a token near the border between two experts may go to different experts in engine and trainer, and its
log-probability jumps. The experts' weights are still computed from the trainer's scores, so that the router has gradients.

A router asks the object in its `router_replay` for the chosen experts. megatron-core's own object (0.16 and 0.19) keeps the
routers of all roles in one list, and must be told whether a pass is recomputation. Here each router keeps the choices of a
pass without gradients until recomputation asks again: the backward passes of a chunk come in the order of its forward passes
under every pipeline schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

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
    """Chooses the experts of one router. `column` is its layer's number among the layers with experts; `counts` are fp64
    sums that all routers of the role share: tokens, replayed tokens, and replayed tokens that the router would have sent to
    other experts."""

    def __init__(self, column: int, counts: Tensor) -> None:
        self.column, self.counts = column, counts
        self.expected: Tensor | None = None  # [rows, experts a token], for the next forward pass
        self.again: deque[Tensor] = deque()  # choices of micro-batches whose layer will be recomputed

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of the chosen experts; megatron-core calls this."""
        # scores [rows, experts] -> [rows, experts a token], twice
        assert default_compute_topk is not None
        if self.expected is None and not self.again:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        with torch.no_grad():
            _, default = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recorded = self._take(default)
        chosen = torch.where(recorded >= 0, recorded, default)
        return scores.gather(1, chosen), chosen

    def expect(self, routing: Tensor, recomputed: bool) -> None:
        """Replay `routing` [rows, experts a token] in the next forward pass, which takes gradients if `recomputed`."""
        self.expected, self.recomputed = routing, recomputed

    def _take(self, default: Tensor) -> Tensor:
        """Return the choices to replay. A training pass without gradients runs again in the backward pass."""
        if self.expected is None:
            return self.again.popleft()
        recorded, self.expected = self.expected.long(), None
        if self.recomputed and not torch.is_grad_enabled():
            self.again.append(recorded)
        assert recorded.shape == default.shape, f"routing {tuple(recorded.shape)}, router {tuple(default.shape)}"
        first = recorded[:, 0]
        other = (recorded.sort(1).values != default.sort(1).values).any(1) & (first >= 0)
        self.counts += torch.stack([(first != PADDING).sum(), (first >= 0).sum(), other.sum()])
        return recorded


class RouterReplay:
    """The routers of a role's stage, whose chunks are `models`.

    It holds a micro-batch's choices, 8 bytes per token, layer and chosen expert, until the end of its forward pass (or its
    backward pass under recomputation).
    """

    def __init__(self, models: Sequence[nn.Module], shape: ModelShape, place: Place) -> None:
        assert shape.experts is not None, "the recipe refuses router replay for a model without experts"
        layers = [layer for layer in range(shape.num_layers) if shape.has_experts(layer)]
        # Layers with experts, and experts a token, for `pack`.
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
        if layout.sequence_parallel:  # a router sees only this tensor rank's slots
            routing = routing.chunk(layout.tensor)[self._place.tensor_rank]
        training, routers = torch.is_grad_enabled(), self._chunks[chunk]
        # One transfer for all layers of the chunk: [layers, own slots, experts a token].
        columns = routing[:, [router.column for router in routers]].transpose(0, 1).contiguous()
        (placed,) = platform.upload([columns.numpy()], self._place.device)
        for router, chosen in zip(routers, placed, strict=True):
            router.expect(chosen, training)

    def finish(self) -> None:
        """Clear what a pipeline run has left."""
        for router in (router for chunk in self._chunks for router in chunk):
            assert router.expected is None, f"layer {router.column} did not replay its last choices"
            router.again.clear()  # a layer without a gradient was not recomputed

    def take_metrics(self) -> dict[str, float]:
        """Return, over all tokens and layers since the last call, the replayed share, and the share of it where the
        trainer's router would have chosen other experts. Collective over all ranks."""
        # Tensor ranks without sequence parallelism all count the same tokens, which changes no share.
        dist.all_reduce(self._counts)
        tokens, replayed, other = self._counts.tolist()
        self._counts.zero_()
        return {
            "actor/router_replay_share": replayed / max(tokens, 1.0),
            "mismatch/routing_share": other / max(replayed, 1.0),
        }
