"""`actor`, `reference`, `teachers`, `critic`, `reward_model`: a role's optimizer, memory, adapters and frozen weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.planner.roles import adapted_sizes
from megarl.recipe.device_section import is_for_cpus
from megarl.recipe.layout_section import LayoutSection
from megarl.recipe.model_section import Fetch, model_shape
from megarl.recipe.reward_section import ModelRewardSection
from megarl.recipe.section import Above, BrokenRules, Count, FilePath, Positive, Section, Share, Weight, refuse_repeats
from megarl.recipe.violation import GIVEN, MISSING, Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


# Legal values of `max_lora_rank` in vLLM (0.32).
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Megatron's names of what `recompute: selective` can recompute.
RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class LearningRateSection(Section):
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    warmup_steps: Count = 0
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over the steps that it is for."""
    min_lr_share: Share = 0.0
    """The final learning rate of `decay`, as a share of `lr`."""

    def broken_rules(self) -> BrokenRules:
        if self.min_lr_share and self.decay == "constant":
            rule = "is where a decay ends, and optimizer.decay is constant"
            yield "min_lr_share", rule, "0, or optimizer.decay: cosine"


class OptimizerSection(LearningRateSection):
    kind: Literal["adam"] = "adam"
    """Adam with decoupled weight decay."""
    weight_decay: Weight = 0.0
    """Decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Larger gradient norms are scaled down to this."""
    overlap_gradients: bool = False
    """Sum gradients over the data-parallel ranks while the last backward pass still runs, bucket by bucket."""
    overlap_parameters: bool = False
    """All-gather updated weights during the next forward pass, one bucket ahead; with `overlap_gradients` only."""

    def broken_rules(self) -> BrokenRules:
        yield from super().broken_rules()
        if self.overlap_parameters and not self.overlap_gradients:
            rule = "gathers weights by the buckets of optimizer.overlap_gradients, which is false"
            yield "overlap_parameters", rule, "optimizer.overlap_gradients: true"


class MemorySection(Section):
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass runs again instead of keeping it: `selective` the `recompute_modules` of each layer, `full`
    every layer, of which only the input is kept."""
    recompute_modules: Annotated[
        tuple[RecomputeModule, ...], Field(min_length=1, strict=False), AfterValidator(refuse_repeats)
    ] = ("core_attn",)
    """With `recompute: selective`, the parts of each layer that run again, under Megatron's names. `core_attn` saves little
    with a fused attention kernel; `layernorm` and `moe_act` need Transformer Engine."""
    offload_activations: bool = False
    """Keep activations for the backward pass in the host's memory. On a GPU the copies overlap with the computation."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What moves to the host's memory while no phase needs it: `optimizer` fp32 weights, moments and gradient buffers
    outside of updates, `all` also the weights outside of the role's phases."""

    def broken_rules(self) -> BrokenRules:
        if self.recompute != "selective" and self.recompute_modules != ("core_attn",):
            rule = f"only memory.recompute: selective reads it, and it is {self.recompute}"
            yield "recompute_modules", rule, "memory.recompute: selective, or remove recompute_modules"


class ReferenceMemorySection(Section):
    offload: Literal["none", "all"] = "none"
    """`all` keeps the weights in the host's memory and brings them to the device for the role's phase."""


class FreezeSection(Section):
    embedding: bool = False
    """Freeze the token embedding, and the head where the model ties them."""
    head: bool = False
    """Freeze the output layer."""
    norms: bool = False
    """Freeze the norms."""
    layers: Count = 0
    """Freeze this many decoder layers, the first ones."""


class LoraSection(Section):
    rank: Positive
    """Inner size of each adapter."""
    alpha: Annotated[float, Field(gt=0)]
    """The output of an adapter is scaled by alpha / rank."""
    targets: Annotated[
        tuple[Literal["qkv", "proj", "fc1", "fc2"], ...], Field(min_length=1, strict=False), AfterValidator(refuse_repeats)
    ] = ("qkv", "proj", "fc1", "fc2")
    """Linear layers of every decoder layer that get an adapter: queries, keys and values; attention's output; gate and up;
    down."""
    send: Literal["merged", "adapter"] = "merged"
    """What a weight sync sends. `merged`: the weights, with adapters merged in. `adapter`: the adapters alone, which vLLM
    applies at each request; engines keep the weights of `model.path` that they loaded."""


