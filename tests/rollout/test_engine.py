"""One engine over a scripted vLLM: it handles one call after the other, generates nothing between a pause and the new
weights, wakes in the order that a sync needs its memory, and reports the failures of its workers. What vLLM is started with
on CPUs and on GPUs, and the sizes that a recipe leaves to megarl."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.planner.check import engine_lines, stream_line
from megarl.planner.engine_memory import PlannedEngines
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.recipe.load import recipe_yaml
from megarl.recipe.rollout_section import OWNED_ENGINE_ARGS, known_engine_args
from megarl.recipe.sizes import engines_of, with_engine_sizes
from megarl.rollout import EngineDirty, RolloutError, plugin
from megarl.rollout import engine as engine_module
from megarl.rollout.engine import GroupRequest, RolloutEngine
from megarl.rollout.engine_settings import EngineSettings, engine_arguments
from tests.planner_cases import forecast_of, write_qwen
from tests.recipe_cases import CONFIG, edited, make_folder, write
from tests.weight_sync.test_fp8_experts import DEEPSEEK, QWEN

pytestmark = pytest.mark.sync

TURNS = 100  # of the event loop, in which whatever waits for nothing but the loop goes on


class Core:
    """In place of vLLM: it says whether it generates, and holds up the first of some call until `go_on` is set."""

    errored = False

    def __init__(self, held_up: str) -> None:
        self.engine_core, self._held_up = self, held_up
        self.generates, self.version = False, 0
        self.generated: list[int] = []  # the version at each resumption
        self.reached, self.go_on, self.takes = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.in_flight: dict[str, asyncio.Future[Any]] = {}

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        await self._meet("pause")
        self.generates = False

    async def add_request(self, *arguments: Any, **options: Any) -> Any:
        await self._meet("add")
        aborted: asyncio.Future[Any] = asyncio.Future()
        self.in_flight[arguments[0]] = aborted
        return SimpleNamespace(get=lambda: aborted)  # no completion ever ends by itself

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            output = SimpleNamespace(finish_reason="abort", token_ids=[])
            self.in_flight.pop(name).set_result(SimpleNamespace(outputs=[output]))

    async def resume_generation(self) -> None:
        await self._meet("resume")
        self.generates = len(self.in_flight) > 0
        self.generated.append(self.version)

    async def call_utility_all_async(self, *arguments: Any) -> Any:
        await self.takes.wait()
        return [[{"version": 3, "received_bytes": 8.0}]]

    async def update_weight_version(self, version: str) -> None:
        self.version = int(version)

    async def _meet(self, call: str) -> None:
        if call == self._held_up and not self.go_on.is_set():
            self.reached.set()
            await self.go_on.wait()


def begin(call: Awaitable[Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(call)


async def let_go_on() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def an_engine(held_up: str) -> tuple[RolloutEngine, Core]:
    settings: Any = SimpleNamespace(
        index=0, layout=RolloutLayout(), temperature=1.0, max_new_tokens=4, stop_token_ids=(), record_routing=False
    )
    engine, core = RolloutEngine(settings), Core(held_up)
    engine._engine = core  # type: ignore[assignment]
    return engine, core


BATCH = [GroupRequest(position, position, np.array([3, 5], np.int32), ((1,), (2,))) for position in range(2)]


@pytest.fixture(autouse=True)
def manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WeightManifest", SimpleNamespace(from_dict=lambda values: SimpleNamespace(**values)))


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
@pytest.mark.parametrize("held_up", ["pause", "add", "resume"])
def test_a_batch_that_a_sync_overtakes_generates_nothing_before_the_new_weights(held_up: str, in_flight: str) -> None:
    async def overtaken() -> None:
        engine, core = an_engine(held_up)
        batch = begin(engine.submit(BATCH))
        await core.reached.wait()
        pause = begin(engine.pause(3, in_flight))
        await let_go_on()
        core.go_on.set()
        metrics = await pause
        await let_go_on()
        assert batch.done(), "the pause did not wait for the batch that came before it"
        assert not core.generates, "it generates between the pause and the new weights"
        assert metrics["in_flight"] == 4.0
        resumed = len(core.generated)
        receive = begin(engine.receive({"version": 3}))
        late = begin(engine.submit([replace(request, position=request.position + 2) for request in BATCH]))
        await let_go_on()
        assert not core.generates and not late.done()
        core.takes.set()
        await asyncio.gather(receive, late)
        assert core.generates and core.generated[resumed:] == [3]
        assert len(core.in_flight) == 8, "the late batch joins the first, of which nothing is lost"

    asyncio.run(overtaken())


def test_a_batch_that_comes_behind_a_pause_is_refused() -> None:
    async def refused() -> None:
        engine, core = an_engine("pause")
        pause = begin(engine.pause(3, "keep"))
        await core.reached.wait()
        batch = begin(engine.submit(BATCH))
        await let_go_on()
        core.go_on.set()
        await pause
        with pytest.raises(EngineDirty, match="the sync of version 3 did not finish"):
            await batch
        assert core.generated == []

    asyncio.run(refused())


class Recorder:
    """In place of vLLM: every call is noted and answered."""

    errored = False

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard
        self.engine_core = self

    def __getattr__(self, name: str) -> Any:
        async def answer(*arguments: Any, **options: Any) -> Any:
            self._heard.append(" ".join([name, *map(str, [*arguments, *options.values()])]))
            if name == "call_utility_all_async":
                return [[{"version": 3, "received_bytes": 8.0}]]

        return answer


def test_an_engine_wakes_for_the_weights_first_and_answers_only_then(monkeypatch: pytest.MonkeyPatch) -> None:

    async def turn() -> list[str]:
        heard: list[str] = []
        settings: Any = SimpleNamespace(index=0, layout=RolloutLayout(), adapter=None)
        engine = RolloutEngine(settings)
        engine._engine = Recorder(heard)  # type: ignore[assignment]
        await engine.sleep()
        with pytest.raises(EngineDirty, match="it sleeps, without weights"):
            await engine.submit([])
        await engine.pause(3, "wait")
        await engine.receive({"version": 3})
        await engine.pause(4, "wait")  # awake: nothing to wake
        return heard

    heard = asyncio.run(turn())
    assert heard == [
        "sleep 2", "pause_scheduler_async wait True", "wake_up ['weights']",
        "call_utility_all_async collective_rpc megarl_take_weights None ({'version': 3}, 0)", "update_weight_version 3",
        "wake_up ['kv_cache']", "pause_scheduler_async abort True", "resume_generation", "pause_scheduler_async wait True",
    ]  # fmt: skip


GIB = 2**30
MODELS = {"dense": CONFIG, "experts": QWEN, "latent": DEEPSEEK}
# What the recipe's `rollout.engine_args` may say in megarl's place.
CHOICES = {"enforce_eager", "max_num_batched_tokens", "moe_backend", "block_size"}


def settings(folder: Path, model: str, **more: Any) -> EngineSettings:
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    planned = PlannedEngines(
        ModelShape.from_directory(folder), 1, RolloutLayout(2), "bf16", kv_cache_bytes=GIB, max_concurrent=64,
        batched_tokens=more.pop("batched_tokens", 8192), utilization=None,
    )  # fmt: skip
    common: dict[str, Any] = dict(
        index=0, model_path=str(folder), planned=planned, kv_cache_bytes=GIB, max_model_len=20000, max_new_tokens=8,
        temperature=1.0, stop_token_ids=(), seed=1,
    )  # fmt: skip
    return EngineSettings(**(common | more))


# Of engines on GPUs: the kernel of the experts that takes weights as they are, and what sleep keeps, as no sync sends it.
ON_GPUS: dict[str, tuple[str | None, list[str]]] = {
    "dense": (None, []),
    "experts": ("triton", []),
    "latent": ("triton", ["*.mlp.gate.e_score_correction_bias"]),
}


@pytest.mark.parametrize("model", MODELS)
def test_engines_on_cpus_do_without_graphs_and_chunked_prefill_and_those_on_gpus_may_sleep(
    tmp_path: Path, model: str
) -> None:
    on_cpu = engine_arguments(settings(tmp_path, model, batched_tokens=20000), None)
    on_gpu = engine_arguments(settings(tmp_path, model), 80 * GIB)
    turns = engine_arguments(settings(tmp_path, model, takes_turns=True), 80 * GIB)
    assert on_cpu["enforce_eager"] is True and on_cpu["enable_chunked_prefill"] is False
    assert not {"gpu_memory_utilization", "enable_sleep_mode", "moe_backend"} & on_cpu.keys()
    assert not {"enforce_eager", "enable_chunked_prefill", "enable_sleep_mode"} & on_gpu.keys(), "vLLM's own defaults"
    assert on_gpu["max_num_batched_tokens"] < on_gpu["max_model_len"] <= on_cpu["max_num_batched_tokens"]
    assert (on_gpu.get("moe_backend"), turns["sleep_preserve_parameter_names"]) == ON_GPUS[model]
    assert turns["enable_sleep_mode"] and turns["sleep_mode_offload_cudagraph"], "graphs leave the device, too"


def test_an_engine_beside_a_trainer_asks_for_what_it_needs_alone(tmp_path: Path) -> None:
    """vLLM refuses to start where its share of the whole device is not free, 0.92 by default."""
    needed = settings(tmp_path, "dense").planned.memory.total
    assert engine_arguments(settings(tmp_path, "dense"), 4 * needed)["gpu_memory_utilization"] == 0.25
    stated = settings(tmp_path, "dense", memory_utilization=0.5)
    assert engine_arguments(stated, 4 * needed)["gpu_memory_utilization"] == 0.5
    with pytest.raises(RolloutError, match=f"needs {needed / GIB:.3g} GiB, and its device has {needed / GIB / 2:.3g}: more"):
        engine_arguments(settings(tmp_path, "dense"), needed // 2)


@pytest.mark.parametrize("device_bytes", [None, 80 * GIB])
def test_the_recipe_s_arguments_go_before_megarl_s_choices_and_every_other_one_has_an_owner(
    tmp_path: Path, device_bytes: int | None
) -> None:
    given = {"enforce_eager": False, "max_num_batched_tokens": 4096, "attention_config": {"backend": "FLASH_ATTN"}}
    known, owned = known_engine_args(), set(OWNED_ENGINE_ARGS)
    assert known is not None and owned <= known.keys()
    for model in MODELS:
        plain = settings(tmp_path, model, takes_turns=True, record_routing=True)
        arguments = engine_arguments(dataclasses.replace(plain, engine_args=given), device_bytes)
        assert given.items() <= arguments.items()
        argument_names = engine_arguments(plain, device_bytes).keys()
        assert argument_names <= known.keys()
        # On CPUs it is the start of an engine that refuses these.
        refused_at_start = {"enable_chunked_prefill", "compilation_config", "enable_prefix_caching"} & argument_names
        assert argument_names - owned - CHOICES == refused_at_start
        for name in refused_at_start:
            with pytest.raises(RolloutError, match=f"rollout.engine_args.{name} = True: engines on CPUs need"):
                engine_arguments(dataclasses.replace(plain, engine_args={name: True}), device_bytes)
        right = {name: engine_arguments(plain, device_bytes)[name] for name in refused_at_start}
        assert right.items() <= engine_arguments(dataclasses.replace(plain, engine_args=right), device_bytes).items()


def test_an_argument_that_vllm_lacks_is_named_with_the_nearest_and_one_of_the_recipe_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, monkeypatch)
    given = {"max_num_batched_token": 4096, "max_num_seqs": 9, "logprobs_mode": "raw_logprobs", "enforce_eager": True,
             "max_num_seqz": 9, "logprob_mode": "raw_logprobs", "_api_process_count": 2}  # fmt: skip
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, edited(("rollout.engine_args", given))))
    violations = {violation.key.removeprefix("rollout.engine_args."): violation for violation in caught.value.violations}
    assert violations.keys() == given.keys() - {"enforce_eager"}
    assert "has no such field" in violations["max_num_batched_token"].rule
    assert violations["max_num_batched_token"].nearest == "rollout.engine_args.max_num_batched_tokens"
    assert violations["max_num_seqs"].nearest == violations["max_num_seqz"].nearest == "phases.rollout.max_concurrent"
    assert violations["logprob_mode"].nearest == "remove rollout.engine_args.logprob_mode"
    assert (
        "has no such field" in violations["_api_process_count"].rule and "._" not in violations["_api_process_count"].nearest
    )
    assert violations["logprobs_mode"].nearest == "remove rollout.engine_args.logprobs_mode"


@pytest.mark.parametrize("tokens", ["abc", -5, True])
def test_a_number_that_sizes_are_computed_with_is_checked(tmp_path: Path, tokens: object) -> None:
    with pytest.raises(RecipeError, match="must be a whole number from 1 on"):
        qwen(tmp_path, f"rollout.engine_args={json.dumps({'max_num_batched_tokens': tokens})}")


NULL: dict[str, Any] = {"max_new_tokens": 4096, "engines": 2, "tensor": 4}


def qwen(folder: Path, *overrides: str) -> Recipe:
    """Qwen2.5-7B on eight GPUs, with engine sizes of null."""
    return load_recipe(write_qwen(folder, rollout=NULL), list(overrides))


def test_null_is_what_the_device_leaves_and_enough_for_every_sequence(tmp_path: Path) -> None:
    """128 sequences over two engines, each of up to 5,120 tokens and vLLM's spare block, at 28 layers x 1 group of a rank x
    128 x 2 x 2 bytes."""
    longest = 28 * 128 * 2 * 2 * (5120 + 16)
    caches = {}
    for memory_gib in (34, 36, 80, 141):
        recipe = qwen(tmp_path, f"device.memory_gib={memory_gib}")
        assert recipe.rollout.kv_cache_bytes is not None and recipe.phases.rollout.max_concurrent == 64
        forecast = forecast_of(write_qwen(tmp_path, rollout=NULL), [f"device.memory_gib={memory_gib}"])
        engines = engines_of(recipe, ModelShape.from_directory(tmp_path / "qwen-model"))
        cache = recipe.rollout.kv_cache_bytes
        assert engines is not None and cache is not None and forecast.engine_room is not None
        assert engines.memory.total <= forecast.engine_room  # the cache is all of it, or all that is of use
        assert engines.memory.total == forecast.engine_room or 64 * longest <= cache < 64 * longest + 2**20
        caches[memory_gib] = cache
    assert list(caches.values()) == sorted(caches.values())
    assert caches[34] < caches[36] and caches[80] == caches[141]
    apart = ["rollout.placement=separate", "rollout.max_staleness=2", "weight_sync.in_flight=keep"]
    stale = qwen(tmp_path, "device.memory_gib=141", "algorithm.mismatch={correction: truncate}", *apart)
    assert stale.phases.rollout.max_concurrent == 3 * 64, "three steps may be under way"
    file = tmp_path / "resolved.yaml"
    file.write_text(recipe_yaml(recipe))
    assert load_recipe(file) == recipe
    sizes = f"engines: {caches[141] / GIB:.3g} GiB of KV cache a worker, 64 sequences at a time"
    assert engine_lines(recipe) == [stream_line(recipe), sizes]


def test_on_cpus_null_is_small_and_without_a_device_a_run_settles_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = qwen(tmp_path, "device={memory_gib: 80, kind: cpu}")
    assert (on_cpu.rollout.kv_cache_bytes, on_cpu.phases.rollout.max_concurrent) == (256 << 20, 64)
    monkeypatch.setattr("megarl.recipe.sizes.vllm_is_for_cpus", lambda: False)
    unsized = qwen(tmp_path, "device=null")
    assert unsized.rollout.kv_cache_bytes is None and "null" in engine_lines(unsized)[1]
    assert with_engine_sizes(unsized, None).rollout.kv_cache_bytes == 256 << 20
    # The device that is found counts as the one that is stated.
    detected, stated = with_engine_sizes(unsized, 80 * GIB), qwen(tmp_path, "device.memory_gib=80")
    assert detected.rollout == stated.rollout and detected.phases == stated.phases


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        (["device.memory_gib=14"], "rollout.kv_cache_bytes", "more rollout.tensor, or actor.memory.offload: all"),
        (["rollout.kv_cache_bytes=85899345920"], "rollout.kv_cache_bytes", "the device has 80 GiB; nearest: at most"),
        (["rollout.memory_utilization=0.92"], "rollout.memory_utilization", "73.6 GiB are free with .* nearest: null"),
        (["device.memory_gib=36", "rollout.memory_utilization=0.9"], "rollout.memory_utilization", "are free with"),
    ],
    ids=["no sequence fits", "an engine larger than its device", "vLLM's own share", "a share that the cache would fill"],
)
def test_engines_that_cannot_start_are_refused(tmp_path: Path, overrides: list[str], key: str, text: str) -> None:
    with pytest.raises(RecipeError, match=text) as caught:
        qwen(tmp_path, *overrides)
    assert [violation.key for violation in caught.value.violations] == [key]


def test_the_nearest_cache_fits_beside_the_idle_trainer(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="GiB of the trainer's idle roles, and the device has 80 GiB") as caught:
        qwen(tmp_path, f"rollout.kv_cache_bytes={80 * GIB}")
    (violation,) = caught.value.violations
    most = int(violation.nearest.removeprefix("at most "))
    file = write_qwen(tmp_path, rollout=NULL)
    assert forecast_of(file, [f"rollout.kv_cache_bytes={most}"]).fits
    assert not forecast_of(file, [f"rollout.kv_cache_bytes={most + GIB}"]).fits
    with pytest.raises(RecipeError, match="nearest: more rollout.tensor first, or actor.memory.offload: all"):
        qwen(tmp_path, f"rollout.kv_cache_bytes={80 * GIB}", "device.memory_gib=20")


def test_a_megarl_that_is_only_on_the_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM finds its weight transfer by an entry point, which only an installed package has."""
    plugin.require_installed()
    monkeypatch.setattr(plugin, "entry_points", lambda **_: ())
    with pytest.raises(RolloutError, match="is not installed there; `pip install"):
        plugin.require_installed()
