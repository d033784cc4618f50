"""The forecast of a step: each phase from its own plan, memory never under-stated, time from efficiency and rate."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.planner.flops import forward_flops, sequence_cost
from megarl.planner.forecast import Forecast, Job, cap_that_fits, forecast, forecast_phase, job_of, worst_memory
from megarl.planner.lengths import Lengths
from megarl.planner.memory_estimate import GIB, RESERVE
from megarl.recipe import load_recipe
from megarl.schedule import Schedule, plan_phase, quality
from tests.planner_cases import forecast_of, write_qwen, write_small
from tests.recipe_cases import CONFIG


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_small(tmp_path)


def by_phase(found: Forecast) -> dict[str, Any]:
    return {phase.phase: phase for phase in found.phases}


def test_every_engine_phase_that_runs_is_forecast_from_its_own_plan(small: Path) -> None:
    recipe = load_recipe(small)
    job = job_of(recipe, "long-tail", seed=5)
    found = forecast(job)
    assert [phase.phase for phase in found.phases] == [
        "actor_logprob", "reference_logprob", "critic_value", "critic_update", "actor_update"
    ]  # fmt: skip
    for phase in found.phases:
        cost = sequence_cost(phase.role.shape)
        groups = [sample // 2 for sample in range(16)]
        plan = plan_phase(recipe.schedule(phase.phase), job.lengths.totals, phase.role.layout, 5, cost, groups)
        assert phase.quality == quality(plan, job.lengths.totals, cost)
        assert phase.num_mini_batches == len(plan.mini_batches)


def test_a_phase_is_forecast_from_its_own_section_and_layout_alone(small: Path) -> None:
    """verl #1028, #7462: what another phase's section says must not arrive here."""
    before = by_phase(forecast_of(small))
    after = by_phase(forecast_of(small, ["phases.critic_value.micro_batch.max_tokens=128"]))
    assert [name for name in before if before[name] != after[name]] == ["critic_value"]
    moved = by_phase(forecast_of(small, ["critic.layout={tensor: 1, pipeline: 2}"]))
    changed = [name for name in before if before[name].quality != moved[name].quality]
    assert changed == ["critic_value", "critic_update"]


@pytest.mark.parametrize(
    ("overrides", "buckets"),
    [
        ([], 0),
        (["weight_sync.transport=group"], 5),  # two legs: 2 of 1.5 that a rank sends, and 2 that it receives for a worker
        (["rollout.placement=separate"], 3),  # 16 devices are two hosts
        (["rollout.placement=separate", "weight_sync.transport=group", "weight_sync.wire=delta"], 0),
    ],
)
def test_buckets_of_a_weight_sync_are_taken_from_the_device(tmp_path: Path, overrides: list[str], buckets: int) -> None:
    job = job_of(load_recipe(write_qwen(tmp_path), overrides))
    assert job.device_bytes is not None and job.bucket_bytes == buckets * 128 * 2**20
    assert job.usable_bytes == int(job.device_bytes * (1 - RESERVE)) - job.bucket_bytes


def test_operations_count_every_sequence_and_epoch(small: Path) -> None:
    found = by_phase(forecast_of(small))
    twice = by_phase(forecast_of(small, ["phases.actor_update.epochs=2"]))
    job = job_of(load_recipe(small))
    pairs = list(zip(job.lengths.totals, job.lengths.completions, strict=True))
    shape = job.role("actor_update").shape
    once = sum(forward_flops(shape, length, head) for length, head in pairs)
    assert found["reference_logprob"].flops == pytest.approx(once)
    head = 2 * shape.hidden * shape.vocab * sum(job.lengths.completions)  # blocks of logits are made twice
    assert found["actor_update"].flops == pytest.approx(3 * once + head)
    assert twice["actor_update"].flops == pytest.approx(6 * once + 2 * head)
    values = sum(forward_flops(shape, length, head, critic=True) for length, head in pairs)
    assert found["critic_update"].flops == pytest.approx(3 * values) and values < once


def test_time_is_operations_over_what_the_plan_leaves_of_the_rate(small: Path) -> None:
    for phase in forecast(job_of(load_recipe(small), tflops=2.0)).phases:
        assert phase.seconds == pytest.approx(phase.flops / (8 * 2e12 * phase.quality.efficiency))
    stated = ["device={memory_gib: 1, tflops: 4}"]
    slow = job_of(load_recipe(small, stated), tflops=2.0)
    assert (slow.tflops, job_of(load_recipe(small, stated)).tflops, job_of(load_recipe(small)).tflops) == (2.0, 4.0, None)


def test_teachers_run_what_they_judge_and_the_update_their_divergence(small: Path) -> None:
    path = load_recipe(small).model.path
    teachers = [
        f"teachers={{math: {{path: {path}, weight: 3}}, code: {{path: {path}}}}}",
        "phases.teacher_logprob={micro_batch: {max_tokens: 128}}",
    ]
    kinds = {"forward_kl": (4, 2), "jensen_shannon": (5, 3)}  # products of the policy's head and of the teacher's
    sampled = forecast_of(small, [*teachers, "algorithm.distillation={place: advantage}"])
    job, before = sampled.job, by_phase(sampled)
    pairs = list(zip(job.lengths.totals, job.lengths.completions, strict=True))
    shape, tokens = job.role("actor_update").shape, sum(job.lengths.completions)
    shares = {"math": 0.75, "code": 0.25}
    for name, share in shares.items():
        expected = share * sum(forward_flops(shape, *pair) for pair in pairs)
        assert before[f"teacher_logprob.{name}"].flops == pytest.approx(expected)
    for kind, (policy, teacher) in kinds.items():
        whole = f"algorithm.distillation={{divergence: {kind}, over: vocabulary, place: loss}}"
        after = by_phase(forecast_of(small, [*teachers, whole]))
        product = 2 * shape.vocab * tokens * shape.hidden
        more = after["actor_update"].flops - before["actor_update"].flops
        assert more == pytest.approx((policy + teacher) * product)
        expected = shares["math"] * sum(forward_flops(shape, length, 0) for length, _ in pairs)
        assert after["teacher_logprob.math"].flops == pytest.approx(expected)


