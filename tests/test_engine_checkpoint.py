"""A resumed run continues bit for bit under the same layout, and within tolerance under another."""

import pytest

from tests.engine_cases import train_with_checkpoints
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.layout


def test_resume_is_exact_and_may_change_the_layout(tmp_path):
    directory = str(save_tiny_model(tmp_path / "model", "qwen3", tied=True))
    folder = str(tmp_path / "checkpoints")
    layout = (2, 2, 1)
    whole = run_ranks(train_with_checkpoints, 4, directory, layout, folder, 5, 2, False)[0]
    # Three updates after the load: a shared Adam counter shows at the second.
    resumed = run_ranks(train_with_checkpoints, 4, directory, layout, folder, 5, None, True)[0]
    assert len(resumed) == 6
    assert resumed == whole[4:]
    for other in ((1, 1, 1), (1, 2, 2)):
        ranks = other[0] * other[1] * other[2]
        for found, expected in zip(
            run_ranks(train_with_checkpoints, ranks, directory, other, folder, 5, None, True)[0], whole[4:], strict=True
        ):
            assert found[:2] == expected[:2]
            assert found[2:] == pytest.approx(expected[2:], rel=1e-4)


def test_a_changed_learning_rate_holds_after_a_resume(tmp_path):
    directory, folder = str(save_tiny_model(tmp_path / "model")), str(tmp_path / "checkpoints")
    whole = run_ranks(train_with_checkpoints, 1, directory, (1, 1, 1), folder, 3, 2, False)[0]
    resumed = run_ranks(train_with_checkpoints, 1, directory, (1, 1, 1), folder, 3, None, True, 5e-3)[0]
    assert [line[:2] for line in resumed] == [line[:2] for line in whole[4:]]
    assert [line[-1] for line in resumed] == pytest.approx([line[-1] / 2 for line in whole[4:]])
