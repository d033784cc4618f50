"""What can be written in a recipe: one frozen model per section, each field explained under it.

No torch here: `megarl check` reads these in a fraction of a second. Types are strict, so that `steps: "3"` or
`steps: true` is a violation and never a silent conversion. What spans several fields is in `rules.py`.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from megarl.models.layout import RolloutLayout

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]


def expand_path(path: str) -> str:
    """Replace a leading `~` and environment variables, as a shell does. Raises ValueError for unknown ones."""
    expanded = os.path.expandvars(os.path.expanduser(path))
    if expanded.startswith("~"):
        raise ValueError(
            f"no user {path.partition('/')[0][1:]!r} is known here, and HOME is not set; write ./~ for a file named ~"
        )
    if (unset := re.search(r"\$(?:\w+|\{[^}]*\})", expanded)) is not None:
        raise ValueError(f"the environment variable {unset[0].strip('${}')} is not set")
    return expanded


FilePath = Annotated[str, Field(min_length=1), AfterValidator(expand_path)]
# Megatron's names of what `recompute: selective` can recompute.
RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
# A tagged union, so that a wrong value is one violation and not one of each kind.
Cap = Annotated[
    Annotated[Positive, Tag("number")] | Annotated[Literal["auto"], Tag("word")],
    Discriminator(lambda value: "word" if isinstance(value, str) else "number"),
]


class UnknownField(LookupError):
    """A field without a legal value was read; only a recipe with violations has such fields (see `load.py`)."""


class Section(BaseModel):
    """Base of every section: frozen, strict, no unknown keys, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def __getattr__(self, name: str) -> Any:
        # Reached only when the instance has no such attribute. Not an AttributeError, which a property would swallow.
        if name in type(self).model_fields:
            raise UnknownField(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run and of its directory: letters, digits, `.`, `_` and `-`."""
    steps: Positive
    """Steps to train."""
    seed: Count = 1
    """Seeds prompt order, sampling, mini-batch order and new weights (a value head)."""
    dir: FilePath = "runs"
    """Directory that holds run directories, from the working directory. In this and every other path of a recipe `~` is the
    home directory, and `$NAME` an environment variable."""
    checkpoint_every: Count = 0
    """Write a checkpoint after every that many steps; one is written after the last step in any case."""
    dump_rollouts: bool = False
    """Write every step's rollouts into the run directory, for `rollout.replay`."""
    preemption: Literal["finish", "abandon"] = "finish"
    """What a run does at SIGTERM or SIGUSR1: finish the step and save it, or leave at the next phase boundary. Then what the
    step before left is saved, or, where this step has changed weights already, the last checkpoint stands."""
    trace: Literal["none", "phases", "spans"] = "phases"
    """What each rank writes of its steps into `trace/` of the run directory, for `megarl trace`: when its phases ran, or
    also the spans in them (micro-batches, waits, optimizer). With either, rank 0 writes when each request of the rollout
    engines came, began and ended."""
    on_not_finite: Literal["stop", "skip"] = "stop"
    """What a run does where a loss, gradient, log-probability, value or reward is not a finite number: stop before the
    update, or leave out that update or that sample, counted in `finite/...`. Broken weights end it in any case."""
    grace_s: Seconds = 120.0
    """Time to leave after such a signal, in seconds; what is still there then is killed."""


class ModelSection(Section):
    path: FilePath
    """Hugging Face directory or hub name the actor, the reference and the rollout engines start from."""


class TrainerSection(Section):
    ranks: Positive
    """Trainer processes; the data-parallel size is what the layout leaves of them."""
    precision: Literal["fp32", "bf16", "fp16"]
    """Number format of weights and activations in the trainer. Gradients add up in fp32 under each, and the optimizer keeps
    fp32 weights and moments. `fp16` scales the loss; an update that overflows is skipped and counted
    (`actor/skipped_updates`)."""
    initial_loss_scale: Annotated[float, Field(ge=1)] = 65536.0
    """The loss scale that `precision: fp16` starts with; it is lowered after overflows and raised after good updates."""
    fp8: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] | None = None
    """Transformer Engine's recipe of FP8 scales for the layers' matrix products, over `precision: bf16`; null for none.
    Needs a GPU that has FP8."""
    collective_timeout_s: Seconds = 600.0
    """Deadline of every collective; half of it is that of a machine which cannot be reached any more."""
    megatron: dict[str, Any] = {}
    """Further options of Megatron's `TransformerConfig`, under Megatron's names, for every role. Fields that megarl sets
    itself are refused, except the fusions."""
    threads: Positive = 1
    """CPU threads of each trainer process."""
    compile: bool = False
    """Compile the arithmetic of log-probabilities and entropy with torch.compile. A rank whose compiler fails logs the error
    and goes on without. Other ranks wait for one that compiles, at most for `watchdog.first_step_s`."""

    @property
    def token_multiple(self) -> int:
        """What FP8 products want the tokens of a rank to be a multiple of: their rows are scaled by 32 under `mxfp8`, and
        their kernels take 16."""
        if self.fp8 is None:
            return 1
        return 32 if self.fp8 == "mxfp8" else 16


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


