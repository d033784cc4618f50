"""Uneven pipeline stages give the numbers of one rank, with several chunks a stage too."""

import numpy as np
import pytest

from megarl.family import ModelShape
from megarl.reshard.boxes import Layout
from megarl.reshard.megatron import stage_layers
from tests.engine_cases import train
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.layout
# Five layers, tied: the last stage has a copy of the embedding.
LAYOUTS = [Layout(pipeline=2, stages=(1, 4)), Layout(pipeline=2, virtual_pipeline=2, stages=(1, 1, 2, 1))]


def test_updates_do_not_depend_on_how_layers_are_spread_over_the_stages(tmp_path):
    directory = str(save_tiny_model(tmp_path, "qwen3", tied=True, layers=5))
    reference = run_ranks(train, 1, directory, {"actor": Layout()}, 2, 400)[0]["actor"]
    for layout in LAYOUTS:
        found = run_ranks(train, 2, directory, {"actor": layout}, 2, 40)[0]["actor"]
        for (loss, norm, outputs), expected in zip(found, reference, strict=True):
            assert (loss, norm) == pytest.approx(expected[:2], rel=1e-4), layout
            np.testing.assert_allclose(outputs, expected[2], rtol=1e-4, atol=1e-4, err_msg=str(layout))


def test_chunks_take_their_layers_in_the_models_order():
    config = {"model_type": "qwen3", "num_hidden_layers": 7, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 131,
                 "num_attention_heads": 4}  # fmt: skip
    shape = ModelShape.from_config(config)
    layout = Layout(pipeline=2, virtual_pipeline=2, stages=(1, 2, 3, 1))
    assert [stage_layers(shape, layout, stage) for stage in range(2)] == [[0, 3, 4, 5], [1, 2, 6]]
