"""Which layers each chunk of each pipeline stage has; the numbers under uneven stages are in test_matrix.py."""

from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.models.megatron_weights import stage_layers


def test_chunks_take_their_layers_in_the_models_order():
    config = {"model_type": "qwen3", "num_hidden_layers": 7, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 131,
                 "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
    shape = ModelShape.from_config(config)
    layout = Layout(pipeline=2, virtual_pipeline=2, stages=(1, 2, 3, 1))
    assert [stage_layers(shape, layout, stage) for stage in range(2)] == [[0, 3, 4, 5], [1, 2, 6]]
