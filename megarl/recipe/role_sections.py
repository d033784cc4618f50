"""`actor`, `reference`, `critic`, `reward_model`: a role's optimizer, memory, adapters and frozen weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from megarl.models import ModelShape
from megarl.models.megatron_weights import chunk_layers
from megarl.planner.adapters import adapted_sizes
from megarl.recipe.device_section import is_for_cpus
from megarl.recipe.layout_section import LayoutSection
from megarl.recipe.model_section import Fetch, ModelNotFound, find_model
from megarl.recipe.reward_section import ModelRewardSection
from megarl.recipe.section import Count, FilePath, Positive, Section, Share, Weight
from megarl.recipe.violation import GIVEN, MISSING, Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


# Megatron's names of what `recompute: selective` can recompute.
RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class OptimizerSection(Section):
    kind: Literal["adam"] = "adam"
    """Adam with decoupled weight decay."""
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    weight_decay: Weight = 0.0
    """Decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm; a larger one is scaled down to it."""
    warmup_steps: Count = 0
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over the steps of the run."""
    min_lr_share: Share = 0.0
    """The learning rate that `decay` ends at, as a share of `lr`."""
    overlap_gradients: bool = False
    """Sum gradients over the data-parallel ranks while the last backward pass still runs, bucket by bucket."""
    overlap_parameters: bool = False
    """Gather updated weights from the data-parallel ranks during the next forward pass, a bucket ahead of the layer that
    needs it; with `overlap_gradients` only."""


class MemorySection(Section):
    recompute: Literal["none", "selective", "full"] = "none"
    """What a forward pass does not keep and the backward pass runs again: `selective` the `recompute_modules` of each layer,
    `full` whole layers, of which only the input is kept."""
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Field(min_length=1, strict=False)] = ("core_attn",)
    """With `recompute: selective`, the parts of each layer that the backward pass runs again, under Megatron's names.
    `core_attn` saves little where the attention kernel is fused; `layernorm` and `moe_act` need Transformer Engine."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """With `recompute: full`, Megatron's method: `uniform` recomputes all layers, in chunks of `recompute_num_layers`;
    `block` recomputes the first `recompute_num_layers` layers of each model chunk and keeps the others."""
    recompute_num_layers: Positive = 1
    """With `recompute: full`, layers recomputed together (`uniform`), or recomputed layers of each model chunk (`block`)."""
    offload_activations: bool = False
    """Keep what a forward pass saves for its backward pass in the host's memory. On a GPU the copies run beside the
    computation."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What moves to the host's memory while the role runs no phase that needs it: `optimizer` its fp32 weights, moments and
    gradient buffers outside of updates, `all` the weights outside of its phases as well."""


class ReferenceMemorySection(Section):
    offload: Literal["none", "all"] = "none"
    """`all` keeps the weights in the host's memory and brings them to the device for `reference_logprob`."""


class FreezeSection(Section):
    embedding: bool = False
    """Leave the token embedding as it is, and the head too where the model ties them."""
    head: bool = False
    """Leave the vocabulary's output layer as it is."""
    norms: bool = False
    """Leave every norm's weight as it is."""
    layers: Count = 0
    """Leave the first that many decoder layers as they are."""


class LoraSection(Section):
    rank: Positive
    """Inner size of each adapter."""
    alpha: Annotated[float, Field(gt=0)]
    """What an adapter adds is scaled by alpha / rank."""
    targets: Annotated[tuple[Literal["qkv", "proj", "fc1", "fc2"], ...], Field(min_length=1, strict=False)] = (
        "qkv",
        "proj",
        "fc1",
        "fc2",
    )
    """Linear layers that get an adapter, in every decoder layer: queries, keys and values; the attention's output; gate and
    up; down."""


class ActorSection(Section):
    layout: LayoutSection = LayoutSection()
    """How the model is cut over the trainer ranks."""
    optimizer: OptimizerSection
    """The actor's optimizer."""
    lora: LoraSection | None = None
    """Train low-rank adapters and leave the model's weights as they are; null trains the weights. A reference under the
    actor's layout is then the actor without its adapters, and no second model is built."""
    memory: MemorySection = MemorySection()
    """Ways to need less of the device's memory."""
    freeze: FreezeSection = FreezeSection()
    """Weights that training leaves as they are: without gradient, gradient buffer and optimizer state."""
    router_replay: bool = False
    """Send each token of a mixture-of-experts model, in `actor_logprob` and `actor_update`, to the experts that the rollout
    engine sent it to; the experts' weights in the sum, and the gradient of the router, are the trainer's own. The recorded
    choice takes one byte (two beyond 256 experts) a token, layer and chosen expert in the host's memory. Engines on a GPU
    use vLLM's own recording."""


