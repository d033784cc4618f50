"""Read facts about torch and the device: peak rates, profiler ranges, out-of-memory errors and the last collectives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUDA out of memory")

# Dense peak rates in 10**12 operations a second, from NVIDIA's data sheets: fp8; bf16 and fp16; fp32 without TF32, which
# torch does not use by default. None: the device lacks the format. Longer names come first.
_PEAKS: tuple[tuple[str, tuple[float | None, float | None, float | None]], ...] = (
    ("GB200", (5000.0, 2500.0, 80.0)),
    ("B200", (4500.0, 2250.0, 75.0)),
    ("GH200", (1979.0, 989.0, 67.0)),
    ("H200 NVL", (1671.0, 835.0, 60.0)),
    ("H200", (1979.0, 989.0, 67.0)),
    ("H100 NVL", (1671.0, 835.0, 60.0)),
    ("H100 PCIe", (1513.0, 756.0, 51.0)),
    ("H100", (1979.0, 989.0, 67.0)),
    ("H800", (1979.0, 989.0, 67.0)),
    ("H20", (296.0, 148.0, 44.0)),
    ("A100", (None, 312.0, 19.5)),
    ("A800", (None, 312.0, 19.5)),
    ("L40S", (733.0, 362.0, 91.6)),
    ("L40", (362.0, 181.0, 90.5)),
    ("L4", (242.0, 121.0, 30.3)),
    ("A40", (None, 149.7, 37.4)),
    ("A30", (None, 165.0, 10.3)),
    ("A10", (None, 125.0, 31.2)),
)


def peak_of(name: str, precision: str) -> float | None:
    """Return the peak rate of the device that torch calls `name` at "fp8", "bf16", "fp16" or "fp32", in 10**12 operations a
    second; None for an unknown device, and for a format that the device lacks."""
    column = {"fp8": 0, "bf16": 1, "fp16": 1, "fp32": 2}[precision]
    return next((peaks[column] for words, peaks in _PEAKS if re.search(rf"\b{words}\b", name)), None)


class TorchRanges:
    """Nested named ranges in torch's profiler."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def open(self, name: str) -> None:
        self._open.append(torch.profiler.record_function(name))
        self._open[-1].__enter__()

    def close(self) -> None:
        self._open.pop().__exit__(None, None, None)


class NvtxRanges:
    """Nested named ranges in Nsight Systems."""

    def open(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def close(self) -> None:
        torch.cuda.nvtx.range_pop()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or an error that caused it, says that device or host memory ran out."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def dump_flight_recorder(path: Path) -> None:
    """Write this process's last collectives, for `torchfrtrace --prefix flight-recorder- FOLDER`, and again as JSON to a
    second file. Any thread may call this function. torch 2.13 keeps 2000 collectives (TORCH_FR_BUFFER_SIZE) of gloo and as
    many of NCCL."""
    recorder: Any = torch._C._distributed_c10d
    if hasattr(recorder, "_dump_nccl_trace"):  # torch is built with NCCL
        binary, text = recorder._dump_nccl_trace, recorder._dump_nccl_trace_json
    else:
        binary, text = recorder._dump_fr_trace, recorder._dump_fr_trace_json
    path.write_bytes(binary(True, True, False))
    path.with_name(path.name + ".json").write_bytes(text(True, False))
