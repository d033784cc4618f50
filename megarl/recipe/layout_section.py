"""`ROLE.layout`: how a role is sharded over the trainer ranks, and what the ranks and a model allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megarl.models import ModelShape
from megarl.recipe.section import Positive, Section
from megarl.recipe.violation import GIVEN, Violation, Violations, closest_number

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class LayoutSection(Section):
    tensor: Positive = 1
    """Tensor-parallel ranks."""
    pipeline: Positive = 1
    """Pipeline stages."""
    virtual_pipeline: Positive = 1
    """Model chunks of each pipeline stage. More make the pipeline's idle time shorter, and its messages more; micro-batches
    then run in groups, one for each stage."""
    context: Positive = 1
    """Context-parallel ranks: they share each sequence, for sequences that are too long for one."""
    sequence_parallel: bool = False
    """Cut the activations between tensor-parallel regions over the tensor ranks."""
    expert: Positive = 1
    """Expert-parallel ranks: each holds a part of the experts of a mixture-of-experts model. They are ranks of one stage
    (tensor x context x data-parallel ones), and take none of their own."""
    expert_tensor: Positive | None = None
    """Tensor-parallel ranks of each expert; null takes `tensor`."""
    stages: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """Layers of each pipeline stage, first to last, for stages that are not even; with `virtual_pipeline` those of the first
    chunk of every stage, then of the second of every stage, and so on. Empty for even ones."""

    @property
    def ranks(self) -> int:
        """Ranks of one copy of the model's work; the data-parallel size is what they leave of the trainer ranks."""
        return self.tensor * self.context * self.pipeline


def cuts(recipe: Recipe) -> Iterator[tuple[str, LayoutSection]]:
    """The layout sections that the recipe writes, with their role; a role without one is cut like the actor."""
    yield "actor", recipe.actor.layout
    for role, owner in (("reference", recipe.reference), ("critic", recipe.critic), ("reward_model", recipe.reward_model)):
        if owner is not None and owner.layout is not None:
            yield role, owner.layout


def cut_by(recipe: Recipe, role: str) -> str:
    """The role whose section holds the layout of a role."""
    return role if any(role == owner for owner, _ in cuts(recipe)) else "actor"