class TrainedSection(Section):
    """What both trained roles have."""

    optimizer: OptimizerSection
    """The role's optimizer."""
    memory: MemorySection = MemorySection()
    """Ways to need less of the device's memory."""
    freeze: FreezeSection = FreezeSection()
    """Frozen weights: no gradient, no gradient buffer, no optimizer state."""


class FollowingLayoutSection(Section):
    """A role that takes the actor's layout unless it has one."""

    layout: LayoutSection | None = None
    """How the model is sharded over the trainer ranks; null takes the actor's layout."""


class ActorSection(TrainedSection):
    layout: LayoutSection = LayoutSection()
    """How the model is sharded over the trainer ranks."""
    lora: LoraSection | None = None
    """Train low-rank adapters instead of the weights; null trains the weights. A reference with the actor's layout is then
    the actor without its adapters, not a second model."""
    router_replay: bool = False
    """Route each token of a mixture-of-experts model, in `actor_logprob` and `actor_update`, to the experts that the rollout
    engine chose; the trainer computes the experts' weights and the router's gradient. The recorded choice takes one byte
    (two above 256 experts) a token, layer and chosen expert in the host's memory. Engines on a GPU use vLLM's recording."""


class ReferenceSection(FollowingLayoutSection):
    path: FilePath | None = None
    """Hugging Face directory or hub name of another reference, of any size and family with the same tokens; null takes
    `model.path`."""
    refresh_every: Positive | None = None
    """Copy the actor's weights every this many steps; null never. Path and layout must then be the actor's, and checkpoints
    hold the reference's weights too."""
    memory: ReferenceMemorySection = ReferenceMemorySection()
    """Ways to need less of the device's memory."""


class TeacherEngineSection(Section):
    tensor: Positive = 1
    """Tensor-parallel ranks of the engine."""
    max_tokens: Positive = 2048
    """Tokens of one forward pass; on CPUs, where vLLM does not divide sequences, at least the longest sequence."""

    @property
    def layout(self) -> RolloutLayout:
        """How the engine is sharded over its workers."""
        return RolloutLayout(self.tensor)


class TeacherSection(FollowingLayoutSection):
    path: FilePath
    """Hugging Face directory or hub name of the teacher, of any size and family with the actor's tokens."""
    memory: ReferenceMemorySection = ReferenceMemorySection()
    """Ways to need less of the device's memory."""
    engine: TeacherEngineSection | None = None
    """A vLLM engine that serves the teacher, on devices of its own; null keeps the teacher on the trainer's ranks. An engine
    gives log-probabilities of sampled tokens alone (`algorithm.distillation.over: sampled`)."""
    weight: Above = 1.0
    """Share of the prompts whose completions this teacher judges, in proportion to the weights of the other teachers."""


class CriticSection(FollowingLayoutSection, TrainedSection):
    path: FilePath | None = None
    """Hugging Face directory or hub name the critic starts from, of any size and family with the same tokens; null takes
    `model.path`."""
    warmup_steps: Count = 0
    """Update only the critic in the first this many steps; the actor and its learning-rate schedule wait."""


class RewardModelSection(FollowingLayoutSection):
    path: FilePath
    """Hugging Face directory or hub name of a sequence-classification checkpoint with one label and the actor's tokenizer.
    It reads the sampled tokens unchanged, behind the prompt as the actor's chat template wrote it, and scores the last."""


def trained_sections(recipe: Recipe) -> Iterator[tuple[str, ActorSection | CriticSection]]:
    """The sections of roles that have an optimizer."""
    yield "actor", recipe.actor
    if recipe.critic is not None:
        yield "critic", recipe.critic


def trained_role_rules(recipe: Recipe) -> Violations:
    """Warm-ups that outlast the run, and weights or modules that cannot be frozen or recomputed."""
    steps, critic_warmup = recipe.rollout_steps, recipe.critic_warmup_steps
    of_run = f"run.steps = {recipe.run.steps}"
    of_run += f" - warmup.sft.steps = {steps}" if steps < recipe.run.steps else ""
    if critic_warmup and critic_warmup >= steps:
        rule = f"the actor would never learn from rollouts: must be below {of_run}"
        yield Violation("critic.warmup_steps", critic_warmup, rule, str(max(0, steps - 1)))
    for role, section in trained_sections(recipe):
        updates, warmup = steps - (critic_warmup if role == "actor" else 0), section.optimizer.warmup_steps
        if warmup > updates > 0:
            less = f" - critic.warmup_steps = {updates}" if updates < steps else ""
            yield Violation(f"{role}.optimizer.warmup_steps", warmup, f"must not pass {of_run}{less}", str(updates))
        if section.memory.recompute == "selective" and is_for_cpus(recipe):
            yield from without_transformer_engine(recipe, role)
        built_as = recipe.trained_role if role == "actor" else role
        if section.freeze.head and built_as != "actor":
            yield Violation(f"{role}.freeze.head", True, f"the head of a {built_as} is new and must be trained", "false")
    if recipe.actor.lora is not None and recipe.actor.freeze != FreezeSection():
        rule = "with actor.lora only the adapters are trained"
        yield Violation("actor.freeze", GIVEN, rule, "remove actor.freeze")


