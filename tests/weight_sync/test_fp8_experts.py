"""Experts and latent attention in FP8 blocks: what a worker has after a sync is what vLLM's own methods make of the same
weights. They run here without a kernel, which few CPUs have, in the layout of one that takes the blocks as they are. Which
weights those are is taken as given: `test_fp8_engines.py` asks vLLM's models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.megatron_weights import checkpoint_sizes, megatron_boxes
from megarl.models.quantised_blocks import quantised_tensors
from megarl.models.vllm_weights import parameter_sizes, vllm_boxes
from megarl.rollout import RolloutError
from megarl.weight_sync.buckets import FP8
from megarl.weight_sync.manifest import SyncSettings
from megarl.weight_sync.publish import WeightSync
from tests.rollout_cases import cut
from tests.sync_cases import Parameters, ThreadEngines
from tests.weight_sync.test_buckets import BLOCKS, MOE
from tests.weight_sync.test_receiver import bare_receiver

pytestmark = pytest.mark.sync

QWEN = BLOCKS | MOE | {"num_hidden_layers": 1, "moe_intermediate_size": 256}
DEEPSEEK = BLOCKS | {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "q_lora_rank": 128,
    "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 256,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "rope_interleave": True,
}  # fmt: skip
EXPERT = re.compile(r"\.experts\.\d+\.")


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    """Keep vLLM from compiling its quantiser, which takes longer than the tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Worker:
    """A worker's modules with the parameters that vLLM would have after it loaded a checkpoint's tensors."""

    def __init__(self, shape: ModelShape, rollout: RolloutLayout, number: int, tensors: Parameters) -> None:
        boxes = [box for box in vllm_boxes(shape, rollout) if box.rank == number]
        loaded, quantised = cut(boxes, tensors)[number], quantised_tensors(shape)
        self.modules: dict[str, Any] = {}
        for name, size in parameter_sizes(shape, rollout, number).items():
            content = torch.zeros(size, dtype=torch.bfloat16)
            content[: loaded[name].shape[0]] = loaded[name]
            names = [box.name for box in boxes if box.parameter == name]
            experts = {match.group() for box_name in names if (match := EXPERT.search(box_name))}
            module = self.modules.setdefault(name.rpartition(".")[0], torch.nn.Module())
            weight = content.view(len(experts), -1, size[1]) if experts else content
            setattr(module, name.rpartition(".")[2], torch.nn.Parameter(weight, requires_grad=False))
            if not experts and set(names) <= quantised.keys():
                linear_method().process_weights_after_loading(module)
        for name, module in self.modules.items():
            if name.endswith("experts"):
                module.moe_config = SimpleNamespace(
                    hidden_dim_unpadded=module.w2_weight.shape[1],
                    intermediate_size_per_partition_unpadded=module.w2_weight.shape[2],
                )
                module.local_num_experts = len(module.w2_weight)
                module.w13_input_scale = module.w2_input_scale = None
                experts_method().process_weights_after_loading(module)
            module.quant_method = experts_method() if name.endswith("experts") else None
            if hasattr(module, "weight_scale_inv"):
                module.quant_method = linear_method()

    def receiver(self, shape: ModelShape, rollout: RolloutLayout, number: int, reader: Any) -> Any:
        return bare_receiver(shape, self.modules, parameter_sizes(shape, rollout, number), reader)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {
            f"{owner}.{name}": parameter.detach()
            for owner, module in self.modules.items()
            for name, parameter in module.named_parameters()
        }


def experts_method() -> Any:
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod

    class Method(Fp8PerBlockOnlineMoEMethod):
        """Without asking for a kernel, and without making one."""

        def __init__(self) -> None:
            self.weight_block_size, self.weight_scale_name = [128, 128], "weight_scale_inv"
            self.fp8_backend, self.moe = Fp8MoeBackend.TRITON, SimpleNamespace(w13_num_shards=2)  # type: ignore[assignment]

        def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> Any:
            return None

    return Method()


def linear_method() -> Any:
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod

    method: Any = Fp8PerBlockOnlineLinearMethod.__new__(Fp8PerBlockOnlineLinearMethod)
    method.weight_block_size, method.requantization_source = [128, 128], None
    method.fp8_linear = SimpleNamespace(process_weights_after_loading=new_scales)
    return method


def new_scales(module: torch.nn.Module) -> None:
    """Make new scales, as DeepGEMM does for its own layout."""
    scales: Any = module.weight_scale_inv
    module.weight_scale_inv = torch.nn.Parameter(scales.data.clone(), requires_grad=False)


