"""The same numbers under every layout as on one rank, in fp32: three updates of an actor and a critic."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megarl.models.layout import Layout
from tests.engine_cases import UpdateMetrics, train
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.layout
STEPS = 3
TOLERANCE = 5e-5
WHOLE, CUT = 400, 40  # max_tokens: the reference runs one micro-batch, every layout several ragged ones
COLUMNS = ("loss", "grad norm", "logprobs", "entropy", "values")

# family, tied embeddings, layers
DENSE = ("qwen3", True, 4)
FIVE = ("qwen3", True, 5)
DEEP = ("qwen3", True, 8)
BIASED = ("qwen2", False, 4)
EXPERTS = ("qwen3_moe", True, 4)  # its first layer has none
ALL_EXPERTS = ("mixtral", False, 4)
WINDOWS = ("gemma3_scaled", True, 4)
LATENT = ("deepseek_v3", False, 4)  # its first layer has no experts
PLAIN_LATENT = ("deepseek_v3_plain", False, 4)

# One case of each kind that another version of megatron-core could change; CI runs these with each version.
QUICK = [
    (DENSE, Layout(tensor=2, pipeline=2, sequence_parallel=True, virtual_pipeline=2)),
    (DENSE, Layout(tensor=2, context=2, data=2)),
    (FIVE, Layout(pipeline=2, stages=(1, 4))),
    (EXPERTS, Layout(tensor=2, sequence_parallel=True, expert=2, expert_tensor=1)),
    (EXPERTS, Layout(pipeline=4, data=2, expert=2)),
]
# With megarl's own version CI runs these as well: each pair of axes that has code of its own is cut in one of them.
OFTEN = [
    (DENSE, Layout(tensor=4, sequence_parallel=True)),
    (DENSE, Layout(tensor=2, pipeline=2, context=2, sequence_parallel=True, virtual_pipeline=2)),
    (FIVE, Layout(pipeline=2, virtual_pipeline=2, stages=(1, 1, 2, 1))),
    (BIASED, Layout(tensor=2, sequence_parallel=True)),
    (EXPERTS, Layout(context=2, expert=2)),
    (EXPERTS, Layout(data=2, expert_tensor=2)),
    (EXPERTS, Layout(tensor=2, data=2, sequence_parallel=True, expert=2)),
    (WINDOWS, Layout(context=2)),
    (LATENT, Layout(pipeline=2, data=2, expert=2)),
    (PLAIN_LATENT, Layout(tensor=2, context=2, sequence_parallel=True, expert=2, expert_tensor=1)),
]
# Nightly.
RARE = [
    (DENSE, Layout(context=4)),
    (DENSE, Layout(data=4)),
    (DENSE, Layout(tensor=2, pipeline=2, data=2, sequence_parallel=True)),
    (EXPERTS, Layout(tensor=2, sequence_parallel=True)),
    (LATENT, Layout(tensor=2, sequence_parallel=True)),
    (DENSE, Layout(tensor=2, sequence_parallel=True)),
    (DENSE, Layout(pipeline=2)),
    (DENSE, Layout(pipeline=4)),
    (DENSE, Layout(pipeline=2, virtual_pipeline=2)),
    (DEEP, Layout(pipeline=4, virtual_pipeline=2)),
    (DENSE, Layout(context=2)),
    (DENSE, Layout(data=2)),
    (DENSE, Layout(tensor=2, pipeline=2)),
    (DENSE, Layout(tensor=2, data=2)),
    (DENSE, Layout(pipeline=2, context=2)),
    (DENSE, Layout(context=2, data=2)),
    (DENSE, Layout(tensor=2, context=2, sequence_parallel=True)),
    (DENSE, Layout(pipeline=2, context=2, virtual_pipeline=2)),
    (DENSE, Layout(pipeline=2, context=2, data=2, virtual_pipeline=2)),
    (DEEP, Layout(tensor=2, pipeline=4, sequence_parallel=True, stages=(1, 3, 3, 1))),
    (BIASED, Layout(pipeline=2, data=2)),
    (EXPERTS, Layout(data=2)),
    (EXPERTS, Layout(data=2, expert=2)),
    (EXPERTS, Layout(data=4, expert=4)),
    (EXPERTS, Layout(tensor=2, context=2, sequence_parallel=True, expert_tensor=1)),
    (EXPERTS, Layout(pipeline=2, data=2, expert=2, stages=(1, 3))),
    (ALL_EXPERTS, Layout(data=2, expert=2)),
    (WINDOWS, Layout(tensor=2, sequence_parallel=True)),
    (WINDOWS, Layout(data=2)),
    (LATENT, Layout(data=2, expert=2)),
    (LATENT, Layout(pipeline=2, stages=(1, 3))),
    (DENSE, Layout(pipeline=2, data=2)),
    (DENSE, Layout(tensor=2)),
    (DEEP, Layout(tensor=2, pipeline=4, sequence_parallel=True, virtual_pipeline=2)),
    (BIASED, Layout(tensor=2, pipeline=2, context=2, sequence_parallel=True)),
    (EXPERTS, Layout(pipeline=2, context=2, virtual_pipeline=2)),
    (EXPERTS, Layout(data=4, expert=2)),
    (ALL_EXPERTS, Layout(tensor=2, pipeline=2, sequence_parallel=True, expert=2, expert_tensor=1)),
    (WINDOWS, Layout(tensor=2, pipeline=2)),
]
CASES = [*QUICK, *OFTEN, *RARE]


def marks_of(case: tuple[tuple[str, bool, int], Layout]) -> list[pytest.MarkDecorator]:
    return [] if case in QUICK else [pytest.mark.slow] if case in OFTEN else [pytest.mark.slow, pytest.mark.nightly]


def name(layout: Layout) -> str:
    """As Megatron users write it: TP2 PP2 VPP2 SP."""
    sizes = (("TP", layout.tensor), ("PP", layout.pipeline), ("VPP", layout.virtual_pipeline), ("CP", layout.context),
             ("DP", layout.data), ("EP", layout.expert))  # fmt: skip
    words = [f"{axis}{size}" for axis, size in sizes if size > 1]
    if layout.expert_tensor is not None:
        words.append(f"ETP{layout.expert_tensor}")
    if layout.stages:
        words.append("stages " + "-".join(map(str, layout.stages)))
    return " ".join(words + ["SP"] * layout.sequence_parallel)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(family, tied, layers) -> the model's directory, and what one rank measures on it; each computed once."""

    @cache
    def of(model: tuple[str, bool, int]) -> tuple[Path, dict[str, list[UpdateMetrics]]]:
        family, tied, layers = model
        directory = save_tiny_model(tmp_path_factory.mktemp(family), family, tied, layers=layers)
        return directory, measured(directory, {"actor": Layout(), "critic": Layout()}, WHOLE)

    return of


