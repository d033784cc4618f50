"""Offload to the host: a role's optimizer, gradient buffers and weights between its phases, and the activations of a forward
pass until its backward pass.

Storages are emptied and filled again, not replaced: megatron-core keeps views of its buffers in many places, and all of them
stay valid. Its own `offload_to_cpu` (0.16 and 0.19) does the same for its buffers but replaces the optimizer's tensors, and
neither frees a weight outside of its buffers, such as a frozen one.
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

# Saved tensors of smaller storages stay on the device: bounds, statistics of norms, rotary tables of short sequences.
LEAST_ACTIVATION_BYTES = 1 << 14


class HostStorages:
    """Storages that are offloaded and restored together. With `keep` their content is copied to the host and back; without,
    it is lost and they are restored as zeros. `constant`: nothing writes to them, so that one copy serves for ever."""

    def __init__(self, keep: bool, constant: bool = False) -> None:
        self.keep, self.constant = keep, constant
        self._away: list[tuple[Storage, int]] = []
        # Copies stay allocated: pinned memory is slow to get.
        self._copies: dict[int, Tensor] = {}

    def offload(self, storages: Iterable[Storage]) -> None:
        """Free the device's memory of the storages."""
        assert not self._away, "already offloaded"
        for storage in storages:
            # torch (2.13) crashes when shared memory of the host grows again.
            assert storage.device.type != "cpu" or not storage.is_shared(), "shared memory cannot be offloaded"
            size = storage.nbytes()
            if self.keep:
                self._copy_to_host(storage, size)
            self._away.append((storage, size))
        platform.synchronize()  # before the memory that is being read is given to others
        for storage, _ in self._away:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, size in self._away:
            storage.resize_(size)
            if self.keep:
                _bytes_of(storage).copy_(self._copies[storage._cdata], non_blocking=True)
            else:
                _bytes_of(storage).zero_()
        self._away = []

    def _copy_to_host(self, storage: Storage, size: int) -> None:
        copy = self._copies.get(storage._cdata)
        if copy is not None and self.constant and copy.numel() == size:
            return
        if copy is None or copy.numel() != size:
            copy = self._copies[storage._cdata] = platform.host_bytes(size)
        copy.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: Storage) -> Tensor:
    """The storage as a tensor of bytes that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages_of(tensors: Iterable[Tensor], but: Iterable[Tensor] = ()) -> list[Storage]:
    """The storages under tensors, each once, without those under `but`."""
    left_out = {tensor.untyped_storage()._cdata for tensor in but}
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [storage for key, storage in found.items() if key not in left_out and storage.nbytes()]


class RoleOffload:
    """Offloads a role's weights, gradient buffers and optimizer between its phases.

    `setting` is "none", "optimizer" (with the gradient buffers) or "all" (the weights too). A role is built on the device,
    so the caller makes the first `offload`. `constant`: nothing writes to the weights.
    """

    def __init__(self, setting: str, models: list[Any], chunks: list[Any], optimizer: Any, constant: bool) -> None:
        self.moves_weights = setting == "all"
        self._moves_training = setting != "none" and optimizer is not None
        self._models, self._chunks, self._optimizer = models, chunks, optimizer
        self._weights = HostStorages(keep=True, constant=constant)
        self._states, self._gradients = HostStorages(keep=True), HostStorages(keep=False)
        self._weights_away = self._training_away = self._is_inside = False

    def is_present(self, training: bool = False) -> bool:
        return not self._weights_away and not (training and self._training_away)

    def offload(self) -> None:
        """Offload everything that `setting` names and that is on the device. The memory goes back to the driver: if the
        allocator kept it, smaller tensors would take parts of it, and nothing as large would find room there again."""
        away = self._weights_away, self._training_away
        # fp32 main parameters share the weights' memory; they go with them.
        weights = [parameter.data for model in self._models for parameter in model.parameters()]
        if self._moves_training and not self._training_away:
            self._states.offload(storages_of(_optimizer_tensors(self._optimizer), but=weights))
            self._gradients.offload(storages_of(_gradient_buffers(self._chunks)))
            self._training_away = True
        if self.moves_weights and not self._weights_away:
            self._weights.offload(storages_of(weights))
            self._weights_away = True
        if away != (self._weights_away, self._training_away):
            platform.empty_cache()

    @contextmanager
    def present(self, training: bool = False) -> Iterator[None]:
        """Restore the weights inside the context, and with `training` what an update or a checkpoint needs besides."""
        assert not self._is_inside, "a role runs one phase at a time"
        self._is_inside = True
        with span("offload"):
            if self._weights_away:
                self._weights.restore()
                self._weights_away = False
            if training and self._training_away:
                self._states.restore()
                self._gradients.restore()
                self._training_away = False
        try:
            yield
        finally:
            self._is_inside = False
            with span("offload"):
                self.offload()


def _gradient_buffers(chunks: Iterable[Any]) -> list[Tensor]:
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """fp32 main parameters and moments; the moments are there from the first update on."""
    tensors: list[Tensor] = []
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if one.optimizer is None:  # a rank without a trainable weight
            continue
        tensors += [parameter.data for group in one.optimizer.param_groups for parameter in group["params"]]
        for state in one.optimizer.state.values():
            # The step counter stays: some Adams keep it on the host.
            tensors += [value for name, value in state.items() if isinstance(value, Tensor) and name != "step"]
    return tensors


class _HostCopy:
    """A saved tensor on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.nbytes = tensor.device, tensor.nbytes
        self.copy, self.event = platform.to_host(tensor)