class RolloutSection(Section):
    max_new_tokens: Positive
    """Longest completion, in tokens."""
    engines: Positive = 1
    """vLLM engines, each with processes of its own."""
    placement: Literal["colocated", "separate"] = "colocated"
    """`colocated`: engines lie on the trainer's nodes and share its devices; on GPUs they take turns with it, asleep and
    without memory from the end of a rollout to the sync. `separate`: on nodes without a trainer rank, or where there are
    none on devices without one. An engine lies on one node, and on GPUs shares its devices with no other engine; on CPUs
    `megarl/cluster/cores.py` deals the cores."""
    tensor: Positive = 1
    """Tensor-parallel ranks of one engine."""
    pipeline: Positive = 1
    """Pipeline stages of one engine: vLLM's own split of the layers, whatever the trainer's is."""
    data: Positive = 1
    """Data-parallel ranks of one engine: each takes its share of the engine's sequences, and of the experts. Models without
    experts need none: more `engines` do the same."""
    expert_parallel: bool = False
    """Deal experts whole over the tensor and data-parallel ranks of an engine; false cuts each over them."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same number. vLLM takes none below 0.01."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format in the engines; null takes `trainer.precision`."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: engines hold the linear weights of the layers as e4m3 with a scale for each 128 x 128 block, and the trainer
    ranks quantise them before they send them; null for none. vLLM has no kernels for most CPUs."""
    timeout_s: Seconds = 600.0
    """Deadline of one step's rollouts and of every other call to an engine."""
    max_restarts: Count = 2
    """How often a dead engine is started again before the run ends."""
    kv_cache_bytes: Positive | None = None
    """Memory of one engine's key-value cache, per worker: per tensor rank of each stage and data-parallel rank. null: on a
    GPU what weights, working memory and the trainer's roles at rest leave of the device, up to all concurrent sequences at
    their longest; 256 MiB on CPUs."""
    memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """On GPU, share of the device's memory that must be free for an engine to start; null takes what a worker needs by
    megarl's estimate: weights, `kv_cache_bytes`, working memory and CUDA graphs. `megarl check --plan` prints the largest
    safe share."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's engines, under vLLM's names (`AsyncEngineArgs`), as `{enforce_eager: true}`. They go
    before what megarl chooses for a device; what other keys of the recipe say is refused here."""
    replay: FilePath | None = None
    """Directory of dumped rollouts to read in place of running engines."""

    @property
    def layout(self) -> RolloutLayout:
        """How one engine is cut over its workers."""
        return RolloutLayout(self.tensor, self.pipeline, self.data, self.expert_parallel)


class MicroBatchSection(Section):
    sequences: Positive | None = None
    """Exactly that many sequences in each micro-batch (fewer in the last)."""
    max_tokens: Cap | None = None
    """As many sequences as fit under this cap, padding included, on each data-parallel rank. `auto` takes the largest cap
    that fits `device.memory_gib`, and the resolved recipe shows the number."""

    @model_validator(mode="after")
    def _one_rule(self) -> MicroBatchSection:
        if (self.sequences is None) == (self.max_tokens is None):
            raise ValueError("exactly one of sequences and max_tokens")
        return self


class RolloutPhaseSection(Section):
    prompts: Positive
    """Prompts of one step."""
    max_concurrent: Annotated[int, Field(ge=1, le=2048)] | None = None
    """Sequences one engine decodes at a time. null: 64 on CPUs; on GPUs an engine's share of a step's sequences, up to 256
    for each data-parallel rank."""


class RewardPhaseSection(Section):
    sequences: Positive = 32
    """Sequences scored by one task."""
    timeout_s: Seconds = 60.0
    """Deadline of one task; a sequence at work then scores 0, and those behind it are masked; both are counted."""
    workers: Positive = 1
    """Processes that score tasks at the same time, in the Ray cluster."""
    memory_mib: Positive = 4096
    """Resident memory of a worker's verifiers and all that they start, in MiB, beside that of a sandbox. A completion on
    which they pass it scores 0; a function that loads a model needs room for it."""


class ForwardPhaseSection(Section):
    micro_batch: MicroBatchSection
    """How the batch is cut into forward passes."""
    share_prompts: bool = False
    """Run a prompt once for the completions of its group that lie in one micro-batch, not once for each. On engines of
    megarl's own attention: on CPUs, on GPUs before Hopper, in fp32, and for DeepSeek-V3 and Gemma 3."""


class UpdatePhaseSection(Section):
    mini_batch: Positive
    """Sequences of one optimizer update, over all data-parallel ranks."""
    micro_batch: MicroBatchSection
    """How a mini-batch is cut into forward and backward passes."""
    epochs: Positive = 1
    """How often each sequence is used."""
    share_prompts: bool = False
    """As of a forward phase. Gradients are those of prompts that each completion has for itself."""


