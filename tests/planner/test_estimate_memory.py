"""The memory model against torch's allocator, and laws that its numbers keep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.models.megatron_weights import padded_vocab, rank_boxes
from megarl.planner import activations
from megarl.planner.memory_estimate import (
    FRAGMENTATION,
    BatchLimits,
    DeviceMemory,
    Load,
    largest_cap,
    micro_batches_held,
    peak,
    resident,
    working,
)
from megarl.planner.roles import PlannedRole, stage_weights
from megarl.recipe.device_section import DeviceSection
from megarl.recipe.role_sections import FreezeSection, MemorySection
from megarl.schedule.phase_plan import most_rows_behind_prompts
from megarl.schedule.schedule import Schedule, in_micro_batch
from tests.memory_cases import CASES, HEADS, MODELS, Case, measure
from tests.planner_cases import planned_role

ROOT = Path(__file__).resolve().parents[2]
# The model's target is 10 % (benchmarks/memory.py); here it is within 2 %, and most terms, lost, make more than 3 %.
TOLERANCE = 0.03
# Experts of random weights do not share their tokens equally, as the model takes them to.
UNBALANCED = 0.1
TRIES = 4
# In CI, too: of a large vocabulary in bf16, which most CPUs emulate, the one that has a role on the host.
LARGE = ("vocabulary", "qwen2-tied")
OFTEN = [*(case for case in CASES[::3] if case.precision != "bf16" or case.model not in LARGE), CASES[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [
    pytest.param(OFTEN, id="often"),
    pytest.param([case for case in CASES if case not in OFTEN], id="the others", marks=pytest.mark.nightly),
])  # fmt: skip
def test_peaks_are_those_of_the_allocator(tmp_path: Path, cases: Sequence[Case]) -> None:
    # On a busy machine gloo's threads free their copies late, which adds to a peak and never takes from it: what is wrong is
    # measured again.
    wrong = deviations(cases, measure(cases, tmp_path / "0"))
    for number in range(1, TRIES):
        if wrong:
            again = [case for case in cases if case.name in wrong]
            wrong = deviations(again, measure(again, tmp_path / str(number)))
    assert not wrong, f"predicted over measured: {wrong}"


def deviations(cases: Sequence[Case], measured: dict[str, list[int]]) -> dict[str, float]:
    """Predicted over measured where that is off."""
    ratios = {case.name: case.predicted().total / max(measured[case.name]) for case in cases}
    tolerances = {case.name: UNBALANCED if case.model == "experts" else TOLERANCE for case in cases}
    return {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > tolerances[name]}


SHAPE = ModelShape.from_config({**MODELS["qwen3"], **HEADS})


def load(update: bool, slots: int, copied_rows: int = 0, head_tokens: int = 700) -> Load:
    return Load(update, slots, head_tokens, 300, 8, copied_rows)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    groups = draw(st.sampled_from([4, 8]))
    config = {
        "model_type": draw(st.sampled_from(["llama", "qwen2", "qwen3"])), "num_hidden_layers": draw(st.sampled_from([4, 8])),
        "hidden_size": draw(st.sampled_from([64, 256])), "intermediate_size": draw(st.sampled_from([96, 512])),
        "num_attention_heads": groups * draw(st.sampled_from([1, 3])), "num_key_value_heads": groups,
        "head_dim": draw(st.sampled_from([8, 32])), "vocab_size": draw(st.integers(50, 5000)),
        "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    return ModelShape.from_config(config)


@st.composite
def roles(draw: st.DrawFn, trained: bool = True) -> PlannedRole:
    tensor = draw(st.sampled_from([1, 2, 4]))
    layout = Layout(
        tensor,
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 3])),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
    )
    name = draw(st.sampled_from(["actor", "critic"]))
    return planned_role(
        name, draw(shapes()), layout, draw(st.sampled_from(["fp32", "bf16"])), trained, entropy_bonus=draw(st.booleans())
    )


@given(roles(), st.data())
def test_weights_are_those_a_rank_loads(role: PlannedRole, data: st.DataObject) -> None:
    layout = role.layout
    stage = data.draw(st.integers(0, layout.pipeline - 1))
    tensor_rank = data.draw(st.integers(0, layout.tensor - 1))
    loaded = sum(
        (box.row1 - box.row0) * (box.col1 - box.col0)
        for box in rank_boxes(role.shape, layout, layout.rank(tensor_rank, stage), critic=role.has_value_head)
    )
    rows = padded_vocab(role.shape, layout.tensor) // layout.tensor
    padding = rows - min(max(role.shape.vocab - tensor_rank * rows, 0), rows)
    last = stage == layout.pipeline - 1
    own_head = last and not role.has_value_head and (not role.shape.tied or layout.pipeline > 1)
    tables = (stage == 0) + own_head
    value_head = role.shape.hidden if last and role.has_value_head else 0
    assert stage_weights(role, stage) == loaded + tables * padding * role.shape.hidden + value_head


@given(roles())
def test_more_data_ranks_share_the_optimizer_and_nothing_else(role: PlannedRole) -> None:
    alone, shared = (replace(role, layout=replace(role.layout, data=data)) for data in (1, 3))
    whole, third = resident(alone, 0), resident(shared, 0)
    assert (third.weights, third.gradients) == (whole.weights, whole.gradients)
    assert 0 <= 3 * third.optimizer - whole.optimizer < 3 * 12
    assert resident(replace(role, trained=False), 0) == DeviceMemory(weights=whole.weights)


@given(roles(), st.booleans(), st.integers(1, 5000), st.integers(1, 5000))
def test_the_peak_rises_with_slots_and_layers(role: PlannedRole, update: bool, slots: int, more: int) -> None:
    def total(of: PlannedRole, tokens: int) -> int:
        return peak([of], of, load(update, tokens, head_tokens=tokens)).total

    deeper = replace(role, shape=replace(role.shape, num_layers=2 * role.shape.num_layers))
    assert total(role, slots) < total(role, slots + more)
    assert total(role, slots) < total(deeper, slots)


@given(roles(), st.integers(10, 400), st.integers(1, 30), st.booleans(), st.floats(0.5, 3.0))
def test_the_largest_cap_fits_and_the_next_does_not(
    role: PlannedRole, longest: int, count: int, update: bool, share: float
) -> None:
    def total(cap: int, copied_rows: int = 0) -> int:
        held = max(2, role.layout.pipeline)
        return peak([role], role, Load(update, cap, cap, longest, held, copied_rows)).total

    lowest = in_micro_batch(longest, role.layout)
    budget = int(total(lowest) * share)
    schedule = Schedule("actor_update", max_tokens=1, mini_batch=count if update else None)
    limits = BatchLimits(count, 4, longest // 2, longest - longest // 2)
    cap = largest_cap([role], role, schedule, limits, budget)
    if cap is None:
        assert total(lowest) > budget
        return
    assert lowest <= cap <= lowest * count
    assert total(cap) <= budget
    step = role.layout.micro_batch_multiple
    assert cap % step == 0
    assert cap == lowest * count or total(cap + step) > budget
    shared = largest_cap([role], role, replace(schedule, share_prompts=True), limits, budget)
    assert shared is None or total(shared, most_rows_behind_prompts(shared, count, longest, 4, longest // 2)) <= budget


def test_a_stage_holds_one_micro_batch_for_itself_and_every_later_stage() -> None:
    role = planned_role("actor", SHAPE, Layout(1, 4, 1), "bf16", True)
    assert [micro_batches_held(role, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [micro_batches_held(role, stage, 2) for stage in range(4)] == [2, 2, 2, 1]


def test_activations_that_come_back_early_are_counted_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as they may take, and never more than there are."""
    role = planned_role("critic", SHAPE, Layout(), "bf16", True, memory=MemorySection(offload_activations=True))

    def activation_bytes(on_cpu: bool, early: int) -> int:
        monkeypatch.setattr(activations, "PREFETCH_BYTES", early)
        return working(replace(role, on_cpu=on_cpu), 0, load(True, 1000)).activations

    host = peak([role], role, load(True, 1000)).host
    assert (
        activation_bytes(False, 5000) - activation_bytes(False, 0) == 5000
        and activation_bytes(False, 1 << 40) - activation_bytes(False, 0) == host > 5000
    )
    assert activation_bytes(True, 5000) == activation_bytes(True, 0)


