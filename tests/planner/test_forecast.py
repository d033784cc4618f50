"""The forecast of a step: each phase from its own plan, memory never under-stated, time from efficiency and rate; and of
`rollout.max_staleness`: times that follow from both sides, and a bound that holds."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megarl.cli import app
from megarl.planner.flops import executed_flops, forward_flops, sequence_cost
from megarl.planner.forecast import Forecast, Job, forecast, forecast_phase, job_of, worst_memory
from megarl.planner.lengths import DISTRIBUTIONS, QUANTILES, Lengths, find_lengths
from megarl.planner.memory_estimate import RESERVE, BatchLimits
from megarl.planner.staleness import STALENESSES, Rates, balanced_devices, rates, staleness_row, staleness_rows
from megarl.recipe import load_recipe, role_of
from megarl.schedule import Schedule, plan_phase, quality
from megarl.telemetry.metrics_file import read_metrics
from tests.planner_cases import document_of, forecast_of, write_qwen, write_small
from tests.recipe_cases import CONFIG

LIMITS = BatchLimits(num_sequences=4, group_size=2, max_prompt=100, max_completion=300)
limits = st.builds(
    lambda groups, size, prompt, completion: BatchLimits(groups * size, size, prompt, completion), st.integers(1, 20),
    st.integers(1, 8), st.integers(1, 2000), st.integers(1, 5000),
)  # fmt: skip


@given(st.sampled_from(DISTRIBUTIONS), limits, st.integers(0, 9))
def test_drawn_lengths_keep_the_limits_and_share_a_prompt_in_each_group(kind: str, bounds: BatchLimits, seed: int) -> None:
    drawn = find_lengths(kind, bounds, seed)
    assert len(drawn.prompts) == len(drawn.completions) == bounds.num_sequences
    assert all(bounds.max_prompt / 2 <= prompt <= bounds.max_prompt for prompt in drawn.prompts)
    assert all(1 <= completion <= bounds.max_completion for completion in drawn.completions)
    assert drawn.totals == tuple(map(sum, zip(drawn.prompts, drawn.completions, strict=True)))
    for start in range(0, bounds.num_sequences, bounds.group_size):
        assert len(set(drawn.prompts[start : start + bounds.group_size])) == 1
    assert find_lengths(kind, bounds, seed) == drawn


def test_another_seed_draws_other_lengths() -> None:
    bounds = BatchLimits(64, 8, 1000, 4000)
    for kind in DISTRIBUTIONS:
        assert find_lengths(kind, bounds, 1).totals != find_lengths(kind, bounds, 2).totals


def write_run(directory: Path, *steps: dict[str, float]) -> str:
    directory.mkdir()
    lines = [json.dumps({"step": number, **step}) for number, step in enumerate(steps, start=1)]
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return str(directory)


def quantiles(*values: float) -> dict[str, float]:
    return {f"rollout/completion_length_p{percent:02d}": value for percent, value in zip(QUANTILES, values, strict=True)}


def test_a_run_gives_lengths_with_its_mean_quantiles(tmp_path: Path) -> None:
    first = quantiles(0, 20, 40, 80, 120, 180, 230, 280) | {"rollout/prompt_length_mean": 40.0}
    second = quantiles(2, 20, 60, 120, 180, 220, 270, 300) | {"rollout/prompt_length_mean": 45.0}
    means = (1, 20, 50, 100, 150, 200, 250, 290)
    drawn = find_lengths(write_run(tmp_path / "run", first, second), BatchLimits(8000, 8, 100, 300), 1, read_metrics)
    assert set(drawn.prompts) == {42}
    assert min(drawn.completions) >= 1 and max(drawn.completions) <= 290
    for percent, mean in zip(QUANTILES[1:-1], means[1:-1], strict=True):
        share = sum(completion <= mean for completion in drawn.completions) / len(drawn.completions)
        assert abs(share - percent / 100) < 0.02, (percent, share)


def test_a_run_on_data_gives_whole_lengths_to_recipes_of_its_kind(tmp_path: Path) -> None:
    values = (10, 20, 40, 80, 120, 180, 230, 280)
    lengths = {f"data/length_p{percent:02d}": float(value) for percent, value in zip(QUANTILES, values, strict=True)}
    run = write_run(tmp_path / "run", lengths)
    drawn = find_lengths(run, BatchLimits(8000, 1, 1, 299), 1, read_metrics)
    assert min(drawn.totals) >= 10 and max(drawn.totals) <= 280
    for percent, value in zip(QUANTILES[1:-1], values[1:-1], strict=True):
        assert abs(sum(total <= value for total in drawn.totals) / 8000 - percent / 100) < 0.02, percent
    with pytest.raises(ValueError, match="no lengths of prompts and completions; give a run of run.kind: rl"):
        find_lengths(run, LIMITS, 1, read_metrics)
    of_rollouts = write_run(tmp_path / "rollouts", {key.replace("data/", "rollout/completion_"): 9.0 for key in lengths})
    with pytest.raises(ValueError, match="no lengths of whole sequences; give a run of run.kind: sft, dpo or reward_model"):
        find_lengths(of_rollouts, BatchLimits(8, 1, 1, 299), 1, read_metrics)
    with pytest.raises(ValueError, match=r"data/length_p99 is 230.*data.max_tokens = 200"):
        find_lengths(run, BatchLimits(8, 1, 1, 199), 1, read_metrics)


def test_a_run_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"--lengths = .*empty.*metrics.jsonl"):
        find_lengths(str(tmp_path / "empty"), LIMITS, 1, read_metrics)
    with pytest.raises(ValueError, match="no step in metrics.jsonl has rollout/completion_length_p00"):
        find_lengths(write_run(tmp_path / "old", {"rollout/prompt_length_mean": 4.0}), LIMITS, 1, read_metrics)
    long = quantiles(*[40.0] * 7, 400.0) | {"rollout/prompt_length_mean": 40.0}
    with pytest.raises(ValueError, match=r"completion_length_p100 is 400.*rollout.max_new_tokens = 300"):
        find_lengths(write_run(tmp_path / "long", long), LIMITS, 1, read_metrics)
    wide = quantiles(*[40.0] * 8) | {"rollout/prompt_length_mean": 140.0}
    with pytest.raises(ValueError, match=r"prompt_length_mean is 140.*data.max_prompt_tokens = 100"):
        find_lengths(write_run(tmp_path / "wide", wide), LIMITS, 1, read_metrics)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_small(tmp_path)


def by_phase(predicted: Forecast) -> dict[str, Any]:
    return {phase.phase: phase for phase in predicted.phases}


def test_every_engine_phase_that_runs_is_forecast_from_its_own_section_and_layout(small: Path) -> None:
    """verl #1028, #7462: what another phase's section or role's layout says must not arrive here."""
    overrides = ["critic.layout={tensor: 1, pipeline: 2}"]
    recipe = load_recipe(small, overrides)
    job = job_of(recipe, "long-tail", seed=5)
    predicted = forecast(job)
    assert [phase.phase for phase in predicted.phases] == [
        "actor_logprob", "reference_logprob", "critic_value", "critic_update", "actor_update"
    ]  # fmt: skip
    groups = [sample // 2 for sample in range(16)]
    for phase in predicted.phases:
        cost, layout = sequence_cost(phase.role.shape), recipe.layout(role_of(phase.phase))
        plan = plan_phase(recipe.schedule(phase.phase), job.lengths.totals, layout, 5, cost, groups)
        assert phase.quality == quality(plan, job.lengths.totals, cost)
        assert phase.num_mini_batches == len(plan.mini_batches)
    before = by_phase(forecast_of(small, overrides))
    after = by_phase(forecast_of(small, [*overrides, "phases.critic_value.micro_batch.max_tokens=128"]))
    assert [name for name in before if before[name] != after[name]] == ["critic_value"]


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
    phases = by_phase(forecast_of(small))
    twice = by_phase(forecast_of(small, ["phases.actor_update.epochs=2"]))
    job = job_of(load_recipe(small))
    pairs = list(zip(job.lengths.totals, job.lengths.completions, strict=True))
    shape = job.role("actor_update").shape
    once = sum(forward_flops(shape, length, head) for length, head in pairs)
    assert phases["reference_logprob"].flops == pytest.approx(once)
    head = 2 * shape.hidden * shape.vocab * sum(job.lengths.completions)  # blocks of logits are made twice
    assert phases["actor_update"].flops == pytest.approx(3 * once + head)
    assert twice["actor_update"].flops == pytest.approx(6 * once + 2 * head)
    values = sum(forward_flops(shape, length, head, critic=True) for length, head in pairs)
    assert phases["critic_update"].flops == pytest.approx(3 * values) and values < once


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
    counts = {name: job.num_run(before[f"teacher_logprob.{name}"].schedule) for name in ("math", "code")}
    assert 12 <= counts["math"] <= 16 and 4 <= counts["code"] < counts["math"]
    for name, count in counts.items():
        expected = sum(forward_flops(shape, *pair) for pair in pairs[:count])
        assert before[f"teacher_logprob.{name}"].flops == pytest.approx(expected)
    for kind, (policy, teacher) in kinds.items():
        whole = f"algorithm.distillation={{divergence: {kind}, over: vocabulary, place: loss}}"
        after = by_phase(forecast_of(small, [*teachers, whole]))
        product = 2 * shape.vocab * tokens * shape.hidden
        more = after["actor_update"].flops - before["actor_update"].flops
        assert more == pytest.approx((policy + teacher) * product)
        actor = after["actor_update"].role
        alone = sum(executed_flops(replace(actor, divergence_alone=True), *pair) for pair in pairs)
        # The head's blocks are not made again, and have no gradients of rows and weight.
        assert after["actor_update"].flops - alone == pytest.approx(3 * product)
        expected = sum(forward_flops(shape, length, 0) for length, _ in pairs[: counts["math"]])
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


def test_without_a_device_nothing_is_said_of_it(small: Path) -> None:
    result = forecast_of(small)
    assert (result.fits, result.safe_utilization) == (None, None)
    assert {phase.largest_cap for phase in result.phases} == {None} and {phase.seconds for phase in result.phases} == {None}


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


SEPARATE = ["rollout.placement=separate"]
AHEAD = ["rollout.max_staleness=2", "weight_sync.in_flight=keep", "algorithm.mismatch={correction: truncate}"]
# Sequences of 100 tokens, a second each, in as many slots as a step has sequences.
EQUAL = Rates(
    engines=2, slots=8, compute_s=0.0, weights_s=0.01, cache_s=0.0, train_s=0.5, logprob_s=0.25, sync_s=0.125,
    group_size=4, completions=(100,) * 16,
)  # fmt: skip


# One sequence in 16 takes as long as four trainings.
TAILED = replace(EQUAL, completions=(10,) * 15 + (300,), slots=64)


@pytest.mark.parametrize(
    ("known", "staleness", "window", "step_s"),
    [
        # Generation up to the last completion, then training, then the sync.
        (EQUAL, 0, None, 1.0 + 0.5 + 0.125),
        (replace(EQUAL, completions=(10,) * 15 + (100,)), 0, None, 1.0 + 0.5 + 0.125),
        (replace(EQUAL, slots=4), 0, None, 2.0 + 0.5 + 0.125),
        # The slower side, and the sync.
        (EQUAL, 1, None, 1.0 + 0.125),
        (replace(EQUAL, train_s=3.0), 1, None, 3.0 + 0.25 + 0.125),
        # A completion that takes longer than a step needs more versions of lead.
        (TAILED, 1, None, (3.0 + 0.5 + 0.25) / 2 + 0.125),
        (TAILED, 2, None, (3.0 + 0.5 + 0.25) / 3 + 0.125),
        (TAILED, 4, None, 0.5 + 0.25 + 0.125),
        # A window that leaves slots idle costs the engines time; with one that does not, the longest completion counts.
        (replace(EQUAL, slots=16), 1, 4, 1.0 + 0.125),
        (replace(EQUAL, slots=16), 1, 8, (1.0 + 0.5 + 0.25) / 2 + 0.125),
    ],
)
def test_a_step_takes_what_the_bound_makes_it_wait_for(
    known: Rates, staleness: int, window: int | None, step_s: float
) -> None:
    row = staleness_row(known, staleness, window)
    assert row.step_s == pytest.approx(step_s)
    trainer_s = known.train_s + (known.logprob_s if staleness else 0.0)
    assert row.trainer_share == pytest.approx(trainer_s / step_s)
    busy_s = sum(known.completions) / (known.engines * known.slots) * known.weights_s
    assert row.engines_share == pytest.approx(busy_s / step_s)


@pytest.mark.parametrize("lengths", ["uniform", "log-normal", "long-tail"])
def test_a_larger_bound_makes_no_step_slower(lengths: str, tmp_path: Path) -> None:
    rows = staleness_rows(forecast_of(write_qwen(tmp_path), SEPARATE, lengths), None)
    assert [row.max_staleness for row in rows] == list(STALENESSES)
    seconds = [row.step_s for row in rows]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 0.7 * seconds[0]


def test_the_balanced_ratio_balances(tmp_path: Path) -> None:
    """With that many trainer devices for the engines' devices both sides take equally long."""
    plan = forecast_of(write_qwen(tmp_path), SEPARATE)
    known, ratio = rates(plan), balanced_devices(plan)
    assert known is not None and ratio is not None
    trainer_s = (known.train_s + known.sync_s) * plan.job.ranks / (plan.job.engines.workers / ratio)  # type: ignore[union-attr]
    assert trainer_s == pytest.approx(known.sample_s(known.slots))


def test_a_step_with_one_update_takes_one_more_pass_above_staleness_0(tmp_path: Path) -> None:
    once = ["phases.actor_update.mini_batch=128", "phases.actor_logprob=null", *SEPARATE]
    known, twice = (rates(forecast_of(write_qwen(tmp_path), overrides)) for overrides in (once, SEPARATE))
    assert known is not None and twice is not None
    assert known.logprob_s == pytest.approx(twice.train_s - known.train_s, rel=0.3) and twice.logprob_s == 0


def test_check_shows_what_the_placement_allows(tmp_path: Path) -> None:
    file = write_qwen(tmp_path)
    entry = document_of(file, *SEPARATE, *AHEAD, "rollout.window=24")
    assert entry["stream"] == {"max_staleness": 2, "window": 24}
    assert [row["max_staleness"] for row in entry["by_staleness"]] == list(STALENESSES)
    asleep = document_of(file)
    assert asleep["stream"] == {"max_staleness": 0, "window": 16}
    assert [row["max_staleness"] for row in asleep["by_staleness"]] == [0]
    assert document_of(file, "device.tflops=null")["by_staleness"] == []
    on_cpus = document_of(file, "device={memory_gib: 900, kind: cpu, tflops: 1}", "rollout.tensor=1")
    assert [row["max_staleness"] for row in on_cpus["by_staleness"]] == list(STALENESSES)
    unknown = staleness_rows(forecast(job_of(load_recipe(file, ["device=null"]), tflops=1.0)), None)
    assert [row.max_staleness for row in unknown] == list(STALENESSES)
    shown = {
        (): "needs rollout.placement: separate",
        (*SEPARATE,): "engine devices for each trainer device; the recipe has 1",
        ("device.tflops=null",): "device.tflops is not stated",
    }
    for overrides, text in shown.items():
        assert text in CliRunner().invoke(app, ["check", str(file), "--plan", *overrides]).output
