"""torch's flight recorder: the last collectives of this process, by process group, and how far each of them is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def dump_flight_recorder(path: Path) -> None:
    """Write the record for torch's own reader (`torchfrtrace --prefix flight-recorder- FOLDER`), and as JSON to a second
    file. May be called in any thread. By default torch 2.13 records 2000 collectives (TORCH_FR_BUFFER_SIZE), with a recorder
    for gloo and another one for NCCL."""
    recorder: Any = torch._C._distributed_c10d
    binary, text = recorder._dump_fr_trace, recorder._dump_fr_trace_json
    if hasattr(recorder, "_dump_nccl_trace"):  # torch is built with NCCL
        binary, text = recorder._dump_nccl_trace, recorder._dump_nccl_trace_json
    path.write_bytes(binary(True, True, False))
    path.with_name(path.name + ".json").write_bytes(text(True, False))
