"""Tiny random models saved as Hugging Face directories, the independent reference of the engine tests."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

FAMILIES = ("llama", "llama3", "qwen2", "qwen3")
MOE_FAMILIES = ("qwen3_moe", "mixtral")


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
    `llama3` is Llama with Llama 3.1's rotary scaling. The expert models have 8 experts, of which a token takes 2; the first
    layer of qwen3_moe has none. Norms and biases are random too, so that a swapped or dropped one shows.
    """
    import transformers as hf

    sizes = dict(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=tied, eos_token_id=1, bos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(seed)
    if family == "qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes))
    elif family == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, head_dim=head_dim))
    elif family == "qwen3_moe":
        experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, **experts, mlp_only_layers=[0], head_dim=head_dim))
    elif family == "mixtral":
        experts = dict(num_local_experts=8, num_experts_per_tok=2)
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, **experts, head_dim=head_dim))
    else:
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
        extra = {"rope_parameters": scaling} if family == "llama3" else {}
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, head_dim=head_dim, **extra))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory, safe_serialization=True)
    return Path(directory)


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
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"  # noqa: E501
    fast.save_pretrained(directory)


if __name__ == "__main__":
    save_tiny_tokenizer(save_tiny_model(Path(sys.argv[1]), "qwen3", head_dim=32))