def reference_rules(recipe: Recipe) -> Violations:
    """A reference that nothing reads, or that cannot copy the actor's weights."""
    reference, every, key = recipe.reference, recipe.refresh_every, "reference.refresh_every"
    if reference is None:
        return
    if not recipe.runs("reference_logprob"):
        yield Violation(
            "reference", GIVEN, "without algorithm.kl or run.kind: dpo nothing reads the reference", "remove reference"
        )
    if reference.memory.offload != "none" and recipe.reference_is_base:
        rule = "the reference is the actor without its adapters and has no weights of its own"
        yield Violation("reference.memory.offload", reference.memory.offload, rule, "none, or remove reference.memory")
    if recipe.reference_follows and recipe.layout_section("reference") != recipe.actor.layout:
        rule = "each rank copies its own shards of the actor to the reference, and reference.layout is not actor.layout"
        other = "name its model in reference.path" if every is None else "remove reference.refresh_every"
        yield Violation("reference.layout", GIVEN, rule, f"remove reference.layout, or {other}")
    if every is None:
        return
    refused = {
        "actor.lora": ("with actor.lora the model's weights stay as they are", recipe.actor.lora is not None),
        "reference.path": ("reference.path is another model", recipe.path("reference") != recipe.model.path),
    }
    for other, (rule, holds) in refused.items():
        if holds:
            yield Violation(key, every, rule, f"remove {key}, or {other}")


def teacher_rules(recipe: Recipe) -> Violations:
    """Teachers that nothing reads, distillation without one, weights and routes that choose nothing, and what an engine
    cannot give of a teacher."""
    teachers, distillation = recipe.teachers, recipe.algorithm.distillation
    if distillation is None:
        if teachers:
            yield Violation("teachers", GIVEN, "without algorithm.distillation nothing reads them", "remove teachers")
        return
    route, key = distillation.route, "algorithm.distillation.route"
    if not teachers:
        yield Violation("teachers", MISSING, "required: algorithm.distillation has none", "teachers: {NAME: {path: ...}}")
    elif route is not None and len(teachers) == 1:
        yield Violation(key, route, "one teacher judges all completions", f"remove {key}")
    for name, section in teachers.items():
        if section.weight != 1.0 and (route is not None or len(teachers) == 1):
            rule = f"{key} chooses the teacher of each row" if route is not None else "one teacher judges all completions"
            yield Violation(f"teachers.{name}.weight", section.weight, rule, f"remove teachers.{name}.weight")
        if section.engine is None:
            continue
        engine, way_out = f"teachers.{name}.engine", f"remove teachers.{name}.engine"
        if section.layout is not None or section.memory != ReferenceMemorySection():
            rule = "no trainer rank holds the teacher, and nothing reads its layout and its memory"
            yield Violation(engine, GIVEN, rule, f"{way_out}, or layout and memory")
        if distillation.over != "sampled":
            rule = "an engine gives the log-probability of the sampled token alone"
            rule += f", and algorithm.distillation.over = {distillation.over} compares more tokens"
            yield Violation(engine, GIVEN, rule, f"{way_out}, or over: sampled")
        if recipe.rollout.temperature != 1.0:
            rule = f"{engine} gives log-probabilities at temperature 1"
            yield Violation("rollout.temperature", recipe.rollout.temperature, rule, f"1.0, or {way_out}")
        if not recipe.has_engines:
            yield Violation(engine, GIVEN, "with rollout.replay no engines are started", f"{way_out}, or rollout.replay")


