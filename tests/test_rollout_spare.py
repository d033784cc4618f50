"""Memory that is lent to one module after the other."""

from __future__ import annotations

import torch

from megarl.rollout.spare import SpareMemory

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
