"""Laws of a weight sync over real gloo ranks, by every transport, also as differences to the last version, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.megatron_weights import megatron_boxes
from megarl.models.vllm_weights import vllm_boxes
from megarl.rollout import EngineSilent, RolloutError
from megarl.telemetry.clock import PhaseClock, recording
from megarl.weight_sync import publish
from megarl.weight_sync.codec import TakenParts
from megarl.weight_sync.manifest import SyncAborted, SyncError, SyncLate, SyncSettings, WeightManifest
from megarl.weight_sync.publish import WeightSync
from tests.ranks import run_ranks
from tests.rollout_cases import Publisher, checkpoint, corrupt, cut, megatron_shards, save_model
from tests.sync_cases import BoxWriter, Parameters, ThreadEngines, assert_has_shard
from tests.tiny_models import save_tiny_model
from tests.weight_sync.test_buckets import BLOCKS

pytestmark = pytest.mark.sync

BUCKET_BYTES = 8192  # a tiny model is many buckets, and most boxes are cut


def publish_and_read(models: list[str], layout: Layout, settings: SyncSettings) -> list[dict[str, float]]:
    """Publish each model as a version; rank 0 has the engines. Returns the metrics."""
    dist.init_process_group("gloo")
    rank, shape = dist.get_rank(), ModelShape.from_directory(models[0])
    sync = WeightSync(shape, layout, settings, rank, dist.group.WORLD)
    readers = ThreadEngines(shape, settings.rollout, settings.num_engines) if rank == 0 else None
    metrics = []
    for version, model in enumerate(map(Path, models), start=1):
        metrics.append(sync.publish(version, megatron_shards(model, layout)[rank], readers))
        if readers is not None:
            assert readers.versions == [version] * settings.num_engines
            for engine, worker in readers.places:
                taken, quantised = readers.taken[engine, worker], settings.quantization is not None
                assert_has_shard(taken, shape, model, settings.rollout, worker, settings.dtype, quantised)
    if readers is not None:
        readers.close()
    sync.close()
    return metrics


def settings_of(
    rollout: RolloutLayout, engines: int = 1, precision: str = "fp32", transport: str = "mapped", ranks: int = 2, **more: Any
) -> SyncSettings:
    """`two_legs` is the transport `group` where a rank serves each worker."""
    more = {"bucket_bytes": BUCKET_BYTES} | more
    if transport == "two_legs":
        workers = range(rollout.workers)
        more["servers"] = tuple(tuple((engine + worker) % ranks for worker in workers) for engine in range(engines))
        transport = "group"
    return SyncSettings(precision, rollout, engines, timeout_s=60.0, transport=transport, **more)


def two_models(folder: Path, family: str = "qwen3", tied: bool = True) -> list[str]:
    return [str(save_tiny_model(folder / str(seed), family, tied, seed)) for seed in (1, 2)]


CASES = [
    ("qwen3", True, Layout(2, 2, 1), RolloutLayout(2), 1, "fp32"),
    ("qwen2", False, Layout(4, 1, 1), RolloutLayout(1), 3, "bf16"),
    ("llama", True, Layout(1, 2, 2), RolloutLayout(4), 1, "fp32"),
    ("qwen3", True, Layout(1, 2, 1, virtual_pipeline=2), RolloutLayout(2), 2, "fp32"),
    ("qwen3", False, Layout(2, 1, 1, context=2), RolloutLayout(1, 2), 1, "fp32"),
    ("qwen3_moe", False, Layout(2, 1, 2, expert=4, expert_tensor=1), RolloutLayout(2, 1, 2, True), 1, "fp32"),
    ("mixtral", True, Layout(1, 2, 2, expert=2, stages=(1, 3)), RolloutLayout(1), 1, "bf16"),
]


# In CI each layout once, and each transport; the plans of many more layouts are in test_plan.py.
IN_CI = {(1, "mapped"), (2, "mapped"), (6, "mapped"), (0, "group"), (3, "two_legs"), (4, "two_legs"), (5, "two_legs")}


@pytest.mark.parametrize(
    ("case", "transport", "merges"),
    [
        *[
            pytest.param(CASES[number], transport, False, marks=() if (number, transport) in IN_CI else pytest.mark.nightly)
            for transport, numbers in (("mapped", range(7)), ("group", (0, 1)), ("two_legs", (3, 4, 5)))
            for number in numbers
        ],
        # Layer by layer, as where adapters are merged.
        (("qwen3", True, Layout(1, 2), RolloutLayout(2), 2, "bf16"), "group", True),
        (("qwen3", True, Layout(2), RolloutLayout(1, 2), 2, "bf16"), "two_legs", True),
    ],
)
def test_workers_receive_exactly_their_shards(tmp_path: Path, case: tuple[Any, ...], transport: str, merges: bool) -> None:
    family, tied, layout, rollout, engines, precision = case
    settings = settings_of(rollout, engines, precision, transport, ranks=layout.ranks, merges=merges)
    answers = run_ranks(publish_and_read, layout.ranks, two_models(tmp_path, family, tied), layout, settings)
    for metrics in answers[0]:
        assert metrics["sync/received_bytes"] == metrics["sync/bound_bytes"] > 0
        # In two legs a rank does not send what it has itself.
        assert transport == "two_legs" or metrics["sync/bound_bytes"] <= metrics["sync/sent_bytes"]
        assert metrics["sync/sent_bytes"] < 1.1 * metrics["sync/bound_bytes"]
        assert metrics["sync/attempts"] == 1 and metrics["sync/mapped"] == (transport == "mapped")
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(("transport", "wire"), [("group", "full"), ("two_legs", "delta")])
def test_fp8_blocks_of_all_ranks_make_the_blocks_of_the_worker(tmp_path: Path, transport: str, wire: str) -> None:
    import transformers as hf

    sizes = {key: value for key, value in BLOCKS.items() if key not in ("architectures", "model_type", "rope_theta")}
    models = [str(tmp_path / str(seed)) for seed in (1, 2)]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes)).save_pretrained(model)
    form: dict[str, Any] = {"transport": transport, "wire": wire, "quantization": "fp8", "bucket_bytes": 1 << 16}
    settings, layout = settings_of(RolloutLayout(2), precision="bf16", **form), Layout(tensor=2, pipeline=2)
    answers = run_ranks(publish_and_read, layout.ranks, [*models, models[1]], layout, settings)
    whole_bytes = sum(2 * tensor.numel() for tensor in checkpoint(Path(models[0])).values())
    for metrics in answers[0]:
        assert metrics["sync/received_bytes"] == metrics["sync/bound_bytes"] < 0.6 * whole_bytes
        assert metrics["sync/attempts"] == 1
    if wire == "delta":
        assert answers[0][2]["sync/changed_share"] == 0.0 and answers[0][1]["sync/changed_share"] > 0.5


def publish_with_a_missing_parameter(model: str, layout: Layout) -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    settings = SyncSettings("fp32", RolloutLayout(), 1, BUCKET_BYTES, timeout_s=60.0)
    sync = WeightSync(ModelShape.from_directory(model), layout, settings, rank, dist.group.WORLD)
    parameters: dict[str, Any] = dict(megatron_shards(Path(model), layout)[rank])
    if rank == 1:
        del parameters["decoder.final_layernorm.weight"]
    try:
        sync.publish(1, parameters)
    except SyncError as error:
        return str(error)
    finally:
        sync.close()
    return ""


def test_a_rank_that_cannot_publish_is_named_on_every_rank(tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "m", "llama", False, 1))
    for message in run_ranks(publish_with_a_missing_parameter, 2, model, Layout(2, 1, 1)):
        assert "rank 1" in message and "decoder.final_layernorm.weight" in message


Published = tuple[Publisher, ThreadEngines, Path]


@pytest.fixture(params=["mapped", "group", "two_legs"])
def published(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Published]:
    """A trainer of one rank, two engines without vLLM that took version 1, and its model."""
    model = save_model(tmp_path / "m", "llama", False, 1)
    form: dict[str, Any] = {"servers": ((0,), (0,))} if request.param == "two_legs" else {}
    transport = "mapped" if request.param == "mapped" else "group"
    publisher = Publisher(model, engines=2, bucket_bytes=BUCKET_BYTES, transport=transport, **form)
    engines = ThreadEngines(ModelShape.from_directory(model), RolloutLayout(), engines=2, retries=1)
    publisher.publish(1, model, engines)
    yield publisher, engines, model
    engines.close()
    publisher.close()


def announced(publisher: Publisher, version: int) -> WeightManifest:
    """A version that was announced, and of which nothing was sent yet."""
    publisher.sync._engines = SimpleNamespace(pause=lambda *_: [0, 0], begin=lambda _: None)  # type: ignore[assignment]
    return publisher.sync._begin(version, 1, (0,))[0]


@pytest.mark.parametrize("version", [1, 2])
def test_a_silent_trainer_rank_is_named_at_the_deadline(published: Published, version: int) -> None:
    """Also where an earlier sync sent the same version."""
    publisher, engines, _ = published
    manifest = replace(announced(publisher, version), timeout_s=0.1)
    with pytest.raises(SyncLate, match=r"(bucket 0 of \d+ from|checksums of) trainer rank 0 did not come by the deadline"):
        list(engines.readers[0, 0].read(manifest, 0, BoxWriter()))


def test_a_deadline_that_passes_on_one_rank_is_a_deadline_for_all(published: Published) -> None:
    """Otherwise some ranks end as after a failure, before the stacks of a hang are there."""
    publisher, _, _ = published

    def pass_deadline() -> None:
        raise EngineSilent("no answer of rollout engine 0")

    def fail() -> None:
        raise RolloutError("rollout engine 0 died")

    for step, kind in ((pass_deadline, SyncLate), (fail, SyncError)):
        with pytest.raises(SyncError, match="weight_sync: send failed on rank 0: .*rollout engine 0") as failure:
            publisher.sync._together("weight_sync: send", step)
        assert type(failure.value) is kind
    clock = PhaseClock()
    with pytest.raises(EngineSilent) as silent, recording(clock), clock.phase("weight_sync"):
        publisher.sync._from_first(pass_deadline)
    assert clock.place_of(silent.value) == ("weight_sync", "wait_engines"), "no rank is at fault"


def test_a_failing_rank_ends_the_wait_of_the_engines_at_once(published: Published) -> None:
    publisher, engines, model = published
    shards = publisher.shards(model)
    shards["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(3, 3)
    with pytest.raises(SyncError, match="weight_sync: (begin|send) failed on rank 0") as failure:
        publisher.publish_shards(2, shards, engines)
    if "begin" not in str(failure.value):
        engines.finish()
        assert len(engines.failures) == 2 and all(isinstance(error, SyncAborted) for error in engines.failures)
    publisher.publish(3, model, engines)
    assert engines.versions == [3, 3]


def test_a_manifest_of_another_plan_is_refused(published: Published) -> None:
    publisher, engines, _ = published
    manifest = replace(announced(publisher, 2), plan_hash="0" * 64)
    with pytest.raises(SyncError, match="reshard plan"):
        list(engines.readers[0, 0].read(manifest, 0, BoxWriter()))


@pytest.mark.parametrize("is_final", [True, False])
def test_too_little_shared_memory_is_an_error_or_another_transport_and_not_a_dead_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_final: bool
) -> None:
    monkeypatch.setattr(publish, "obstacle_of", lambda needs: f"{sum(needs[0])} is too much")
    model = save_model(tmp_path / "m", "llama", False, 1)
    publisher = Publisher(model, bucket_bytes=BUCKET_BYTES, is_final=is_final)
    engines = ThreadEngines(ModelShape.from_directory(model), RolloutLayout())
    if is_final:
        with pytest.raises(
            SyncError, match=r"weight_sync.transport = mapped: \d+ is too much; raise the limit, or use group"
        ):
            publisher.publish(1, model, engines)
    else:
        assert publisher.publish(1, model, engines)["sync/mapped"] == 0
        assert engines.versions == [1]
    engines.close()
    publisher.close()


ROLLOUT = RolloutLayout(2)
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
                unpadded = taken[name][:rows, :cols]
                # Nobody writes the padding rows of a vocabulary.
                assert torch.equal(torch.where(torch.isnan(unpadded), 0.0, unpadded), content), name

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
            if event == "other bytes" and (parts := trainer.kept(0, 1)) is not None:
                parts._contents[0][0][0] ^= 1
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
    tiny_trainer = Trainer(save_tiny_model(tmp_path / "m", "qwen3", True, 1), Layout())
    tiny_trainer.publish()
    yield tiny_trainer
    tiny_trainer.close()


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
