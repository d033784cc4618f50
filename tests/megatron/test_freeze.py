"""Frozen weights stay as they are; the others get the gradients that they get without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.models.layout import Layout
from tests.feature_cases import Feature, build, cut, digest, train_with
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.layout

# The first stage of a pipeline of 2 has layers 1 and 2: nothing is left to train there.
FIRST_HALF = {"embedding": True, "layers": 2}
ALL_LAYERS = {"norms": True, "layers": 4}


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        pytest.param(Layout(pipeline=2, data=2, virtual_pipeline=2), False, marks=pytest.mark.slow),
        (Layout(tensor=2, pipeline=2, sequence_parallel=True), True),
    ],
    ids=["virtual pipeline, data", "tied, tensor, pipeline, sequence"],
)
def test_the_same_under_every_layout_and_after_a_resume(tmp_path: Path, layout: Layout, tied: bool) -> None:
    directory, folder = str(save_tiny_model(tmp_path / "model", "qwen3", tied)), str(tmp_path / "checkpoints")
    plain = [Feature(freeze=freeze) for freeze in (FIRST_HALF, ALL_LAYERS)]
    (whole,) = run_ranks(train_with, 1, directory, Layout(), plain)
    more = [
        Feature(freeze=FIRST_HALF, checkpoint=folder),
        Feature(freeze=FIRST_HALF, memory={"recompute": "full", "offload": "all"}),
    ]
    for results in run_ranks(train_with, layout.ranks, directory, layout, [*plain, *more]):
        assert results[2] == results[0], "a resumed run is another"
        assert results[3] == results[0], "recompute or offload lost a gradient"
        for lines, expected in zip(results[:2], whole, strict=True):
            for line, expected_line in zip(lines, expected, strict=True):
                assert line.loss == pytest.approx(expected_line.loss, rel=1e-4)
                assert line.grad_norm == pytest.approx(expected_line.grad_norm, rel=1e-4)


def changed_parameters(directory: str, freeze: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Names of the parameters that an update changed, of those without a gradient buffer."""
    from tests.engine_cases import objective_of, small_batch, start

    place = start(Layout())
    trained = build(directory, place, Feature(freeze=freeze))
    before = {name: digest([shard]) for name, shard in trained.shards().items()}
    batch = small_batch(trained.shape.vocab)
    for _ in range(2):  # the warm-up's first update is small
        trained.update(batch, cut(batch, place.layout), objective_of("actor", 100))
    after = {name: digest([shard]) for name, shard in trained.shards().items()}
    named = dict(trained.models[0].named_parameters())
    without = {name for name, parameter in named.items() if not hasattr(parameter, "main_grad")}
    return {name for name in after if after[name] != before[name]}, without


@pytest.mark.parametrize(
    ("freeze", "is_frozen"),
    [
        (FIRST_HALF, lambda name: name.startswith(("embedding", "decoder.layers.0.", "decoder.layers.1."))),
        ({"norms": True}, lambda name: "norm" in name),
        ({"head": True, "layers": 1}, lambda name: name.startswith(("output_layer", "decoder.layers.0."))),
    ],
    ids=["first half", "norms", "head"],
)
def test_exactly_the_frozen_ones_stay(tmp_path: Path, freeze: dict[str, Any], is_frozen: Any) -> None:
    directory = str(save_tiny_model(tmp_path, "qwen3"))
    ((changed, without),) = run_ranks(changed_parameters, 1, directory, freeze)
    names = changed | without
    assert without == {name for name in names if is_frozen(name)} and without
    assert changed == {name for name in names if not is_frozen(name)} and changed
