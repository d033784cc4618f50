"""The boxes of checkpoint tensors that each worker of a vLLM engine holds, from the family's weight table (vLLM 0.32).

Stages are vLLM's (`vllm.distributed.utils.get_pp_indices`), and experts are sharded as in `FusedMoEParallelConfig.make`.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.models import FAMILIES, Held, ModelShape, Weight
from megarl.models.layout import Box, RolloutLayout
from megarl.models.weight_table import VLLM_VOCABULARY, Share, boxes_of, embedding, final_norm, head


def held(weight: Weight) -> Held:
    """Return the place where vLLM holds a weight. Raises ValueError if the family's table does not name it."""
    if weight.vllm is None:
        raise ValueError(f"no weight table says where vLLM holds {weight.name}; weight_sync.mode: checkpoint asks for none")
    return weight.vllm


def has_weight_map(shape: ModelShape) -> bool:
    """Return whether the family's table says where vLLM holds its weights."""
    return all(weight.vllm is not None for _, weight in stage_weights(shape, RolloutLayout(), 0))


def padded_vocab(shape: ModelShape) -> int:
    """Return the rows of vLLM's embedding over all tensor ranks; rows from `shape.vocab` on are padding."""
    return VLLM_VOCABULARY.padded(shape.vocab, 1)


def vllm_boxes(shape: ModelShape, rollout: RolloutLayout) -> list[Box]:
    """Return the boxes of all workers of an engine, without padding rows.

    Raises ValueError for a layout that cannot shard the model.
    """
    check_layout(shape, rollout)
    return [box for worker in range(rollout.workers) for box in worker_boxes(shape, rollout, worker)]


def parameter_sizes(shape: ModelShape, rollout: RolloutLayout, worker: int) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of each parameter of a worker, with padding; a vector has one column, and a worker's experts
    are stacked."""
    sizes: dict[str, tuple[int, int]] = {}
    for prefix, weight in stage_weights(shape, rollout, rollout.coordinates(worker)[1]):
        parameter, sharding = held(weight)
        share = weight_share(weight, rollout, worker)
        rows, columns = sharding.extent(weight.rows, weight.columns, share.ranks)
        sizes[prefix + parameter] = (len(share.experts) * rows, columns)
    return sizes


def worker_boxes(shape: ModelShape, rollout: RolloutLayout, worker: int) -> Iterator[Box]:
    """Yield the boxes of a worker, in the order of the forward pass."""
    for prefix, weight in stage_weights(shape, rollout, rollout.coordinates(worker)[1]):
        yield from weight_boxes(prefix, weight, rollout, worker)


def weight_boxes(prefix: str, weight: Weight, rollout: RolloutLayout, worker: int) -> Iterator[Box]:
    """Yield a worker's boxes of a row of the table; `prefix` precedes both of its names."""
    return boxes_of(weight, held(weight), weight_share(weight, rollout, worker), worker, prefix, prefix)


def idle_parameters(shape: ModelShape, rollout: RolloutLayout, worker: int) -> set[str]:
    """Return the parameters that some of vLLM's models (Mixtral, Qwen3-MoE, Gemma) build on every stage, although only the
    first or last stage reads them. No plan sends these parameters."""
    ends = {held(weight).parameter for weight in (embedding(shape), final_norm(shape), head(shape))}
    return ends - {held(weight).parameter for _, weight in stage_weights(shape, rollout, rollout.coordinates(worker)[1])}


def fixed_tensors(shape: ModelShape) -> set[str]:
    """Return the checkpoint names of tensors that no update moves."""
    return {prefix + weight.name for prefix, weight in stage_weights(shape, RolloutLayout(), 0) if weight.fixed}


def fixed_parameters(shape: ModelShape) -> list[str]:
    """Return patterns of vLLM's names of parameters that no update moves and no plan sends."""
    weights = [weight for _, weight in stage_weights(shape, RolloutLayout(), 0) if weight.fixed]
    return sorted({f"*.{weight.name if weight.vllm is None else weight.vllm.parameter}" for weight in weights})


def stage_layers(num_layers: int, pipeline: int, pipeline_rank: int) -> range:
    """Return the global layer numbers, from 0, of a stage. Remaining layers go to the stages before the last, back first."""
    even, left = divmod(num_layers, pipeline)
    sizes = [even + (pipeline - 1 - left <= stage < pipeline - 1) for stage in range(pipeline)]
    first = sum(sizes[:pipeline_rank])
    return range(first, first + sizes[pipeline_rank])


