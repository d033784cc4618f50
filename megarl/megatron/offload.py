"""Offload to the host: a role's optimizer, gradient buffers and weights between its phases, and the activations of a forward
pass until its backward pass.

Storages are emptied and filled again, not replaced, so that megatron-core's many views of its buffers stay valid. Its own
`offload_to_cpu` (0.16 and 0.19) replaces the optimizer's tensors, and keeps weights outside of its buffers on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megarl.planner.activations import PREFETCH_BYTES
from megarl.platform import current as platform
from megarl.telemetry.clock import span

Storage = torch.UntypedStorage

# Smaller saved tensors stay on the device: bounds, statistics of norms, rotary tables of short sequences.
LEAST_ACTIVATION_BYTES = 1 << 14


class HostStorages:
    """Storages that are offloaded and restored together. With `keep` their content is copied to the host and back; otherwise
    they are restored as zeros. `constant`: nothing writes to them, so that they are copied to the host once."""

    def __init__(self, keep: bool, constant: bool = False) -> None:
        self.keep, self.constant, self.is_away = keep, constant, False
        self._away: list[tuple[Storage, int]] = []
        # Copies stay allocated: allocating pinned memory is slow.
        self._copies: list[Tensor] = []  # in the order of the storages, which come in the same order each time

    def offload(self, storages: Iterable[Storage]) -> None:
        """Free the storages' device memory."""
        assert not self.is_away, "already offloaded"
        self.is_away = True
        for number, storage in enumerate(storages):
            # torch (2.13) crashes when it resizes shared memory.
            assert storage.device.type != "cpu" or not storage.is_shared(), "shared memory cannot be offloaded"
            size = storage.nbytes()
            is_copied = number < len(self._copies) and self._copies[number].numel() == size
            if self.keep and not (is_copied and self.constant):
                if not is_copied:
                    self._copies[number : number + 1] = [platform.host_bytes(size)]
                self._copies[number].copy_(_bytes_of(storage), non_blocking=True)
            self._away.append((storage, size))
        platform.synchronize()  # the copies must end before the memory is freed
        for storage, _ in self._away:
            storage.resize_(0)

    def restore(self) -> None:
        """Fill the storages again, if they are offloaded."""
        for number, (storage, size) in enumerate(self._away):
            storage.resize_(size)
            if self.keep:
                _bytes_of(storage).copy_(self._copies[number], non_blocking=True)
            else:
                _bytes_of(storage).zero_()
        self._away, self.is_away = [], False


def _bytes_of(storage: Storage) -> Tensor:
    """Return the storage as a tensor of bytes that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages_of(tensors: Iterable[Tensor], but: Iterable[Tensor] = ()) -> list[Storage]:
    """Return the storages of tensors, each once, without the storages of `but`."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in but}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for address, storage in storages.items() if address not in left_out and storage.nbytes()]


