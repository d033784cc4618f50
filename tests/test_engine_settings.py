"""What the engine sets in megatron-core's optimizer."""

from types import SimpleNamespace

import torch
from torch.testing import assert_close

from megarl.engine.settings import fuse


def test_torch_s_adam_passes_once_over_its_weights():
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 40)) for _ in range(2)]
    plain, fused = (torch.optim.AdamW([weight], lr=0.1, weight_decay=0.3) for weight in weights)
    fuse(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=fused), SimpleNamespace(optimizer=None)]))
    assert [(group["fused"], group["foreach"]) for group in fused.param_groups] == [(True, False)]
    for step in range(1, 4):
        for weight, optimizer in zip(weights, (plain, fused), strict=True):
            weight.grad = torch.sin(step * weight.detach())
            optimizer.step()
    assert_close(*weights)
