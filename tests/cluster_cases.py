"""The models that the recipes for clusters name, as their `config.json` says them."""

from __future__ import annotations

from typing import Any

from tests.planner_cases import QWEN_7B

LLAMA_2 = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False}
QWEN_3 = {
    "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-7B-Instruct": QWEN_7B,
    "Qwen/Qwen2.5-32B": QWEN_7B | {
        "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
        "intermediate_size": 27648, "max_position_embeddings": 131072,
    },
    "meta-llama/Llama-2-70b-chat-hf": LLAMA_2 | {
        "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
    "meta-llama/Llama-2-13b-chat-hf": LLAMA_2 | {
        "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 40,
        "intermediate_size": 13824,
    },
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-8B": QWEN_3 | {
        "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    },
    "Qwen/Qwen3-32B": QWEN_3 | {
        "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
    },
    "unsloth/DeepSeek-V3-bf16": {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "max_position_embeddings": 163840, "tie_word_embeddings": False,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                         "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}  # fmt: skip