class RoleOffload:
    """Offloads a role's weights, gradient buffers and optimizer between its phases.

    `setting` is "none", "optimizer" (with the gradient buffers) or "all" (the weights too). A role is built on the device,
    so call `offload` once after that. `constant`: nothing writes to the weights.
    """

    def __init__(self, setting: str, models: list[Any], chunks: list[Any], optimizer: Any, constant: bool) -> None:
        self.moves_weights = setting == "all"
        self._moves_training = setting != "none" and optimizer is not None
        self._models, self._chunks, self._optimizer = models, chunks, optimizer
        self._weights = HostStorages(keep=True, constant=constant)
        self._states, self._gradients = HostStorages(keep=True), HostStorages(keep=False)
        self._is_inside = False

    def is_present(self, training: bool = False) -> bool:
        return not self._weights.is_away and not (training and self._states.is_away)

    def offload(self) -> None:
        """Offload everything that `setting` names and that is on the device. The memory goes back to the driver: in the
        allocator, smaller tensors would fragment it."""
        moves_training = self._moves_training and not self._states.is_away
        moves_weights = self.moves_weights and not self._weights.is_away
        # fp32 main parameters share the weights' memory.
        weights = [parameter.data for model in self._models for parameter in model.parameters()]
        if moves_training:
            self._states.offload(storages_of(_optimizer_tensors(self._optimizer), but=weights))
            buffers = (buffer for chunk in self._chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
            self._gradients.offload(storages_of(buffer.grad_data for buffer in buffers))
        if moves_weights:
            self._weights.offload(storages_of(weights))
        if moves_training or moves_weights:
            platform.empty_cache()

    @contextmanager
    def present(self, training: bool = False) -> Iterator[None]:
        """Restore the weights inside the context, and with `training` also the optimizer and gradient buffers."""
        assert not self._is_inside, "a role runs one phase at a time"
        self._is_inside = True
        with span("offload"):
            for storages in (self._weights, self._states, self._gradients) if training else (self._weights,):
                storages.restore()
        try:
            yield
        finally:
            self._is_inside = False
            with span("offload"):
                self.offload()


def _optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """Return fp32 main parameters and moments; the moments exist from the first update on."""
    tensors: list[Tensor] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:  # a rank without a trainable weight
            continue
        tensors += [parameter.data for group in part.optimizer.param_groups for parameter in group["params"]]
        for state in part.optimizer.state.values():
            # The step count stays: some Adams keep it on the host.
            tensors += [value for name, value in state.items() if isinstance(value, Tensor) and name != "step"]
    return tensors


class _HostCopy:
    """A saved tensor on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.nbytes = tensor.device, tensor.nbytes
        self.copy, self.event = platform.to_host(tensor)


class _Saved:
    """A tensor that an operation saved: its copy on the host, and its number in the order of the forward pass."""

    def __init__(self, copy: _HostCopy, order: list[ref[_Saved]]) -> None:
        self.copy, self.order, self.number = copy, order, len(order)
        self._arriving: tuple[Tensor, Any] | None = None
        order.append(ref(self))

    def prefetch(self) -> None:
        """Start to copy the tensor back."""
        if self._arriving is None:
            self._arriving = platform.to_device(self.copy.copy, self.copy.device, self.copy.event)

    def take(self) -> Tensor:
        """Return the tensor on the device, for the computation that is queued next."""
        self.prefetch()
        assert self._arriving is not None
        (tensor, event), self._arriving = self._arriving, None
        if event is not None:
            event.wait()
        return tensor

    def __del__(self) -> None:
        if self._arriving is not None:  # unused: its memory must not be reused before the copy ends
            self.take()


class ActivationOffload:
    """Moves the saved tensors of a forward pass to the host, and back before the backward pass needs them.

    Weights, views of them, and storages below LEAST_ACTIVATION_BYTES stay. A tensor that two operations save is copied once.
    Copies are contiguous even if views were not, so that a kernel may round the last digit differently.

    A backward pass needs tensors in about the reverse order. With each tensor that it takes, the tensors before it start to
    come back, as many as fit `ahead_bytes` and at least one; with 0 none does.
    """

    def __init__(self, models: list[Any], ahead_bytes: int | None = None) -> None:
        self._models = models
        self._ahead_bytes = ahead_bytes if ahead_bytes is not None else PREFETCH_BYTES if platform.prefetches else 0
        self._copies: WeakValueDictionary[Any, _HostCopy] = WeakValueDictionary()
        self.moved_bytes = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Send the saved tensors of the forward pass inside to the host."""
        kept = {
            parameter.untyped_storage().data_ptr()
            for model in self._models
            for parameter in (*model.parameters(), *model.buffers())
        }
        order: list[ref[_Saved]] = []

        def pack(tensor: Tensor) -> Tensor | _Saved:
            storage = tensor.untyped_storage()
            # By the storage's size: a small view would keep all of it.
            small = storage.nbytes() < LEAST_ACTIVATION_BYTES
            if small or storage.data_ptr() in kept or tensor.device.type != platform.kind:
                return tensor
            # While the weak reference lives no other storage gets the same address. A tensor that was written to has
            # another version.
            view = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
            key = (StorageWeakRef(storage), *view, tensor._version)
            copy = self._copies.get(key)
            if copy is None:
                copy = self._copies[key] = _HostCopy(tensor)
                self.moved_bytes += tensor.nbytes
            return _Saved(copy, order)

        def unpack(saved: Tensor | _Saved) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            tensor = saved.take()
            self._prefetch_before(saved)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _prefetch_before(self, saved: _Saved) -> None:
        """Start to copy back the tensors that were saved just before, up to `ahead_bytes`."""
        coming_bytes = 0
        for reference in reversed(saved.order[: saved.number]) if self._ahead_bytes else ():
            earlier = reference()
            if earlier is None:  # its operation has run backward
                continue
            coming_bytes += earlier.copy.nbytes
            if coming_bytes > self._ahead_bytes and coming_bytes > earlier.copy.nbytes:
                return
            earlier.prefetch()
