"""What a weight is: a box in checkpoint coordinates, held by a rank in a parameter.

Everything that moves weights (load from a Hugging Face directory, save to one, sync into vLLM) describes both of its
ends as segments, so one declarative table a model family serves all three. No torch here: `megarl check` reads it too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Segment(NamedTuple):
    """A rectangle of one checkpoint tensor and the place where one rank holds it.

    Rows and columns are half-open and in Hugging Face coordinates; a vector of n elements is an [n, 1] matrix.
    `local_row` and `local_col` are where the rectangle starts in the rank's own `parameter`.
    """

    name: str
    row0: int
    row1: int
    col0: int
    col1: int
    rank: int
    parameter: str
    local_row: int
    local_col: int


@dataclass(frozen=True)
class Layout:
    """How one role is cut over the trainer ranks.

    rank = tensor_rank + tensor * (context_rank + context * (data_rank + data * pipeline_rank)), megatron-core's order.

    `virtual_pipeline` counts the model chunks of each stage, `context` the ranks that share one sequence;
    `sequence_parallel` splits the activations between tensor-parallel regions over the tensor group.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence_parallel: bool = False
    virtual_pipeline: int = 1
    context: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def sequence_multiple(self) -> int:
        """Tokens of a sequence are padded to a multiple of this: context parallelism cuts each into 2 chunks a rank."""
        if self.context == 1:
            return 1
        return 2 * self.context * (self.tensor if self.sequence_parallel else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """Tokens of a micro-batch are padded to a multiple of this: sequence parallelism cuts it over the tensor group."""
        return self.tensor * self.context if self.sequence_parallel else 1

    @property
    def micro_batch_step(self) -> int:
        """A rank's number of micro-batches must be a multiple of this: the interleaved schedule runs groups of them."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    def rank(self, tensor_rank: int, pipeline_rank: int, data_rank: int = 0, context_rank: int = 0) -> int:
        return tensor_rank + self.tensor * (context_rank + self.context * (data_rank + self.data * pipeline_rank))

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """(tensor, pipeline, data, context) rank of a trainer rank."""
        rest, tensor_rank = divmod(rank, self.tensor)
        rest, context_rank = divmod(rest, self.context)
        pipeline_rank, data_rank = divmod(rest, self.data)
        return tensor_rank, pipeline_rank, data_rank, context_rank


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense decoder, in the words of its `config.json`."""

    family: str
    num_layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_epsilon: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, Any], ...]
    max_positions: int
    initializer_range: float

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelShape:
        """Read a Hugging Face directory. Raises ValueError for a family or a feature that megarl does not know."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(f"model.path = {str(path)!r}: no config.json there; give a Hugging Face directory")
        return cls.from_config(json.loads(file.read_text()), str(file))

    @classmethod
    def from_config(cls, config: dict[str, Any], origin: str = "config.json") -> ModelShape:
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"{origin}: model_type = {family!r} is not supported; one of {sorted(FAMILIES)}")
        for key in ("use_sliding_window", "mlp_bias"):
            if config.get(key):
                raise ValueError(f"{origin}: {key} = true is not supported")
        if family != "qwen2" and config.get("attention_bias"):
            raise ValueError(f"{origin}: attention_bias = true is not supported for {family}")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{origin}: hidden_act = {config['hidden_act']!r} is not supported; silu is")
        # transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
        if kind not in ("default", "llama3"):
            raise ValueError(f"{origin}: rope_type = {kind!r} is not supported; default and llama3 are")
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        sizes = {key: config[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups}
        for key, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{origin}: {key} = {size!r} must be a whole number of at least 1")
        if heads % groups:
            raise ValueError(f"{origin}: num_attention_heads = {heads} must be a multiple of num_key_value_heads = {groups}")
        return cls(
            family=family,
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            groups=groups,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(theta),
            rope_scaling=tuple(sorted(rope.items())) if kind == "llama3" else (),
            max_positions=config.get("max_position_embeddings", 2048),
            initializer_range=config.get("initializer_range", 0.02),
        )
