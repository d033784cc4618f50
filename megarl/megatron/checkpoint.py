"""Save and load roles with megatron-core's distributed checkpoints: any layout can load what another layout saved.

A checkpoint is written under another name and renamed when it is complete, so that a crash while saving loses no earlier
checkpoint. Each role has its own directory in it, so that offloaded roles come to the device one after the other. For a role
with adapters only the adapters are saved: the other weights are those of its model directory.
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
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, ReadItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megarl.megatron.lora import Adapter, adapter_states, fill_adapters
from megarl.megatron.model import DecoderModel, local_name
from megarl.megatron.non_finite import NotFinite, name_ranks, non_finite_tensors
from megarl.megatron.parallel import gather_to_all
from megarl.megatron.role import Role
from megarl.telemetry.disk import free_bytes, no_room

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory  # isort: skip

_DENSE, _EXPERTS = "dense", "experts"
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}

_STATES = ("param", "exp_avg", "exp_avg_sq")  # of a parameter: the names that megatron-core gives its fp32 copy and moments

_PIECE_BYTES = 64 * 2**20  # of states that go to another rank at once, so that saving needs this much of a device, no more

_STATE = "state.pt"  # in a checkpoint, beside its roles
_BORROWED = "borrowed"  # no parameter: a key that torch's optimizers leave alone


def save_checkpoint(directory: str | Path, step: int, roles: Mapping[str, Role], state: Mapping[str, Any]) -> Path:
    """Write the roles and `state` (plain values, the same on every rank). Collective; returns the directory.

    The roles may have different layouts: each role's place decides which rank writes what, and the write itself needs no
    layout. Raises NotFinite where a weight or a moment is NaN or infinite, and DiskFull, on every rank, where the disk is
    too full; an error leaves no partial checkpoint.
    """
    target = Path(directory) / f"step-{step:06d}"
    partial = target.with_name(target.name + ".partial")
    try:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            for name in roles:
                (partial / name).mkdir(parents=True)
            torch.save(dict(state), partial / _STATE)
        dist.barrier()
        for name, role in roles.items():
            with _whole(role):
                _refuse_broken(role, step)
                content = _sharded(role, is_loading=False)
                _need_room(partial, f"checkpoint of step {step}: the {name}", content)
                dist_checkpointing.save(content, str(partial / name))
        dist.barrier()
    except BaseException:  # a partial checkpoint only takes room
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    dist.barrier()
    return target


def load_checkpoint(checkpoint: str | Path, roles: Mapping[str, Role]) -> dict[str, Any]:
    """Fill every role's weights, and where it is trained its optimizer and learning-rate schedule; returns the saved
    `state`. Collective. Raises ValueError where the checkpoint lacks a role."""
    for name, role in roles.items():
        if not (Path(checkpoint) / name).is_dir():
            way = "remove reference.refresh_every, or start another run" if name == "reference" else "start another run"
            raise ValueError(f"{checkpoint} holds no {name}: it was written by a run whose {name} did not move; {way}")
        with _whole(role):
            _load(Path(checkpoint) / name, role)
    return dict(torch.load(Path(checkpoint) / _STATE, weights_only=True))


@contextmanager
def _whole(role: Role) -> Iterator[None]:
    """Bring the role and its optimizer to the device, its weights gathered."""
    with role.present(training=True):
        role.gather_weights()
        yield


def _refuse_broken(role: Role, step: int) -> None:
    """Raise NotFinite, on every rank, where a weight or a moment is NaN or infinite: no run can continue from it."""
    broken = role.broken_weights() or name_ranks(non_finite_tensors(_moments(role)))
    if broken is not None:
        raise NotFinite(
            f"checkpoint of step {step}: the {role.role}'s weights or moments are not finite ({broken}); "
            "it was not written, and the one before stands"
        )


def _need_room(directory: Path, what: str, content: dict[str, Any]) -> None:
    """Raise DiskFull on every rank where the parts that all ranks are about to write do not fit. Collective."""
    own_bytes = sum(
        part.data.nbytes
        for part in nested_values(content)
        if isinstance(part, ShardedTensor | ShardedTensorFactory) and not np.any(part.replica_id)
    )
    sizes, free = zip(*gather_to_all((own_bytes, free_bytes(directory))), strict=True)
    if sum(sizes) > min(free):
        raise no_room(directory.parent, what, sum(sizes))


def _moments(role: Role) -> Iterator[tuple[str, torch.Tensor]]:
    for number, optimizer in enumerate(_optimizers(role)):
        for place, state in enumerate(optimizer.optimizer.state.values()):
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"{name} of state {place} of optimizer {number}", value


def _load(directory: Path, role: Role) -> None:
    with role.place.active():
        for optimizer in _optimizers(role):
            # Without Transformer Engine or Apex the states do not exist before the first step, and the load skips what does
            # not exist (megatron-core 0.16 and 0.19).
            optimizer._init_optimizer_states_with_dummy_values()
    loaded = dist_checkpointing.load(_sharded(role, is_loading=True), str(directory))
    with role.place.active():
        _restore(role, loaded)


def _restore(role: Role, loaded: dict[str, Any]) -> None:
    if role.adapters:
        fill_adapters(role.adapters, loaded["model"])
    else:
        _fill(role.models, loaded["model"])
    if role.optimizer is None:
        return
    # Every layout has dense weights on every rank, so that rank 0 has written this.
    dense = loaded["optimizer"][_DENSE]
    step = {key: value for key, value in dense["optimizer"]["param_groups"][0].items() if key == "step"}
    with _step_everywhere(role):
        for optimizer in _optimizers(role):
            own = loaded["optimizer"][_part(optimizer)]
            part = {key: value for key, value in dense.items() if key != "param_state"} | own
            # Only the step count is taken of the saved groups. All else of them is what this run's recipe says, which holds
            # after a resume too; and the groups of another layout may be others.
            part["optimizer"] = optimizer.state_dict()["optimizer"]
            for group in part["optimizer"]["param_groups"]:
                group.update(step)
            optimizer._set_main_param_and_optimizer_states = partial(_set_states, optimizer)
            optimizer.load_state_dict(part)
    # megarl advances a new schedule to its first point; megatron-core adds the loaded count to what it finds.
    role.scheduler.num_steps = 0
    role.scheduler.load_state_dict(loaded["scheduler"])
    for optimizer in _optimizers(role):
        # megatron-core gives every parameter the same `step` tensor, which Adam then raises once a parameter: the
        # first update after a resume is right and the second is not.
        for entry in optimizer.optimizer.state.values():
            if isinstance(entry.get("step"), torch.Tensor):
                entry["step"] = entry["step"].clone()


class StoredRole:
    """The weights of one role in a checkpoint, to be read parameter by parameter.

    megatron-core itself loads a whole model only: torch's sharded tensors, which it reads through, must have all their parts
    on the ranks that load (0.16 and 0.19). So its description of each parameter is read through torch's reader.
    """

    def __init__(self, checkpoint: str | Path, role: str, chunks: Sequence[DecoderModel]) -> None:
        """`chunks` are of one rank that holds the whole role, and may be without content; call it inside their place."""
        (states,) = _chunk_states(chunks, role).values()
        self._parts = {local_name(name): part for name, part in states.items()}
        self._reader = FileSystemReader(Path(checkpoint) / role)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def dtype(self, parameter: str) -> torch.dtype:
        dtype: torch.dtype = self._parts[parameter].data.dtype
        return dtype

    def read(self, parameter: str) -> torch.Tensor:
        """One parameter by its local name, with its padding. Raises ValueError where the checkpoint lacks a part of it."""
        part = self._parts[parameter]
        content = torch.zeros(part.data.shape, dtype=part.data.dtype)
        # A factory cuts the parameter into parts that are stored apart (gate and up); they are views of the whole.
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
        # A vocabulary may be padded otherwise.
        if sum(item.lengths.numel() for item in items) < sizes.numel() and not stored.allow_shape_mismatch:
            raise ValueError(f"{self._reader.path}: the checkpoint has no {stored.key!r} for {parameter}")
        self._reader.read_data(LoadPlan(items), _Into(stored.data.view(sizes))).wait()


class _Into(DefaultLoadPlanner):
    """Everything that is read goes into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return narrow_tensor_by_index(self._target, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is a view: nothing is left to do."""


def load_adapters(checkpoint: str | Path, role: str, adapters: Mapping[str, Adapter]) -> None:
    """Fill a role's adapters alone; to be called inside the place that they were built in."""
    wanted = {"model": adapter_states(adapters, role)}
    fill_adapters(adapters, dist_checkpointing.load(wanted, str(Path(checkpoint) / role))["model"])


def _chunk_states(chunks: Sequence[DecoderModel], role: str) -> dict[str, dict[str, Any]]:
    """What each model chunk holds, by its number and its own names. A tensor's key in the checkpoint says its role and its
    layer in the whole model, not its chunk: under another layout another chunk takes it."""
    prefix = f"{role}."
    return {
        str(number): {name.removeprefix(prefix): part for name, part in _chunk_state(chunk, prefix).items()}
        for number, chunk in enumerate(chunks)
    }


def _chunk_state(chunk: DecoderModel, prefix: str) -> dict[str, Any]:
    # Each layer by its own keys: over all layers in one tensor, the optimizer states of frozen ones would be holes.
    return dict(chunk.sharded_state_dict(prefix=prefix, metadata={"non_homogeneous_layers": True}))


def _fill(chunks: Sequence[DecoderModel], states: Mapping[str, dict[str, Any]]) -> None:
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(states[str(number)])


def _sharded(role: Role, is_loading: bool) -> dict[str, Any]:
    with role.place.active():
        adapters = role.adapters
        model = adapter_states(adapters, role.role) if adapters else _chunk_states(role.models, role.role)
        if role.optimizer is None:
            return {"model": model}
        for one in _optimizers(role):
            _make_states(one)
            one.get_parameter_state_dp_zero = partial(_states_of_owned, one)
        # Part by part, and not the chain of both: it numbers its parts, and a layout that does not cut experts has one.
        with _step_everywhere(role):
            optimizer = {
                _part(part): part.sharded_state_dict(_owned(part, model), is_loading=is_loading, metadata=_SHARDING)
                for part in _optimizers(role)
            }
        for part in _optimizers(role) if is_loading else ():
            states = optimizer[_part(part)]["param_state"]
            for number, has_part in enumerate(_has_part(part)):
                if not has_part:
                    states[number] = {}
    for part in _tensors(optimizer):
        if not part.key.startswith(f"{role.role}/"):
            part.key = f"{role.role}/{part.key}"
    return {"model": model, "optimizer": optimizer, "scheduler": role.scheduler.state_dict()}


def _make_states(optimizer: Any) -> None:
    """Adam's states where no update was taken yet (under fp16 all may have overflowed so far)."""
    if optimizer.optimizer.state:
        return
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    if isinstance(optimizer.optimizer, torch.optim.Adam):  # others count steps by parameter group
        for entry in optimizer.optimizer.state.values():
            # A fused Adam counts where the weights are, any other one on the host.
            fused = optimizer.optimizer.param_groups[0].get("fused")
            entry["step"] = torch.tensor(0.0, device=entry["exp_avg"].device if fused else "cpu")


@contextmanager
def _step_everywhere(role: Role) -> Iterator[None]:
    """Rank 0 writes Adam's step count for all, and megatron-core (0.16 and 0.19) reads it off a rank's own states; a rank
    whose weights are all frozen has none, so it borrows the count of the others inside. Collective."""
    states = [optimizer.optimizer.state for optimizer in _optimizers(role)]
    own = [float(entry["step"]) for state in states for entry in state.values() if "step" in entry]
    step = torch.tensor(max(own, default=0.0), device=role.place.device)
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
    """The data-parallel rank that writes a parameter's states: the one that updates its middle, so that all write about as
    much. In the order of `param_state`."""
    owners = {}
    for buffer in optimizer.buffers:
        for parameter, (start, stop, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // optimizer.data_parallel_group.size()
            owners[parameter] = ((start + stop - 1) // 2 - bucket.offset) // share
    return owners


def _has_part(optimizer: Any) -> list[bool]:
    """Of each entry of `param_state`, whether this rank updates a part of the parameter. Owners do."""
    own = {
        parameter
        for by_type in optimizer.gbuf_ranges
        for buckets in by_type.values()
        for bucket in buckets
        for parameter in bucket["param_map"]
    }
    return [parameter in own for parameter in _owners(optimizer)]


def _owned(optimizer: Any, model: Any) -> dict[int, Any]:
    """What megatron-core describes the states by: the model's shards, each of which its owner writes."""
    owners, group = _owners(optimizer), optimizer.data_parallel_group
    size, rank = group.size(), group.rank()
    shards = [part for part in nested_values(model) if isinstance(part, ShardedTensor | ShardedTensorFactory)]
    return {
        number: replace(part, replica_id=(*part.replica_id[:-1], (rank - owners[part.data]) % size))
        for number, part in enumerate(shards)
        if part.data in owners
    }


@torch.no_grad()
def _states_of_owned(optimizer: Any, *arguments: Any, empty_data: bool = False, **settings: Any) -> dict[Any, Any]:
    """megarl's stand-in for the method `get_parameter_state_dp_zero`, which gathers the states of all parameters on every
    data-parallel rank's host (megatron-core 0.16 and 0.19). Here a parameter's states go to the rank that writes them; the
    rest of the returned tensors is memory that is never touched, which the system does not back. Collective.

    The caller looks states up by the parameter's place in the gradient buffer. megatron-core lays buckets end to end without
    the padding behind each (its issue 504), so that all but the first are off the mark, silently; here padding is kept.
    """
    found: dict[Any, Any] = {"buckets_coalesced": True}
    length = _PIECE_BYTES // (4 * len(_STATES))
    owners, group = _owners(optimizer), optimizer.data_parallel_group
    for number, (buffer, by_type) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
        ((dtype, buckets),) = by_type.items()
        tensors = {name: torch.from_numpy(np.zeros(buffer.numel, np.float32)) for name in _STATES}
        own = {parameter: part["param"] for bucket in buckets for parameter, part in bucket["param_map"].items()}
        for parameter, (start, stop, _) in buffer.param_index_map.items() if not empty_data else ():
            shards, part = [], own.get(parameter)
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
                # As bits, so that a sum with zeros changes none.
                dist.reduce(piece.view(torch.int32), dist.get_global_rank(group, owners[parameter]), group=group)
                for target, row in zip(targets, piece, strict=False):
                    target[begin:end] = row
        found[number] = {dtype: {**tensors, "numel_unpadded": buffer.numel_unpadded}}
    return found


def _set_states(optimizer: Any, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    """megarl's stand-in for the method of that name: it asks for torch Adam's `step`, which the loader took out and has
    already set from the parameter groups (megatron-core 0.16 and 0.19)."""
    present = optimizer._get_main_param_and_optimizer_states(parameter)
    if "step" in present:
        tensors = {**tensors, "step": present["step"]}
    type(optimizer)._set_main_param_and_optimizer_states(optimizer, parameter, tensors)


def _tensors(tree: Any) -> list[Any]:
    return [value for value in nested_values(tree) if isinstance(value, ShardedBase)]


def _part(optimizer: Any) -> str:
    """Weights that are cut and replicated over other ranks have an optimizer of their own."""
    return _EXPERTS if any(group["is_expert_parallel"] for group in optimizer.param_groups) else _DENSE


def _optimizers(role: Role) -> list[Any]:
    """The parts of the optimizer that move weights of this rank. On a stage without experts theirs has nothing to move, and
    megatron-core can neither save nor load such a part (0.16 and 0.19). None where nothing is trained."""
    if role.optimizer is None:
        return []
    parts = list(getattr(role.optimizer, "chained_optimizers", [role.optimizer]))
    return [one for one in parts if any(group["params"] for group in one.param_groups)] or parts[:1]
