"""Save and load roles with megatron-core's distributed checkpoints: any layout can load what another layout saved.

A checkpoint is written under a temporary name and renamed when it is complete, so that a crash while saving loses no
earlier checkpoint. Each role has its own directory, so that offloaded roles come to the device one at a time. Of a role with
adapters only the adapters are saved: its other weights are in the model directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, ReadItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megarl.megatron.lora import Adapter, adapter_states, fill_adapters
from megarl.megatron.model import DecoderModel, local_name
from megarl.megatron.non_finite import NotFinite, name_ranks, non_finite_tensors
from megarl.megatron.parallel import gather_to_all
from megarl.megatron.role import Role
from megarl.telemetry.disk import DiskFull, free_bytes, is_full, no_room, size_bytes
from megarl.telemetry.run_directory import latest_checkpoint

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory  # isort: skip

_WITH_DATA = (ShardedTensor, ShardedTensorFactory)
_DENSE, _EXPERTS = "dense", "experts"
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}

_STATES = ("param", "exp_avg", "exp_avg_sq")  # megatron-core's names of a parameter's fp32 copy and moments
_PIECE_BYTES = 64 * 2**20  # optimizer states that a rank sends at once, the device memory that saving needs
_STATE = "state.pt"  # the file of the plain values, next to the roles' directories
_ROLLOUTS = "rollouts.pt"
_BORROWED = "borrowed"  # a state key that is no parameter; torch's optimizers leave it alone


def save_checkpoint(
    directory: str | Path,
    step: int,
    roles: Mapping[str, Role],
    state: Mapping[str, Any],
    rollouts: Mapping[str, Any] | None = None,
) -> Path:
    """Write the roles, `state` (plain values, the same on every rank), and the `rollouts` of rank 0 (tensors and plain
    values). Collective; returns the directory.

    Raises NotFinite for a NaN or infinite weight or moment, and DiskFull if the checkpoint does not fit, both on every rank;
    an error leaves no partial checkpoint.
    """
    target = Path(directory) / f"step-{step:06d}"
    partial = target.with_name(target.name + ".partial")
    try:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            for name in roles:
                (partial / name).mkdir(parents=True)
            torch.save(dict(state), partial / _STATE)
            torch.save(rollouts, partial / _ROLLOUTS)
        dist.barrier()
        for name, role in roles.items():
            with _whole(role):
                _refuse_non_finite(role, step)
                content = _sharded(role, is_loading=False)
                num_bytes = sum(
                    part.data.nbytes
                    for part in nested_values(content)
                    if isinstance(part, _WITH_DATA) and not np.any(part.replica_id)
                )
                sizes, free = zip(*gather_to_all((num_bytes, free_bytes(partial))), strict=True)
                if sum(sizes) > min(free):
                    raise no_room(partial.parent, f"checkpoint of step {step}: the {name}", sum(sizes))
                dist_checkpointing.save(content, str(partial / name))
        dist.barrier()
    except BaseException as error:  # whatever ended the save, an interrupt included: leave no partial checkpoint behind
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if is_full(error) and not isinstance(error, DiskFull):
            before = size_bytes(latest_checkpoint(Path(directory)))
            raise no_room(Path(directory), f"the checkpoint of step {step}", before) from error
        raise
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    dist.barrier()
    return target


def load_checkpoint(checkpoint: str | Path, roles: Mapping[str, Role]) -> dict[str, Any]:
    """Load every role's weights, and if it is trained its optimizer and learning-rate schedule; returns the saved `state`.
    Collective. Raises ValueError if the checkpoint lacks a role."""
    for name, role in roles.items():
        if not (Path(checkpoint) / name).is_dir():
            way = "remove reference.refresh_every, or start another run" if name == "reference" else "start another run"
            raise ValueError(f"{checkpoint} holds no {name}: it was written by a run whose {name} did not move; {way}")
        with _whole(role):
            with role.place.active():
                for optimizer in _optimizers(role):
                    # Without Transformer Engine or Apex the states do not exist before the first step, and the load skips
                    # what does not exist (megatron-core 0.16 and 0.19).
                    optimizer._init_optimizer_states_with_dummy_values()
            loaded = dist_checkpointing.load(_sharded(role, is_loading=True), str(Path(checkpoint) / name))
            with role.place.active():
                _restore(role, loaded)
    return dict(torch.load(Path(checkpoint) / _STATE, weights_only=True))


def load_rollouts(checkpoint: str | Path) -> Any:
    """Return the `rollouts` of a checkpoint; only rank 0 has a use for them."""
    return torch.load(Path(checkpoint) / _ROLLOUTS, weights_only=True)


@contextmanager
def _whole(role: Role) -> Iterator[None]:
    """Bring the role and its optimizer to the device, its weights gathered."""
    with role.present(training=True):
        role.gather_weights()
        yield


def _refuse_non_finite(role: Role, step: int) -> None:
    """Raise NotFinite, on every rank, for a NaN or infinite weight or moment: no run can continue from it."""
    moments = (
        (f"{name} of state {number} of optimizer {part}", value)
        for part, optimizer in enumerate(_optimizers(role))
        for number, state in enumerate(optimizer.optimizer.state.values())
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    )
    broken = role.broken_weights() or name_ranks(non_finite_tensors(moments))
    if broken is not None:
        raise NotFinite(
            f"checkpoint of step {step}: the {role.role}'s weights or moments are not finite ({broken}); "
            "it was not written, and the one before stands"
        )


def _restore(role: Role, loaded: dict[str, Any]) -> None:
    if role.adapters:
        fill_adapters(role.adapters, loaded["model"])
    else:
        for number, chunk in enumerate(role.models):
            chunk.load_state_dict(loaded["model"][str(number)])
    if role.optimizer is None:
        return
    # Rank 0 has dense weights under every layout, so that the checkpoint always has this part.
    dense = loaded["optimizer"][_DENSE]
    step = {key: value for key, value in dense["optimizer"]["param_groups"][0].items() if key == "step"}
    with _step_everywhere(role):
        for optimizer in _optimizers(role):
            stored = loaded["optimizer"][_part(optimizer)]
            part = {key: value for key, value in dense.items() if key != "param_state"} | stored
            # Of the saved groups only the step count is used: this run's recipe sets all else, and another layout has
            # other groups.
            part["optimizer"] = optimizer.state_dict()["optimizer"]
            for group in part["optimizer"]["param_groups"]:
                group.update(step)
            optimizer._set_main_param_and_optimizer_states = partial(_set_states, optimizer)
            optimizer.load_state_dict(part)
    # A new schedule stands at its first point; megatron-core adds the loaded count to that.
    role.scheduler.num_steps = 0
    role.scheduler.load_state_dict(loaded["scheduler"])
    for optimizer in _optimizers(role):
        # megatron-core gives every parameter the same `step` tensor, which Adam then increments once per parameter, so that
        # the second update after a resume would be wrong.
        for entry in optimizer.optimizer.state.values():
            if isinstance(entry.get("step"), torch.Tensor):
                entry["step"] = entry["step"].clone()


class StoredRole:
    """The weights of one role in a checkpoint, read parameter by parameter.

    megatron-core itself loads a tensor only with all experts that share its key (0.16 and 0.19). So torch's reader reads
    what megatron-core describes.
    """

    def __init__(self, checkpoint: str | Path, role: str, chunks: Sequence[DecoderModel]) -> None:
        """`chunks` belong to one rank that holds the whole role, and may be on "meta"; call this inside their place."""
        (states,) = _chunk_states(chunks, role).values()
        self._parts = {local_name(name): part for name, part in states.items()}
        self._reader = FileSystemReader(Path(checkpoint) / role)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read(self, parameter: str) -> torch.Tensor:
        """Read a parameter by its local name, with its padding. Raises ValueError if the checkpoint lacks a part of it."""
        part = self._parts[parameter]
        content = torch.zeros(part.data.shape, dtype=part.data.dtype)
        # A factory divides the parameter into views that are stored separately (gate and up).
        filled = replace(part, data=content)
        for stored in nested_values(filled.build()) if isinstance(filled, ShardedTensorFactory) else [filled]:
            self._fill(parameter, stored)
        return content

    def _fill(self, parameter: str, stored: ShardedTensor) -> None:
        sizes = torch.Size((1,) * stored.prepend_axis_num + tuple(stored.local_shape))
        chunk = ChunkStorageMetadata(torch.Size(stored.global_offset), sizes)
        known = self._metadata.state_dict_metadata.get(stored.key)
        items: list[ReadItem] = []
        if isinstance(known, TensorStorageMetadata):
            items = create_read_items_for_chunk_list(stored.key, known, [chunk])
        # The vocabulary may have other padding.
        if sum(item.lengths.numel() for item in items) < sizes.numel() and not stored.allow_shape_mismatch:
            raise ValueError(f"{self._reader.path}: the checkpoint has no {stored.key!r} for {parameter}")
        self._reader.read_data(LoadPlan(items), _Into(stored.data.view(sizes))).wait()


class _Into(DefaultLoadPlanner):
    """Reads everything into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        part = self._target
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dimension, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The tensor is a view of the target."""


def load_adapters(checkpoint: str | Path, role: str, adapters: Mapping[str, Adapter]) -> None:
    """Load a role's adapters only; call this inside the place that they were built in."""
    wanted = {"model": adapter_states(adapters, role)}
    fill_adapters(adapters, dist_checkpointing.load(wanted, str(Path(checkpoint) / role))["model"])


