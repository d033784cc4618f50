"""What a vLLM worker owes its trainers, whatever becomes of the weights in it."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from tests.rollout.test_pool import MANIFEST
from tests.rollout_cases import save_model

pytestmark = pytest.mark.sync


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """vLLM writes there what it wants of its worker processes, from its import on."""
    with mock.patch.dict(os.environ):
        yield


class Reader:
    """Stands in for a stream; `closed` says whether the worker has told the other end that it reads no more."""

    closed = False

    def boxes(self, *arguments: Any) -> Generator[None, None, None]:
        try:
            yield
            yield
        finally:
            self.closed = True


def breaks(boxes: Iterator[Any], *arguments: Any) -> None:
    next(boxes)
    raise ValueError("no such parameter")


@pytest.mark.parametrize("mode", ["reshard", "checkpoint"])
def test_a_worker_that_fails_reads_no_more_while_its_failure_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    from megarl.weight_sync import receiver

    worker, reader = receiver.WeightReceiver.__new__(receiver.WeightReceiver), Reader()
    worker._shape, worker._rollout = ModelShape.from_directory(save_model(tmp_path / "m", "llama", True, 0)), RolloutLayout()
    worker._reader, worker._spares = reader, []  # type: ignore[assignment]
    worker.model = worker.model_config = None  # type: ignore[assignment]
    worker.device = torch.device("cpu")
    monkeypatch.setattr(worker, "_load", breaks)
    monkeypatch.setattr(receiver, "whole_tensors", lambda boxes, sizes: boxes)
    monkeypatch.setattr(receiver, "load_checkpoint_tensors", lambda model, config, tensors: breaks(tensors))
    monkeypatch.setattr(
        receiver.WeightManifest, "from_dict", lambda values: replace(MANIFEST, rollout=RolloutLayout(), mode=mode)
    )
    with pytest.raises(ValueError, match="no such parameter") as failure:
        worker.receive_weights(receiver.Update({}, 0))
    assert reader.closed
    assert failure.traceback, "it is held, and with it all that the failed call had in hand"
    worker.report = {"version": 1}
    worker.start_weight_update()
    assert worker.report == (False, "took no weights", False)
