"""An engine that holds FP8 blocks and was synced equals one that loaded the same weights and quantised them itself; and
the weights that are sent in blocks are those that vLLM quantises, of every family."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from megarl.models import FAMILIES, ModelShape
from megarl.models.quantised_blocks import block_bytes, quantised_tensors
from megarl.weight_sync.codec import quantise_blocks
from tests.fp8_engine import quantised_by_vllm, sampled
from tests.rollout_cases import checkpoint
from tests.rollout_cases import save_model as save_small_model
from tests.sync_cases import dequantise_blocks

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
    found = engine_process.submit(sampled, old, new).result(timeout=300)
    assert found["new"] != found["loaded"]
    assert found["back"] == found["loaded"], "tokens or log-probabilities differ from those of the loaded weights"
    for number, (tokens, logprobs) in enumerate(zip(*found["new"], strict=True)):
        expected = logprobs_of_blocks(new, list(range(3 + number, 9 + 2 * number)), tokens)
        assert float((expected - torch.tensor(logprobs)).abs().max()) < 0.1, "more than bf16 activations explain"
    quantised = quantised_tensors(ModelShape.from_directory(new))
    sizes = {name: tensor.numel() for name, tensor in checkpoint(new).items()}
    rest = 2 * sum(size for name, size in sizes.items() if name not in quantised)
    assert found["bound_bytes"] == rest + sum(block_bytes(*size) for size in quantised.values())


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
