"""What the engine sets in megatron-core's configuration and optimizer."""

import subprocess
import sys

from megarl.megatron.model import transformer_config
from megarl.models import ModelShape
from megarl.models.layout import Layout
from tests.recipe_cases import CONFIG


def test_a_stage_keeps_no_content_of_what_it_sent():
    """Its gradients are those of a pipeline that keeps it: see the tests of layouts."""
    shape = ModelShape.from_config(CONFIG)
    assert transformer_config(shape, Layout(pipeline=2), "bf16").deallocate_pipeline_outputs
    assert not transformer_config(shape, Layout(), "bf16").deallocate_pipeline_outputs


def test_a_stage_of_a_virtual_pipeline_keeps_what_it_sends():
    """Its sends run on while it computes, and megatron-core's schedule does not wait for them before it frees."""
    config = transformer_config(ModelShape.from_config(CONFIG), Layout(pipeline=2, virtual_pipeline=2), "bf16")
    assert config.overlap_p2p_comm and not config.deallocate_pipeline_outputs


def test_a_run_shows_megatron_s_warnings_about_its_options():
    script = """
import megarl.build, warnings
config = "megatron.core.transformer.transformer_config"
warnings.warn_explicit("look here", UserWarning, "a.py", 1, module=config, registry={})
warnings.warn_explicit("not here", UserWarning, "b.py", 1, module="megatron.core.jit", registry={})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "look here" in done.stderr and "not here" not in done.stderr
