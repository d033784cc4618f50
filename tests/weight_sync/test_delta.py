"""Weights that travel as their difference to the last version, over real gloo messages and without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.megatron_weights import megatron_boxes
from megarl.models.vllm_weights import vllm_boxes
from megarl.weight_sync.codec import TakenParts
from megarl.weight_sync.manifest import SyncSettings
from megarl.weight_sync.publish import WeightSync
from tests.ranks import run_ranks
from tests.rollout_cases import checkpoint, corrupt, cut
from tests.sync_cases import Parameters, ThreadEngines
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.sync

ROLLOUT = RolloutLayout(2)
BUCKET_BYTES = 8192
TIMEOUT_S = 60.0  # no test waits for it
CHANGED = 0.02  # the share of values that changes in a version
EVENTS = ("nothing", "nothing", "restart", "forget", "other bytes", "corrupt", "one engine")


class Trainer:
    """A trainer rank; rank 0 has two engines of two workers."""

    def __init__(self, model: Path, layout: Layout) -> None:
        grouped = dist.is_initialized()
        self.rank = dist.get_rank() if grouped else 0
        self.shape, self.layout = ModelShape.from_directory(model), layout
        settings = SyncSettings("bf16", ROLLOUT, 2, BUCKET_BYTES, TIMEOUT_S, transport="group", wire="delta")
        group = dist.group.WORLD if grouped else None
        self.sync = WeightSync(self.shape, layout, settings, self.rank, group)
        self.engines = ThreadEngines(self.shape, ROLLOUT, engines=2, retries=3) if self.rank == 0 else None
        self.tensors = checkpoint(model)
        self.random = np.random.default_rng(0)
        self.version = 0
        self.expected: dict[int, dict[int, Parameters]] = {}  # by version and worker

    def publish(self, chosen: list[int] | None = None) -> dict[str, float]:
        """Change some values, by one unit in the last place of bf16, and publish."""
        self.version += 1
        for name, tensor in self.tensors.items():
            words = tensor.bfloat16().view(torch.int16).clone()
            moved = torch.from_numpy(self.random.random(tuple(words.shape)) < CHANGED)
            self.tensors[name] = (words + moved.to(torch.int16)).view(torch.bfloat16).float()
        self.expected[self.version] = cut(vllm_boxes(self.shape, ROLLOUT), self.tensors)
        parameters = cut(megatron_boxes(self.shape, self.layout), self.tensors)[self.rank]
        return self.sync.publish(self.version, parameters, self.engines, chosen)

    def check(self) -> None:
        """Every engine has exactly the bytes of the version that it took last."""
        assert self.engines is not None
        for engine, worker in self.engines.places:
            expected, taken = self.expected[self.engines.versions[engine]][worker], self.engines.taken[engine, worker]
            assert taken.keys() == expected.keys()
            for name, content in expected.items():
                rows, cols = content.shape
                found = taken[name][:rows, :cols]
                # Nobody writes the padding rows of a vocabulary.
                assert torch.equal(torch.where(torch.isnan(found), 0.0, found), content), name

    def kept(self, engine: int, worker: int) -> TakenParts | None:
        assert self.engines is not None
        inbox = self.engines.readers[engine, worker]._inbox
        return None if inbox is None else inbox.parts

    def close(self) -> None:
        if self.engines is not None:
            self.engines.close()
        self.sync.close()


def walk(model: str, layout: Layout, steps: int) -> list[tuple[str, tuple[int | None, ...]]]:
    """Publish versions with events between them; the event of each version and the bases of its attempts."""
    if layout.ranks > 1:
        dist.init_process_group("gloo")
    trainer, random = Trainer(Path(model), layout), np.random.default_rng(1)
    engines, done = trainer.engines, []
    for step in range(steps):
        if step % len(EVENTS) == 2:
            events = random.permutation(EVENTS)
        event = str(events[(step - 2) % len(EVENTS)]) if step > 1 else "nothing"
        engine = int(random.integers(2))
        if engines is not None:
            engines.bases.clear()
            if event == "restart":
                engines.restart(engine)
            if event == "forget":
                for worker in range(ROLLOUT.workers):
                    engines.readers[engine, worker]._inbox = None
            if event == "other bytes" and (kept := trainer.kept(0, 1)) is not None:
                kept._contents[0][0][0] ^= 1
            if event == "corrupt":
                corrupt(trainer, times=1, bucket=1)
        trainer.publish([engine] if event == "one engine" else None)
        if engines is not None:
            trainer.check()
            done.append((event, tuple(engines.bases)))
    trainer.close()
    return done


@pytest.mark.parametrize(("layout", "steps"), [
    pytest.param(Layout(), 18, marks=pytest.mark.nightly), (Layout(2, 2, 1), 18),
])  # fmt: skip
def test_whatever_happens_every_engine_has_exactly_the_bytes_of_its_version(
    tmp_path: Path, layout: Layout, steps: int
) -> None:
    model = save_tiny_model(tmp_path / "m", "qwen3", True, 1)
    done = run_ranks(walk, layout.ranks, str(model), layout, steps)[0]
    assert done[0] == ("nothing", (None,)) and done[1] == ("nothing", (1,))
    assert {event for event, _ in done} == set(EVENTS)
    attempts = [bases for _, bases in done]
    assert all(base is None for bases in attempts for base in bases[1:]), "a retry travelled as a difference"
    assert all(bases[0] in (None, version) for version, bases in enumerate(attempts))
    assert sum(bases[0] is not None for bases in attempts) >= steps // 3, "hardly any version travelled as a difference"


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    """A trainer of one rank whose engines took version 1."""
    made = Trainer(save_tiny_model(tmp_path / "m", "qwen3", True, 1), Layout())
    made.publish()
    yield made
    made.close()


def engines_of(trainer: Trainer) -> ThreadEngines:
    assert trainer.engines is not None
    return trainer.engines


def test_what_did_not_change_does_not_travel(trainer: Trainer) -> None:
    before = dict(trainer.expected[1])
    metrics = trainer.publish()
    elements = [
        (new != before[worker][name]).float().mean() * new.numel()
        for worker, parameters in trainer.expected[2].items()
        for name, new in parameters.items()
    ]
    share = 2 * float(sum(elements)) / (metrics["sync/bound_bytes"] / 2)  # two bytes an element; two engines
    assert 0 < metrics["sync/changed_share"] == pytest.approx(share, rel=0.01)
    assert metrics["sync/received_bytes"] == metrics["sync/bound_bytes"]
    assert metrics["sync/sent_bytes"] < 0.05 * metrics["sync/bound_bytes"]


def test_a_difference_to_other_bytes_never_passes(trainer: Trainer) -> None:
    kept = trainer.kept(0, 1)
    assert kept is not None and kept.version == 1
    kept._contents[-1][0][7] ^= 1
    metrics = trainer.publish()
    trainer.check()
    assert metrics["sync/attempts"] == 2 and engines_of(trainer).bases[-2:] == [1, None]
    assert any("wrong bytes in bucket" in str(error) for error in engines_of(trainer).failures)
