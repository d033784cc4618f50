"""The module that megatron-core sees as `torch.cuda` on a machine without CUDA.

The device is the CPU. Streams and events run in program order, so waiting does nothing. Reading a missing name adds the name
to `missed`, which a test reads, and raises AttributeError.

Tests replace `torch.cuda` by this module to see which calls a GPU would get.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import BFloat16Tensor, FloatTensor, HalfTensor, get_rng_state, manual_seed, set_rng_state  # type: ignore[attr-defined]  # noqa: F401

missed: set[str] = set()
# megatron-core reads these names by `hasattr` or behind a version test, so they may be absent.
_ABSENT_IS_FINE = {"MemPool"}


class Stream(torch.cpu.Stream):
    """A stream in which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        return event or Event()

    def synchronize(self) -> None: ...


class Event(torch.cpu.Event):
    """An event that has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class CUDAGraph:
    """A name for annotations and isinstance tests; nothing captures a graph on a CPU."""


class CUDAPluggableAllocator:
    """A name that megatron-core imports and never constructs."""


class nvtx:
    """Range markers without a profiler."""

    range_push = range_pop = staticmethod(lambda message="": None)
    range = contextlib.nullcontext


class amp:
    """Decorators of autograd functions, which keep the function as it is."""

    custom_fwd = custom_bwd = staticmethod(lambda function=None, **_: function or (lambda function: function))


class random:
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())


_STREAM = Stream()
default_generators = {torch.device("cpu"): torch.default_generator}
stream = device = contextlib.nullcontext  # a stream, or a device, inside a context


def current_device() -> torch.device:
    return torch.device("cpu")


def current_stream(device: object = None) -> Stream:
    return _STREAM


def device_count() -> int:
    return 1


def is_available() -> bool:
    return False


def is_bf16_supported() -> bool:
    return True


def can_device_access_peer(device: int, peer: int) -> bool:
    return True


def get_device_capability(device: object = None) -> tuple[int, int]:
    return (0, 0)


def get_device_name(device: object = None) -> str:
    return "cpu"


def memory_allocated(device: object = None) -> int:
    return 0


default_stream = current_stream
is_initialized = is_current_stream_capturing = is_available
max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


def synchronize(device: object = None) -> None: ...


empty_cache = reset_peak_memory_stats = set_device = synchronize


def _lazy_call(callable: Any, **kwargs: Any) -> None:
    callable()


def _lazy_init() -> None: ...


def __getattr__(name: str) -> Any:
    if not name.startswith("__") and name not in _ABSENT_IS_FINE:
        missed.add(name)
    raise AttributeError(f"megarl's CPU stand-in for torch.cuda has no {name!r}; add it to megarl/platform/cuda_stub.py")
