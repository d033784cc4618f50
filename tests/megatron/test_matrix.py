"""The same numbers under every layout as on one rank, in fp32: three updates of an actor and a critic."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

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

# Layouts of each model, as Megatron users write them. One case of each kind that another version of megatron-core could
# change; CI runs these with each version.
QUICK = {
    DENSE: "TP2 PP2 VPP2 SP, TP2 CP2 DP2", FIVE: "PP2 stages 1-4", EXPERTS: "TP2 EP2 ETP1 SP, PP4 DP2 EP2",
}  # fmt: skip
# With megarl's own version CI runs these as well: each pair of axes that has code of its own is cut in one of them.
OFTEN = {
    DENSE: "TP4 SP, TP2 PP2 VPP2 CP2 SP", FIVE: "PP2 VPP2 stages 1-1-2-1", BIASED: "TP2 SP",
    EXPERTS: "CP2 EP2, DP2 ETP2, TP2 DP2 EP2 SP", WINDOWS: "CP2", LATENT: "PP2 DP2 EP2",
    PLAIN_LATENT: "TP2 CP2 EP2 ETP1 SP",
}  # fmt: skip
# Nightly.
RARE = {
    DENSE: "CP4, DP4, TP2 PP2 DP2 SP, TP2 SP, PP2, PP4, PP2 VPP2, CP2, DP2, TP2 PP2, TP2 DP2, PP2 CP2, CP2 DP2, TP2 CP2 SP, "
    "PP2 VPP2 CP2, PP2 VPP2 CP2 DP2, PP2 DP2, TP2",
    DEEP: "PP4 VPP2, TP2 PP4 stages 1-3-3-1 SP, TP2 PP4 VPP2 SP",
    BIASED: "PP2 DP2, TP2 PP2 CP2 SP",
    EXPERTS: "TP2 SP, DP2, DP2 EP2, DP4 EP4, TP2 CP2 ETP1 SP, PP2 DP2 EP2 stages 1-3, PP2 VPP2 CP2, DP4 EP2",
    ALL_EXPERTS: "DP2 EP2, TP2 PP2 EP2 ETP1 SP",
    WINDOWS: "TP2 SP, DP2, TP2 PP2",
    LATENT: "TP2 SP, DP2 EP2, PP2 stages 1-3",
}
AXES = {"TP": "tensor", "PP": "pipeline", "VPP": "virtual_pipeline", "CP": "context", "DP": "data", "EP": "expert",
        "ETP": "expert_tensor"}  # fmt: skip


def layout_of(text: str) -> Layout:
    sizes = {AXES[axis]: int(size) for axis, size in re.findall(r"([A-Z]+)(\d)", text)}
    stages = re.search(r"stages ([\d-]+)", text)
    layers = tuple(map(int, stages[1].split("-"))) if stages else Layout().stages
    return Layout(**sizes, stages=layers, sequence_parallel=text.endswith("SP"))  # type: ignore[arg-type]


PARAMS = [
    pytest.param(model, layout_of(text), id=f"{model[0]}-{text}", marks=marks)
    for table, marks in ((QUICK, []), (OFTEN, [pytest.mark.slow]), (RARE, [pytest.mark.slow, pytest.mark.nightly]))
    for model, texts in table.items()
    for text in texts.split(", ")
]
CASES: list[Any] = [param.values for param in PARAMS]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(family, tied, layers) -> the model's directory, and what one rank measures on it; each computed once. The updates
    move what is compared."""

    @cache
    def of(model: tuple[str, bool, int]) -> tuple[Path, dict[str, list[UpdateMetrics]]]:
        family, tied, layers = model
        directory = save_tiny_model(tmp_path_factory.mktemp(family), family, tied, layers=layers)
        expected = measured(directory, Layout(), WHOLE)
        for role, metrics in expected.items():
            moved = differences({role: metrics[1:]}, {role: metrics[:-1]})
            assert all(value > 100 * TOLERANCE for value in moved.values() if value), (model, role)
            assert {"loss", "grad norm"} <= {column for column, value in moved.items() if value}
        return directory, expected

    return of


def measured(directory: Path, layout: Layout, max_tokens: int) -> dict[str, list[UpdateMetrics]]:
    """What the first rank measured; every rank agrees on the gradient norms."""
    results = run_ranks(train, layout.ranks, str(directory), {"actor": layout, "critic": layout}, STEPS, max_tokens)
    for other in results[1:]:
        for role in results[0]:
            assert [update.grad_norm for update in other[role]] == [update.grad_norm for update in results[0][role]]
    return results[0]


def differences(actual: dict[str, list[UpdateMetrics]], expected: dict[str, list[UpdateMetrics]]) -> dict[str, float]:
    """The largest relative difference of each column, over roles and steps; per-token metrics are related to their root
    mean square, as single ones may be near 0."""
    largest = dict.fromkeys(COLUMNS, 0.0)
    for role in expected:
        for update, other in zip(actual[role], expected[role], strict=True):
            of_step = {
                "loss": abs(update.loss - other.loss) / abs(other.loss),
                "grad norm": abs(update.grad_norm - other.grad_norm) / other.grad_norm,
            }
            for column, figure in other.outputs.items():
                of_step[column] = float(np.abs(update.outputs[column] - figure).max() / np.sqrt(np.mean(figure**2)))
            for column, difference in of_step.items():
                largest[column] = max(largest[column], difference)
    return largest


@pytest.mark.parametrize("model,layout", PARAMS)
def test_a_layout_gives_the_numbers_of_one_rank(reference, model, layout):
    directory, expected = reference(model)
    off = differences(measured(directory, layout, CUT), expected)
    assert max(off.values()) <= TOLERANCE, off


def test_the_matrix_covers_every_axis():
    plain = Layout()
    for axis in (*AXES.values(), "sequence_parallel", "stages"):
        changed = [layout for _, layout in CASES if getattr(layout, axis) != getattr(plain, axis)]
        assert any(replace(layout, **{axis: getattr(plain, axis)}) != plain for layout in changed), f"{axis} with others"
    assert len({layout for _, layout in CASES}) >= 24
    assert max(layout.ranks for _, layout in CASES) == 8
