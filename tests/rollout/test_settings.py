"""What vLLM is started with on CPUs and on GPUs, and the sizes that a recipe leaves to megarl. No engine is started."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.planner.check import engine_lines, stream_line
from megarl.planner.engine_memory import PlannedEngines
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.recipe.load import recipe_yaml
from megarl.recipe.rollout_section import OWNED_ENGINE_ARGS, known_engine_args
from megarl.recipe.sizes import engines_of, with_engine_sizes
from megarl.rollout import RolloutError, plugin
from megarl.rollout.engine_settings import EngineSettings, engine_arguments
from tests.planner_cases import forecast_of, write_qwen
from tests.recipe_cases import CONFIG, edited, make_folder, write
from tests.weight_sync.test_fp8_experts import DEEPSEEK, QWEN

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


@pytest.mark.parametrize("model", MODELS)
def test_only_engines_on_cpus_do_without_graphs_and_chunked_prefill(tmp_path: Path, model: str) -> None:
    on_cpu = engine_arguments(settings(tmp_path, model, batched_tokens=20000), None)
    on_gpu = engine_arguments(settings(tmp_path, model, takes_turns=True), 80 * GIB)
    assert on_cpu["enforce_eager"] is True and on_cpu["enable_chunked_prefill"] is False
    assert not {"enforce_eager", "enable_chunked_prefill"} & on_gpu.keys()  # vLLM's own defaults
    assert on_gpu["max_num_batched_tokens"] < on_gpu["max_model_len"] <= on_cpu["max_num_batched_tokens"]
    assert not {"gpu_memory_utilization", "enable_sleep_mode", "moe_backend"} & on_cpu.keys()


def test_an_engine_beside_a_trainer_asks_for_what_it_needs_alone(tmp_path: Path) -> None:
    """vLLM refuses to start where its share of the whole device is not free, 0.92 by default."""
    needed = settings(tmp_path, "dense").planned.memory.total
    assert engine_arguments(settings(tmp_path, "dense"), 4 * needed)["gpu_memory_utilization"] == 0.25
    stated = settings(tmp_path, "dense", memory_utilization=0.5)
    assert engine_arguments(stated, 4 * needed)["gpu_memory_utilization"] == 0.5
    with pytest.raises(RolloutError, match=f"needs {needed / GIB:.3g} GiB, and its device has {needed / GIB / 2:.3g}: more"):
        engine_arguments(settings(tmp_path, "dense"), needed // 2)


def test_experts_have_the_kernel_that_takes_weights_as_they_are(tmp_path: Path) -> None:
    backend = {model: engine_arguments(settings(tmp_path, model), 80 * GIB).get("moe_backend") for model in MODELS}
    assert backend == {"dense": None, "experts": "triton", "latent": "triton"}


def test_sleep_keeps_what_no_sync_sends_and_leaves_no_graphs_on_the_device(tmp_path: Path) -> None:
    kept = {
        model: engine_arguments(settings(tmp_path, model, takes_turns=True), 80 * GIB)["sleep_preserve_parameter_names"]
        for model in MODELS
    }
    assert kept == {"dense": [], "experts": [], "latent": ["*.mlp.gate.e_score_correction_bias"]}
    turns = engine_arguments(settings(tmp_path, "dense", takes_turns=True), 80 * GIB)
    assert turns["enable_sleep_mode"] and turns["sleep_mode_offload_cudagraph"]
    assert "enable_sleep_mode" not in engine_arguments(settings(tmp_path, "dense"), 80 * GIB)


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
        made = engine_arguments(plain, device_bytes).keys()
        assert made <= known.keys()
        # On CPUs it is the start of an engine that refuses these.
        refused_at_start = {"enable_chunked_prefill", "compilation_config", "enable_prefix_caching"} & made
        assert made - owned - CHOICES == refused_at_start
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
    found = {one.key.removeprefix("rollout.engine_args."): one for one in caught.value.violations}
    assert found.keys() == given.keys() - {"enforce_eager"}
    assert "has no such field" in found["max_num_batched_token"].rule
    assert found["max_num_batched_token"].nearest == "rollout.engine_args.max_num_batched_tokens"
    assert found["max_num_seqs"].nearest == found["max_num_seqz"].nearest == "phases.rollout.max_concurrent"
    assert found["logprob_mode"].nearest == "remove rollout.engine_args.logprob_mode"
    assert "has no such field" in found["_api_process_count"].rule and "._" not in found["_api_process_count"].nearest
    assert found["logprobs_mode"].nearest == "remove rollout.engine_args.logprobs_mode"


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
        found = forecast_of(write_qwen(tmp_path, rollout=NULL), [f"device.memory_gib={memory_gib}"])
        engines = engines_of(recipe, ModelShape.from_directory(tmp_path / "qwen-model"))
        cache = recipe.rollout.kv_cache_bytes
        assert engines is not None and cache is not None and found.engine_room is not None
        assert engines.memory.total <= found.engine_room  # the cache is all of it, or all that is of use
        assert engines.memory.total == found.engine_room or 64 * longest <= cache < 64 * longest + 2**20
        caches[memory_gib] = cache
    assert list(caches.values()) == sorted(caches.values())
    assert caches[34] < caches[36] and caches[80] == caches[141]
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
    found, stated = with_engine_sizes(unsized, 80 * GIB), qwen(tmp_path, "device.memory_gib=80")
    assert found.rollout == stated.rollout and found.phases == stated.phases


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
    assert [one.key for one in caught.value.violations] == [key]


def test_a_megarl_that_is_only_on_the_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM finds its weight transfer by an entry point, which only an installed package has."""
    plugin.require_installed()
    monkeypatch.setattr(plugin, "entry_points", lambda **_: ())
    with pytest.raises(RolloutError, match="is not installed there; `pip install"):
        plugin.require_installed()
