"""What the actor learns from teachers equals brute force over Hugging Face's models, under every layout, cut and packed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megarl.models.layout import Layout
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.layout

ONE, TENSOR, PIPELINE = Layout(), Layout(tensor=2, sequence_parallel=True), Layout(pipeline=2)
CONTEXT, DATA = Layout(context=2), Layout(data=2)
LOSSES: tuple[dict[str, Any], ...] = (
    {"place": "advantage", "coefficient": 0.7},
    {"place": "loss"},
    {"place": "loss", "over": "vocabulary", "coefficient": 0.5},
    {"place": "loss", "over": "vocabulary", "divergence": "forward_kl"},
    {"place": "loss", "over": "vocabulary", "divergence": "jensen_shannon", "mixture": 0.3, "data_share": 0.25},
    {"place": "loss", "over": "top_k", "top_k": 8},
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A student, and teachers of other families, one with experts and one whose head is its embedding."""
    folder = tmp_path_factory.mktemp("models")
    teachers = {"experts": save_tiny_model(folder / "experts", "qwen3_moe", seed=2, layers=2)}
    teachers["tied"] = save_tiny_model(folder / "tied", "llama", tied=True, seed=3, layers=2)
    return save_tiny_model(folder / "student", tied=True, layers=2), teachers


@pytest.fixture(scope="module")
def brute_force(models: tuple[Path, dict[str, Path]]) -> Any:
    """Return a function that gives, for the names of teachers, an update by each of LOSSES; each is computed once."""
    from tests.distillation_cases import expected, settings_of

    student, teachers = models

    @cache
    def of(names: tuple[str, ...]) -> list[Any]:
        return [expected(student, {name: teachers[name] for name in names}, settings_of(**loss)) for loss in LOSSES]

    return of


@pytest.mark.parametrize(
    ("layouts", "max_tokens"),
    [
        ((ONE, ONE), 24),
        ((TENSOR, PIPELINE), 40),
        ((PIPELINE, DATA), 40),
        ((DATA, TENSOR), 40),
        ((CONTEXT, DATA), 40),
        ((DATA, Layout(data=2, expert=2)), 400),
    ],
)
def test_an_update_equals_brute_force(
    models: tuple[Path, dict[str, Path]], brute_force: Any, layouts: tuple[Layout, Layout], max_tokens: int
) -> None:
    """In fp32, the precision of the roles: to 2e-5 of the loss and of the gradient's norm."""
    from tests.distillation_cases import learn, settings_of

    student, teachers = models
    if layouts[1].expert > 1:
        teachers = {"experts": teachers["experts"]}
    algorithms = [settings_of(**loss) for loss in LOSSES]
    for learned in run_ranks(learn, layouts[0].ranks, student, teachers, layouts, max_tokens, algorithms):
        for loss, actual, wanted in zip(LOSSES, learned, brute_force(tuple(teachers)), strict=True):
            assert actual == pytest.approx(wanted, rel=2e-5), loss


def test_a_teacher_runs_whole_rollouts_in_a_number_that_its_layout_can_run() -> None:
    """Of those that it judges, and the shortest others; however many segments they fell into."""
    import numpy as np

    from megarl.megatron.batch import Batch
    from megarl.megatron.teaching import samples_of
    from megarl.schedule import Schedule

    rollouts = np.array([0, 0, 1, 2, 2, 2, 3])
    ones = np.ones(7, np.int64)
    lengths = np.array([9, 1, 2, 1, 1, 1, 8])
    named = np.where(rollouts == 0, "one", "two")
    batch = Batch(ones, lengths, rollouts, np.zeros(7, np.float32), ones.astype(bool), rollouts=rollouts, teachers=named)
    schedule = Schedule("teacher_logprob.one", max_tokens=100)
    assert samples_of("teachers.one", batch, schedule, Layout(), 20) == [0, 1]
    assert samples_of("teachers.one", batch, schedule, DATA, 20) == [0, 1, 2], "one more rollout: the shortest"
    assert samples_of("teachers.two", batch, schedule, DATA, 20) == list(range(7)), "three are no number for two ranks"
    assert samples_of("actor", batch, schedule, DATA, 20) == list(range(7))
