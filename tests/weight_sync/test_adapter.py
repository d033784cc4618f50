"""With `actor.lora.send: adapter` an engine computes what the merged export does, and no request sees old adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.cluster.ray_cluster import start_cluster, stop_cluster
from megarl.data.sample import Prompt, Sample
from megarl.megatron.checkpoint import load_checkpoint
from megarl.megatron.export import adapter_factors, export, export_adapter, peft_tensors
from megarl.megatron.lora import MergedShards
from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.recipe.recipe import Recipe
from megarl.recipe.role_sections import LoraSection
from megarl.rollout import RolloutError
from megarl.rollout.pool import EnginePool
from megarl.telemetry.run_directory import latest_checkpoint
from megarl.weight_sync.adapter import AdapterSync
from megarl.weight_sync.manifest import AdapterManifest, SyncError
from tests.engine_cases import engine, start
from tests.lora_cases import LORA, adapters_of, train_lora
from tests.ranks import run_ranks
from tests.rollout_cases import STOP, VOCAB, distance, generate, megatron_shards, prompts, recipe, same, samples, save_model
from tests.runs import tiny_recipe

pytestmark = [pytest.mark.sync, pytest.mark.slow]
SENT = LORA.model_copy(update={"send": "adapter"})
STEPS = 3


def adapter_recipe(
    model: Path, lora: LoraSection = SENT, weight_sync: Mapping[str, Any] | None = None, **rollout: Any
) -> Recipe:
    edits = ("actor.lora", lora), ("data.max_prompt_tokens", 100), ("weight_sync", weight_sync or {})
    return recipe(model, *edits, **rollout)


def open_pool(lora_recipe: Recipe, model: Path, stops: Sequence[int] = STOP) -> EnginePool:
    pool = EnginePool(lora_recipe, str(model), stops, seed=3)
    pool.start()
    return pool


def sends_adapters(
    model: Path, checkpoints: Path, merged: Path, layout: Layout, rollout: RolloutLayout, lora: LoraSection
) -> dict[str, float]:
    """On the ranks of a trainer. Rank 0's engine loaded the base model, and gets the adapters of a checkpoint; `merged` is
    the export of this checkpoint."""
    place = start(layout)
    actor = engine(str(model), place, lr=1e-2, lora=lora)
    latest = latest_checkpoint(checkpoints)
    assert latest is not None
    load_checkpoint(latest, {"actor": actor})
    lora_recipe = adapter_recipe(model, lora, tensor=rollout.tensor, pipeline=rollout.pipeline)
    sync = AdapterSync(lora_recipe, actor.shape, layout, place.rank, dist.new_group(backend="gloo"))
    if place.rank:
        return sync.publish(1, actor.shards())
    start_cluster()
    pool = open_pool(lora_recipe, model)
    try:
        assert distance(model, samples(pool, 1)) < 1e-4
        metrics = sync.publish(1, actor.shards(), pool)
        drawn = samples(pool, 1)
        assert distance(merged, drawn) < 1e-4 < distance(model, drawn)
        return metrics
    finally:
        pool.shutdown()
        stop_cluster()


@pytest.mark.parametrize(
    ("family", "targets", "layout", "rollout"),
    [
        ("qwen3", LORA.targets, Layout(tensor=2, pipeline=2), RolloutLayout(2)),
        pytest.param("qwen2", ("qkv", "fc2"), Layout(tensor=2), RolloutLayout(), marks=pytest.mark.nightly),
        pytest.param("llama", LORA.targets, Layout(data=2), RolloutLayout(pipeline=2), marks=pytest.mark.nightly),
        pytest.param("gemma3", ("proj", "fc1"), Layout(pipeline=2), RolloutLayout(), marks=pytest.mark.nightly),
    ],
)
def test_an_engine_with_the_adapters_computes_what_the_merged_export_does(
    tmp_path: Path, family: str, targets: tuple[Any, ...], layout: Layout, rollout: RolloutLayout
) -> None:
    """By transformers. What the engine gets is what `megarl export --adapter` writes, and no more bytes are sent."""
    lora = LORA.model_copy(update={"targets": targets, "rank": 3})
    model = save_model(tmp_path / "model", family, False, 0)
    run = tmp_path / "runs" / "lora"
    run.mkdir(parents=True)
    tiny_recipe(tmp_path, "lora", False, 2, 1, 1, 1, actor__lora=lora.model_dump(mode="json")).replace(run / "recipe.yaml")
    saved = str(run / "checkpoints")
    run_ranks(train_lora, layout.ranks, str(model), layout, STEPS, 40, saved, STEPS, False, lora, 0.1)
    export(run, tmp_path / "merged")
    export_adapter(run, tmp_path / "adapter")
    sent = lora.model_copy(update={"send": "adapter"})
    every = run_ranks(sends_adapters, layout.ranks, model, run / "checkpoints", tmp_path / "merged", layout, rollout, sent)
    exported = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    for metrics in every:
        assert metrics == every[0] and exported < metrics["sync/sent_bytes"] < exported + 1000
        assert metrics["sync/received_bytes"] == metrics["sync/sent_bytes"]


class Publisher:
    """A trainer of one rank, whose adapters are random, by their seed."""

    def __init__(self, lora_recipe: Recipe, model: Path) -> None:
        self._model, self._shape = model, ModelShape.from_directory(model)
        self.sync = AdapterSync(lora_recipe, self._shape, Layout(), 0, None)
        self._last: tuple[int, int, Any]

    def shards(self, seed: int) -> MergedShards:
        weights = megatron_shards(self._model, Layout())[0]
        return MergedShards(weights, adapters_of(weights, SENT, 0.15, seed))

    def publish(self, version: int, seed: int, pool: EnginePool, chosen: Sequence[int] | None = None) -> dict[str, float]:
        self._last = (version, seed, pool)
        return self.sync.publish(version, self.shards(seed), pool, chosen)

    def resync(self, chosen: Sequence[int]) -> None:
        self.publish(*self._last, chosen)

    def merged(self, seed: int, directory: Path) -> Path:
        """The model with the adapters in its weights, as PEFT merges them."""
        tensors = load_file(self._model / "model.safetensors")
        factors = peft_tensors(self._shape, Layout(), [adapter_factors(self.shards(seed).adapters)])
        for name in {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in factors}:
            a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
            tensors[f"{name}.weight"] += SENT.alpha / SENT.rank * (b @ a)
        directory.mkdir()
        for file in ("config.json", "generation_config.json"):
            (directory / file).write_bytes((self._model / file).read_bytes())
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory


Running = tuple[EnginePool, Publisher, list[Path]]
OLD, NEW = 0, 1


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two engines, a publisher of two sets of adapters, and the merged model of each."""
    folder = tmp_path_factory.mktemp("models")
    model = save_model(folder / "model", "llama", True, 0)
    lora_recipe = adapter_recipe(model, engines=2, max_restarts=9)
    publisher = Publisher(lora_recipe, model)
    start_cluster()
    pool = open_pool(lora_recipe, model)
    yield pool, publisher, [publisher.merged(seed, folder / str(seed)) for seed in (OLD, NEW)]
    pool.shutdown()
    stop_cluster()


