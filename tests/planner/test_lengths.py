"""Lengths of a step: drawn, or drawn like an earlier run's, never beyond what the recipe allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.planner.lengths import DISTRIBUTIONS, QUANTILES, find_lengths
from megarl.planner.memory_estimate import BatchLimits
from megarl.telemetry.metrics_file import read_metrics

LIMITS = BatchLimits(num_sequences=4, group_size=2, max_prompt=100, max_completion=300)
limits = st.builds(
    lambda groups, size, prompt, completion: BatchLimits(groups * size, size, prompt, completion),
    st.integers(1, 20),
    st.integers(1, 8),
    st.integers(1, 2000),
    st.integers(1, 5000),
)


@given(st.sampled_from(DISTRIBUTIONS), limits, st.integers(0, 9))
def test_drawn_lengths_keep_the_limits_and_share_a_prompt_in_each_group(kind: str, bounds: BatchLimits, seed: int) -> None:
    found = find_lengths(kind, bounds, seed)
    assert len(found.prompts) == len(found.completions) == bounds.num_sequences
    assert all(bounds.max_prompt / 2 <= prompt <= bounds.max_prompt for prompt in found.prompts)
    assert all(1 <= completion <= bounds.max_completion for completion in found.completions)
    assert found.totals == tuple(map(sum, zip(found.prompts, found.completions, strict=True)))
    for start in range(0, bounds.num_sequences, bounds.group_size):
        assert len(set(found.prompts[start : start + bounds.group_size])) == 1
    assert find_lengths(kind, bounds, seed) == found


def test_another_seed_draws_other_lengths() -> None:
    bounds = BatchLimits(64, 8, 1000, 4000)
    for kind in DISTRIBUTIONS:
        assert find_lengths(kind, bounds, 1).totals != find_lengths(kind, bounds, 2).totals


def test_what_is_no_source_of_lengths_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"--lengths = 'lognormal'.*uniform, log-normal, long-tail"):
        find_lengths("lognormal", LIMITS, 1)


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
    found = find_lengths(write_run(tmp_path / "run", first, second), BatchLimits(8000, 8, 100, 300), 1, read_metrics)
    assert set(found.prompts) == {42}
    assert min(found.completions) >= 1 and max(found.completions) <= 290
    for percent, mean in zip(QUANTILES[1:-1], means[1:-1], strict=True):
        share = sum(one <= mean for one in found.completions) / len(found.completions)
        assert abs(share - percent / 100) < 0.02, (percent, share)


def test_a_run_on_data_gives_whole_lengths_to_recipes_of_its_kind(tmp_path: Path) -> None:
    values = (10, 20, 40, 80, 120, 180, 230, 280)
    lengths = {f"data/length_p{percent:02d}": float(value) for percent, value in zip(QUANTILES, values, strict=True)}
    run = write_run(tmp_path / "run", lengths)
    found = find_lengths(run, BatchLimits(8000, 1, 1, 299), 1, read_metrics)
    assert min(found.totals) >= 10 and max(found.totals) <= 280
    for percent, value in zip(QUANTILES[1:-1], values[1:-1], strict=True):
        assert abs(sum(one <= value for one in found.totals) / 8000 - percent / 100) < 0.02, percent
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
