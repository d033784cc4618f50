"""`ROLE.layout`: how a role is sharded over the trainer ranks, and what the ranks and a model allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megarl.models import ModelShape
from megarl.recipe.section import BrokenRules, Positive, Section
from megarl.recipe.violation import Violation, Violations, closest_number

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class LayoutSection(Section):
    tensor: Positive = 1
    """Tensor-parallel ranks."""
    pipeline: Positive = 1
    """Pipeline stages."""
    virtual_pipeline: Positive = 1
    """Model chunks of each pipeline stage. More chunks mean less idle time and more messages; micro-batches then run in
    groups of one for each stage."""
    context: Positive = 1
    """Context-parallel ranks, which share each sequence, for long sequences."""
    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel regions over the tensor ranks."""
    expert: Positive = 1
    """Expert-parallel ranks: each holds a part of the experts. They are the tensor x context x data-parallel ranks of a
    stage, not further ones."""
    expert_tensor: Positive | None = None
    """Tensor-parallel ranks of each expert; null takes `tensor`."""
    stages: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """Layers of each pipeline stage, first to last, for uneven stages; with `virtual_pipeline` the first chunk of every
    stage, then the second of every stage, and so on. Empty for even stages."""

    def broken_rules(self) -> BrokenRules:
        pipeline, chunks = self.pipeline, self.pipeline * self.virtual_pipeline
        if self.sequence_parallel and self.tensor == 1:
            yield "sequence_parallel", "shards activations over the tensor ranks, and layout.tensor is 1", "false"
        if self.virtual_pipeline > 1 and pipeline == 1:
            yield "virtual_pipeline", "divides the stages of a pipeline, and layout.pipeline is 1", "1"
        elif self.stages and pipeline == 1:
            yield "stages", "gives the layers of each stage of a pipeline, and layout.pipeline is 1", "[]"
        elif self.stages and len(self.stages) != chunks:
            needed = f"pipeline {pipeline} x virtual_pipeline {self.virtual_pipeline} = {chunks} chunks need one each"
            yield "stages", f"has {len(self.stages)} numbers; {needed}", f"{chunks} numbers that sum to the model's layers"

    @property
    def ranks(self) -> int:
        """Ranks of one model replica; the data-parallel size is trainer ranks / these."""
        return self.tensor * self.context * self.pipeline


def written_layouts(recipe: Recipe) -> Iterator[tuple[str, LayoutSection]]:
    """The layout sections that the recipe writes, with their role; a role without one has the actor's."""
    yield "actor", recipe.actor.layout
    for role, section in recipe.other_roles.items():
        if section.layout is not None:
            yield role, section.layout


def layout_owner(recipe: Recipe, role: str) -> str:
    """The role whose section holds the layout of a role."""
    return role if any(role == owner for owner, _ in written_layouts(recipe)) else "actor"


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def rank_rules(recipe: Recipe) -> Violations:
    """Each layout divides the trainer ranks, and its experts the ranks of one stage."""
    for role, section in written_layouts(recipe):
        yield from _role_rank_rules(role, section, recipe.trainer.ranks)


def _role_rank_rules(role: str, section: LayoutSection, ranks: int) -> Violations:
    key, model_ranks = f"{role}.layout", section.ranks
    if ranks % model_ranks:
        shown = f"tensor {section.tensor} x context {section.context} x pipeline {section.pipeline} = {model_ranks}"
        others = model_ranks // section.pipeline
        nearest = closest_number(section.pipeline, lambda size: ranks % (others * size) == 0, ranks)
        way_out = f"{nearest or 'a smaller tensor'}, or trainer.ranks: {-(-ranks // model_ranks) * model_ranks}"
        yield Violation(f"{key}.pipeline", section.pipeline, f"{shown} must divide trainer.ranks = {ranks}", way_out)
        return
    stage = ranks // section.pipeline
    tensor = section.tensor if section.expert_tensor is None else section.expert_tensor
    rule = f"must divide the {stage} ranks of a stage (trainer.ranks {ranks} / pipeline {section.pipeline})"
    if stage % tensor:
        nearest = closest_number(tensor, lambda size: stage % size == 0, stage)
        yield Violation(f"{key}.expert_tensor", tensor, rule, nearest)
    elif stage % (section.expert * tensor):
        shown = f"expert {section.expert} x expert_tensor {tensor} = {section.expert * tensor}"
        nearest = closest_number(section.expert, lambda size: stage % (size * tensor) == 0, stage)
        yield Violation(f"{key}.expert", section.expert, f"{shown} {rule}", nearest)


