"""What sinks wrote, read back from their files; and sample rows to write."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # bytes; of wandb's file, and of each record in it


def sample_row(step: int, sample: int) -> dict[str, Any]:
    """A row of a sample table, with what tables find hard: a masked reward, line ends, bars."""
    return {
        "step": step, "sample": sample, "group": 7, "prompt": "1 + 1?\n", "completion": "a | b", "reward": None,
        "parts": {"exact": None}, "advantage": None, "valid": False, "reason": "the verifier gave no number",
        "prompt_tokens": 4, "completion_tokens": 3, "finish_reason": "stop", "version": 2, "first_version": 1,
    }  # fmt: skip


def tensorboard_points(folder: Path, key: str) -> list[tuple[int, float]]:
    """Steps and values of a scalar as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, round(event.value, 4)) for event in accumulator.Scalars(key)]


def wandb_records(folder: Path) -> Iterator[Any]:
    """All records of the offline runs under `wandb/`, in the order of the starts."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        data, at, part = path.read_bytes(), HEADER, b""
        while at + HEADER <= len(data):
            if BLOCK - at % BLOCK < HEADER:  # the end of a block holds no record
                at += BLOCK - at % BLOCK
                continue
            size, place = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            if at + HEADER + size > len(data):  # it is being written
                break
            part += data[at + HEADER : at + HEADER + size]
            at += HEADER + size
            if place in (1, 4):  # whole, or the last part of one
                record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # made when it is imported
                record.ParseFromString(part)
                part = b""
                yield record


def wait_for(is_so: Callable[..., object]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if is_so():
            return
        time.sleep(0.001)
    raise AssertionError("not within two minutes")


def wait_for_wandb(folder: Path, starts: int) -> None:
    """Until its own process has written the end of so many offline runs: that takes longer than to finish one."""
    wait_for(lambda: [record.WhichOneof("record_type") for record in wandb_records(folder)].count("exit") == starts)


def wandb_points(folder: Path, key: str) -> list[tuple[int, float]]:
    """Steps and values of a figure in those runs' history."""
    points = []
    for record in wandb_records(folder):
        items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if key in items:
            points.append((record.history.step.num, items[key]))
    return points


def mlflow_points(folder: Path, run: str, key: str) -> list[tuple[int, float]]:
    """Steps and values of a metric of an MLflow run in a directory."""
    return [(metric.step, metric.value) for metric in mlflow_client(folder).get_metric_history(run, key)]


def mlflow_client(folder: Path) -> Any:
    """A client of a directory. From the sink's module, which has MLflow read directories at all."""
    import os

    from megarl.telemetry.sinks import SINKS

    os.environ.update(SINKS["mlflow"][2])
    from mlflow.tracking import MlflowClient

    return MlflowClient(str(folder))