def expert_ranks(recipe: Recipe) -> Violations:
    """Experts are cut over the ranks of one stage."""
    ranks = recipe.trainer.ranks
    for role, section in cuts(recipe):
        if ranks % section.ranks:
            continue  # has a violation of its own
        stage, key = ranks // section.pipeline, f"{role}.layout"
        tensor = section.tensor if section.expert_tensor is None else section.expert_tensor
        rule = f"must divide the {stage} ranks of a stage (trainer.ranks {ranks} / pipeline {section.pipeline})"
        if stage % tensor:
            nearest = closest_number(tensor, divisors(stage).__contains__, stage)
            yield Violation(f"{key}.expert_tensor", tensor, rule, nearest)
        elif stage % (section.expert * tensor):
            shown = f"expert {section.expert} x expert_tensor {tensor} = {section.expert * tensor}"
            nearest = closest_number(section.expert, divisors(stage // tensor).__contains__, stage)
            yield Violation(f"{key}.expert", section.expert, f"{shown} {rule}", nearest)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def uneven_stages(recipe: Recipe) -> Violations:
    """`stages` names the layers of each chunk of a pipeline."""
    for role, section in cuts(recipe):
        given, count = section.stages, section.pipeline * section.virtual_pipeline
        key = f"{role}.layout.stages"
        if given and section.pipeline == 1:
            rule = f"says the layers of the stages of a pipeline, and {role}.layout.pipeline is 1"
            yield Violation(key, list(given), rule, f"remove {key}")
        elif given and len(given) != count:
            chunks = f"pipeline {section.pipeline} x virtual_pipeline {section.virtual_pipeline} = {count} chunks"
            rule = f"has {len(given)} numbers, one for each of {chunks} is needed"
            yield Violation(key, list(given), rule, f"{count} numbers that sum to the model's layers")


def tensor_divides(shape: ModelShape, tensor: int) -> bool:
    """Heads, key-value groups (or their copies) and feed-forward rows come out even over `tensor` ranks; routed experts are
    left out, which may be cut by other numbers."""
    groups = shape.groups % tensor == 0 or tensor % shape.groups == 0
    return shape.heads % tensor == 0 and groups and all(rows % tensor == 0 for rows in feed_forward_rows(shape))


def feed_forward_rows(shape: ModelShape) -> list[int]:
    """Rows of the feed-forward networks that all tokens pass."""
    dense = not all(shape.has_experts(layer) for layer in range(shape.num_layers))
    shared = shape.experts.shared_ffn if shape.experts is not None else 0
    return [shape.ffn] * dense + [shared] * bool(shared)


def tensor_size(key: str, tensor: int, shape: ModelShape) -> Violations:
    """Heads, key-value groups and the rows of feed-forward networks come out even."""
    if not tensor_divides(shape, tensor):
        legal = [size for size in range(1, shape.heads + 1) if tensor_divides(shape, size)]
        rows = "".join(f", {count} feed-forward rows" for count in feed_forward_rows(shape))
        rule = (
            f"must divide the model's {shape.heads} heads, {shape.groups} key-value groups (or be a multiple of them)"
            f"{rows}; legal: {', '.join(map(str, legal))}"
        )
        yield Violation(key, tensor, rule, closest_number(tensor, lambda size: size in legal, shape.heads))


def pipeline(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    """Even stages divide the layers; uneven ones have them all."""
    section, layers = recipe.layout_section(role), shape.num_layers
    stages, chunks, key = section.pipeline, section.virtual_pipeline, f"{cut_by(recipe, role)}.layout"
    if section.stages:
        if len(section.stages) == stages * chunks and sum(section.stages) != layers:
            rule = f"sum to {sum(section.stages)}, and the model has {layers} layers"
            yield Violation(f"{key}.stages", list(section.stages), rule, str(spread_layers(layers, stages * chunks)))
    elif layers % stages:
        nearest = closest_number(stages, lambda size: layers % size == 0, layers)
        uneven = f", or {key}.stages: {spread_layers(layers, stages * chunks)}" if stages * chunks <= layers else ""
        yield Violation(f"{key}.pipeline", stages, f"must divide the model's {layers} layers", nearest + uneven)
    elif layers % (stages * chunks):
        rule = f"pipeline {stages} x virtual_pipeline {chunks} = {stages * chunks} must divide the model's {layers} layers"
        nearest = closest_number(chunks, lambda count: layers % (stages * count) == 0, layers // stages)
        uneven = f", or {key}.stages: {spread_layers(layers, stages * chunks)}" if stages * chunks <= layers else ""
        yield Violation(f"{key}.virtual_pipeline", chunks, rule, nearest + uneven)


def spread_layers(layers: int, chunks: int) -> list[int]:
    """Layers over chunks as evenly as they go, the fuller ones in the middle: the first has the embedding and the last the
    head."""
    each, more = divmod(layers, chunks)
    start = (chunks - more) // 2
    return [each + (start <= number < start + more) for number in range(chunks)]


def experts(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    """The cut of experts fits the model's."""
    section, owner = recipe.layout_section(role), cut_by(recipe, role)
    key = f"{owner}.layout"
    if shape.experts is None:
        if section.expert == 1 and section.expert_tensor is None:
            return
        given = ("expert", section.expert) if section.expert > 1 else ("expert_tensor", section.expert_tensor)
        if owner == role:
            yield Violation(f"{key}.{given[0]}", given[1], "the model has no experts", f"remove {key}.{given[0]}")
        else:
            rule = f"is cut like the {owner}, whose layout cuts experts, and its model has none"
            yield Violation(role, GIVEN, rule, f"{role}.layout: {{tensor: {section.tensor}, pipeline: {section.pipeline}}}")
        return
    count, rows = shape.experts.count, shape.experts.ffn
    stage = recipe.trainer.ranks // section.pipeline
    tensor, name = section.expert_tensor, "expert_tensor"
    if tensor is None:
        tensor, name = section.tensor, "tensor"
    if count % section.expert:
        nearest = closest_number(section.expert, divisors(math.gcd(count, stage // tensor)).__contains__, count)
        yield Violation(f"{key}.expert", section.expert, f"must divide the model's {count} experts", nearest)
    if rows % tensor:
        nearest = closest_number(tensor, divisors(math.gcd(rows, stage)).__contains__, rows)
        way_out = nearest if name == "expert_tensor" else f"{nearest}, or {key}.expert_tensor: 1"
        yield Violation(f"{key}.{name}", tensor, f"must divide the {rows} feed-forward rows of an expert", way_out)
    if section.tensor > 1 and not section.sequence_parallel:
        rule = "a model with experts needs it with tensor above 1: each tensor rank sends its own tokens to the experts"
        yield Violation(f"{key}.sequence_parallel", False, rule, "true")


def _ranks(recipe: Recipe) -> Violations:
    ranks = recipe.trainer.ranks
    for role, section in cuts(recipe):
        cut = section.ranks
        if ranks % cut == 0:
            continue
        sizes = {"tensor": section.tensor, "context": section.context, "pipeline": section.pipeline}
        sizes = {name: size for name, size in sizes.items() if name != "context" or size > 1}
        if role == "actor":
            rule = f"must be a multiple of actor.layout.{' x '.join(sizes)} = {cut}"
            nearest = closest_number(ranks, set(range(cut, ranks + cut + 1, cut)).__contains__, ranks + cut)
            yield Violation("trainer.ranks", ranks, rule, nearest)
            continue
        others = cut // section.pipeline
        fits = {size for size in range(1, ranks + 1) if ranks % (others * size) == 0}
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
        rule = f"{shown} = {cut} must divide trainer.ranks = {ranks}"
        nearest = closest_number(section.pipeline, fits.__contains__, ranks)
        yield Violation(f"{role}.layout.pipeline", section.pipeline, rule, nearest or "a smaller tensor first")


def _sequence_parallel(recipe: Recipe) -> Violations:
    for role, section in cuts(recipe):
        if section.sequence_parallel and section.tensor == 1:
            rule = f"cuts activations over the tensor ranks, and {role}.layout.tensor is 1"
            yield Violation(f"{role}.layout.sequence_parallel", True, rule, "false")


def _virtual_pipeline(recipe: Recipe) -> Violations:
    for role, section in cuts(recipe):
        if section.virtual_pipeline > 1 and section.pipeline == 1:
            rule = f"cuts the stages of a pipeline, and {role}.layout.pipeline is 1"
            yield Violation(f"{role}.layout.virtual_pipeline", section.virtual_pipeline, rule, "1")


def _tensor(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    yield from tensor_size(f"{cut_by(recipe, role)}.layout.tensor", recipe.layout_section(role).tensor, shape)
