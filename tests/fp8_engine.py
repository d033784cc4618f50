"""A vLLM engine in one process that holds its linear weights in FP8 blocks and takes versions of two models; and which
weights vLLM's own models hold so.

vLLM has block kernels for GPUs and for CPUs with AMX tiles; here one of plain torch stands in, so that all else, vLLM's
layers and parameters too, is real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch


def reference_kernel() -> type:
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel

    from megarl.weight_sync.codec import Blocks
    from tests.sync_cases import dequantise_blocks

    class ReferenceKernel(Fp8BlockScaledMMLinearKernel):
        """Products with the dequantised weights."""

        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
            return torch.nn.functional.linear(A, dequantise_blocks(Blocks(B, Bs)).to(A.dtype))

    return ReferenceKernel


def sampled(old: Path, new: Path) -> dict[str, Any]:
    """Tokens and log-probabilities of the weights that were `loaded`, of the `new` ones and of the first ones, `back` again;
    and the bytes of a version."""
    from vllm import SamplingParams
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    from megarl.models import ModelShape
    from megarl.models.layout import Layout, RolloutLayout
    from megarl.rollout.engine_settings import QUANTIZATIONS
    from megarl.weight_sync.manifest import SyncSettings
    from megarl.weight_sync.publish import WeightSync
    from tests.in_process_engine import Receiving, close_engines, open_receiver
    from tests.rollout_cases import megatron_shards

    with mock.patch.dict(linear._POSSIBLE_FP8_BLOCK_KERNELS, {PlatformEnum.CPU: [reference_kernel()]}):
        engine = open_receiver(old, dtype="bfloat16", quantization=QUANTIZATIONS["fp8"])
    shape = ModelShape.from_directory(old)
    settings = SyncSettings("bf16", RolloutLayout(), 1, 1 << 17, 60.0, transport="group", quantization="fp8")
    sync = WeightSync(shape, Layout(), settings, 0, None)

    def sample() -> list[Any]:
        prompts: Any = [{"prompt_token_ids": list(range(3 + n, 9 + 2 * n))} for n in range(4)]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, detokenize=False))
        tokens = [list(one.outputs[0].token_ids) for one in outputs]
        logprobs = [
            [step[token].logprob for token, step in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)]
            for one in outputs
        ]
        return [tokens, logprobs]

    receiving, found = Receiving(engine), {"loaded": sample()}
    for version, (name, model) in enumerate((("new", new), ("back", old)), start=1):
        metrics = sync.publish(version, megatron_shards(model, Layout())[0], receiving)
        found[name] = sample()
    sync.close()
    close_engines()
    return found | {"bound_bytes": metrics["sync/bound_bytes"]}


def quantised_by_vllm(model: Path) -> dict[str, tuple[int, ...]]:
    """Sizes of the checkpoint tensors that vLLM puts into parameters which it quantises; nothing of megarl says which.

    vLLM's own model is built without memory. A tensor goes where the model's loader puts it, and is quantised where the
    module there has a method for FP8 blocks: those of matrices, as biases keep their format.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import PlatformEnum
    from vllm.utils.torch_utils import set_default_torch_dtype

    from megarl.rollout.engine_settings import QUANTIZATIONS
    from tests.in_process_engine import close_engines
    from tests.rollout_cases import checkpoint

    config = EngineArgs(
        model=str(model), dtype="bfloat16", quantization=QUANTIZATIONS["fp8"], skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=64,
    ).create_engine_config()  # fmt: skip
    methods = fp8.Fp8PerBlockOnlineLinearMethod, fp8.Fp8PerBlockOnlineMoEMethod
    found = {}
    with (
        mock.patch.dict(linear._POSSIBLE_FP8_BLOCK_KERNELS, {PlatformEnum.CPU: [reference_kernel()]}),
        mock.patch.object(fp8, "select_fp8_moe_backend", lambda **asked: (Fp8MoeBackend.TRITON, None)),
        mock.patch.object(layerwise, "_layerwise_process"),  # there is no content that it could quantise
        set_current_vllm_config(config),
    ):
        init_distributed_environment(1, 0, f"file://{model / 'meeting'}", 0, "gloo")
        initialize_model_parallel()
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            made: Any = initialize_model(config)
        for name, tensor in checkpoint(model).items():
            (parameter,) = made.load_weights([(name, tensor.to("meta"))])
            method = getattr(made.get_submodule(parameter.rpartition(".")[0]), "quant_method", None)
            if isinstance(method, methods) and made.get_parameter(parameter).dim() > 1:
                found[name] = tuple(tensor.shape)
    close_engines()
    return found
