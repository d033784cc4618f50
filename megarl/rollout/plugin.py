"""Entry point in the group `vllm.general_plugins`: vLLM calls it in each of its processes."""

from __future__ import annotations

import multiprocessing
import platform
import sys
from contextlib import suppress
from importlib.metadata import entry_points

from megarl.rollout import RolloutError
from megarl.telemetry.stacks import mark_from_environment

UNRECORDED = "canary"  # the start of the names of requests whose experts nobody takes
BACKEND = "megarl"


def require_installed() -> None:
    """Raise RolloutError unless megarl is installed in this Python; vLLM finds this entry point in no other way."""
    if not entry_points(group="vllm.general_plugins", name="megarl"):
        raise RolloutError(
            f"vLLM cannot find megarl's weight transfer on {platform.node()}: megarl is on the path of {sys.executable} but "
            "is not installed there; `pip install --no-deps -e DIRECTORY` registers it"
        )


def register() -> None:
    """Make `weight_transfer_config={"backend": "megarl"}` a valid choice, and have the watchdog find this process. Safe to
    call more than once."""
    # An engine's own processes: its core, and its workers where there are several.
    mark_from_environment("" if multiprocessing.parent_process() is None else multiprocessing.current_process().name)
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with suppress(ValueError):  # vLLM refuses a second registration in one process
        WeightTransferEngineFactory.register_engine(BACKEND, "megarl.weight_sync.receiver", "WeightReceiver")
