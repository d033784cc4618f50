"""Read `config.json` in the forms of transformers 4 and 5: accepted values, refused values, and defaults of missing
keys."""

from typing import Any

import pytest

from megarl.models import ModelShape

SIZES = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 131, "rms_norm_eps": 1e-6,
}  # fmt: skip
DEEPSEEK = {
    **SIZES, "model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5,
}  # fmt: skip
YARN = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
GEMMA = {**SIZES, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8}


def test_both_forms_of_deepseeks_yarn_mean_the_same():
    old = {**DEEPSEEK, "rope_theta": 10000, "rope_scaling": {**YARN, "type": "yarn"}}
    new = {**DEEPSEEK, "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 10000}}
    assert ModelShape.from_config(old) == ModelShape.from_config(new)


def test_an_exported_config_names_only_layers_that_were_saved():
    from megarl.megatron.export import exported_config

    config = {**DEEPSEEK, "torch_dtype": "float8_e4m3fn", "num_nextn_predict_layers": 1}
    assert exported_config(config, "bf16") == {**DEEPSEEK, "dtype": "bfloat16", "num_nextn_predict_layers": 0}
    assert "num_nextn_predict_layers" not in exported_config(GEMMA, "fp32")


def test_a_weight_sync_does_not_send_the_routers_bias():
    """No update changes the bias, and engines keep it in fp32 under every precision of the sync."""
    from megarl.models.layout import Layout, RolloutLayout
    from megarl.models.megatron_weights import checkpoint_sizes
    from megarl.weight_sync.plan import sync_plan

    shape = ModelShape.from_config(DEEPSEEK)
    sent = set(sync_plan(shape, Layout(data=2, expert=2), RolloutLayout()).names)
    router_biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}
    assert checkpoint_sizes(shape).keys() - sent == router_biases


DENSE = SIZES | {
    "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False, "rope_theta": 5e4, "hidden_act": "silu",
}  # fmt: skip
MIXED = {"num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
COMPLETE = {
    "llama": DENSE,
    "qwen2": {key: value for key, value in DENSE.items() if key != "head_dim"},
    "qwen3": DENSE,
    "qwen3_moe": DENSE | MIXED | {"num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": DENSE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma3_text": GEMMA | {
        "max_position_embeddings": 512, "rope_theta": 5e4, "rope_local_base_freq": 1e3, "query_pre_attn_scalar": 20,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "deepseek_v3": DENSE | DEEPSEEK | {"rope_scaling": YARN | {"rope_type": "yarn"}},
}  # fmt: skip


@pytest.mark.parametrize("family", COMPLETE)
def test_a_missing_key_has_the_default_of_transformers_and_vllm(family):
    """Or the file is refused. Engines read config.json through transformers, which has defaults for each family, and which
    writes the keys of transformers 4 as those of transformers 5."""
    from transformers import AutoConfig

    everything = {key: value for key, value in COMPLETE[family].items() if key != "model_type"}
    # vLLM and transformers have no other routing for DeepSeek-V3, and no key for it.
    fixed = {"model_type": family} | {key: everything[key] for key in ("scoring_func", "topk_method") if key in everything}
    compared = 0
    for left_out in (None, *everything):
        config = {key: value for key, value in everything.items() if key != left_out}
        try:
            shape = ModelShape.from_config({"model_type": family} | config)
        except (ValueError, KeyError):
            continue
        theirs = AutoConfig.for_model(family, **config).to_dict()
        assert shape == ModelShape.from_config(theirs | fixed), left_out
        compared += 1
    assert compared >= 6


# Each is refused alone.
ODD_VALUES: dict[str, dict[str, Any]] = {
    "llama": {"sliding_window": 128, "qkv_bias": True, "logit_scale": 0.5, "is_causal": False,
              "original_max_position_embeddings": 64},
    "qwen3": {"partial_rotary_factor": 0.5},
    "gemma3_text": {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "use_bidirectional_attention": True,
                    "hidden_activation": "gelu", "sliding_window": None, "query_pre_attn_scalar": 0},
    "deepseek_v3": {"sliding_window": 128, "index_topk": 64, "norm_topk_prob": False, "moe_layer_freq": 2,
                    "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_interleave": False, "attention_bias": True,
                    "kv_lora_rank": 0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        *((family, {key: value}, f"{key} = {value!r}") for family, odd in ODD_VALUES.items() for key, value in odd.items()),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "beside"),
        ("llama", {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, "beside"),
        ("deepseek_v3", {"scoring_func": None}, "scoring_func = None must be 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy' must be 'noaux_tc'"),
        ("deepseek_v3", {"topk_group": 4}, "num_experts_per_tok = 4 must be twice topk_group = 4"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3 must divide n_routed_experts = 8"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group = 5 must be at most n_group = 4"),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
            "num_experts_per_tok = 1 must be at least 2",
        ),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method = 'fp8'"),
        ("deepseek_v3", {"rope_scaling": {"type": "dynamic"}}, "rope_type = 'dynamic'"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": None}}, "factor = None of rope_type 'yarn'"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "llama3"}}, "rope_type = 'llama3'"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1] is not supported; the first layers"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must be at most num_experts = 8"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size = 0 must be a whole number of at least 1"),
        ("qwen3_moe", {"architectures": ["Qwen3MoeForTokenClassification"]}, "Qwen3MoeForCausalLM is"),
    ],
)
def test_a_model_that_engines_and_trainer_would_compute_differently_is_refused(family, change, words):
    """Engines would sample from another policy than the trainer trains, or the layers would compute something else."""
    config = COMPLETE[family] | {"model_type": family}
    ModelShape.from_config(config)
    with pytest.raises(ValueError, match="^there: ") as caught:
        ModelShape.from_config(config | change, "there")
    assert words.lower() in str(caught.value).lower()


def test_gemmas_old_and_new_keys_together_mean_the_same_as_in_transformers():
    config = COMPLETE["gemma3_text"] | {
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    shape = ModelShape.from_config(config)
    assert (shape.rope_theta, dict(shape.rope_scaling)["factor"], shape.local_rope_theta) == (1e6, 8.0, 1e3)
