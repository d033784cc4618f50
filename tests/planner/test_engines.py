"""What engines and trainer take of a device's memory, worked by hand, since nothing here measures vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.vllm_weights import parameter_sizes
from megarl.planner.engine_memory import PlannedEngines
from megarl.planner.forecast import Forecast, Job, engine_room, on_devices
from megarl.planner.lengths import Lengths
from megarl.planner.memory_estimate import GIB, BatchLimits, DeviceMemory, resident
from megarl.planner.roles import PlannedRole
from megarl.recipe import load_recipe
from megarl.recipe.role_sections import MemorySection
from megarl.recipe.sizes import memory_roles
from tests.models.test_table import shape_of
from tests.planner_cases import QWEN_7B, forecast_of, planned_role, write_qwen

SEPARATE, CPU = "rollout.placement=separate", "device.kind=cpu"
# Hidden 8, 2 heads of 4, 2 groups, feed-forward 16, vocabulary 128, 2 layers, tied: a layer has 4 x 8 x 8 = 256 weights of
# attention, 3 x 8 x 16 = 384 of feed-forward and 2 x 8 of norms, 656; with the embedding, 1,024, and the final norm: 2,344.
TINY = ModelShape.from_config(
    {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": True,
    }
)  # fmt: skip
WEIGHTS = 2344 * 4
# Of an engine: 3 sequences of logits, 3 x 128 x (4 + 4 x 4) = 7,680; 10 prompt tokens, 10 x (32 + 32 + 48) x 4 = 4,480.
WORKING = 7680 + 4480


def engines(placement: str, shared: bool, count: int = 1, utilization: float | None = None) -> PlannedEngines:
    return PlannedEngines(TINY, count, RolloutLayout(), "fp32", 1000, 3, 10, utilization, placement, shared)


def roles(offload: str) -> tuple[PlannedRole, ...]:
    """An actor on two ranks, and a reference: both whole on each of them, the optimizer cut over both."""
    layout = Layout(data=2)
    memory = MemorySection.model_validate({"offload": offload})
    return tuple(
        planned_role(role, TINY, layout, "fp32", trained=role == "actor", memory=memory) for role in ("actor", "reference")
    )


def test_a_worker_needs_its_weights_cache_and_working_memory() -> None:
    assert engines("separate", False).memory == DeviceMemory(weights=WEIGHTS, engine=1000, logits=7680, activations=4480)


ENGINE = WEIGHTS + 1000 + WORKING  # 22,536
TRAINER = {"actor_update": DeviceMemory(weights=60_000)}


@pytest.mark.parametrize(
    ("planned", "offload", "totals", "room"),
    [
        # Of 100,000 bytes 90,000 are usable.
        (engines("colocated", False), "none",
         {"rollout": 4 * WEIGHTS + ENGINE, "actor_update": 60_000, "weight_sync": 4 * WEIGHTS + ENGINE},
         90_000 - 4 * WEIGHTS),
        (engines("colocated", False), "all",
         {"rollout": ENGINE, "actor_update": 60_000, "weight_sync": WEIGHTS + ENGINE}, 90_000 - WEIGHTS),
        (engines("separate", False), "none", {"rollout": ENGINE, "actor_update": 60_000}, 90_000),
        # Two engines and two ranks: one for each, awake all the time, and the trainer's peak is what leaves least room.
        (engines("colocated", True, count=2), "none", {
            "rollout": 4 * WEIGHTS + ENGINE, "actor_update": 60_000 + ENGINE, "weight_sync": 4 * WEIGHTS + ENGINE}, 30_000),
        (engines("separate", True, count=4), "none", {
            "rollout": 4 * WEIGHTS + 2 * ENGINE, "actor_update": 60_000 + 2 * ENGINE,
            "weight_sync": 4 * WEIGHTS + 2 * ENGINE}, 15_000),
    ],
)  # fmt: skip
def test_the_fullest_device_of_each_phase(planned: PlannedEngines, offload: str, totals: dict[str, int], room: int) -> None:
    job = Job(roles(offload), (), Lengths((), (), ""), BatchLimits(1, 1, 1, 1), 1, planned, device_bytes=100_000)
    assert {phase: held.total for phase, held in on_devices(job, TRAINER).items()} == totals
    assert engine_room(job, list(TRAINER.values())) == room


def peaks(predicted: Forecast) -> tuple[int, int]:
    """The trainer's and one worker's, each alone on a device."""
    assert predicted.job.engines is not None
    return max(phase.worst_memory.total for phase in predicted.phases), predicted.job.engines.memory.total


def test_a_recipe_s_placement_says_what_adds_up(tmp_path: Path) -> None:
    """Eight ranks and two engines of four workers: on CPUs a worker for each rank's share."""
    file = write_qwen(tmp_path)
    turns, apart, host = (forecast_of(file, overrides) for overrides in ([], [SEPARATE], [CPU]))
    trainer, worker = peaks(turns)
    at_rest = sum(resident(role, 0, "between").total for role in memory_roles(load_recipe(file)).values())
    assert apart.device_peak == max(trainer, worker) and apart.worst_memory["rollout"].total == worker
    assert turns.device_peak == max(trainer, at_rest + worker)
    assert host.device_peak == sum(peaks(host))
    buckets = 3 * 128 / (80 * 1024)  # of the weight sync, as 16 GPUs are two hosts
    assert (apart.safe_utilization, host.safe_utilization) == (pytest.approx(0.9 - buckets), None)
    assert turns.safe_utilization == pytest.approx(0.9 - at_rest / (80 * GIB))
    replayed = forecast_of(file, [f"rollout.replay={tmp_path}"])
    assert (replayed.job.engine_bytes, replayed.safe_utilization) == (0, None)


