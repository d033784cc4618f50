"""Memory that is lent to one module after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.rollout.spare import SpareMemory
from megarl.sync.read import Box

CPU = torch.device("cpu")


def test_the_next_module_gets_the_same_memory_and_two_parameters_of_one_never_do() -> None:
    spare = SpareMemory()
    first, second = spare.take((4, 8), torch.float32, CPU), spare.take((2, 8), torch.bfloat16, CPU)
    places = first.data_ptr(), second.data_ptr()
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    del first, second
    spare.take_back()
    again = spare.take((2, 2, 4), torch.bfloat16, CPU)
    assert again.shape == (2, 2, 4) and again.dtype == torch.bfloat16 and again.data_ptr() == places[0]


def test_memory_that_somebody_kept_is_not_lent_again() -> None:
    """vLLM computes with the weights as they are where it has no kernel that packs them."""
    spare = SpareMemory()
    kept = torch.nn.Parameter(spare.take((4, 8), torch.float32, CPU).fill_(1), requires_grad=False)
    spare.take_back()
    spare.take((4, 8), torch.float32, CPU).fill_(2)
    assert (kept == 1).all()


def test_a_larger_parameter_gets_larger_memory() -> None:
    spare = SpareMemory()
    spare.take((4, 8), torch.float32, CPU)
    spare.take_back()
    assert spare.take((400, 8), torch.float32, CPU).fill_(3).sum() == 9600


def test_a_worker_writes_one_module_after_the_other_into_the_same_memory() -> None:
    """With a module that packs its weight and drops it, as vLLM's linear layers do on CPUs that have a kernel for it."""
    pytest.importorskip("vllm", reason="needs vLLM's base class of receivers")
    from megarl.rollout.receiver import WeightReceiver

    places, packed = [], []

    class Packing:
        def process_weights_after_loading(self, module: Any) -> None:
            places.append(module.weight.data_ptr())
            packed.append(module.weight.clone())
            module.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    names = [f"layers.{number}.linear" for number in range(3)]
    modules = {}
    for name in names:
        modules[name] = module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        setattr(module, "quant_method", Packing())  # noqa: B010
    receiver: Any = WeightReceiver.__new__(WeightReceiver)
    receiver._modules, receiver._spare, receiver._repack_s = modules, SpareMemory(), 0.0
    receiver._sizes = {f"{name}.weight": (4, 8) for name in names}
    receiver._shape, receiver.model, receiver.device = SimpleNamespace(tied=False), torch.nn.Module(), CPU
    # The last one has a row of padding, which is zero although the memory was written before.
    covered = dict(zip(receiver._sizes, (32, 32, 24), strict=True))
    receiver._reader = SimpleNamespace(elements=covered.__getitem__)
    contents = [torch.full((covered[f"{name}.weight"] // 8, 8), float(number + 1)) for number, name in enumerate(names)]
    boxes = (Box(f"{name}.weight", 0, 0, content) for name, content in zip(names, contents, strict=True))
    receiver._load(boxes, torch.float32)
    assert len(set(places)) == 1
    assert [one.sum().item() for one in packed] == [32.0, 64.0, 72.0] and (packed[2][3] == 0).all()
