"""Rules on the form in which weights travel to the engines; `rules.py` runs them with its own."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.models import ModelShape
from megarl.models.megatron_weights import megatron_segments
from megarl.models.quantised_blocks import BLOCK, block_bytes, check_blocks, quantised_tensors
from megarl.models.vllm_weights import vllm_segments
from megarl.recipe.cpu_rules import is_for_cpus
from megarl.recipe.recipe import Recipe
from megarl.recipe.rollout_rules import BESIDE_ROW_BYTES
from megarl.recipe.violation import Violation

Violations = Iterator[Violation]


def delta(recipe: Recipe) -> Violations:
    """Differences have a length of their own, and cost more than a fast transport takes for the whole."""
    section = recipe.weight_sync
    if section.wire != "delta" or recipe.rollout.replay is not None:
        return
    if section.transport == "auto":
        rule = "differences travel as messages alone, and auto may choose shared memory"
        yield Violation("weight_sync.wire", section.wire, rule, "full, or weight_sync.transport: gloo")
    elif section.transport != "gloo":
        rule = f"differences travel as messages, and weight_sync.transport is {section.transport}, which is faster than them"
        yield Violation("weight_sync.wire", section.wire, rule, "full, or weight_sync.transport: gloo")


def quantization(recipe: Recipe) -> Violations:
    """What FP8 blocks go with on GPUs, whatever the model."""
    key, name, rollout = "rollout.quantization", recipe.rollout.quantization, recipe.rollout
    if name is None or rollout.replay is not None or is_for_cpus(recipe):
        return
    if recipe.rollout_precision == "fp32":
        rule = "FP8 weights work with activations of 16 bits, and engines run in fp32"
        yield Violation(key, name, rule, "rollout.precision: bf16")
    if recipe.weight_sync.mode == "checkpoint":
        yield Violation(
            key, name, "weight_sync.mode checkpoint sends weights that nobody quantised", "weight_sync.mode: reshard"
        )


def blocks(recipe: Recipe, shape: ModelShape) -> Violations:
    """Neither the actor's layout nor the engines' cuts a block, so that one rank quantises it and one worker takes it."""
    name = recipe.rollout.quantization
    if name is None or recipe.rollout.replay is not None or is_for_cpus(recipe) or list(quantization(recipe)):
        return
    rollout = recipe.rollout.layout
    quantised = quantised_tensors(shape)
    try:
        sources, destinations = megatron_segments(shape, recipe.layout("actor")), vllm_segments(shape, rollout)
    except ValueError:
        return  # a layout that does not cut the model, which has rules of its own
    try:
        check_blocks(sources, destinations, quantised)
    except ValueError as error:
        way_out = "null, or smaller actor.layout.tensor and rollout.tensor"
        yield Violation("rollout.quantization", name, str(error), way_out)
    widest = max(box.col1 - box.col0 for box in destinations if box.name in quantised)
    needed = block_bytes(BLOCK, widest) + BESIDE_ROW_BYTES
    if (given := recipe.weight_sync.bucket_bytes) is not None and given < needed:
        rule = f"must hold a row of FP8 blocks of {widest} columns, {needed} bytes with its checksum"
        yield Violation("weight_sync.bucket_bytes", given, rule, str(needed))