class _Saved:
    """What an operation has saved: a copy on the host, and its place in the order in which the forward pass saved."""

    def __init__(self, copy: _HostCopy, order: list[ref[_Saved]]) -> None:
        self.copy, self.order, self.number = copy, order, len(order)
        self._arriving: tuple[Tensor, Any] | None = None
        order.append(ref(self))

    def prefetch(self) -> None:
        """Start to bring the tensor back."""
        if self._arriving is None:
            self._arriving = platform.to_device(self.copy.copy, self.copy.device, self.copy.event)

    def take(self) -> Tensor:
        """The tensor on the device, for the computation that is queued next."""
        self.prefetch()
        assert self._arriving is not None
        (tensor, event), self._arriving = self._arriving, None
        if event is not None:
            event.wait()
        return tensor

    def __del__(self) -> None:
        if self._arriving is not None:  # asked for by nobody: its memory must not be used again before the copy has ended
            self.take()


class ActivationOffload:
    """Moves what a forward pass saves for its backward pass to the host, and back before the backward pass asks for it.

    Weights and views of them stay, and what lies in less than LEAST_ACTIVATION_BYTES. What two operations save of one tensor
    is copied once. Copies have no gaps where views had some, so that a kernel may round a last digit unlike.

    A backward pass asks in about the reverse order. With each tensor that it takes, those before it start to come back, as
    many as `ahead_bytes` hold and at least one; 0 brings back only what is asked for.
    """

    def __init__(self, models: list[Any], ahead_bytes: int | None = None) -> None:
        self._models = models
        self._ahead_bytes = ahead_bytes if ahead_bytes is not None else PREFETCH_BYTES if platform.prefetches else 0
        self._copies: WeakValueDictionary[Any, _HostCopy] = WeakValueDictionary()
        self.moved_bytes = 0  # in all

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward pass whose saved tensors go to the host."""
        kept = {
            parameter.untyped_storage()._cdata
            for model in self._models
            for parameter in (*model.parameters(), *model.buffers())
        }
        order: list[ref[_Saved]] = []

        def pack(tensor: Tensor) -> Tensor | _Saved:
            storage = tensor.untyped_storage()
            # The storage's size counts: a small view that stays keeps all of it.
            small = storage.nbytes() < LEAST_ACTIVATION_BYTES
            if small or storage._cdata in kept or tensor.device.type != platform.kind:
                return tensor
            # While the weak reference lives no other storage gets the same address. A tensor that was written to in
            # between has another version.
            view = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
            place = (StorageWeakRef(storage), *view, tensor._version)
            found = self._copies.get(place)
            if found is None:
                found = self._copies[place] = _HostCopy(tensor)
                self.moved_bytes += tensor.nbytes
            return _Saved(found, order)

        def unpack(saved: Tensor | _Saved) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            tensor = saved.take()
            self._prefetch_before(saved)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _prefetch_before(self, saved: _Saved) -> None:
        """Start to bring back what was saved just before, as far as `ahead_bytes` go."""
        coming_bytes = 0
        for reference in reversed(saved.order[: saved.number]) if self._ahead_bytes else ():
            earlier = reference()
            if earlier is None:  # its operation has run backward
                continue
            coming_bytes += earlier.copy.nbytes
            if coming_bytes > self._ahead_bytes and coming_bytes > earlier.copy.nbytes:
                return
            earlier.prefetch()
