"""Same numbers under every layout: per-token outputs, losses and gradient norms over several updates, in fp32."""

import numpy as np
import pytest

from tests.engine_cases import train
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.layout
STEPS = 3
LAYOUTS = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)]


def _figures(directory, layout, role, max_tokens):
    return run_ranks(train, layout[0] * layout[1] * layout[2], str(directory), layout, role, STEPS, max_tokens)[0]


@pytest.mark.parametrize(
    "role,family,tied", [("actor", "qwen3", True), ("actor", "qwen2", False), ("critic", "qwen3", False)]
)
def test_updates_do_not_depend_on_the_layout_or_the_cut(tmp_path, role, family, tied):
    directory = save_tiny_model(tmp_path, family, tied)
    reference = _figures(directory, (1, 1, 1), role, 400)
    losses = [loss for loss, _, _ in reference]
    assert losses[0] > losses[1] > losses[2], "the updates move the weights"
    for layout in LAYOUTS:
        for step, (loss, norm, outputs) in enumerate(_figures(directory, layout, role, 40)):
            expected_loss, expected_norm, expected_outputs = reference[step]
            assert loss == pytest.approx(expected_loss, rel=1e-4), (layout, step)
            assert norm == pytest.approx(expected_norm, rel=1e-4), (layout, step)
            np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-4, atol=1e-4)
