"""The shipped recipes as a user runs them: every second of every rank is in a span."""

from pathlib import Path

import pytest

from tests.runs import megarl
from tests.span_sums import check_spans

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "ranks"), [("quickstart", 2), ("ppo-tiny", 4)])
def test_spans_of_a_shipped_recipe_sum_to_wall_time(recipe, ranks, tmp_path):
    """Of the four ranks of PPO a smaller run is in `tests/trainer/test_run.py`."""
    changes = ["run.steps=3", "run.trace=spans", f"run.dir={tmp_path}", "trainer.precision=fp32"]
    megarl("train", str(ROOT / "recipes" / f"{recipe}.yaml"), *changes)
    check_spans(tmp_path / recipe, ranks)
