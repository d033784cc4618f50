"""A sync holds no model beside the model: what both of its ends take from memory, measured by the kernel."""

from __future__ import annotations

import multiprocessing
from collections import deque
from pathlib import Path

import pytest
import torch

from megarl.family import ModelShape
from megarl.reshard.boxes import Layout, RolloutLayout
from megarl.reshard.megatron import megatron_segments
from megarl.sync.publish import SyncSettings, WeightSync
from tests.sync_cases import ThreadEngines

pytestmark = pytest.mark.sync

BUCKET_BYTES = 1 << 20
SHAPE = ModelShape.from_config(
    {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 512, "head_dim": 64,
        "intermediate_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }
)  # fmt: skip


def peak_beyond_rest() -> tuple[int, int, int]:
    """Bytes that a sync in bfloat16 takes beyond rest, of one layer, and of the model; all buckets are in use before."""
    torch.set_num_threads(1)
    parameters: dict[str, torch.Tensor] = {}
    for s in megatron_segments(SHAPE, Layout()):
        rows, cols = s.local_row + s.row1 - s.row0, s.local_col + s.col1 - s.col0
        known = parameters.get(s.parameter)
        if known is None or known.shape[0] < rows or known.shape[1] < cols:
            parameters[s.parameter] = torch.ones(rows, cols)
    settings = SyncSettings(torch.bfloat16, RolloutLayout(), 1, BUCKET_BYTES, timeout_s=60.0)
    sync = WeightSync(SHAPE, Layout(), settings, "test", 0, None)
    engines = Draining(SHAPE, RolloutLayout())
    sync.publish(1, parameters, engines)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    rest = resident("VmRSS")
    figures = sync.publish(2, parameters, engines)
    peak = resident("VmHWM")
    engines.close()
    sync.close()
    layer = sum(content.nbytes for name, content in parameters.items() if ".layers.0." in name)
    return peak - rest, layer, int(figures["sync/received_bytes"])


class Draining(ThreadEngines):
    """Workers that keep nothing of what they read."""

    def _read(self, engine: int, worker: int) -> dict[str, torch.Tensor]:
        deque(self.readers[engine, worker].boxes(self._manifest, engine), maxlen=0)
        return {}


def resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which))


def test_both_ends_together_take_no_more_than_one_layer_and_two_buckets() -> None:
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        beyond, layer, model = pool.apply(peak_beyond_rest)
    allowed = layer + 2 * BUCKET_BYTES
    assert model > 5 * allowed, "the model is too small to tell"
    assert beyond <= allowed, f"{beyond} bytes beyond rest; {allowed} are allowed"