class ReferenceSection(Section):
    path: FilePath | None = None
    """Hugging Face directory or hub name of another model to stay near, of any size and family with the same tokens; null
    takes `model.path`."""
    layout: LayoutSection | None = None
    """How the model is cut over the trainer ranks; null cuts it like the actor."""
    refresh_every: Positive | None = None
    """After every that many steps the reference takes the actor's weights; null leaves it as it was at the start. Its path
    and layout must then be the actor's, and checkpoints hold its weights too."""
    memory: ReferenceMemorySection = ReferenceMemorySection()
    """Ways to need less of the device's memory."""


class CriticSection(Section):
    path: FilePath | None = None
    """Hugging Face directory or hub name the critic starts from, of any size and family with the same tokens; null takes
    `model.path`."""
    layout: LayoutSection | None = None
    """How the model is cut over the trainer ranks; null cuts it like the actor."""
    optimizer: OptimizerSection
    """The critic's optimizer."""
    warmup_steps: Count = 0
    """So many first steps update the critic alone: the actor stays as it is, and so does its learning-rate schedule."""
    memory: MemorySection = MemorySection()
    """Ways to need less of the device's memory."""
    freeze: FreezeSection = FreezeSection()
    """Weights that training leaves as they are: without gradient, gradient buffer and optimizer state."""


class RewardModelSection(Section):
    path: FilePath
    """Hugging Face directory or hub name of a sequence-classification checkpoint with one label and the actor's tokenizer.
    It reads exactly the tokens of prompt and completion, no chat template of its own; its score is that of the last one."""
    layout: LayoutSection | None = None
    """How the model is cut over the trainer ranks; null cuts it like the actor."""


def trained_sections(recipe: Recipe) -> Iterator[tuple[str, ActorSection | CriticSection]]:
    """The sections of roles that have an optimizer."""
    yield "actor", recipe.actor
    if recipe.critic is not None:
        yield "critic", recipe.critic


def critic_warmup(recipe: Recipe) -> Violations:
    """Some steps are left for the actor, and for its learning rate's warm-up."""
    warmup, steps = recipe.critic_warmup_steps, recipe.run.steps
    if warmup >= steps:
        rule = f"the actor would never be updated: must be below run.steps = {steps}"
        yield Violation("critic.warmup_steps", warmup, rule, str(steps - 1))


def reference_refresh(recipe: Recipe) -> Violations:
    """Each rank copies its own shards, so that both roles hold the same ones."""
    every, key = recipe.refresh_every, "reference.refresh_every"
    if every is None:
        return
    remove = f"remove {key}"
    if recipe.actor.lora is not None:
        rule = "with actor.lora the model's weights stay as they are, and there is nothing to take"
        yield Violation(key, every, rule, f"{remove}, or actor.lora")
    if recipe.path("reference") != recipe.model.path:
        rule = f"takes the weights of model.path = {recipe.model.path}, and reference.path is another model"
        yield Violation(key, every, rule, f"{remove}, or reference.path")
    if recipe.layout_section("reference") != recipe.actor.layout:
        rule = "each rank copies its own shards, and reference.layout cuts the model otherwise than actor.layout"
        yield Violation(key, every, rule, f"{remove}, or reference.layout")
    if every > recipe.run.steps:
        yield Violation(key, every, f"never comes: run.steps = {recipe.run.steps}", str(recipe.run.steps))


def learning_rate(recipe: Recipe) -> Violations:
    """A constant learning rate ends where it begins."""
    for role, owner in (("actor", recipe.actor), ("critic", recipe.critic)):
        if owner is not None and owner.optimizer.min_lr_share and owner.optimizer.decay == "constant":
            rule = f"is where a decay ends, and {role}.optimizer.decay is constant"
            key = f"{role}.optimizer.min_lr_share"
            yield Violation(key, owner.optimizer.min_lr_share, rule, f"decay: cosine, or remove {key}")


def _reference(recipe: Recipe) -> Violations:
    if recipe.reference is not None and recipe.algorithm.kl is None:
        yield Violation("reference", GIVEN, "without algorithm.kl nothing reads the reference", "remove reference")