class PhasesSection(Section):
    rollout: RolloutPhaseSection
    """Prompts to engines, completions back."""
    reward: RewardPhaseSection = RewardPhaseSection()
    """Completions to scores."""
    reward_model: ForwardPhaseSection | None = None
    """Scores of the reward model; runs with one."""
    actor_logprob: ForwardPhaseSection | None = None
    """Log-probabilities before the first update; runs with more than one update per batch or a KL term in the reward."""
    reference_logprob: ForwardPhaseSection | None = None
    """Log-probabilities under the reference; runs with a KL term."""
    critic_value: ForwardPhaseSection | None = None
    """Values of every token; runs with a critic."""
    critic_update: UpdatePhaseSection | None = None
    """Updates of the critic; runs with a critic."""
    actor_update: UpdatePhaseSection
    """Updates of the actor."""


class DeviceSection(Section):
    memory_gib: Annotated[float, Field(gt=0)]
    """Memory of one trainer rank's device in GiB (2**30 bytes); on CPU, the rank's share of the machine's."""
    kind: Literal["gpu", "cpu"] = "gpu"
    """What the memory belongs to. Engines on GPUs sleep while a colocated trainer works, and separate ones have devices of
    their own; on CPUs all processes of a machine hold theirs at the same time."""
    host_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of one node's host in GiB, for all trainer ranks and engines on it: what `megarl check` estimates of offloaded
    roles, checkpoints, the weight sync and processes must fit. null says the estimate and checks nothing."""
    tflops: Annotated[float, Field(gt=0)] | None = None
    """Sustained rate of one device in 10**12 floating-point operations a second, for the times that `megarl check --plan`
    estimates."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)


# Bytes of a bucket where the recipe gives none: on a CPU two fit its cache, on a GPU the host waits for the device at each.
BUCKET_BYTES = {"cpu": 4 << 20, "gpu": 128 << 20}


class WeightSyncSection(Section):
    transport: Literal["auto", "shared_memory", "gloo", "cuda_ipc", "nccl"] = "auto"
    """How new weights reach the engines. On one machine: `shared_memory`, of the host; or `cuda_ipc`, where trainer ranks
    write into the memory of an engine's GPU. As messages, one copy for all engines of a machine: `gloo` from host to host,
    `nccl` from GPU to GPU, where `rollout.placement: separate` gives each trainer rank and each worker a GPU of its own.
    `auto` takes `shared_memory` or `cuda_ipc` where trainer ranks and engines are on one machine, else `nccl` between GPUs
    that are apart, else `gloo`. Where two GPUs of the machine cannot reach each other's memory it takes `nccl` or
    `shared_memory` in the place of `cuda_ipc`."""
    mode: Literal["reshard", "checkpoint"] = "reshard"
    """`reshard` sends each worker the parts that it holds, by megarl's table of the model. `checkpoint` sends every worker
    the whole model, tensor by tensor, to vLLM's own loader: slower, and needs no table of vLLM's parameters."""
    wire: Literal["full", "delta"] = "full"
    """`full` sends weights as they are. `delta` sends what changed since the version before, bit for bit: for links slower
    than a core finds the differences, 0.3 to 0.8 GB/s, so with `transport: gloo` alone. A trainer rank keeps a copy of what
    it sends, and a worker of what it receives, in the host's memory."""
    verify: Literal["all", "sampled"] = "all"
    """Which of the boxes that arrive on a GPU are checked against their checksums: `all`; or one in sixteen, in every
    version others, and always the first of what one rank wrote into a bucket. Elsewhere all are."""
    bucket_bytes: Positive | None = None
    """Size of a bucket. Weights travel in buckets that are used again and again: two for each worker of an engine, which
    shared memory, or the engine's GPU, must have room for. A row of the largest matrix must fit. `null`: 4 MiB in the
    host's memory, of which both fit a CPU's cache; 128 MiB in a GPU's (`cuda_ipc`, `nccl`), where the host waits for the
    device once a bucket."""
    timeout_s: Seconds = 120.0
    """How long a trainer rank waits for an engine to read the next bucket before it gives that one up; an engine waits
    longer for a rank. Other waits of a sync are multiples of it, too, which errors name; what vLLM does with the weights
    once they are there counts in the wait for an engine's report."""
    retries: Count = 1
    """How often weights that arrived with wrong bytes are sent again to the same engine before the run ends."""
    in_flight: Literal["wait", "keep", "abort"] = "wait"
    """What becomes of completions that an engine still generates when new weights come. `wait`: they are finished first, for
    which `rollout.timeout_s` is the deadline. `keep`: they go on under the new weights, and have both versions. `abort`:
    groups that are not complete are generated again under the new weights. A step waits for all of its rollouts before it
    updates, so that a run has nothing in flight yet."""
