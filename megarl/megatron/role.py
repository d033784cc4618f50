"""One role on this rank: a Megatron model, its optimizer, and the two ways a phase runs it.

`forward` runs a plan's only mini-batch without gradients; `update` runs one mini-batch and takes an optimizer step.
Both run exactly the micro-batches that they are given, and report what ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.batch import Batch, PackedMicroBatch, pack
from megarl.megatron.logprobs import LogProbabilities
from megarl.megatron.lora import Adapter, attach, switched_off
from megarl.megatron.model import (
    SCALAR_ROLES,
    DecoderModel,
    build_model,
    freeze,
    has_own_attention,
    keep_gradients_through_recompute,
    merged_shards,
    named_shards,
)
from megarl.megatron.non_finite import (
    BackwardWatch,
    GradientNotFinite,
    name_ranks,
    non_finite_loss,
    non_finite_tensors,
    refuse_non_finite_norm,
)
from megarl.megatron.offload import ActivationOffload, RoleOffload
from megarl.megatron.optimizer import (
    data_parallel_config,
    finish_gather,
    forget,
    fuse,
    fuse_gradient_accumulation,
    gather_all,
    optimizer_config,
)
from megarl.megatron.parallel import Place
from megarl.megatron.router_replay import RouterReplay
from megarl.megatron.spans import MegatronTimers
from megarl.megatron.weights import load_shards, score_box
from megarl.models import ModelShape
from megarl.models.attention import Packing
from megarl.models.megatron_weights import rank_boxes
from megarl.models.stored_weights import SCORE, stored_tensors
from megarl.recipe.role_sections import FreezeSection, LoraSection, MemorySection, OptimizerSection, ReferenceMemorySection
from megarl.schedule import Executed, MiniBatch, Plan, Shape
from megarl.telemetry.clock import span
from megarl.telemetry.progress import begin_work

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads  # isort: skip
from megatron.core.optimizer import get_megatron_optimizer  # isort: skip
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # isort: skip
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region  # isort: skip

# The outputs of the last stage for one micro-batch, by name: "logprobs" (and "entropy" in an update) or "values", each
# [own tokens], the tokens that the policy sampled (`Batch`).
Outputs = dict[str, Tensor]
# Returns the loss of one micro-batch, weighted for the whole mini-batch, and sums for the metrics.
Objective = Callable[[PackedMicroBatch, Outputs], tuple[Tensor, dict[str, Tensor]]]


# Give up after this many skipped updates in a row: by then the loss scale is practically zero.
MAX_SKIPPED_UPDATES = 50


@dataclass(frozen=True)
class Update:
    """What one optimizer step did, with metric sums of this rank's micro-batches (last stage only).

    `skipped`: gradients overflowed under `precision: fp16`. `refused` names a NaN or infinite loss or gradient, with the
    same text on every rank. In both cases weights, moments and schedule are unchanged, and `grad_norm` is 0.
    """

    sums: dict[str, float]
    grad_norm: float
    learning_rate: float
    executed: Executed
    skipped: bool = False
    refused: str | None = None


@dataclass(frozen=True)
class RoleSettings:
    """Settings that all roles of a run share."""

    precision: str
    temperature: float
    seed: int = 1
    fp8: str | None = None
    initial_loss_scale: float = 1.0
    compile: bool = False  # of the head (`LogProbabilities`)
    megatron: Mapping[str, Any] | None = None  # further options of Megatron's TransformerConfig (`trainer.megatron`)
    # Megatron keeps a rotary table for each of the last 32 sequence lengths, so every micro-batch names this one.
    max_sequence_tokens: int | None = None


@dataclass(frozen=True)
class Training:
    """How a role is trained: its optimizer, the length of the learning-rate schedule, and which weights move.

    With `lora` only adapters are trained."""

    optimizer: OptimizerSection
    steps: int = 1
    updates_per_step: int = 1
    lora: LoraSection | None = None
    frozen: FreezeSection = FreezeSection()
    warmup: Training | None = None  # of the supervised steps of a warm-up


class Role:
    """A role (actor, reference, critic or reward model) under one layout, on this rank.

    `training` is None for a role that is never updated; with `follows` such a role still takes the weights of another one
    (`take_weights`).
    """

    def __init__(
        self,
        role: str,
        shape: ModelShape,
        directory: str | Path,
        place: Place,
        settings: RoleSettings,
        training: Training | None = None,
        memory: MemorySection | ReferenceMemorySection | None = None,
        router_replay: bool = False,
        follows: bool = False,
    ) -> None:
        self.role, self.shape, self.place = role, shape, place
        self._max_sequence_tokens = settings.max_sequence_tokens
        self._has_own_attention = has_own_attention(shape, settings.precision)
        # One model for each chunk of this stage; `chunks` wraps them with gradient buffers if they are trained.
        self.models: list[DecoderModel]
        self.chunks: list[Any]
        self.optimizer: Any = None
        self.adapters: dict[str, Adapter] = {}
        self._backward: BackwardWatch | None = None
        self._weights_to_gather = False
        self._skipped_in_a_row = 0
        features = memory if isinstance(memory, MemorySection) else MemorySection()
        with place.active():
            self._build(directory, settings, features, router_replay, training is not None)
            self.head = LogProbabilities(shape.vocab, settings.temperature, place.tensor_group, settings.compile)
            if training is None:
                for model in self.models:
                    model.requires_grad_(False)
            else:
                self._make_trainable(training, settings)
        # A teacher that gives rows reads its head in this way, and they have this width and type; see `teaching.py`.
        self.reads_head: Callable[[Tensor, Tensor, LogProbabilities], dict[str, Tensor]] | None = None
        self.row_width, self.row_dtype = 0, self.config.params_dtype
        # An actor that compares itself with teachers' rows; returns the divergence at this context rank's own tokens.
        self.distillation: Callable[[Batch, PackedMicroBatch, Tensor, Tensor], Tensor] | None = None
        self.router_replay = RouterReplay(self.models, shape, place) if router_replay else None
        self.activations = ActivationOffload(self.models) if features.offload_activations else None
        offload = memory.offload if memory is not None else "none"
        constant = training is None and not follows
        self.offload = RoleOffload(offload, self.models, self.chunks, self.optimizer, constant)
        self.offload.offload()

    def _build(
        self, directory: str | Path, settings: RoleSettings, memory: MemorySection, router_replay: bool, is_trained: bool
    ) -> None:
        """Build this rank's model chunks and read their weights."""
        shape, place, role = self.shape, self.place, self.role
        features = settings.fp8, memory, settings.megatron, router_replay
        self.models = build_model(shape, place.layout, settings.precision, role, place.device, *features)
        self.chunks = list(self.models)
        self.config = self.models[0].config
        self.config.timers = MegatronTimers()
        is_scalar, has_head = role in SCALAR_ROLES, self.models[-1].post_process
        scores = role == "reward_model" and (not is_trained or SCORE in stored_tensors(directory))
        boxes = [*rank_boxes(shape, place.layout, place.rank, critic=is_scalar)]
        if scores and has_head:
            boxes.append(score_box(shape, place.layout, place.rank))
        load_shards(directory, shape, boxes, named_shards(self.models, place.layout), is_scalar, scores)
        if is_scalar and has_head and not scores:  # the same small head under every layout, so that values start near 0
            generator = torch.Generator().manual_seed(settings.seed)
            with torch.no_grad():
                weight = torch.randn(1, shape.hidden, generator=generator) * shape.initializer_range
                self.models[-1].output_layer.weight.copy_(weight)

    def _make_trainable(self, training: Training, settings: RoleSettings) -> None:
        """Add adapters, freeze weights, and make gradient buffers, optimizer and learning-rate schedule."""
        if training.lora is not None:
            place = self.place
            self.adapters = attach(self.models, training.lora, settings.seed, place.tensor_rank, place.tensor_group)
        freeze(self.models, training.frozen)
        keep_gradients_through_recompute(self.models)
        optimizer = training.optimizer
        data = data_parallel_config(optimizer)
        self.chunks = [DistributedDataParallel(config=self.config, ddp_config=data, module=model) for model in self.models]
        for model in self.models:
            fuse_gradient_accumulation(model)
        config = optimizer_config(optimizer, settings.precision, settings.initial_loss_scale)
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        fuse(self.optimizer)
        self._training = training
        self._start_schedule(training.warmup or training)
        refuse_non_finite_norm(self.optimizer)
        self._backward = BackwardWatch(self.models)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        # Megatron enters it for all but the last micro-batch, so that overlapped gradients are reduced once.
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _start_schedule(self, training: Training) -> None:
        """Begin a learning-rate schedule over the updates of a training."""
        optimizer, updates = training.optimizer, training.steps * training.updates_per_step
        warmup_updates = optimizer.warmup_steps * training.updates_per_step
        rates = {"max_lr": optimizer.lr, "min_lr": optimizer.lr * optimizer.min_lr_share}
        for group in self.optimizer.param_groups:  # megatron-core reads these before those of the schedule
            group.update(rates)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            **rates,
            lr_warmup_steps=warmup_updates,
            # One more than there are updates, so that the last update still moves.
            lr_decay_steps=max(updates, warmup_updates) + 1,
            lr_decay_style=optimizer.decay,
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
            # After a resume the recipe's schedule wins over the checkpoint's.
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        self.scheduler.step(1)  # update k of n runs at point k of the schedule, so that no update runs at rate 0

    def end_supervised(self) -> None:
        """Begin the schedule of the steps after a warm-up, as a run from these weights would: without moments."""
        with self.present(training=True), self.place.active():
            forget(self.optimizer)
            self._start_schedule(self._training)

    @contextmanager
    def present(self, training: bool = False) -> Iterator[None]:
        """Bring the offloaded weights back to the device for a phase, and with `training` the optimizer too."""
        with self.offload.present(training):
            yield
            if self.offload.moves_weights:  # a gather that is still running would write to freed memory
                self.gather_weights()

    def announce(self, plan: Plan, passes: int = 1) -> None:
        """Tell the progress line how many micro-batches this rank will run, in how many passes through its chunks."""
        count = sum(len(mini_batch.micro_batches[self.place.data_rank]) for mini_batch in plan.mini_batches)
        begin_work("micro-batches", count, passes * len(self.chunks))

    # The two ways to run a phase ---------------------------------------------------------------------------------

    def forward(
        self, batch: Batch, mini_batch: MiniBatch, adapted: bool = True
    ) -> tuple[dict[str, dict[int, Tensor]], Executed]:
        """Run a plan's only mini-batch without gradients; returns the outputs of this data-parallel rank's sequences, name
        -> sample -> fp32 [own tokens], and the shapes that ran.

        Only the last pipeline stage has outputs. Without `adapted` the adapters are off and the base model runs.
        For tokens that are no rollout's (`Batch.sampled`) the temperature is 1, and routers choose the experts themselves.
        """
        assert self.offload.is_present(), f"the {self.role}'s weights are offloaded: enter present()"
        for model in self.models:
            model.eval()
        temperature = self.head.temperature if batch.sampled else 1.0
        replay = self.router_replay if adapted and batch.sampled else None  # the base model chooses its experts itself
        adapters = switched_off(() if adapted else self.adapters.values())
        with self.place.active(), torch.no_grad(), adapters, self.head.at(temperature):

            def finish(micro: PackedMicroBatch, output: Tensor) -> tuple[PackedMicroBatch, Outputs]:
                outputs = self._outputs(micro, output, entropy=False)
                # Rows are many: the device does not keep them to the end of the phase.
                return micro, {name: part.cpu() if name == "rows" else part for name, part in outputs.items()}

            stored, executed = self._run(
                batch,
                mini_batch,
                finish,
                forward_only=True,
                replay=replay,
            )
        results: dict[str, dict[int, Tensor]] = {}
        samples = [sample for micro, _ in stored for sample in micro.samples]
        lengths = [length for micro, _ in stored for length in micro.own_lengths]
        for name in stored[0][1] if stored else ():
            flat = torch.cat([outputs[name] for _, outputs in stored])
            flat = flat if name == "rows" else flat.float().cpu()  # the only wait of the host
            results[name] = dict(zip(samples, flat.split(lengths), strict=True))
        return results, executed

    def update(self, batch: Batch, mini_batch: MiniBatch, objective: Objective) -> Update:
        """Take one optimizer step on a mini-batch, or none if a loss or the gradient is not finite. Raises RuntimeError
        after MAX_SKIPPED_UPDATES updates in a row without a step."""
        assert self.optimizer is not None and self._backward is not None, f"the {self.role} has no optimizer"
        assert self.offload.is_present(training=True), (
            f"the {self.role}'s optimizer is offloaded: enter present(training=True)"
        )
        temperature = self.head.temperature if batch.sampled else 1.0
        with self.place.active(), self.head.at(temperature):
            for model, chunk in zip(self.models, self.chunks, strict=True):
                model.train()
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._backward.start()

            def finish(micro: PackedMicroBatch, output: Tensor) -> tuple[Tensor, Any]:
                outputs = self._outputs(micro, output, entropy=True)
                if self.distillation is not None and batch.sampled:
                    local = self.distillation(batch, micro, output.squeeze(1), self.models[-1].head_weight)
                    outputs["divergence"] = over_context(local, micro, self.place)
                if not micro.samples:  # padding, so that all ranks run as many micro-batches
                    loss = torch.stack([values.sum() for values in outputs.values()]).sum()
                    return loss, ((micro.samples, loss.detach()), {})
                loss, sums = objective(micro, outputs)
                return loss, ((micro.samples, loss.detach()), sums)

            replay = self.router_replay if batch.sampled else None
            stored, executed = self._run(batch, mini_batch, finish, forward_only=False, replay=replay)
            learning_rate = self.scheduler.get_lr({})  # also on a rank without trainable weights
            with span("optimizer"):
                succeeded, grad_norm, refused = self._step_optimizer([loss for loss, _ in stored])
        self._weights_to_gather = True
        self._skipped_in_a_row = 0 if succeeded else self._skipped_in_a_row + 1
        if self._skipped_in_a_row == MAX_SKIPPED_UPDATES:
            overflow = (
                f"the {self.role}'s gradients overflowed, at a loss scale of {float(self.optimizer.get_loss_scale()):g}; "
                "use trainer.precision: bf16"
            )
            raise RuntimeError(f"{MAX_SKIPPED_UPDATES} updates in a row were skipped; in the last {refused or overflow}")
        if succeeded:
            self.scheduler.step(1)
        sums: dict[str, float] = {}
        named = [(name, value) for _, part in stored for name, value in part.items()]
        values = torch.stack([value for _, value in named]).tolist() if named else []  # the only wait of the host
        for (name, _), value in zip(named, values, strict=True):
            merged = (sums[name], value) if name in sums else (value,)
            sums[name] = max(merged) if name.endswith("_max") else sum(merged)
        skipped = not succeeded and refused is None
        return Update(sums, grad_norm, float(learning_rate), executed, skipped, refused)

    def take_weights(self, other: Role) -> None:
        """Copy this rank's shards from another role of the same model under the same layout, adapters merged in.
        Collective."""
        assert self is not other, f"the {self.role} has no weights of its own"
        with self.present(), other.present(), torch.no_grad():
            weights, sources = self.shards(), other.shards()
            assert weights.keys() == sources.keys(), (
                f"{self.role} and {other.role} are built differently: {weights.keys() ^ sources.keys()}"
            )
            for name, weight in weights.items():
                weight.copy_(sources[name])

    def skip_updates(self, count: int) -> None:
        """Advance the learning rate past `count` planned updates that an early stop skips."""
        with self.place.active():
            self.scheduler.step(count)

    def _step_optimizer(self, losses: Sequence[tuple[tuple[int, ...], Tensor]]) -> tuple[bool, float, str | None]:
        """Step, unless a loss or gradient is not finite in a way that no loss scale repairs. Returns whether the optimizer
        stepped, the gradient norm, and why it refused to step; the same on every rank."""
        # Losses first: lowering the loss scale would not repair one.
        refused = name_ranks(non_finite_loss(losses))
        if refused is not None:
            return False, 0.0, refused
        try:
            succeeded, grad_norm, _ = self.optimizer.step()
        except GradientNotFinite:
            assert self._backward is not None, "made with the optimizer"
            gradients = (
                (name, weight.main_grad)
                for model in self.models
                for name, weight in model.named_parameters()
                if weight.requires_grad and hasattr(weight, "main_grad")
            )
            refused = f"gradients are not finite: {name_ranks(non_finite_tensors(gradients)) or 'their norm overflows'}"
            samples = name_ranks(self._backward.first_samples())
            return False, 0.0, refused if samples is None else f"{refused}; since {samples}"
        return succeeded, float(grad_norm) if succeeded else 0.0, None

    def broken_weights(self) -> str | None:
        """Name the ranks that hold NaN or infinite weights; None if all weights are finite. Collective."""
        assert self.offload.is_present(), f"the {self.role}'s weights are offloaded: enter present()"
        return name_ranks(non_finite_tensors(named for model in self.models for named in model.named_parameters()))

    def _run(
        self,
        batch: Batch,
        mini_batch: MiniBatch,
        finish: Callable[[PackedMicroBatch, Tensor], Any],
        forward_only: bool,
        replay: RouterReplay | None,
    ) -> tuple[list[Any], Executed]:
        """Drive megatron-core's pipeline schedule over this rank's micro-batches.

        Returns the results of `finish(micro_batch, output)` (on the last stage), and the shapes that ran, in order. In
        training `finish` returns a loss and the result.
        """
        place = self.place
        ends_alone, choices = self.role == "reward_model", None if replay is None else replay.choices
        with span("data"):
            packed = [
                pack(batch, micro, place.device, place.layout, place.context_rank, ends_alone, choices)
                for micro in mini_batch.micro_batches[place.data_rank]
            ]
        ran: list[PackedMicroBatch] = []
        stored = get_forward_backward_func()(
            forward_step_func=partial(self._step, finish, ran, len(packed)),
            data_iterator=[iter(packed) for _ in self.chunks],  # each chunk runs all micro-batches
            model=self.chunks,
            num_microbatches=len(packed),
            seq_length=packed[0].num_slots,  # read only without a pipeline; stages send shapes with the tensors
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        if replay is not None:
            replay.finish()
        # From the tensors that ran, not from the plan.
        return stored, tuple(Shape(micro.num_sequences, micro.num_tokens, micro.num_slots) for micro in ran)

    def _step(
        self,
        finish: Callable[[PackedMicroBatch, Tensor], Any],
        ran: list[PackedMicroBatch],
        num_micro_batches: int,
        micro_batches: Iterator[PackedMicroBatch],
        model: Any,
    ) -> tuple[Tensor, Callable[..., Any]]:
        """Run a micro-batch through a chunk; returns its output and the function that Megatron applies on the last stage."""
        micro = next(micro_batches)
        self.models[-1].head_positions = micro.head_positions  # no other chunk has a head
        packing = self._packing(micro)
        if micro.routing is not None:
            assert self.router_replay is not None
            self.router_replay.expect(self.chunks.index(model), micro.routing)
        if self._backward is not None:
            self._backward.samples = micro.samples
        offload = self.activations if self.activations is not None and torch.is_grad_enabled() else None
        with nullcontext() if offload is None else offload.forward():
            output = model(micro.input_ids, micro.position_ids, None, packed_seq_params=packing)
        if model is self.chunks[-1]:  # the whole stage has run
            ran.append(micro)
        if self._backward is not None:
            self._backward.watch(output)

        def last(output: Tensor, non_loss_data: bool = False) -> Any:
            if non_loss_data:  # forward only
                return finish(micro, output)
            loss, sums = finish(micro, output)
            # Megatron divides a loss by the number of micro-batches and averages gradients over data-parallel ranks. The
            # objective's weights already are those of the whole mini-batch, so both are undone here. Megatron itself undoes
            # its average over context ranks.
            return loss * (num_micro_batches * self.place.layout.data), sums

        return output, last

    def _packing(self, micro: PackedMicroBatch) -> PackedSeqParams:
        """Describe a micro-batch for the attention of this role's layers."""
        if self._has_own_attention:
            return Packing(parts=micro.parts, query_bounds=micro.query_bounds, key_bounds=micro.key_bounds)
        assert not micro.continues, "refused before the start: Transformer Engine's attention supports no shared prompts"
        sizes: dict[str, Any] = dict(qkv_format="thd", cu_seqlens_q=micro.bounds, cu_seqlens_kv=micro.bounds)
        longest = max(self._max_sequence_tokens or 0, micro.longest)  # context parallelism pads sequences
        return PackedSeqParams(**sizes, max_seqlen_q=longest, max_seqlen_kv=longest)

    def gather_weights(self) -> None:
        """Finish the gathers that `overlap_parameters` leaves to the next forward pass; call this before reading weights
        outside of one. Collective."""
        for chunk in self.chunks if self._weights_to_gather else ():
            gather_all(chunk)
        self._weights_to_gather = False

    def _outputs(self, micro: PackedMicroBatch, output: Tensor, entropy: bool) -> Outputs:
        # output [this context rank's own tokens, 1, hidden], or [1, this context rank's own tokens, 1] of a scalar role
        if self.role in SCALAR_ROLES:
            local = {SCALAR_ROLES[self.role]: output.float().flatten()}
        elif self.reads_head is not None:
            local = self.reads_head(output.squeeze(1), self.models[-1].head_weight, self.head)
        else:
            weight = self.models[-1].head_weight
            if self.optimizer is not None:  # the head is no module whose hook would wait for the gather
                finish_gather(self.chunks[-1], weight)
            local = self.head(output.squeeze(1), weight, micro.targets[micro.heads], entropy)
        return {name: over_context(rows, micro, self.place) for name, rows in local.items()}

    def shards(self) -> Mapping[str, Tensor]:
        """This rank's weights by local name, adapters merged in, for the weight sync and the export. Collective under
        overlap_parameters."""
        assert self.offload.is_present(), f"the {self.role}'s weights are offloaded: enter present()"
        self.gather_weights()
        return merged_shards(self.models, self.place.layout)


def over_context(local: Tensor, micro: PackedMicroBatch, place: Place) -> Tensor:
    """Combine the rows that each context rank predicts into the rows of all own tokens, on every context rank.

    Each rank computes the whole loss from them, so that the gradient of its rows is complete and must not be summed.
    """
    # local [own tokens that this context rank predicts, ...]
    if place.layout.context == 1:
        return local
    rows = local.new_zeros(len(micro.targets), *local.shape[1:]).index_copy(0, micro.heads, local)
    return reduce_from_tensor_model_parallel_region(rows, group=place.context_group)


def share_results(
    results: dict[int, Tensor], mini_batch: MiniBatch, batch: Batch, place: Place, one_each: bool = False
) -> list[Tensor]:
    """Broadcast the results of each data-parallel rank; returns the results of every sequence, in sample order.

    Results are per token, or one per sequence if `one_each`; 0 for sequences that the phase did not run. `place` belongs to
    the role that computed them. Collective.
    """
    ordered: list[Tensor] = []
    for data_rank, micro_batches in enumerate(mini_batch.micro_batches):
        samples = [sample for micro in micro_batches for sample in micro.samples]
        lengths = [1 if one_each else int(batch.own_lengths[sample]) for sample in samples]
        source = place.source_of(data_rank)
        if place.rank == source:
            flat = torch.cat([results[sample] for sample in samples]).to(place.device)
        else:
            flat = torch.empty(sum(lengths), dtype=torch.float32, device=place.device)
        with span("wait_ranks"):
            dist.broadcast(flat, src=source)
            host = flat.cpu()  # here the host waits for a GPU
        ordered += host.split(lengths)
    by_sample = dict(zip(mini_batch.order, ordered, strict=True))
    lengths = batch.own_lengths.tolist()
    return [by_sample[sample] if sample in by_sample else torch.zeros(length) for sample, length in enumerate(lengths)]