EXPERTS = shape_of("deepseek_v3", num_hidden_layers=5, vocab_size=128, moe_intermediate_size=24, n_shared_experts=2)


def engine_memory(
    shape: ModelShape,
    layout: RolloutLayout,
    precision: str,
    cache: int,
    rows: int,
    tokens: int,
    quantization: str | None = None,
) -> DeviceMemory:
    return PlannedEngines(shape, 1, layout, precision, cache, rows, tokens, None, quantization=quantization).memory


def test_a_known_model_weighs_what_its_card_says() -> None:
    assert engine_memory(ModelShape.from_config(QWEN_7B), RolloutLayout(), "bf16", 0, 1, 2048).weights == 2 * 7_615_616_512


@pytest.mark.parametrize("sizes", [(2, 1, 3), (2, 1, 3, True), (1, 1, 4, True), (4, 3), (2, 3, 2, True)])
def test_the_fullest_worker_holds_what_it_receives_and_both_ends_of_a_pipeline(sizes: tuple[Any, ...]) -> None:
    layout = RolloutLayout(*sizes)
    workers = [parameter_sizes(EXPERTS, layout, worker) for worker in range(layout.workers)]
    # A router's bias counts for nothing.
    received = max(sum(rows * columns for name, (rows, columns) in held.items() if "bias" not in name) for held in workers)
    weights = engine_memory(EXPERTS, layout, "fp32", 0, 1, 2048).weights
    ends = (2 * EXPERTS.vocab // layout.tensor + 1) * EXPERTS.hidden
    assert 4 * received <= weights <= 4 * (received + (ends if layout.pipeline > 1 else 0))


# Queries of 2 heads and keys and values of one of 128 are 512 rows, the output 256 columns; feed-forward 384.
BLOCKS = ModelShape.from_config(
    {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 384,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 640, "tie_word_embeddings": True,
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "blocks", "others"),
    [
        # qkv 4 x 2 blocks, output 2 x 2, gate and up 6 x 2, down 2 x 3: 30 a layer. The embedding and seven norms.
        (RolloutLayout(), 3 * (8 + 4 + 12 + 6), 640 * 256 + 7 * 256),
        # Two layers of three in the fullest stage.
        (RolloutLayout(1, 2), 2 * (8 + 4 + 12 + 6), 640 * 256 + 5 * 256),
    ],
)
def test_quantised_weights_take_a_byte_an_element_and_a_scale_a_block(
    layout: RolloutLayout, blocks: int, others: int
) -> None:
    memory = engine_memory(BLOCKS, layout, "bf16", 0, 1, 2048, "fp8")
    assert memory.weights == blocks * (128 * 128 + 4) + 2 * others
    plain = engine_memory(BLOCKS, layout, "bf16", 0, 1, 2048)
    assert plain.weights == 2 * (blocks * 128 * 128 + others)
    assert (plain.activations, plain.logits, plain.engine) == (memory.activations, memory.logits, memory.engine)
