"""What megatron-core sees as `torch.cuda` on a machine without CUDA.

The device is the CPU, streams and events run in program order, so waiting is a no-op. A name that is not here is
recorded in `missed` (a test reads it) and raises AttributeError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import BFloat16Tensor, FloatTensor, HalfTensor, get_rng_state, manual_seed, set_rng_state  # type: ignore[attr-defined]  # noqa: F401  # noqa: F401

missed: set[str] = set()

# Asked for by `hasattr` or behind a version test: absent is the right answer.
_ABSENT_IS_FINE = {"MemPool"}


class Stream:
    """A stream in which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Event:
    """An event that has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class CUDAGraph:
    """Only named in annotations and isinstance tests: no graph is ever captured here."""


class CUDAPluggableAllocator:
    """Imported at the top of a module; never built here."""


class nvtx:
    """Range markers for a profiler that is not there."""

    @staticmethod
    def range_push(message: str) -> None: ...

    @staticmethod
    def range_pop() -> None: ...

    @staticmethod
    def range(message: str) -> Any:
        return contextlib.nullcontext()


class amp:
    custom_fwd = staticmethod(lambda fwd=None, **_: fwd if fwd is not None else (lambda function: function))
    custom_bwd = staticmethod(lambda bwd=None, **_: bwd if bwd is not None else (lambda function: function))


_STREAM = Stream()


def current_device() -> torch.device:
    return torch.device("cpu")


def device_count() -> int:
    return 1


def is_available() -> bool:
    return False


def is_initialized() -> bool:
    return False


def is_bf16_supported() -> bool:
    return True


def is_current_stream_capturing() -> bool:
    return False


def get_device_capability(device: object = None) -> tuple[int, int]:
    return (0, 0)


def get_device_name(device: object = None) -> str:
    return "cpu"


def synchronize(device: object = None) -> None: ...


def empty_cache() -> None: ...


def set_device(device: object) -> None: ...


def memory_allocated(device: object = None) -> int:
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


def current_stream(device: object = None) -> Stream:
    return _STREAM


def default_stream(device: object = None) -> Stream:
    return _STREAM


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    yield


@contextlib.contextmanager
def device(device: object) -> Iterator[None]:
    yield


def _lazy_call(callable: Any, **kwargs: Any) -> None:
    callable()


def _lazy_init() -> None: ...


def __getattr__(name: str) -> Any:
    if not name.startswith("__") and name not in _ABSENT_IS_FINE:
        missed.add(name)
    raise AttributeError(f"megarl's CPU stand-in for torch.cuda has no {name!r}; add it to megarl/platform/cuda_stub.py")