def feed_forward_rows(shape: ModelShape) -> list[int]:
    """Rows of the feed-forward networks that all tokens pass."""
    dense = not all(shape.has_experts(layer) for layer in range(shape.num_layers))
    shared = shape.experts.shared_ffn if shape.experts is not None else 0
    return [shape.ffn] * dense + [shared] * bool(shared)


def tensor_divides(shape: ModelShape, tensor: int) -> bool:
    """Whether `tensor` ranks divide heads, key-value groups (or are a multiple of them) and feed-forward rows. Routed
    experts are not asked: they may be sharded over another number."""
    groups = shape.groups % tensor == 0 or tensor % shape.groups == 0
    return shape.heads % tensor == 0 and groups and all(rows % tensor == 0 for rows in feed_forward_rows(shape))


def spread_layers(layers: int, chunks: int) -> list[int]:
    """Spread layers over chunks evenly. Chunks in the middle get the remainder: the first chunk also holds the embedding,
    the last one the head."""
    each, more = divmod(layers, chunks)
    start = (chunks - more) // 2
    return [each + (start <= number < start + more) for number in range(chunks)]


def layout_fits_model(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    """The layout of a role divides its model's heads, layers and experts."""
    section, owner, layers = recipe.layout_section(role), layout_owner(recipe, role), shape.num_layers
    stages, chunks, key = section.pipeline, section.virtual_pipeline, f"{owner}.layout"
    if not tensor_divides(shape, section.tensor):
        legal = [size for size in range(1, shape.heads + 1) if tensor_divides(shape, size)]
        rows = "".join(f", {count} feed-forward rows" for count in feed_forward_rows(shape))
        rule = (
            f"must divide the model's {shape.heads} heads, {shape.groups} key-value groups (or be a multiple of them)"
            f"{rows}; legal: {', '.join(map(str, legal))}"
        )
        yield Violation(
            f"{key}.tensor", section.tensor, rule, closest_number(section.tensor, legal.__contains__, shape.heads)
        )
    uneven = f", or {key}.stages: {spread_layers(layers, stages * chunks)}" if stages * chunks <= layers else ""
    if section.stages:
        if sum(section.stages) != layers:
            rule = f"sum to {sum(section.stages)}, and the model has {layers} layers"
            yield Violation(f"{key}.stages", list(section.stages), rule, str(spread_layers(layers, stages * chunks)))
    elif layers % stages:
        nearest = closest_number(stages, lambda size: layers % size == 0, layers)
        yield Violation(f"{key}.pipeline", stages, f"must divide the model's {layers} layers", nearest + uneven)
    elif layers % (stages * chunks):
        rule = f"pipeline {stages} x virtual_pipeline {chunks} = {stages * chunks} must divide the model's {layers} layers"
        nearest = closest_number(chunks, lambda count: layers % (stages * count) == 0, layers // stages)
        yield Violation(f"{key}.virtual_pipeline", chunks, rule, nearest + uneven)
    if shape.experts is not None:
        yield from _experts_fit(recipe, shape, section, key)
    elif section.expert > 1 or section.expert_tensor is not None:
        name = "expert" if section.expert > 1 else "expert_tensor"
        way_out = f"remove {key}.{name}" + ("" if owner == role else f", or {role}.layout: {{tensor: {section.tensor}}}")
        yield Violation(f"{key}.{name}", getattr(section, name), f"the model of the {role} has no experts", way_out)


def _experts_fit(recipe: Recipe, shape: ModelShape, section: LayoutSection, key: str) -> Violations:
    assert shape.experts is not None, "a model with experts"
    count, rows, stage = shape.experts.count, shape.experts.ffn, recipe.trainer.ranks // section.pipeline
    name = "tensor" if section.expert_tensor is None else "expert_tensor"
    tensor = section.expert_tensor or section.tensor
    if count % section.expert:
        nearest = closest_number(section.expert, divisors(math.gcd(count, stage // tensor)).__contains__, count)
        yield Violation(f"{key}.expert", section.expert, f"must divide the model's {count} experts", nearest)
    if rows % tensor:
        nearest = closest_number(tensor, divisors(math.gcd(rows, stage)).__contains__, rows)
        nearest += "" if name == "expert_tensor" else f", or {key}.expert_tensor: 1"
        yield Violation(f"{key}.{name}", tensor, f"must divide the {rows} feed-forward rows of an expert", nearest)
    if section.tensor > 1 and not section.sequence_parallel:
        rule = "a model with experts needs it with tensor above 1: each tensor rank sends its own tokens to the experts"
        yield Violation(f"{key}.sequence_parallel", False, rule, "true")
