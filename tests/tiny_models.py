"""Tiny random models saved as Hugging Face directories, the independent reference of the engine tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

FAMILIES = ("llama", "llama3", "qwen2", "qwen3")
MOE_FAMILIES = ("qwen3_moe", "mixtral")
# `_plain` and `_scaled` are the same family with another config.
LATENT_FAMILIES = ("deepseek_v3", "deepseek_v3_plain")
GEMMA_FAMILIES = ("gemma3", "gemma3_scaled")
# What the names of Hugging Face's classes begin with.
PREFIXES = {
    "qwen3_moe": "Qwen3Moe", "qwen3": "Qwen3", "qwen2": "Qwen2", "mixtral": "Mixtral", "deepseek_v3": "DeepseekV3",
    "gemma3": "Gemma3", "llama": "Llama",
}  # fmt: skip


def save_tiny_model(
    directory: Path,
    family: str = "qwen3",
    tied: bool = False,
    seed: int = 0,
    vocab: int = 131,
    layers: int = 4,
    head_dim: int = 12,
) -> Path:
    """Write a random model of about 50 thousand weights: 4 heads, 2 groups, an odd vocabulary.

    `head_dim` (not of qwen2, whose heads share the hidden size) must be 32 or more where vLLM runs it on a CPU.
    `llama3` is Llama with Llama 3.1's rotary scaling. Norms and biases are random too, so that a swapped or dropped one
    shows.
    """
    sizes: dict[str, Any] = dict(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=tied, eos_token_id=1, bos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    if family.startswith("deepseek_v3"):
        sizes = _deepseek(sizes, plain=family.endswith("plain"))
    elif family.startswith("gemma3"):
        sizes = _gemma(sizes, head_dim, scaled=family.endswith("scaled"))
    elif family != "qwen2":
        sizes |= {"head_dim": head_dim}
    if family == "llama3":
        sizes["rope_parameters"] = {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 10000.0,
        }  # fmt: skip
    model = random_model(family, seed, sizes)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory, safe_serialization=True)
    return Path(directory)


def random_model(family: str, seed: int, sizes: dict[str, Any]) -> Any:
    """A model of these sizes, whose norms and biases are random too. The expert models have 8 experts, of which a token
    takes 2; the first layer of qwen3_moe has none."""
    import transformers

    experts: dict[str, Any] = {  # 24 rows an expert: vLLM pads them to 32 when it packs them for CPUs
        "qwen3_moe": dict(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[0]
        ),
        "mixtral": dict(num_local_experts=8, num_experts_per_tok=2),
    }
    prefix = next(name for start, name in PREFIXES.items() if family.startswith(start))
    config = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config(**sizes, **experts.get(family, {})))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _deepseek(sizes: dict[str, Any], plain: bool) -> dict[str, Any]:
    """8 experts in 4 groups and a shared one, in all layers but the first; YaRN from 64 positions; queries compressed.

    `plain` has neither YaRN nor compressed queries nor groups, and as many shared experts as two.
    """
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8, "beta_slow": 1}  # fmt: skip
    return sizes | dict(
        num_key_value_heads=sizes["num_attention_heads"], kv_lora_rank=12, q_lora_rank=None if plain else 20,
        qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=14, n_routed_experts=8, num_experts_per_tok=4,
        n_group=1 if plain else 4, topk_group=1 if plain else 2, n_shared_experts=2 if plain else 1,
        moe_intermediate_size=24, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True,
        scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0} if plain else yarn,
    )  # fmt: skip


def _gemma(sizes: dict[str, Any], head_dim: int, scaled: bool) -> dict[str, Any]:
    """Windows of 8 tokens in two of three layers, a scale that is not that of the head's size; `scaled` stretches the
    rotary embedding of the other layers."""
    everywhere = {"rope_type": "linear", "factor": 8.0} if scaled else {"rope_type": "default"}
    return sizes | dict(
        head_dim=head_dim, query_pre_attn_scalar=20, sliding_window=8, sliding_window_pattern=3,
        hidden_activation="gelu_pytorch_tanh", rope_parameters={
            "full_attention": everywhere | {"rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    )  # fmt: skip


def save_tiny_tokenizer(directory: Path) -> None:
    """One token a printable character: 0 pads, 1 ends, 2 … 96 are ASCII 32 … 126; with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<end>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="<pad>")
    fast.chat_template = "{% for message in messages %}{% if message['role'] == 'assistant' %}={% endif %}{{ message['content'] }}{% if message['role'] == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"  # noqa: E501
    fast.save_pretrained(directory)


def save_tiny_reward_model(directory: Path, family: str = "qwen3", seed: int = 1) -> Path:
    """Write a random sequence classifier of the sizes of `save_tiny_model`."""
    import transformers

    save_tiny_model(directory, family, seed=seed)
    config = transformers.AutoConfig.from_pretrained(directory, num_labels=1, pad_token_id=0)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{PREFIXES[family]}ForSequenceClassification")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or name == "score.weight":
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory, safe_serialization=True)
    return Path(directory)


if __name__ == "__main__":
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    save_tiny_tokenizer(save_tiny_model(Path(sys.argv[1]), "qwen3", seed=seed, layers=2, head_dim=32))
