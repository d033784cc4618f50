"""Same numbers under every layout: per-token outputs, losses and gradient norms over several updates, in fp32."""

import numpy as np
import pytest

from megarl.reshard.boxes import Layout
from tests.engine_cases import train
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.layout
STEPS = 3
LAYOUTS = [
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(tensor=2, pipeline=2),
    Layout(data=2),
    Layout(tensor=2, sequence_parallel=True),
    Layout(tensor=2, pipeline=2, sequence_parallel=True),
    Layout(pipeline=2, virtual_pipeline=2),
    Layout(tensor=2, pipeline=2, sequence_parallel=True, virtual_pipeline=2),
    Layout(context=2),
    Layout(tensor=2, context=2, sequence_parallel=True),
    Layout(pipeline=2, context=2, virtual_pipeline=2),
]


def _figures(directory, layouts, max_tokens):
    """What the first rank measured; every rank agrees on the gradient norms."""
    (ranks,) = {layout.ranks for layout in layouts.values()}
    found = run_ranks(train, ranks, str(directory), layouts, STEPS, max_tokens)
    for other in found[1:]:
        for role in layouts:
            assert [norm for _, norm, _ in other[role]] == [norm for _, norm, _ in found[0][role]]
    return found[0]


def _assert_same(figures, reference, where):
    for step, ((loss, norm, outputs), expected) in enumerate(zip(figures, reference, strict=True)):
        assert loss == pytest.approx(expected[0], rel=1e-4), (where, step)
        assert norm == pytest.approx(expected[1], rel=1e-4), (where, step)
        np.testing.assert_allclose(outputs, expected[2], rtol=1e-4, atol=1e-4, err_msg=f"{where} {step}")


@pytest.mark.parametrize(
    "role,family,tied", [("actor", "qwen3", True), ("actor", "qwen2", False), ("critic", "qwen3", False)]
)
def test_updates_do_not_depend_on_the_layout_or_the_cut(tmp_path, role, family, tied):
    directory = save_tiny_model(tmp_path, family, tied)
    reference = _figures(directory, {role: Layout()}, 400)[role]
    losses = [loss for loss, _, _ in reference]
    assert losses[0] > losses[1] > losses[2], "the updates move the weights"
    for layout in LAYOUTS:
        _assert_same(_figures(directory, {role: layout}, 40)[role], reference, layout)


def test_roles_of_different_layouts_train_side_by_side(tmp_path):
    directory = save_tiny_model(tmp_path, "qwen3", tied=True)
    reference = _figures(directory, {"actor": Layout(), "critic": Layout()}, 400)
    layouts = {"actor": Layout(tensor=2, pipeline=2, sequence_parallel=True), "critic": Layout(pipeline=2, data=2)}
    found = _figures(directory, layouts, 40)
    for role in layouts:
        _assert_same(found[role], reference[role], role)