def test_only_gloo_copies_the_gradients_to_reduce_them() -> None:
    """An update of few tokens: what is largest then is the copy, of 4 bytes a weight, where there is one."""
    role = planned_role("critic", SHAPE, Layout(), "fp32", True, freeze=FreezeSection(embedding=True))
    held = {cpu: working(replace(role, on_cpu=cpu), 0, load(True, 8)) for cpu in (True, False)}
    assert held[True].gradients == resident(role, 0).gradients and held[False].gradients == 0


@pytest.mark.parametrize("update", [True, False])
def test_a_gpu_s_allocator_keeps_a_share_of_what_comes_and_goes(update: bool) -> None:
    role = planned_role("critic", SHAPE, Layout(), "bf16", True)
    held = working(role, 0, load(update, 1000))
    assert held.reserved == pytest.approx(FRAGMENTATION * held.total, abs=1)
    assert working(replace(role, on_cpu=True), 0, load(False, 1000)).reserved == 0


def test_the_fullest_rank_is_found_across_layouts() -> None:
    actor = planned_role("actor", SHAPE, Layout(2, 2, 1), "bf16", True)
    critic = planned_role("critic", SHAPE, Layout(1, 2, 2), "bf16", True)
    reference = planned_role("reference", SHAPE, Layout(1, 1, 4), "bf16", False)
    fullest = peak([actor, critic, reference], critic, load(True, 500))
    by_rank = []
    for rank in range(4):
        total = working(critic, critic.layout.coordinates(rank)[1], load(True, 500)).total
        for role in (actor, critic, reference):
            total += resident(role, role.layout.coordinates(rank)[1]).total
        by_rank.append(total)
    assert fullest.total == max(by_rank) > min(by_rank)


