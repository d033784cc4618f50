"""What `benchmarks/engine.py --gpu` computes, on a tiny model."""

from __future__ import annotations

import statistics

import pytest

from megarl.family import ModelShape
from tests.memory_cases import HEADS, MODELS
from tests.ranks import run_ranks

CONFIG = {**MODELS["layers"], **HEADS}
LENGTHS = [(4, 12), (8, 8), (2, 6), (1, 7)]
PEAK = 1e9


def _measured():
    from benchmarks.engine import against_peak
    from megarl.reshard.boxes import Layout
    from tests.engine_cases import start

    return against_peak(CONFIG, start(Layout()), "fp32", LENGTHS, 2, PEAK, 2)


def test_utilisation_is_that_of_the_model_s_operations() -> None:
    (rows,) = run_ranks(_measured, 1)
    shape = ModelShape.from_config(CONFIG)
    # By hand, leaving attention's scores out (they are less than 2 % of so short sequences): weights times two a token.
    attention = 2 * shape.heads * shape.head_dim + 2 * shape.groups * shape.head_dim
    layers = 2 * shape.num_layers * shape.hidden * (attention + 3 * shape.ffn) * 48
    forward = layers + 2 * shape.hidden * shape.vocab * 33
    for row, passes in zip(rows, (3, 1), strict=True):
        seconds = statistics.median(row["seconds"]["engine"])
        assert len(row["seconds"]["engine"]) == 2
        assert row["value"] == pytest.approx(passes * forward / (seconds * PEAK), rel=0.03)
        assert row["tokens_per_second"]["engine"] == pytest.approx(48 / seconds)
    assert [row["run"] for row in rows] == ["update", "logprob"]