def _chunk_states(chunks: Sequence[DecoderModel], role: str) -> dict[str, dict[str, Any]]:
    """Return the shards of each model chunk by its number and local names. A tensor's key in the checkpoint has its role
    and its layer in the whole model, not its chunk, so that another layout can load it."""
    # Each layer has its own keys: in one tensor of all layers, the optimizer states of frozen layers would be missing.
    options: dict[str, Any] = {"prefix": f"{role}.", "metadata": {"non_homogeneous_layers": True}}
    return {
        str(number): {name.removeprefix(f"{role}."): part for name, part in chunk.sharded_state_dict(**options).items()}
        for number, chunk in enumerate(chunks)
    }


def _sharded(role: Role, is_loading: bool) -> dict[str, Any]:
    """Describe this rank's shards of weights and optimizer for megatron-core."""
    with role.place.active():
        adapters = role.adapters
        model = adapter_states(adapters, role.role) if adapters else _chunk_states(role.models, role.role)
        if role.optimizer is None:
            return {"model": model}
        for part in _optimizers(role):
            if not part.optimizer.state:  # no update was taken yet, or all have overflowed
                part.init_state_fn(part.optimizer, part.config)
                if isinstance(part.optimizer, torch.optim.Adam):  # other optimizers count steps by parameter group
                    fused = part.optimizer.param_groups[0].get("fused")  # a fused Adam counts on the device
                    for entry in part.optimizer.state.values():
                        entry["step"] = torch.tensor(0.0, device=entry["exp_avg"].device if fused else "cpu")
            part.get_parameter_state_dp_zero = partial(_states_of_owned, part)
        # Each part by itself: megatron-core's chain numbers its parts, and their number depends on the layout.
        with _step_everywhere(role):
            optimizer = {
                _part(part): part.sharded_state_dict(_owned(part, model), is_loading=is_loading, metadata=_SHARDING)
                for part in _optimizers(role)
            }
        for part in _optimizers(role) if is_loading else ():
            states = optimizer[_part(part)]["param_state"]
            ranges = (bucket["param_map"] for types in part.gbuf_ranges for buckets in types.values() for bucket in buckets)
            updated = {parameter for parameters in ranges for parameter in parameters}  # by this rank
            for number, parameter in enumerate(_owners(part)):
                if parameter not in updated:
                    states[number] = {}
    for part in nested_values(optimizer):
        if isinstance(part, ShardedBase) and not part.key.startswith(f"{role.role}/"):
            part.key = f"{role.role}/{part.key}"
    return {"model": model, "optimizer": optimizer, "scheduler": role.scheduler.state_dict()}