def measured(directory: Path, layouts: dict[str, Layout], max_tokens: int) -> dict[str, list[UpdateMetrics]]:
    """What the first rank measured; every rank agrees on the gradient norms."""
    (ranks,) = {layout.ranks for layout in layouts.values()}
    found = run_ranks(train, ranks, str(directory), layouts, STEPS, max_tokens)
    for other in found[1:]:
        for role in layouts:
            assert [one.grad_norm for one in other[role]] == [one.grad_norm for one in found[0][role]]
    return found[0]


def differences(found: dict[str, list[UpdateMetrics]], expected: dict[str, list[UpdateMetrics]]) -> dict[str, float]:
    """The largest relative difference of each column, over roles and steps; per-token metrics are related to their root
    mean square, as single ones may be near 0."""
    largest = dict.fromkeys(COLUMNS, 0.0)
    for role in expected:
        for one, other in zip(found[role], expected[role], strict=True):
            of_step = {
                "loss": abs(one.loss - other.loss) / abs(other.loss),
                "grad norm": abs(one.grad_norm - other.grad_norm) / other.grad_norm,
            }
            for column, figure in other.outputs.items():
                of_step[column] = float(np.abs(one.outputs[column] - figure).max() / np.sqrt(np.mean(figure**2)))
            for column, difference in of_step.items():
                largest[column] = max(largest[column], difference)
    return largest


@pytest.mark.parametrize(
    "model,layout", [pytest.param(*case, id=f"{case[0][0]}-{name(case[1])}", marks=marks_of(case)) for case in CASES]
)
def test_a_layout_gives_the_numbers_of_one_rank(reference, model, layout):
    directory, expected = reference(model)
    off = differences(measured(directory, {"actor": layout, "critic": layout}, CUT), expected)
    assert max(off.values()) <= TOLERANCE, off


def test_the_updates_that_are_compared_move_the_weights(reference):
    for model in dict.fromkeys(model for model, _ in CASES):
        _, expected = reference(model)
        for role, metrics in expected.items():
            moved = differences({role: metrics[1:]}, {role: metrics[:-1]})
            assert all(value > 100 * TOLERANCE for value in moved.values() if value), (model, role)
            assert {"loss", "grad norm"} <= {column for column, value in moved.items() if value}


def test_roles_of_different_layouts_train_side_by_side(reference):
    directory, expected = reference(DENSE)
    layouts = {"actor": Layout(tensor=2, pipeline=2, sequence_parallel=True), "critic": Layout(pipeline=2, data=2)}
    assert max(differences(measured(directory, layouts, CUT), expected).values()) <= TOLERANCE


def test_the_matrix_covers_every_axis():
    plain = Layout()
    for axis in ("tensor", "pipeline", "data", "sequence_parallel", "virtual_pipeline", "context", "stages", "expert",
                 "expert_tensor"):  # fmt: skip
        changed = [layout for _, layout in CASES if getattr(layout, axis) != getattr(plain, axis)]
        assert any(replace(layout, **{axis: getattr(plain, axis)}) != plain for layout in changed), f"{axis} with others"
    assert len({layout for _, layout in CASES}) >= 24
    assert max(layout.ranks for _, layout in CASES) == 8