class Engines(ThreadEngines):
    """Engines whose workers hand their boxes to the receivers."""

    receivers: list[Any]

    def _read(self, engine: int, worker: int) -> Parameters:
        receiver = self.receivers[worker]
        receiver._unpacked = []
        with torch.no_grad():
            for box in self.readers[engine, worker].read(self._manifest, engine, receiver):
                receiver._arrived(box)
        return {}


def addresses(worker: Worker) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in worker.parameters().items()}


@pytest.mark.parametrize(
    ("config", "rollout", "num_quantised"),
    [
        (QWEN, RolloutLayout(2), 4 + 1 + 12),
        (QWEN, RolloutLayout(2, expert_parallel=True), 4 + 1 + 12),
        (DEEPSEEK, RolloutLayout(2), 2 * 5 + 3 + 3 + 12),
    ],
    ids=["cut", "dealt", "latent"],
)
def test_experts_in_blocks_are_those_that_vllm_makes(
    config: dict[str, Any], rollout: RolloutLayout, num_quantised: int
) -> None:
    """On a GPU they also keep their addresses, where captured CUDA graphs read them."""
    pytest.importorskip("vllm", reason="needs vLLM's quantisation")
    shape = ModelShape.from_config(config)
    assert len(quantised_tensors(shape)) == num_quantised
    generator = torch.Generator().manual_seed(0)
    old, new = (
        {name: torch.randn(size, generator=generator).bfloat16() for name, size in checkpoint_sizes(shape).items()}
        for _ in range(2)
    )
    for name in new:
        if name.endswith("e_score_correction_bias"):
            old[name] = new[name]  # no sync sends it
    workers = [Worker(shape, rollout, number, old) for number in range(2)]
    settings = SyncSettings("bf16", rollout, 1, 1 << 17, 60.0, transport="group", quantization="fp8")
    sync, engines = WeightSync(shape, Layout(), settings, 0, None), Engines(shape, rollout)
    engines.receivers = [
        worker.receiver(shape, rollout, number, engines.readers[0, number]) for number, worker in enumerate(workers)
    ]
    for receiver in engines.receivers:
        receiver._homes = {}  # it captures graphs
    before = [addresses(worker) for worker in workers]
    try:
        for version, tensors in ((1, new), (2, old), (3, new)):
            sync.publish(version, cut(megatron_boxes(shape, Layout()), tensors)[0], engines)
    finally:
        engines.close()
        sync.close()
    assert [addresses(worker) for worker in workers] == before
    for number, worker in enumerate(workers):
        taken, expected = worker.parameters(), Worker(shape, rollout, number, new).parameters()
        assert taken.keys() == expected.keys()
        for name, content in expected.items():
            assert taken[name].dtype == content.dtype and taken[name].shape == content.shape, name
            assert torch.equal(taken[name].view(torch.uint8), content.view(torch.uint8)), name
        assert sum(content.dtype == FP8 for content in taken.values()) > 4


def test_an_engine_that_has_started_names_the_formats_that_no_sync_writes() -> None:
    """Marlin's experts are integers with scales of 16 bits, and DeepGEMM's scales may be powers of two in integers;
    here by hand, since no CPU has those kernels."""
    pytest.importorskip("vllm", reason="needs vLLM's quantisation")
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    from megarl.rollout.engine_settings import refuse_other_formats

    shape, rollout = ModelShape.from_config(QWEN), RolloutLayout()
    tensors = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in checkpoint_sizes(shape).items()}
    worker = Worker(shape, rollout, 0, tensors)
    receiver = worker.receiver(shape, rollout, 0, None)
    receiver._rollout, receiver._worker = rollout, lambda: 0
    receiver.model = SimpleNamespace(named_modules=worker.modules.items)
    assert receiver.other_formats() == []
    refuse_other_formats("fp8", [[], []])

    experts, output = (
        worker.modules[f"model.layers.0.{name}"] for name in ("mlp.experts.routed_experts", "self_attn.o_proj")
    )
    experts.quant_method.fp8_backend = Fp8MoeBackend.MARLIN
    experts.w2_weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)
    experts.w2_weight_scale_inv = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16), requires_grad=False)
    output.weight_scale_inv = torch.nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)
    formats = receiver.other_formats()
    assert sorted(formats) == [
        "model.layers.0.mlp.experts.routed_experts.w2_weight is torch.int32, not torch.float8_e4m3fn, under MARLIN",
        "model.layers.0.mlp.experts.routed_experts.w2_weight_scale_inv is torch.bfloat16, not torch.float32, under MARLIN",
        "model.layers.0.self_attn.o_proj.weight_scale_inv is torch.int32, not torch.float32, under SimpleNamespace",
    ]
    with pytest.raises(RolloutError, match=r"rollout.quantization = fp8: .* \(and 2 more\); set it to null"):
        refuse_other_formats("fp8", [[], formats])