def teacher_fits_model(recipe: Recipe, key: str, path: str, shape: ModelShape, fetch: Fetch | None) -> Violations:
    """Each token of the student has a probability under the teacher; over the vocabulary, no other token has one. Raises
    what `model_shape` raises for `model.path`."""
    distillation, vocab = recipe.algorithm.distillation, model_shape(recipe.model.path, fetch).vocab
    if distillation is None:
        return
    if distillation.top_k is not None and distillation.top_k >= vocab:
        rule = f"the vocabulary has {vocab} tokens"
        yield Violation("algorithm.distillation.top_k", distillation.top_k, rule, "over: vocabulary, or fewer tokens")
    longest, engine = recipe.max_sequence_tokens, recipe.served.get(key.split(".")[1])
    if engine is not None and shape.max_positions == longest:
        rule = f"vLLM scores sequences of at most {longest - 1} tokens where a model has {longest} positions"
        yield Violation(f"{key.removesuffix('.path')}.engine", GIVEN, rule, "a shorter rollout.max_new_tokens")
    if shape.vocab == vocab:
        return
    rule = f"its vocabulary has {shape.vocab} tokens, that of model.path {vocab}"
    if shape.vocab < vocab:
        yield Violation(key, path, rule, "a teacher with all tokens of model.path")
    elif distillation.over != "sampled":
        rule += f", and algorithm.distillation.over = {distillation.over} compares token by token"
        yield Violation(key, path, rule, "a teacher with the vocabulary of model.path, or over: sampled")


def reward_model_rules(recipe: Recipe) -> Violations:
    """A reward model needs exactly one part of the reward that reads it."""
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


def reward_model_files(path: str, directory: Path) -> Violations:
    """The reward model in `directory` is a classifier with one label."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for architecture in config.get("architectures") or ():
        if not architecture.endswith("ForSequenceClassification"):
            rule = f"is a {architecture}, and a reward model is a sequence classifier"
            yield Violation("reward_model.path", path, rule, "a checkpoint of a ...ForSequenceClassification")
    labels = len(config.get("id2label") or ()) or int(config.get("num_labels", 2))  # as transformers reads it
    if labels != 1:
        rule = f"its config.json has {labels} labels, and a reward is one number"
        yield Violation("reward_model.path", path, rule, "one label")


def adapters_fit_model(recipe: Recipe, shape: ModelShape) -> Violations:
    """Adapters that are wider than the weights or belong to layers that the model lacks, and replay without experts."""
    if recipe.actor.router_replay and shape.experts is None:
        yield Violation("actor.router_replay", True, "the model has no experts to choose from", "false")
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
            nearest = ", ".join(legal or (name for name in ("qkv", "proj") if name not in refused))
            yield Violation("actor.lora.targets", target, refused[target], nearest)
    narrowest = min((size for target in legal for size in adapted_sizes(shape, target)), default=lora.rank)
    if lora.rank > narrowest:
        rule = f"must not pass {narrowest}, the narrower side of the smallest weight among actor.lora.targets"
        yield Violation("actor.lora.rank", lora.rank, rule, str(narrowest))
    elif recipe.sent_adapter is not None and lora.rank > VLLM_LORA_RANKS[-1]:
        rule = f"vLLM applies adapters of rank {VLLM_LORA_RANKS[-1]} at most"
        yield Violation("actor.lora.rank", lora.rank, rule, f"{VLLM_LORA_RANKS[-1]}, or actor.lora.send: merged")


def freeze_fits_model(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    """Frozen layers that the model lacks, and models with nothing left to train."""
    freeze, layers = dict(trained_sections(recipe))[role].freeze, shape.num_layers
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


def without_transformer_engine(recipe: Recipe, role: str) -> Violations:
    """Modules that only Transformer Engine's layers recompute, for a role without them."""
    modules = dict(trained_sections(recipe))[role].memory.recompute_modules
    foreign = [module for module in ("layernorm", "moe_act") if module in modules]
    if foreign:
        rule = f"Megatron recomputes {' and '.join(foreign)} in Transformer Engine's layers alone, and these are not"
        rest = [module for module in modules if module not in foreign] or ["core_attn"]
        yield Violation(f"{role}.memory.recompute_modules", list(modules), rule, f"[{', '.join(rest)}]")


def recompute_fits_model(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    """Recompute of parts that the model lacks."""
    memory = dict(trained_sections(recipe))[role].memory
    if memory.recompute != "selective":
        return
    modules, missing = memory.recompute_modules, dict[str, str]()
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
    if recipe.trainer.fp8 == "delayed":
        rule = "has scales of FP8 that trainer.fp8: delayed takes from earlier passes, which a second pass changes"
        missing |= dict.fromkeys(("layernorm", "moe_act"), rule)
    for module in (module for module in modules if module in missing):
        rest = [other for other in modules if other not in missing] or ["core_attn"]
        rule = f"{module} {missing[module]}"
        yield Violation(f"{role}.memory.recompute_modules", list(modules), rule, f"[{', '.join(rest)}]")
