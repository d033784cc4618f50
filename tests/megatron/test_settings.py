"""What the engine sets in megatron-core's configuration and optimizer."""

import subprocess
import sys
from types import SimpleNamespace

import torch
from torch.testing import assert_close

from megarl.megatron.model import transformer_config
from megarl.megatron.optimizer import fuse
from megarl.models import ModelShape
from megarl.models.layout import Layout
from tests.recipe_cases import CONFIG


def test_torch_s_adam_passes_once_over_its_weights():
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 40)) for _ in range(2)]
    plain, fused = (torch.optim.AdamW([weight], lr=0.1, weight_decay=0.3) for weight in weights)
    fuse(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=fused), SimpleNamespace(optimizer=None)]))
    assert [(group["fused"], group["foreach"]) for group in fused.param_groups] == [(True, False)]
    for step in range(1, 4):
        for weight, optimizer in zip(weights, (plain, fused), strict=True):
            weight.grad = torch.sin(step * weight.detach())
            optimizer.step()
    assert_close(*weights)


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
