"""How plans are measured, what they reach, and what no plan could."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.planner.flops import sequence_cost
from megarl.planner.lengths import DISTRIBUTIONS, draw
from megarl.schedule import Cost, MicroBatch, MiniBatch, Plan, Schedule, bubble_share, plan_phase, quality
from megarl.schedule.cost import run_times
from tests.cluster_cases import MODELS
from tests.planner_cases import QWEN_7B


def test_a_worked_example_is_measured_right() -> None:
    """Two ranks, three sequences; 2 stages; costs 10, 20 and 40 + 1 a micro-batch; the layout pads to multiples of 4."""
    layout = Layout(tensor=4, pipeline=2, data=2, sequence_parallel=True)
    ranks = ((MicroBatch((0,), 10, 12), MicroBatch((1,), 20, 20)), (MicroBatch((2,), 40, 40), MicroBatch((3,), 6, 8)))
    plan = Plan("actor_update", (MiniBatch(0, (0, 1, 2, 3), ranks),), layout)
    metrics = quality(plan, [10, 20, 40, 6], Cost(0.0, 1.0))
    assert (metrics.num_micro_batches, metrics.tokens, metrics.slots, metrics.max_slots) == (2, 76, 80, 40)
    assert metrics.useful_share == pytest.approx(76 / 80)
    assert metrics.imbalance == pytest.approx(46 / 38)
    # Rank 0: 30 + 2 + (20 + 1) = 53, rank 1: 46 + 2 + (40 + 1) = 89.
    assert metrics.bubble_share == pytest.approx((21 + 41) / (53 + 89))
    assert metrics.efficiency == pytest.approx(76 / (2 * 89))


def test_mini_batches_wait_for_their_own_slowest_rank() -> None:
    layout = Layout(data=2)
    uneven = [
        MiniBatch(0, (0, 1), ((MicroBatch((a,), a + 1, a + 1),), (MicroBatch((1 - a,), 2 - a, 2 - a),))) for a in (0, 1)
    ]
    metrics = quality(Plan("x", tuple(uneven), layout), [1, 2], Cost(0.0, 0.0))
    assert metrics.imbalance == pytest.approx(4 / 3) and metrics.efficiency == pytest.approx(6 / (2 * 4))


def test_the_cost_of_windows_and_of_latent_attention_is_counted_pair_by_pair() -> None:
    """Gemma 3 sees 512 tokens in five of six layers; DeepSeek-V3's heads have 192 dimensions of keys and 128 of values."""
    gemma = ModelShape.from_config(QWEN_7B | {
        "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 512, "sliding_window_pattern": 6,
        "head_dim": 128, "query_pre_attn_scalar": 128,
    })  # fmt: skip
    weights = 3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944
    met = sum(5 * min(place, 512) + place for place in range(1, 4097)) / 6
    assert sequence_cost(gemma).sequence(4096) == pytest.approx(4096 + 2 * 28 * 2 * 128 * met / (2 * weights))
    deepseek = ModelShape.from_config(MODELS["unsloth/DeepSeek-V3-bf16"])
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    weights = 61 * attention + 3 * 3 * 7168 * 18432 + 58 * 7168 * (256 + 3 * 9 * 2048)
    met = 4096 * 4097 // 2
    assert sequence_cost(deepseek).sequence(4096) == pytest.approx(4096 + 61 * 2 * 128 * (192 + 128) * met / (2 * weights))


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_ranks_that_share_experts_are_even_under_a_pipeline_too(kind: str) -> None:
    layout, cost = Layout(pipeline=8, data=4, expert=4), Cost(1.5e-5)
    lengths, cap = batch(kind, 64, layout)
    measured = quality(plan_phase(Schedule("actor_update", max_tokens=cap), lengths, layout, 0, cost), lengths, cost)
    assert measured.imbalance <= 1.01


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_alike_micro_batches_idle_by_the_known_formula(stages: int, chunks: int) -> None:
    layout = Layout(pipeline=stages, virtual_pipeline=chunks)
    time, bubble = run_times([5.0] * 8, layout, Cost(0.0, 0.0))
    assert bubble / time == pytest.approx(bubble_share(8, stages, chunks))
    assert bubble_share(8, stages, chunks) == pytest.approx((stages - 1) / (chunks * 8 + stages - 1))


def batch(kind: str, per_rank: int, layout: Layout, longest: int = 8192) -> tuple[list[int], int]:
    """(lengths, a cap of four times their mean that holds the longest)."""
    lengths = draw(kind, per_rank * layout.data, longest, seed=5)
    return lengths, max(longest, -(-4 * sum(lengths) // len(lengths)))


@pytest.mark.parametrize("data", [8, 64])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("per_rank", [8, 64])
def test_plans_reach_their_targets(kind: str, data: int, per_rank: int) -> None:
    """Padding under 2 %, micro-batches within one of the fewest, ranks within 1 % (8 a rank: 3 % of the longest's bound)."""
    layout, cost = Layout(tensor=2, data=data, sequence_parallel=True), Cost(1.5e-5)
    lengths, cap = batch(kind, per_rank, layout)
    metrics = quality(plan_phase(Schedule("critic_value", max_tokens=cap), lengths, layout, 0, cost), lengths, cost)
    costs = [cost.sequence(length) for length in lengths]
    least_imbalance = max(1.0, max(costs) * data / sum(costs))
    assert metrics.useful_share >= 0.98
    assert metrics.num_micro_batches <= -(-sum(lengths) // (cap * data)) + 1
    assert metrics.imbalance <= least_imbalance * (1.01 if per_rank == 64 else 1.03)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("stages", [4, 8])
def test_a_plan_for_a_pipeline_idles_less_than_one_that_only_fills_the_cap(kind: str, stages: int) -> None:
    layout, cost = Layout(pipeline=stages, data=8), Cost(1.5e-5)
    lengths, cap = batch(kind, 64, layout)
    schedule = Schedule("actor_update", max_tokens=cap)
    plan = plan_phase(schedule, lengths, layout, 0, cost)
    filled = replace(plan_phase(schedule, lengths, replace(layout, pipeline=1), 0, cost), layout=layout)
    assert quality(plan, lengths, cost).efficiency > 1.05 * quality(filled, lengths, cost).efficiency


def test_micro_batches_run_costliest_first() -> None:
    """A shortage of memory then shows at once."""
    generator = random.Random(2)
    lengths = [generator.randint(1, 900) for _ in range(96)]
    schedule = Schedule("actor_update", max_tokens=1800, mini_batch=96)
    plan = plan_phase(schedule, lengths, Layout(pipeline=4, data=2), 0, Cost(1e-4))
    for rank in plan.mini_batches[0].micro_batches:
        costs = [sum(Cost(1e-4).sequence(lengths[sample]) for sample in micro_batch.samples) for micro_batch in rank]
        assert costs == sorted(costs, reverse=True)
