"""torch's flight recorder: the last collectives of this process, by group, and how far each has come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def dump_flight_recorder(path: Path) -> None:
    """Write what torch has recorded, in the form that its own reader takes (`torchfrtrace --prefix flight-recorder-
    FOLDER`), and as JSON beside it. From any thread. Without any setting torch 2.13 records 2000 collectives
    (TORCH_FR_BUFFER_SIZE), of gloo as of NCCL, each in a recorder of its own."""
    recorder: Any = torch._C._distributed_c10d
    binary, text = recorder._dump_fr_trace, recorder._dump_fr_trace_json
    if hasattr(recorder, "_dump_nccl_trace"):  # there where torch is built with NCCL
        binary, text = recorder._dump_nccl_trace, recorder._dump_nccl_trace_json
    path.write_bytes(binary(True, True, False))
    path.with_name(path.name + ".json").write_bytes(text(True, False))
