"""What the engine sets in megatron-core's configuration and optimizer."""

import warnings

from megarl.megatron.model import transformer_config
from megarl.models import ModelShape
from megarl.models.layout import Layout
from tests.ranks import run_ranks
from tests.recipe_cases import CONFIG


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
