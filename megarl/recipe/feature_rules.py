"""Rules on precision, memory features, frozen weights and overlap; `rules.py` runs them with its own."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.models import ModelShape
from megarl.recipe.cpu_rules import DEVICE_TRANSPORTS, is_for_cpus
from megarl.recipe.layout_rules import cut_by
from megarl.recipe.recipe import Recipe
from megarl.recipe.sections import ActorSection, CriticSection, FreezeSection, TrainerSection
from megarl.recipe.violation import GIVEN, Violation

Violations = Iterator[Violation]

# Transformer Engine's FP8 products want the sizes of a weight to be multiples of this.
FP8_MULTIPLE = 16


def trained_sections(recipe: Recipe) -> Iterator[tuple[str, ActorSection | CriticSection]]:
    """The sections of roles that have an optimizer."""
    yield "actor", recipe.actor
    if recipe.critic is not None:
        yield "critic", recipe.critic


def fp8(recipe: Recipe) -> Violations:
    name = recipe.trainer.fp8
    if name is None:
        return
    if recipe.trainer.precision != "bf16":
        rule = f"FP8 products work on bf16 weights, and trainer.precision is {recipe.trainer.precision}"
        yield Violation("trainer.fp8", name, rule, "trainer.precision: bf16, or remove trainer.fp8")
    elif is_for_cpus(recipe):
        yield Violation("trainer.fp8", name, "FP8 products run on GPUs, and device.kind is cpu", "remove trainer.fp8")


def sampled_weights(recipe: Recipe) -> Violations:
    """Samples are taken on GPUs alone."""
    transport = recipe.weight_sync.transport
    if recipe.rollout.replay is not None:
        return  # nothing is synced
    if recipe.weight_sync.verify == "sampled" and transport not in ("auto", *DEVICE_TRANSPORTS):
        rule = f"samples are taken of what arrives on GPUs, and with weight_sync.transport = {transport} nothing does"
        yield Violation("weight_sync.verify", "sampled", rule, "all")


def fp8_sizes(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    """The sizes that a tensor rank multiplies."""
    name = recipe.trainer.fp8
    if name is None:
        return
    tensor = recipe.layout_section(role).tensor
    sizes = {
        "hidden size": shape.hidden,
        "attention width": shape.heads * shape.head_dim // tensor,
        "feed-forward rows": shape.ffn // tensor,
    }
    if shape.latent is not None:
        latent = shape.latent
        sizes["attention width"] = shape.heads * latent.value_dim // tensor
        sizes["rows of queries"] = shape.heads * latent.key_dim // tensor
        sizes["rows of keys and values"] = shape.heads * (latent.plain_dim + latent.value_dim) // tensor
        sizes |= {"query rank": latent.query_rank, "key-value rank": latent.key_value_rank}
    if shape.experts is not None:
        sizes["rows of an expert"] = shape.experts.ffn // recipe.layout(role).expert_tensor_size
    odd = [f"{name} {size}" for name, size in sizes.items() if size % FP8_MULTIPLE]
    if odd:
        rule = f"FP8 products want multiples of {FP8_MULTIPLE}, and a tensor rank of the {role} has {', '.join(odd)}"
        yield Violation(f"{cut_by(recipe, role)}.layout.tensor", tensor, rule, "a smaller one, or remove trainer.fp8")


def read_by_nothing(recipe: Recipe) -> Violations:
    """A number that was changed and has no effect. Their defaults may stand: a resolved recipe writes them out."""
    trainer, defaults = recipe.trainer, TrainerSection.model_fields
    if trainer.precision != "fp16" and trainer.initial_loss_scale != defaults["initial_loss_scale"].default:
        rule = f"only fp16 scales the loss, and trainer.precision is {trainer.precision}"
        yield Violation("trainer.initial_loss_scale", trainer.initial_loss_scale, rule, "remove trainer.initial_loss_scale")


def overlap(recipe: Recipe) -> Violations:
    for role, section in trained_sections(recipe):
        if section.optimizer.overlap_parameters and not section.optimizer.overlap_gradients:
            # Only gradients that overlap are cut into buckets, and it is buckets that are gathered ahead.
            rule = f"weights are gathered by the buckets of {role}.optimizer.overlap_gradients, which is false"
            nearest = f"{role}.optimizer.overlap_gradients: true"
            yield Violation(f"{role}.optimizer.overlap_parameters", True, rule, nearest)


def frozen_head(recipe: Recipe) -> Violations:
    if recipe.critic is not None and recipe.critic.freeze.head:
        yield Violation("critic.freeze.head", True, "a critic's head is new and must be trained", "false")


def adapters(recipe: Recipe) -> Violations:
    """What is frozen or has no weights of its own already."""
    if recipe.actor.lora is not None and recipe.actor.freeze != FreezeSection():
        rule = "with actor.lora every weight but the adapters' stays as it is"
        yield Violation("actor.freeze", GIVEN, rule, "remove actor.freeze")
    if recipe.reference is not None and recipe.reference.memory.offload != "none" and recipe.reference_is_base:
        rule = "the reference is the actor without its adapters and has no weights of its own"
        yield Violation("reference.memory.offload", recipe.reference.memory.offload, rule, "actor.memory.offload: all")


def router_replay(recipe: Recipe, shape: ModelShape) -> Violations:
    """To be called for the actor's model."""
    if recipe.actor.router_replay and shape.experts is None:
        yield Violation("actor.router_replay", True, "the model has no experts to choose from", "false")
    if recipe.actor.router_replay and recipe.weight_sync.in_flight == "keep":
        rule = "actor.router_replay repeats one choice of experts, and a kept completion's tokens chose under two versions"
        yield Violation("weight_sync.in_flight", "keep", rule, "wait or abort")


def frozen(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    """To be called for roles that are trained."""
    freeze, layers = _freeze_of(recipe, role), shape.num_layers
    if freeze is None:
        return
    if freeze.layers > layers:
        yield Violation(f"{role}.freeze.layers", freeze.layers, f"the model has {layers} layers", str(layers))
    if role == "critic":
        return  # its head is always trained
    if shape.tied and freeze.head and not freeze.embedding:
        rule = "the model's head is its embedding, and actor.freeze.embedding is false"
        yield Violation("actor.freeze.head", True, rule, "actor.freeze.embedding: true")
    elif freeze.embedding and (freeze.head or shape.tied) and freeze.norms and freeze.layers >= layers:
        rule = f"with the embedding, the norms and all {layers} layers nothing is left to train"
        yield Violation("actor.freeze.layers", freeze.layers, rule, str(layers - 1))


def _freeze_of(recipe: Recipe, role: str) -> FreezeSection | None:
    return next((section.freeze for name, section in trained_sections(recipe) if name == role), None)