def test_a_shared_prompt_is_computed_once_in_operations_and_time(small: Path) -> None:
    """Groups of two in one micro-batch each: every second prompt is left out, in full, and of the head nothing is."""
    job = job_of(load_recipe(small), tflops=2.0)
    lengths = Lengths((10,) * 16, (5,) * 16, "stated")
    schedule = Schedule("actor_update", max_tokens=20, mini_batch=16, share_prompts=True)
    phase = forecast_phase(replace(job, lengths=lengths), schedule)
    shape = phase.role.shape
    needed = (
        3 * (16 * forward_flops(shape, 15, 5) - 8 * forward_flops(shape, 10, 0)) + 16 * 5 * 2 * shape.hidden * shape.vocab
    )
    assert phase.flops == pytest.approx(needed)
    assert phase.seconds == pytest.approx(needed / (8 * 2e12 * phase.quality.efficiency))


@pytest.mark.parametrize("rule", [{"max_tokens": 4096}, {"sequences": 4}])
def test_the_worst_case_of_shared_prompts_holds_their_copies(small: Path, rule: dict[str, int]) -> None:
    job = job_of(load_recipe(small))
    plain = Schedule("critic_update", mini_batch=16, **rule)  # type: ignore[arg-type]
    shared = replace(plain, share_prompts=True)
    assert worst_memory(job, shared).total > worst_memory(job, plain).total


RULES = ("{sequences: 1}", "{sequences: 3}", "{max_tokens: 64}", "{max_tokens: 150}", "{max_tokens: 4096}")
LAYOUTS = ("{tensor: 1, pipeline: 1}", "{tensor: 2, pipeline: 2, sequence_parallel: true}", "{tensor: 1, pipeline: 4}")


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary so large that logits are what counts."""
    return write_small(tmp_path_factory.mktemp("recipe"), model=CONFIG | {"vocab_size": 50_000})


@functools.cache
def job_under(file: Path, rule: str, layout: str) -> Job:
    phases = [f"phases.{phase}.micro_batch={rule}" for phase in ("actor_update", "reference_logprob", "critic_update")]
    return job_of(load_recipe(file, [*phases, f"actor.layout={layout}"]))


@settings(max_examples=60)
@given(
    rule=st.sampled_from(RULES),
    layout=st.sampled_from(LAYOUTS),
    pairs=st.lists(st.tuples(st.integers(1, 32), st.integers(1, 32)), min_size=16, max_size=16),
    share=st.booleans(),
)
def test_no_lengths_take_more_memory_than_the_worst_case(
    recipe_file: Path, rule: str, layout: str, pairs: list[tuple[int, int]], share: bool
) -> None:
    prompts, completions = zip(*pairs, strict=True)
    job = job_under(recipe_file, rule, layout)
    schedules = tuple(replace(schedule, share_prompts=share) for schedule in job.schedules)
    one_each = tuple(prompts[group * job.limits.group_size] for group in job.groups) if share else prompts
    job = replace(job, lengths=Lengths(one_each, completions, "drawn"), schedules=schedules)
    for phase in forecast(job).phases:
        assert phase.memory.total <= phase.worst_memory.total, phase.phase


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_the_largest_cap_is_the_largest_that_fits(tensor: int, tmp_path: Path) -> None:
    job = job_of(load_recipe(write_qwen(tmp_path), [f"actor.layout.tensor={tensor}"]))
    job = replace(job, device_bytes=150 * GIB)
    assert job.budget_bytes is not None
    for schedule in job.schedules:
        cap = cap_that_fits(job, schedule)
        assert cap
        assert worst_memory(job, replace(schedule, max_tokens=cap)).total <= job.budget_bytes
        everything = job.limits.longest * (schedule.mini_batch or job.limits.num_sequences)
        if cap < everything:
            above = cap + job.role(schedule.phase).layout.micro_batch_multiple
            assert worst_memory(job, replace(schedule, max_tokens=above)).total > job.budget_bytes


def test_without_a_device_nothing_is_said_of_it(small: Path) -> None:
    found = forecast_of(small)
    assert (found.fits, found.safe_utilization) == (None, None)
    assert {phase.largest_cap for phase in found.phases} == {None} and {phase.seconds for phase in found.phases} == {None}


def test_auto_takes_the_cap_that_the_forecast_says_fits(tmp_path: Path) -> None:
    file = write_qwen(tmp_path)
    stated = by_phase(forecast_of(file))
    resolved = load_recipe(file, ["phases.actor_update.micro_batch.max_tokens=auto"])
    assert resolved.schedule("actor_update").max_tokens == stated["actor_update"].largest_cap
    assert forecast(job_of(resolved)).fits


def test_the_largest_safe_share_of_the_device_is_just_safe(tmp_path: Path) -> None:
    file = write_qwen(tmp_path)
    safe = forecast_of(file).safe_utilization
    assert safe is not None and 0 < safe < 1 - RESERVE
    assert forecast_of(file, [f"rollout.memory_utilization={safe - 1e-6}"]).fits
    assert not forecast_of(file, [f"rollout.memory_utilization={safe + 1e-3}"]).fits
