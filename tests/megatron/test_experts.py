"""Experts cut over ranks: their groups and their routing. What every layout computes is compared in the layout matrix, and
checkpoints that move between cuts are in `test_checkpoint.py`."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.models.layout import Layout
from tests.engine_cases import start_places
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.layout
CUTS = [
    Layout(data=4, expert=2),
    Layout(tensor=2, data=2, expert=2, sequence_parallel=True),
    Layout(tensor=2, data=2, expert=2, expert_tensor=1, sequence_parallel=True),
    Layout(pipeline=2, data=2, expert_tensor=2),
    Layout(context=2, data=2, expert=4),
]


def _expert_ranks():
    """What megatron-core and the layout say of this rank, for each cut."""
    from megatron.core import parallel_state

    results = []
    for layout, place in start_places(CUTS).items():
        with place.active():
            theirs = (
                parallel_state.get_expert_tensor_parallel_rank(),
                parallel_state.get_expert_model_parallel_rank(),
                parallel_state.get_expert_data_parallel_rank(),
            )
            holders = dist.get_process_group_ranks(parallel_state.get_expert_data_parallel_group())
        results.append((theirs, layout.expert_coordinates(place.rank), holders))
    return results


def test_the_layout_and_megatron_agree_on_who_holds_which_experts():
    for rank, results in enumerate(run_ranks(_expert_ranks, 4)):
        for layout, (theirs, ours, holders) in zip(CUTS, results, strict=True):
            assert theirs == ours, (layout, rank)
            assert len(holders) == layout.expert_data, (layout, rank)
            parts = {layout.expert_coordinates(other)[:2] for other in holders}
            assert parts == {ours[:2]}, (layout, rank)


@pytest.mark.parametrize("normalise", [True, False])
def test_chosen_experts_have_the_weights_that_the_model_gives_them(tmp_path, normalise):
    """Probabilities are those of all experts, normalised over the chosen ones where the model's config says so."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    from megarl.megatron.model import transformer_config

    shape = ModelShape.from_directory(save_tiny_model(tmp_path, "qwen3_moe"))
    assert shape.experts is not None
    settings = replace(shape.experts, normalise=normalise)
    shape = replace(shape, experts=settings)
    config = transformer_config(shape, Layout(), "fp32")
    logits = torch.randn(50, settings.count, generator=torch.Generator().manual_seed(0)) * 3
    probabilities, chosen = topk_routing_with_score_function(
        logits,
        config.moe_router_topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=config.moe_router_score_function,
    )
    weights, experts = logits.softmax(-1).topk(settings.per_token)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(probabilities, torch.zeros_like(logits).scatter(1, experts, weights))
    assert (chosen.sum(1) == settings.per_token).all()