def held_experts(count: int, ranks: int, rank: int) -> range:
    """Return the experts that a rank holds whole: an interval, longer by one expert on the first ranks if some remain."""
    each, left = divmod(count, ranks)
    first = rank * each + min(rank, left)
    return range(first, first + each + (rank < left))


def weight_share(weight: Weight, rollout: RolloutLayout, worker: int) -> Share:
    """Return a worker's share of a weight of its stage.

    All workers of a stage, over data-parallel ranks, share the experts of a layer: by expert parallelism, or by the rows of
    each expert. Under expert parallelism over tensor and data-parallel ranks vLLM divides a layer's tokens over the tensor
    ranks, and each rank holds the shared experts whole (`ParallelConfig.use_sequence_parallel_moe`).
    """
    tensor_rank, _, data_rank = rollout.coordinates(worker)
    if weight.experts:
        ranks, rank = rollout.tensor * rollout.data, tensor_rank + rollout.tensor * data_rank
        if rollout.expert_parallel:
            return Share(1, 0, held_experts(weight.experts, ranks, rank))
        return Share(ranks, rank, range(weight.experts))
    if weight.shared and rollout.cuts_tokens:
        return Share(1, 0, range(1))
    return Share(rollout.tensor, tensor_rank, range(1))


def stage_weights(shape: ModelShape, rollout: RolloutLayout, pipeline_rank: int) -> Iterator[tuple[str, Weight]]:
    """Yield the rows of the table that a stage reads, after the prefix of their names."""
    first, last = pipeline_rank == 0, pipeline_rank == rollout.pipeline - 1
    layers = stage_layers(shape.num_layers, rollout.pipeline, pipeline_rank)
    for layer, weight in FAMILIES[shape.family].weights(shape, layers, first, last):
        yield "" if layer is None else f"model.layers.{layer}.", weight


def check_layout(shape: ModelShape, rollout: RolloutLayout) -> None:
    """Raise ValueError naming the key of the `rollout` section that cannot shard the model."""
    for size, rule in layout_faults(shape, rollout):
        raise ValueError(f"rollout.{size} = {str(getattr(rollout, size)).lower()} {rule}")


def layout_faults(shape: ModelShape, rollout: RolloutLayout) -> Iterator[tuple[str, str]]:
    """Yield each size of an engine's layout that cannot shard the model, with the rule that it breaks."""
    tensor, data, experts, rows = rollout.tensor, rollout.data, shape.experts, _cut_rows(shape, rollout)
    rules = {
        f"divide the {shape.heads} attention heads": shape.heads % tensor == 0,
        f"divide the {shape.groups} key-value groups or be a multiple of them": (
            shape.groups % tensor == 0 or tensor % shape.groups == 0
        ),
        f"divide the {' and '.join(map(str, rows))} feed-forward rows": all(row % tensor == 0 for row in rows),
        "be at most the number of experts": experts is None or tensor <= experts.count,
        f"divide the {padded_vocab(shape)} padded vocabulary rows": padded_vocab(shape) % tensor == 0,
    }
    broken = [f"must {rule}" for rule, holds in rules.items() if not holds]
    if broken:
        yield "tensor", broken[0]
    if rollout.pipeline > shape.num_layers:
        yield "pipeline", f"must be at most the {shape.num_layers} layers of the model: each stage has one"
    if experts is None and rollout.expert_parallel:
        yield "expert_parallel", "needs a model with experts"
    if experts is None or broken:
        return
    # Tensor ranks of all data-parallel ranks share the experts: whole experts under expert parallelism, else parts of each.
    size, product = "data" if data > 1 else "tensor", f"is a factor: rollout.tensor x rollout.data = {tensor} x {data}"
    if rollout.expert_parallel and tensor * data > experts.count:
        yield size, f"{product} must be at most the {experts.count} experts"
    if not rollout.expert_parallel and experts.ffn % (tensor * data):
        yield size, f"{product} must divide the {experts.ffn} feed-forward rows of an expert"


def _cut_rows(shape: ModelShape, rollout: RolloutLayout) -> list[int]:
    """Return the rows of the feed-forward networks that tensor ranks divide, without routed experts."""
    dense = not all(shape.has_experts(layer) for layer in range(shape.num_layers))
    shared = shape.experts is not None and shape.experts.shared_ffn and not rollout.cuts_tokens
    return [shape.ffn] * dense + ([shape.experts.shared_ffn] if shared and shape.experts else [])
