"""What DeepSeek-V3's and Gemma 3's `config.json` may say, in the words of transformers 4 and 5, and what is refused."""

import pytest

from megarl.family import ModelShape

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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scoring_func": None}, "scoring_func = None must be 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' must be 'noaux_tc'"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"topk_group": 4}, "num_experts_per_tok = 4 must be twice topk_group = 4"),
        ({"n_group": 3}, "n_group = 3 must divide n_routed_experts = 8"),
        ({"topk_group": 5}, "topk_group = 5 must be at most n_group = 4"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "num_experts_per_tok = 1 must be at least 2"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method = 'fp8'"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type = 'dynamic'"),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "factor = None of rope_type 'yarn'"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0"),
    ],
)
def test_deepseek_refuses_what_it_would_compute_otherwise(change, words):
    with pytest.raises(ValueError, match=r"^there: ") as caught:
        ModelShape.from_config({**DEEPSEEK, **change}, "there")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ({"sliding_window": None}, "sliding_window = None"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type = 'llama3'"),
    ],
)
def test_gemma_refuses_what_it_would_compute_otherwise(change, words):
    with pytest.raises(ValueError, match=r"^there: ") as caught:
        ModelShape.from_config({**GEMMA, **change}, "there")
    assert words in str(caught.value)


def test_both_ways_to_write_deepseeks_yarn_are_one():
    old = {**DEEPSEEK, "rope_theta": 10000, "rope_scaling": {**YARN, "type": "yarn"}}
    new = {**DEEPSEEK, "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 10000}}
    assert ModelShape.from_config(old) == ModelShape.from_config(new)


def test_yarn_scales_attention_as_deepseek_v3_does():
    """0.1 ln 40 + 1 = 1.3689, squared, is the factor of DeepSeek-V3's scale; its cosines and sines keep theirs."""
    shape = ModelShape.from_config({**DEEPSEEK, "rope_scaling": {**YARN, "type": "yarn"}})
    assert shape.attention_scale == pytest.approx(24**-0.5 * 1.368888**2)
    assert shape.latent is not None
    assert shape.latent.rotary_scale == 1.0


def test_both_ways_to_write_gemmas_layers_are_one():
    old = {
        **GEMMA, "sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    new = {
        **GEMMA,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    shape = ModelShape.from_config(old)
    assert shape == ModelShape.from_config(new)
    assert shape.windows == (8, 0, 8, 0)
    assert shape.tied, "transformers ties Gemma's embeddings where config.json says nothing"


def test_an_exported_model_claims_no_layers_that_were_not_saved():
    from megarl.engine.export import exported_config

    config = {**DEEPSEEK, "torch_dtype": "float8_e4m3fn", "num_nextn_predict_layers": 1}
    assert exported_config(config, "bf16") == {**DEEPSEEK, "dtype": "bfloat16", "num_nextn_predict_layers": 0}
    assert "num_nextn_predict_layers" not in exported_config(GEMMA, "fp32")


def test_a_weight_sync_leaves_the_bias_of_the_experts_choice_alone():
    """No update moves it, and engines keep it in fp32 whatever the sync is in."""
    from megarl.reshard.boxes import Layout, RolloutLayout
    from megarl.reshard.engines import engine_plan
    from megarl.reshard.megatron import checkpoint_sizes

    shape = ModelShape.from_config(DEEPSEEK)
    sent = set(engine_plan(shape, Layout(data=2, expert=2), RolloutLayout()).names)
    kept = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}
    assert checkpoint_sizes(shape).keys() - sent == kept