def _lora_targets(recipe: Recipe) -> Violations:
    if recipe.actor.lora is not None:
        targets = recipe.actor.lora.targets
        if len(set(targets)) < len(targets):
            yield Violation("actor.lora.targets", list(targets), "names a layer twice", ", ".join(dict.fromkeys(targets)))


def _warmup(recipe: Recipe) -> Violations:
    waits = recipe.critic_warmup_steps
    for role, owner, steps in (
        ("actor", recipe.actor, recipe.run.steps - waits),
        ("critic", recipe.critic, recipe.run.steps),
    ):
        if owner is not None and owner.optimizer.warmup_steps > steps > 0:
            less = f" - critic.warmup_steps = {steps}" if steps < recipe.run.steps else ""
            rule = f"must not pass run.steps = {recipe.run.steps}{less}"
            yield Violation(f"{role}.optimizer.warmup_steps", owner.optimizer.warmup_steps, rule, str(steps))


def _lora(recipe: Recipe, shape: ModelShape) -> Violations:
    """Adapters are narrower than the weights, and lie beside layers that the model has."""
    lora = recipe.actor.lora
    if lora is None:
        return
    has_experts = any(shape.has_experts(layer) for layer in range(shape.num_layers))
    refused = {target: "experts get no adapters" for target in ("fc1", "fc2") if has_experts}
    if shape.latent is not None:
        refused["qkv"] = "multi-latent attention has no such layer"
    legal = [target for target in lora.targets if target not in refused]
    for target in lora.targets:
        if target in refused:
            nearest = ", ".join(legal or (one for one in ("qkv", "proj") if one not in refused))
            yield Violation("actor.lora.targets", target, refused[target], nearest)
    narrowest = min((size for target in legal for size in adapted_sizes(shape, target)), default=lora.rank)
    if lora.rank > narrowest:
        rule = f"must not pass {narrowest}, the narrower side of the smallest weight among actor.lora.targets"
        yield Violation("actor.lora.rank", lora.rank, rule, str(narrowest))


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


_DEFAULTS = {name: field.default for name, field in MemorySection.model_fields.items()}


def recompute(recipe: Recipe) -> Violations:
    """Settings of one kind of recompute are not given with another."""
    for role, section in trained_sections(recipe):
        memory, key = section.memory, f"{role}.memory"
        readers = {
            "recompute_modules": ("selective", memory.recompute_modules),
            "recompute_method": ("full", memory.recompute_method),
            "recompute_num_layers": ("full", memory.recompute_num_layers),
        }
        for name, (reader, value) in readers.items():
            if memory.recompute != reader and value != _DEFAULTS[name]:
                shown = list(value) if isinstance(value, tuple) else value
                rule = f"only {key}.recompute: {reader} reads it, and it is {memory.recompute}"
                yield Violation(f"{key}.{name}", shown, rule, f"{key}.recompute: {reader}, or remove {key}.{name}")
        modules = memory.recompute_modules
        if len(set(modules)) < len(modules):
            rule, way_out = "names a module twice", f"[{', '.join(dict.fromkeys(modules))}]"
            yield Violation(f"{key}.recompute_modules", list(modules), rule, way_out)
        if memory.recompute == "selective" and is_for_cpus(recipe):
            yield from without_transformer_engine(recipe, role)


def without_transformer_engine(recipe: Recipe, role: str) -> Violations:
    """To be called for a trained role whose layers are not Transformer Engine's."""
    modules = dict(trained_sections(recipe))[role].memory.recompute_modules
    foreign = [module for module in ("layernorm", "moe_act") if module in modules]
    if foreign:
        rule = f"Megatron recomputes {' and '.join(foreign)} in Transformer Engine's layers alone, and these are not"
        rest = [module for module in modules if module not in foreign] or ["core_attn"]
        yield Violation(f"{role}.memory.recompute_modules", list(modules), rule, f"[{', '.join(rest)}]")


