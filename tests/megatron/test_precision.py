"""megatron-core's configuration, fp16 with a loss scale that moves, and FP8 as far as a machine without a GPU can tell."""

from __future__ import annotations

import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from megarl.megatron import role
from megarl.megatron.batch import pack
from megarl.megatron.model import transformer_config
from megarl.models import ModelShape
from megarl.models.layout import Layout
from tests.engine_cases import objective_of, planned, random_batch, small_batch, start
from tests.feature_cases import Feature, build, cut, train_with
from tests.ranks import run_ranks
from tests.recipe_cases import CONFIG
from tests.tiny_models import save_tiny_model


@pytest.mark.layout
def test_fp16_trains_like_fp32_and_skips_what_overflows(tmp_path: Path) -> None:
    directory, folder = str(save_tiny_model(tmp_path / "model", "qwen3")), str(tmp_path / "checkpoints")
    layout = Layout(pipeline=2, data=2)
    features = [
        Feature(),
        Feature(precision="fp16", initial_loss_scale=256.0),
        Feature(precision="fp16", initial_loss_scale=2.0**19),
        Feature(precision="fp16", initial_loss_scale=2.0**19, checkpoint=folder),
    ]
    for wide, half, overflowing, resumed in run_ranks(train_with, layout.ranks, directory, layout, features, 6):
        assert not any(line.skipped for line in half)
        for line, expected in zip(half, wide, strict=True):
            assert line.loss == pytest.approx(expected.loss, rel=0.02)
            assert line.grad_norm == pytest.approx(expected.grad_norm, rel=0.05), "the gradient is scaled back"
        assert [line.skipped for line in overflowing[:2]] == [True, True]
        assert overflowing[0].weights == overflowing[1].weights, "a skipped update moved the weights"
        assert overflowing[0].learning_rate == overflowing[2].learning_rate, "a skipped update moved the schedule"
        assert not overflowing[-1].skipped, "the scale never came down"
        assert resumed == overflowing, "the loss scale was not in the checkpoint"


def overflow_for_ever(directory: str) -> int:
    """How many updates that overflow an engine takes before it gives up."""
    place = start(Layout())
    trained = build(directory, place, Feature(precision="fp16", initial_loss_scale=1e30))
    batch = small_batch(trained.shape.vocab)
    with mock.patch.object(role, "MAX_SKIPPED_UPDATES", 5):
        for number in range(100):
            try:
                assert trained.update(batch, cut(batch, place.layout), objective_of("actor", 100)).skipped
            except RuntimeError as error:
                assert "overflowed" in str(error) and "bf16" in str(error)
                return number
    return -1


@pytest.mark.layout
def test_overflow_without_end_is_an_error(tmp_path: Path) -> None:
    assert run_ranks(overflow_for_ever, 1, str(save_tiny_model(tmp_path))) == [4]


@pytest.mark.parametrize(
    ("recipe", "form", "history"),
    [("tensorwise", "hybrid", 1), ("delayed", "hybrid", 1024), ("blockwise", "e4m3", 1), ("mxfp8", "e4m3", 1)],
)
def test_fp8_reaches_megatron(recipe: str, form: str, history: int, tmp_path: Path) -> None:
    shape = ModelShape.from_directory(save_tiny_model(tmp_path))
    config = transformer_config(shape, Layout(), "bf16", fp8=recipe)
    assert (config.fp8, config.fp8_recipe, config.fp8_amax_history_len) == (form, recipe, history)
    assert config.params_dtype == torch.bfloat16 and not config.fp8_param
    assert transformer_config(shape, Layout(), "bf16").fp8 is None


@pytest.mark.parametrize(
    "layout",
    [
        Layout(token_multiple=16), Layout(tensor=2, sequence_parallel=True, token_multiple=16),
        Layout(context=2, data=2, token_multiple=32), Layout(tensor=2, context=2, sequence_parallel=True, token_multiple=16),
    ],
    ids=str,
)  # fmt: skip
def test_every_rank_runs_a_multiple_of_what_its_kernels_take(layout: Layout) -> None:
    batch = random_batch(100, [(3 + index % 5, 2 + (index * 7) % 11) for index in range(16)])
    mini_batch = planned(batch, layout, max_tokens=512)
    share = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    for micro in (micro_batch for rank in mini_batch.micro_batches for micro_batch in rank):
        assert micro.slots <= 512 and micro.slots % (share * layout.token_multiple) == 0
        for context_rank in range(layout.context):
            packed = pack(batch, micro, torch.device("cpu"), layout, context_rank)
            assert packed.input_ids.shape[1] == micro.slots // layout.context
    assert np.concatenate([micro_batch.samples for rank in mini_batch.micro_batches for micro_batch in rank]).size == 16


def test_a_stage_keeps_no_content_of_what_it_sent():
    """Its gradients are those of a pipeline that keeps it: see the tests of layouts. A stage of a virtual pipeline sends
    while it computes, and megatron-core's schedule does not wait for the sends before it frees: so this one keeps it."""
    shape = ModelShape.from_config(CONFIG)
    one, two, virtual = (
        transformer_config(shape, layout, "bf16")
        for layout in (Layout(), Layout(pipeline=2), Layout(pipeline=2, virtual_pipeline=2))
    )
    assert two.deallocate_pipeline_outputs and not one.deallocate_pipeline_outputs
    assert virtual.overlap_p2p_comm and not virtual.deallocate_pipeline_outputs


def shown_warnings():
    """Which of two warnings a rank shows."""
    import megarl.build  # noqa: F401

    with warnings.catch_warnings(record=True) as shown:
        for module in ("megatron.core.transformer.transformer_config", "megatron.core.jit"):
            warnings.warn_explicit(module, UserWarning, "a.py", 1, module=module, registry={})
    return [str(warning.message) for warning in shown]


def test_a_run_shows_megatron_s_warnings_about_its_options():
    assert run_ranks(shown_warnings, 1) == [["megatron.core.transformer.transformer_config"]]
