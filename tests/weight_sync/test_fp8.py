"""What the trainer ranks quantise arrives as the blocks of the worker's whole parameter, whoever sends which of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.vllm_weights import vllm_segments
from megarl.weight_sync.codec import quantise_blocks
from megarl.weight_sync.publish import SyncSettings, WeightSync
from tests.ranks import run_ranks
from tests.rollout_cases import checkpoint, cut, megatron_shards
from tests.sync_cases import ThreadEngines, dequantise_blocks
from tests.weight_sync.test_stream import BLOCKS

pytestmark = pytest.mark.sync

LAYOUT, ROLLOUT = Layout(tensor=2, pipeline=2), RolloutLayout(2)


def save_model(directory: Path, seed: int) -> Path:
    import transformers as hf

    torch.manual_seed(seed)
    sizes = {key: value for key, value in BLOCKS.items() if key not in ("architectures", "model_type", "rope_theta")}
    hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes)).save_pretrained(directory)
    return directory


def publish_blocks(models: list[str], transport: str, wire: str) -> list[dict[str, float]]:
    dist.init_process_group("gloo")
    rank, shape = dist.get_rank(), ModelShape.from_directory(models[0])
    form = partial(SyncSettings, transport=transport, wire=wire, quantization="fp8")
    settings = form(torch.bfloat16, ROLLOUT, 1, 1 << 16, 60.0)
    sync = WeightSync(shape, LAYOUT, settings, "fp8", rank, dist.group.WORLD)
    engines = ThreadEngines(shape, ROLLOUT) if rank == 0 else None
    figures = []
    for version, model in enumerate(map(Path, models), start=1):
        figures.append(sync.publish(version, megatron_shards(model, LAYOUT)[rank], engines))
        if engines is None:
            continue
        for worker, parameters in cut(vllm_segments(shape, ROLLOUT), checkpoint(model)).items():
            assert engines.taken[0, worker].keys() == parameters.keys()
            for name, content in parameters.items():
                expected = content.bfloat16()
                if "_proj" in name:
                    expected = dequantise_blocks(quantise_blocks(expected))
                taken = engines.taken[0, worker][name][: content.shape[0], : content.shape[1]]
                assert torch.equal(torch.where(torch.isnan(taken), 0.0, taken), expected.float()), name
    if engines is not None:
        engines.close()
    sync.close()
    return figures


@pytest.mark.parametrize(("transport", "wire"), [("shared_memory", "full"), ("gloo", "delta")])
def test_blocks_of_all_ranks_make_the_blocks_of_the_worker(tmp_path: Path, transport: str, wire: str) -> None:
    models = [str(save_model(tmp_path / str(seed), seed)) for seed in (1, 2)]
    answers = run_ranks(publish_blocks, LAYOUT.ranks, [*models, models[1]], transport, wire)
    whole = sum(tensor.numel() * 2 for tensor in checkpoint(Path(models[0])).values())
    for figures in answers[0]:
        assert figures["sync/received_bytes"] == figures["sync/bound_bytes"] < 0.6 * whole
        assert figures["sync/attempts"] == 1
    if wire == "delta":
        assert answers[0][2]["sync/changed_share"] == 0.0 and answers[0][1]["sync/changed_share"] > 0.5
