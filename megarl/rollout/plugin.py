"""Entry point in the group `vllm.general_plugins`: vLLM calls it in each of its processes."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress

from megarl.telemetry.stacks import mark_from_environment

UNRECORDED = "canary"  # the start of the names of requests whose experts nobody takes
BACKEND = "megarl"


def register() -> None:
    """Make `weight_transfer_config={"backend": "megarl"}` a valid choice, and have the watchdog find this process. Safe to
    call more than once."""
    # An engine's own processes: its core, and its workers where there are several.
    mark_from_environment("" if multiprocessing.parent_process() is None else multiprocessing.current_process().name)
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with suppress(ValueError):  # vLLM refuses a second registration in one process
        WeightTransferEngineFactory.register_engine(BACKEND, "megarl.weight_sync.receiver", "WeightReceiver")