def corrupt(monkeypatch: pytest.MonkeyPatch, pool: EnginePool, times: int) -> None:
    """One byte of the adapters changes on its way, that many times."""
    begin, left = pool.begin, [times]

    def begin_wrong(manifest: AdapterManifest) -> None:
        if left[0]:
            left[0] -= 1
            name, content = next(iter(manifest.files.items()))
            wrong = bytearray(content)
            wrong[-1] ^= 1
            manifest = replace(manifest, files=manifest.files | {name: bytes(wrong)})
        begin(manifest)

    monkeypatch.setattr(pool, "begin", begin_wrong)


def drawn(pool: EnginePool, publisher: Publisher, step: int) -> dict[int, Sample]:
    return generate(pool, prompts(), step, publisher.resync).payload.fetch(range(16))


def test_wrong_bytes_are_sent_again_and_silence_the_engines_if_they_stay_wrong(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, publisher, merged = running
    assert publisher.publish(1, OLD, pool)["sync/attempts"] == 1
    assert distance(merged[OLD], drawn(pool, publisher, 1)) < 1e-4
    corrupt(monkeypatch, pool, times=1)
    assert publisher.publish(2, NEW, pool)["sync/attempts"] == 2
    assert distance(merged[NEW], drawn(pool, publisher, 1)) < 1e-4
    corrupt(monkeypatch, pool, times=2)
    with pytest.raises(SyncError, match=r"rollout engine \d, phase weight_sync: wrong bytes in the adapters of version 3"):
        publisher.publish(3, OLD, pool)
    with pytest.raises(RolloutError, match=r"rollout engine \d refuses phase rollout: .*version 3"):
        drawn(pool, publisher, 1)
    publisher.publish(4, OLD, pool)
    batch = generate(pool, prompts(), 1)
    assert set(batch.first_version) == set(batch.last_version) == {4}
    assert distance(merged[OLD], batch.payload.fetch(range(16))) < 1e-4


def test_adapters_that_were_sent_as_another_version_are_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, publisher, _ = running
    begin = pool.begin
    monkeypatch.setattr(pool, "begin", lambda manifest: begin(replace(manifest, version=manifest.version - 1)))
    with pytest.raises(SyncError, match="wrong bytes in the adapters of version 4"):
        publisher.publish(5, NEW, pool)


def test_a_restarted_engine_gets_the_current_adapters_and_the_other_keeps_them(running: Running) -> None:
    pool, publisher, merged = running
    publisher.publish(6, NEW, pool)
    before = drawn(pool, publisher, 2)
    restarts = [handle.restarts for handle in pool.engines]
    pool.engines[1].kill()
    after = drawn(pool, publisher, 2)
    assert [handle.restarts for handle in pool.engines] == [restarts[0], restarts[1] + 1]
    assert same(before, after) and distance(merged[NEW], after) < 1e-4


def test_no_request_reads_a_prefix_that_the_last_adapters_computed(running: Running) -> None:
    """All prompts begin with the same 64 tokens, two blocks of the cache, which the engines hold from the last version."""
    pool, publisher, merged = running
    ids = [np.random.default_rng(0).integers(0, VOCAB, 64).tolist() + [index, 3, 5] for index in range(4)]
    prefix_prompts = [Prompt(index, np.array(token_ids, dtype=np.int32), "", "", {}) for index, token_ids in enumerate(ids)]
    for version, seed in ((7, OLD), (8, NEW), (9, OLD)):
        publisher.publish(version, seed, pool)
        assert distance(merged[seed], generate(pool, prefix_prompts, 1).payload.fetch(range(16))) < 1e-4
