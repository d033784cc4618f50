"""Laws of the weight tables: the trainer ranks and vLLM's ranks hold the whole checkpoint, for every family and many
layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models import FAMILIES, ModelShape
from megarl.models import megatron_weights as megatron
from megarl.models.layout import Box, Layout

LAYERS = 4
DECODER: dict[str, Any] = {
    "num_hidden_layers": LAYERS, "hidden_size": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
    "intermediate_size": 24, "vocab_size": 131,
}  # fmt: skip
# A small model of every family, with every feature of the family.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "mixtral": DECODER | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": DECODER | {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
    },
    "gemma3_text": DECODER | {"sliding_window": 8},
    "deepseek_v3": DECODER | {
        "num_key_value_heads": 8, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
        "v_head_dim": 6, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4,
        "topk_group": 2, "n_shared_experts": 1, "moe_intermediate_size": 16, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "norm_topk_prob": True,
    },
}  # fmt: skip


def shape_of(family: str, **edits: Any) -> ModelShape:
    return ModelShape.from_config({"model_type": family, **CONFIGS[family], **edits})


def test_every_family_is_here() -> None:
    assert CONFIGS.keys() == FAMILIES.keys()
    assert all(shape_of(family).family == family for family in FAMILIES)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw layouts of the decoder and of its experts, with even and uneven pipeline stages."""
    tensor, context, data = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    stage = tensor * context * data
    expert_tensor = draw(st.sampled_from([None, *(size for size in (1, 2, 4) if stage % size == 0)]))
    rest = stage // (tensor if expert_tensor is None else expert_tensor)
    expert = draw(st.sampled_from([size for size in (1, 2, 4, 8) if rest % size == 0]))
    pipeline = draw(st.sampled_from([1, 2, 4]))
    chunks = draw(st.sampled_from([1, 2])) if pipeline == 2 else 1
    stages: tuple[int, ...] = ()
    if pipeline > 1 and draw(st.booleans()):
        layers = [1] * (pipeline * chunks)
        for _ in range(LAYERS - len(layers)):
            layers[draw(st.integers(0, len(layers) - 1))] += 1
        stages = tuple(layers)
    experts: dict[str, Any] = {"expert": expert, "expert_tensor": expert_tensor}
    return Layout(tensor, pipeline, data, virtual_pipeline=chunks, context=context, stages=stages, **experts)


def count(boxes: Sequence[Box], sizes: dict[str, tuple[int, int]]) -> dict[str, np.ndarray]:
    """Return the number of boxes that contain each element of each checkpoint tensor."""
    counts = {name: np.zeros(size, dtype=int) for name, size in sizes.items()}
    for s in boxes:
        assert 0 <= s.row0 < s.row1 <= sizes[s.name][0] and 0 <= s.col0 < s.col1 <= sizes[s.name][1], s
        counts[s.name][s.row0 : s.row1, s.col0 : s.col1] += 1
    return counts


@settings(max_examples=40)
@given(st.sampled_from(sorted(FAMILIES)), layouts(), st.booleans(), st.booleans())
def test_trainer_ranks_hold_every_element_once_per_replica(family: str, layout: Layout, tied: bool, critic: bool) -> None:
    shape = shape_of(family, tie_word_embeddings=tied)
    sizes = megatron.checkpoint_sizes(shape, critic)
    boxes = megatron.megatron_boxes(shape, layout, critic)
    held = count(boxes, sizes)
    for name, counts in held.items():
        assert counts.min() == counts.max(), f"{name} is held unevenly"
        replicas = layout.data * layout.context
        if ".experts." in name and "shared" not in name:
            replicas = layout.expert_data
        elif name == "model.embed_tokens.weight" and tied and not critic and layout.pipeline > 1:
            replicas *= 2
        assert counts.max() in (replicas, replicas * layout.tensor), name  # norms and routers are whole on tensor ranks


@settings(max_examples=40)
@given(st.sampled_from(sorted(FAMILIES)), layouts(), st.booleans())
def test_boxes_fill_the_parameters_without_overlap(family: str, layout: Layout, tied: bool) -> None:
    shape = shape_of(family, tie_word_embeddings=tied)
    by_rank: dict[int, list[Box]] = defaultdict(list)
    for box in megatron.megatron_boxes(shape, layout):
        by_rank[box.rank].append(box)
    assert set(by_rank) == set(range(layout.ranks))
    for rank, boxes in by_rank.items():
        fill(boxes, megatron.parameter_sizes(shape, layout, rank))


def fill(boxes: list[Box], sizes: dict[str, tuple[int, int]]) -> None:
    """Check that a rank's boxes cover its parameters without gap or overlap, except rows that pad the vocabulary."""
    filled = {name: np.zeros(size, dtype=int) for name, size in sizes.items()}
    for s in boxes:
        target = filled[s.parameter]
        end = s.local_row + s.row1 - s.row0, s.local_col + s.col1 - s.col0
        assert end[0] <= target.shape[0] and end[1] <= target.shape[1], s
        target[s.local_row : end[0], s.local_col : end[1]] += 1
    for name, counts in filled.items():
        assert counts.max(initial=0) <= 1, f"two boxes on one place of {name}"
        if "embed" not in name and "output_layer" not in name and "lm_head" not in name:
            assert counts.min() == 1, f"{name} has gaps"


def test_the_page_on_adding_a_model_is_true() -> None:
    """The example is a file of the package, the rows run, and the page names every sharding, part and test."""
    from megarl.models import weight_table

    root = Path(__file__).parents[2]
    page = (root / "docs" / "architecture.md").read_text().split("## How do I add a model family?")[1]
    example, row = (part.split("```")[0] for part in page.split("```python\n")[1:])
    assert example == (root / "megarl" / "models" / "qwen3.py").read_text()
    exec(compile(row, "docs/architecture.md", "exec"), {})
    shardings = {name for name, value in vars(weight_table).items() if isinstance(value, type) and hasattr(value, "pieces")}
    assert {name for name in shardings - {"Sharding"} if f"| `{name}()` |" not in page} == set()
    named = page.split("families share: ")[1].split(".")[0]
    assert all(callable(vars(weight_table)[name.strip(" `\n")]) for name in named.split(","))
    for file in ("tests/tiny_models.py", "tests/megatron/test_golden.py", "tests/weight_sync/test_families.py"):
        assert file in page and (root / file).is_file()
    assert (
        "def test_synced_engine_equals_one_that_loaded_from_disk"
        in (root / "tests/weight_sync/test_families.py").read_text()
    )