def recomputed(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    """What is recomputed is there. To be called for roles that are trained."""
    memory = dict(trained_sections(recipe))[role].memory
    if memory.recompute == "full":
        layout = recipe.layout(role)
        if layout.stages or shape.num_layers % (layout.pipeline * layout.virtual_pipeline) == 0:
            places = [(stage, chunk) for stage in range(layout.pipeline) for chunk in range(layout.virtual_pipeline)]
            layers = sorted({len(chunk_layers(shape, layout, *place)) for place in places})
            key, number = f"{role}.memory.recompute_num_layers", memory.recompute_num_layers
            if number > layers[-1]:
                rule = f"a model chunk of the {role}'s pipeline stages has at most {layers[-1]} layers"
                yield Violation(key, number, rule, str(layers[-1]))
            elif memory.recompute_method == "uniform" and any(count % number for count in layers):
                # megatron-core 0.16.1 runs past the end of a chunk.
                rule = f"uniform recompute cuts each model chunk of the {role} evenly, and they have {layers} layers"
                yield Violation(key, number, rule, str(math.gcd(*layers)))
    if memory.recompute != "selective":
        return
    missing = _missing(shape, memory.recompute_modules)
    if recipe.trainer.fp8 == "delayed":
        missing |= {
            module: "has scales of FP8 that trainer.fp8: delayed takes from earlier passes, which a second pass changes"
            for module in ("layernorm", "moe_act")
        }
    for module in memory.recompute_modules:
        if module in missing:
            rest = [other for other in memory.recompute_modules if other not in missing] or ["core_attn"]
            rule = f"{module} {missing[module]}"
            yield Violation(f"{role}.memory.recompute_modules", list(memory.recompute_modules), rule, f"[{', '.join(rest)}]")


def _missing(shape: ModelShape, modules: tuple[str, ...]) -> dict[str, str]:
    """Modules that a model has none of, and why."""
    missing: dict[str, str] = {}
    if shape.experts is None:
        missing |= dict.fromkeys(("moe", "moe_act", "shared_experts"), "is a part of experts, and the model has none")
    elif not shape.experts.shared_ffn:
        missing["shared_experts"] = "is a part that the model's layers do not have"
    if "moe" in modules:
        missing |= dict.fromkeys(("moe_act", "shared_experts"), "is recomputed with moe already")
    if all(shape.has_experts(layer) for layer in range(shape.num_layers)):
        missing["mlp"] = "is a dense feed-forward network, and every layer of the model has experts"
    if shape.latent is None:
        missing["mla_up_proj"] = "is a part of latent attention, which the model does not have"
        if shape.experts is None:
            missing["layernorm"] = "of a dense model is fused into the next linear layer, which keeps only its input"
    return missing


_PATH = "reward_model.path"


def reward_model_is_read(recipe: Recipe) -> Violations:
    """A reward model and one part of the reward that reads it come together."""
    parts = [number for number, part in enumerate(recipe.reward) if isinstance(part, ModelRewardSection)]
    if recipe.reward_model is not None and not parts:
        rule = "no part of reward reads it"
        yield Violation("reward_model", GIVEN, rule, "remove reward_model, or add {kind: model} to reward")
    if recipe.reward_model is None and parts:
        rule = f"required: reward.{parts[0]} is of kind: model"
        yield Violation("reward_model", MISSING, rule, "reward_model: {path: ...}")
    for number in parts:
        if recipe.reward[number].weight == 0:
            rule = "a whole model would run for nothing"
            yield Violation(f"reward.{number}.weight", 0.0, rule, f"remove reward.{number} and reward_model")
    for number in parts[1:]:
        yield Violation(f"reward.{number}.kind", "model", "there is one reward model", f"remove reward.{number}")


def reward_model_files(recipe: Recipe, fetch: Fetch | None) -> Violations:
    """A classifier with one label. A model that is not found has a violation of its own, and so has its tokenizer."""
    if recipe.reward_model is None:
        return
    path = recipe.reward_model.path
    try:
        own = find_model(path, fetch)
    except ModelNotFound:
        return
    config = json.loads((own / "config.json").read_text(encoding="utf-8"))
    for architecture in config.get("architectures") or ():
        if not architecture.endswith("ForSequenceClassification"):
            rule = f"is a {architecture}, and a reward model is a sequence classifier"
            yield Violation(_PATH, path, rule, "a checkpoint of a ...ForSequenceClassification")
    labels = _num_labels(config)
    if labels != 1:
        yield Violation(_PATH, path, f"its config.json has {labels} labels, and a reward is one number", "one label")


def _num_labels(config: dict[str, Any]) -> int:
    """As transformers reads it: 2 where the file says nothing."""
    if config.get("id2label"):
        return len(config["id2label"])
    return int(config.get("num_labels", 2))