@pytest.mark.parametrize("kind", ["update", "logprob"])
def test_estimate_of_fused_layers_is_what_a_gpu_reserved(kind):
    """The dense model of `benchmarks/gpu.py`, as its last recorded run measured it on an H100."""
    recorded = json.loads((ROOT / "benchmarks" / "measured" / "gpu.json").read_text())
    measured = recorded["parts"]["dense"]["values"][kind]["reserved_bytes"]
    shape = ModelShape.from_config(recorded["config"]["dense"])
    lengths = [tuple(pair) for pair in recorded["config"]["lengths"]]
    role = planned_role("actor", shape, Layout(), "bf16", trained=True)
    tokens, completions = (sum(column) for column in zip(*((sum(pair), pair[1]) for pair in lengths[:4]), strict=True))
    load = Load(kind == "update", tokens, completions, max(map(sum, lengths)), num_micro_batches=len(lengths) // 4)
    assert peak([role], role, load).total == pytest.approx(measured, rel=0.1)


def test_layers_without_transformer_engine_keep_more():
    recorded = json.loads((ROOT / "benchmarks" / "measured" / "gpu.json").read_text())
    shape = ModelShape.from_config(recorded["config"]["dense"])
    fused = planned_role("actor", shape, Layout(), "bf16", trained=True)
    unfused = replace(fused, device=DeviceSection(memory_gib=80, transformer_engine=False))
    on_cpu = replace(fused, on_cpu=True)
    assert activations.saved_per_token(unfused, 0) == activations.saved_per_token(on_cpu, 0)
    assert 1.6 < activations.saved_per_token(unfused, 0) / activations.saved_per_token(fused, 0) < 1.8