@contextmanager
def _step_everywhere(role: Role) -> Iterator[None]:
    """Give a rank without trainable weights Adam's step count: megatron-core (0.16 and 0.19) reads it from the states of
    each rank. Collective."""
    states = [optimizer.optimizer.state for optimizer in _optimizers(role)]
    steps = [float(entry["step"]) for state in states for entry in state.values() if "step" in entry]
    step = torch.tensor(max(steps, default=0.0), device=role.place.device)
    dist.all_reduce(step, op=dist.ReduceOp.MAX)
    for state in states:
        if not state:
            state[_BORROWED] = {"step": step}
    try:
        yield
    finally:
        for optimizer in _optimizers(role):
            optimizer.optimizer.state.pop(_BORROWED, None)


def _owners(optimizer: Any) -> dict[torch.nn.Parameter, int]:
    """Return the data-parallel rank that writes each parameter's states, in the order of `param_state`: the rank that
    updates the parameter's middle, so that all write about as much."""
    owners = {}
    for buffer in optimizer.buffers:
        for parameter, (start, stop, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // optimizer.data_parallel_group.size()
            owners[parameter] = ((start + stop - 1) // 2 - bucket.offset) // share
    return owners


def _owned(optimizer: Any, model: Any) -> dict[int, Any]:
    """Return the shards by which megatron-core describes optimizer states, marked so that each is written by its owner."""
    owners, group = _owners(optimizer), optimizer.data_parallel_group
    size, rank = group.size(), group.rank()
    shards = [part for part in nested_values(model) if isinstance(part, _WITH_DATA)]
    return {
        number: replace(part, replica_id=(*part.replica_id[:-1], (rank - owners[part.data]) % size))
        for number, part in enumerate(shards)
        if part.data in owners
    }


@torch.no_grad()
def _states_of_owned(optimizer: Any, *arguments: Any, empty_data: bool = False, **settings: Any) -> dict[Any, Any]:
    """Replaces the method `get_parameter_state_dp_zero`, which gathers the states of all parameters on the host of every
    data-parallel rank (megatron-core 0.16 and 0.19). Here a parameter's states go only to the rank that writes them; the
    rest of the returned tensors is never touched, so that the system does not back it with memory. Collective.

    The caller finds states by the parameter's place in the gradient buffer. megatron-core's method leaves out the padding
    after each bucket (its issue 504), so that states of all buckets but the first are silently wrong; here it is kept.
    """
    gathered: dict[Any, Any] = {"buckets_coalesced": True}
    length = _PIECE_BYTES // (4 * len(_STATES))
    owners, group = _owners(optimizer), optimizer.data_parallel_group
    for number, (buffer, by_type) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
        ((dtype, buckets),) = by_type.items()
        tensors = {name: torch.from_numpy(np.zeros(buffer.numel, np.float32)) for name in _STATES}
        ranges = {parameter: part["param"] for bucket in buckets for parameter, part in bucket["param_map"].items()}
        for parameter, (start, stop, _) in buffer.param_index_map.items() if not empty_data else ():
            shards, part = [], ranges.get(parameter)
            if part is not None:
                states = optimizer._get_main_param_and_optimizer_states(parameter)
                shards = [states[name].flatten() for name in _STATES]
            targets = [tensors[name][start:stop] for name in _STATES] if owners[parameter] == group.rank() else []
            for begin in range(0, stop - start, length):
                end = min(begin + length, stop - start)
                piece = torch.zeros(len(_STATES), end - begin, device=parameter.device)
                if part is not None and (low := max(begin, part.start)) < (high := min(end, part.end)):
                    for row, shard in zip(piece, shards, strict=True):
                        row[low - begin : high - begin] = shard[low - part.start : high - part.start]
                # As integers, so that adding zeros changes no bit.
                dist.reduce(piece.view(torch.int32), dist.get_global_rank(group, owners[parameter]), group=group)
                for target, row in zip(targets, piece, strict=False):
                    target[begin:end] = row
        gathered[number] = {dtype: {**tensors, "numel_unpadded": buffer.numel_unpadded}}
    return gathered


def _set_states(optimizer: Any, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces `_set_main_param_and_optimizer_states`, which asks for torch Adam's `step`; the loader has removed it and
    already set it from the parameter groups (megatron-core 0.16 and 0.19)."""
    present = optimizer._get_main_param_and_optimizer_states(parameter)
    if "step" in present:
        tensors = {**tensors, "step": present["step"]}
    type(optimizer)._set_main_param_and_optimizer_states(optimizer, parameter, tensors)


def _part(optimizer: Any) -> str:
    """Return the name of an optimizer part: expert weights, which are sharded over other ranks, have their own."""
    return _EXPERTS if any(group["is_expert_parallel"] for group in optimizer.param_groups) else _DENSE


def _optimizers(role: Role) -> list[Any]:
    """Return the parts of the optimizer that update weights of this rank. megatron-core (0.16 and 0.19) can neither save
    nor load a part without weights, such as that of the experts on a stage without experts."""
    if role.optimizer is None:
        return []
    parts = list(getattr(role.optimizer, "chained_optimizers", [role.optimizer]))
    return [part for part in parts if any(group["params"] for group in part.param_groups)] or parts[:1]
