"""An engine that holds FP8 blocks and was synced equals one that loaded the same weights and quantised them itself; and
the weights that are sent in blocks are those that vLLM quantises, of every family.

vLLM has block kernels for GPUs and for CPUs with AMX tiles; here one of plain torch stands in, so that all else, vLLM's
layers and parameters too, is real."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.models import FAMILIES, ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.quantised_blocks import block_bytes, quantised_tensors
from megarl.rollout.engine_settings import QUANTIZATIONS
from megarl.weight_sync.codec import Blocks, quantise_blocks
from megarl.weight_sync.manifest import SyncSettings
from megarl.weight_sync.publish import WeightSync
from tests.in_process_engine import Receiving, answers, close_engines, open_receiver
from tests.rollout_cases import checkpoint, megatron_shards
from tests.rollout_cases import save_model as save_small_model
from tests.sync_cases import dequantise_blocks


def reference_kernel() -> type:
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel

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
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    with mock.patch.dict(linear._POSSIBLE_FP8_BLOCK_KERNELS, {PlatformEnum.CPU: [reference_kernel()]}):
        engine = open_receiver(old, dtype="bfloat16", quantization=QUANTIZATIONS["fp8"])
    shape = ModelShape.from_directory(old)
    settings = SyncSettings("bf16", RolloutLayout(), 1, 1 << 17, 60.0, transport="group", quantization="fp8")
    sync = WeightSync(shape, Layout(), settings, 0, None)

    receiving, samples = Receiving(engine), {"loaded": answers(engine)}
    for version, (name, model) in enumerate((("new", new), ("back", old)), start=1):
        metrics = sync.publish(version, megatron_shards(model, Layout())[0], receiving)
        samples[name] = answers(engine)
    sync.close()
    close_engines()
    return samples | {"bound_bytes": metrics["sync/bound_bytes"]}


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

    config = EngineArgs(
        model=str(model), dtype="bfloat16", quantization=QUANTIZATIONS["fp8"], skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=64,
    ).create_engine_config()  # fmt: skip
    methods = fp8.Fp8PerBlockOnlineLinearMethod, fp8.Fp8PerBlockOnlineMoEMethod
    sizes = {}
    with (
        mock.patch.dict(linear._POSSIBLE_FP8_BLOCK_KERNELS, {PlatformEnum.CPU: [reference_kernel()]}),
        mock.patch.object(fp8, "select_fp8_moe_backend", lambda **options: (Fp8MoeBackend.TRITON, None)),
        mock.patch.object(layerwise, "_layerwise_process"),  # there is no content that it could quantise
        set_current_vllm_config(config),
    ):
        init_distributed_environment(1, 0, f"file://{model / 'meeting'}", 0, "gloo")
        initialize_model_parallel()
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            meta_model: Any = initialize_model(config)
        for name, tensor in checkpoint(model).items():
            (parameter,) = meta_model.load_weights([(name, tensor.to("meta"))])
            method = getattr(meta_model.get_submodule(parameter.rpartition(".")[0]), "quant_method", None)
            if isinstance(method, methods) and meta_model.get_parameter(parameter).dim() > 1:
                sizes[name] = tuple(tensor.shape)
    close_engines()
    return sizes


pytestmark = [pytest.mark.sync, pytest.mark.slow]


def save_model(directory: Path, seed: int) -> Path:
    """A Llama in bf16 whose shards all begin at a block of 128 x 128."""
    import transformers as hf

    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=131, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=128, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=1,
        bos_token_id=None, initializer_range=0.08,
    )  # fmt: skip
    hf.LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    return directory


def logprobs_of_blocks(model: Path, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """transformers' float32 log-probabilities of tokens under the dequantised weights."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    quantised = quantised_tensors(ModelShape.from_directory(model))
    state = checkpoint(model)
    for name, parameter in reference.named_parameters():
        if name in quantised:
            parameter.data = dequantise_blocks(quantise_blocks(state[name]))
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_a_synced_engine_in_fp8_equals_one_that_loaded_the_weights(
    engine_process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    old, new = save_model(tmp_path / "old", 0), save_model(tmp_path / "new", 1)
    samples = engine_process.submit(sampled, old, new).result(timeout=300)
    assert samples["new"] != samples["loaded"]
    assert samples["back"] == samples["loaded"], "tokens or log-probabilities differ from those of the loaded weights"
    for number, completion in enumerate(samples["new"]):
        expected = logprobs_of_blocks(new, [3, 5, 7, 11 + number], [token for token, _ in completion])
        logprobs = torch.tensor([likely[token] for token, likely in completion])
        assert float((expected - logprobs).abs().max()) < 0.1, "more than bf16 activations explain"
    quantised = quantised_tensors(ModelShape.from_directory(new))
    sizes = {name: tensor.numel() for name, tensor in checkpoint(new).items()}
    rest = 2 * sum(size for name, size in sizes.items() if name not in quantised)
    assert samples["bound_bytes"] == rest + sum(block_bytes(*size) for size in quantised.values())


IN_CI = ("llama", "qwen3_moe", "mixtral", "deepseek_v3")  # dense, both kinds of routers, latent attention


@pytest.mark.parametrize(
    "family", [family if family in IN_CI else pytest.param(family, marks=pytest.mark.nightly) for family in FAMILIES]
)
def test_the_weights_sent_in_blocks_are_those_that_vllm_quantises(
    engine_process: ProcessPoolExecutor, tmp_path: Path, family: str
) -> None:
    """Above all routers: vLLM quantises the routers of some families only."""
    model = save_small_model(tmp_path / "model", family.removesuffix("_text"), False, 0)
    shape = ModelShape.from_directory(model)
    assert shape.family == family
    expected = engine_process.submit(quantised_by_vllm, model).result(timeout=300)
    assert expected and quantised_tensors(shape) == expected
