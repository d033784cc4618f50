"""What an engine's layout may be is said before anything starts, and agrees with what the reshard plan cuts."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.vllm_weights import check_layout, vllm_boxes
from megarl.planner.check import engine_name, stream_line
from megarl.recipe import RecipeError, load_recipe
from megarl.recipe.device_section import DeviceSection
from megarl.recipe.phases_section import rollout_and_reward_phases
from megarl.recipe.role_sections import LoraSection
from megarl.recipe.rollout_section import engines_fit_model, rollout_rules
from megarl.recipe.weight_sync_section import weight_sync_fits_model, weight_sync_rules
from tests.recipe_cases import CONFIG, edited, make_folder, write
from tests.rollout_cases import recipe, without_vllm_table
from tests.weight_sync.test_buckets import BLOCKS
from tests.weight_sync.test_fp8_experts import DEEPSEEK

EXPERTS: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2,
                           "moe_intermediate_size": 24, "num_hidden_layers": 3}  # fmt: skip
SHAPES = {
    "dense": ModelShape.from_config(CONFIG | {"num_hidden_layers": 3}),
    "experts": ModelShape.from_config(CONFIG | EXPERTS),
    "the first two layers without experts": ModelShape.from_config(CONFIG | EXPERTS | {"mlp_only_layers": [0, 1]}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_layout_is_legal_where_the_plan_and_vllm_take_it(name: str) -> None:
    shape = SHAPES[name]
    for tensor, pipeline, data, dealt in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 3, 4), (False, True)):
        layout = RolloutLayout(tensor, pipeline, data, dealt)
        found = list(engines_fit_model(recipe(Path("model"), **asdict(layout)), shape))
        try:
            check_layout(shape, layout)
            legal = True
        except ValueError:
            legal = False
        legal &= not (shape.experts is None and data > 1)  # more engines do the same
        legal &= not (name.startswith("the first") and pipeline > 1)  # [0], [1], [2] or [0, 1], [2]
        assert legal == (not found), (layout, found)
        assert all(one.key in ("rollout." + key for key in asdict(layout)) and one.nearest for one in found)


BROKEN: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "more stages than layers": ("tiny", {"pipeline": 5}, {"rollout.pipeline": "at most the 4 layers of the model"}),
    "experts of a model without any": ("tiny", {"data": 2, "expert_parallel": True, "engines": 3}, {
        "rollout.expert_parallel": "a model with experts false", "rollout.data": "1, and rollout.engines: 6",
    }),
    "experts dealt over one rank": ("experts", {"expert_parallel": True}, {"rollout.expert_parallel": "there is one false"}),
    "experts cut too finely": ("experts", {"tensor": 4, "data": 2}, {
        "rollout.data": "rollout.tensor x rollout.data = 4 x 2 must divide the 36 feed-forward rows of an expert 1",
    }),
    "fewer experts than ranks": ("experts", {"tensor": 4, "data": 4, "expert_parallel": True}, {
        "rollout.data": "rollout.tensor x rollout.data = 4 x 4 must be at most the 8 experts 2",
    }),
    "a stage without experts": ("late experts", {"pipeline": 4}, {
        "rollout.pipeline": "leaves a stage with layers 0 to 0, none with experts, where vLLM does not start 2",
    }),
    "uneven shares of the sequences": ("experts", {"tensor": 4, "data": 3, "expert_parallel": True}, {
        "phases.rollout.max_concurrent": "a multiple of the 3 data-parallel ranks", "rollout.data": "4 x 3",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_layout_that_cannot_run_is_named_with_a_way_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rollout, expected = BROKEN[name]
    folder = make_folder(tmp_path, monkeypatch)
    keys = [("model.path", model), *((f"rollout.{key}", value) for key, value in rollout.items())]
    keys.append(("phases.rollout.max_concurrent", 64))
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, edited(*keys)))
    found = {one.key: f"{one.rule} {one.nearest}" for one in caught.value.violations if "rollout" in one.key}
    assert found.keys() == expected.keys()
    for key, text in expected.items():
        assert text in found[key], found[key]


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_engines_that_sleep_have_what_they_keep_on_every_stage(kind: str) -> None:
    """Experts in the last of three layers alone, and their bias, which no sync sends."""
    shape = ModelShape.from_config(DEEPSEEK | {"num_hidden_layers": 3, "first_k_dense_replace": 2})
    made = recipe(Path("model"), pipeline=2)
    made = made.model_copy(update={"device": DeviceSection.model_validate({"memory_gib": 80, "kind": kind})})
    found = [f"{one.key} {one.rule}" for one in engines_fit_model(made, shape)]
    refused = "rollout.pipeline leaves a stage with layers 0 to 1, none with experts, where vLLM does not sleep"
    assert found == ([refused] if kind == "gpu" else [])


def test_recorded_experts_need_all_layers_and_tokens_in_one_place() -> None:
    wanted = recipe(Path("model"), pipeline=2, data=2)
    assert not list(rollout_rules(wanted))
    wanted = wanted.model_copy(update={"actor": wanted.actor.model_copy(update={"router_replay": True})})
    assert {one.key for one in rollout_rules(wanted)} == {"rollout.pipeline", "rollout.data"}


def test_a_stage_caches_its_own_layers_and_sends_its_own_rows() -> None:
    """Two of three layers: 2 groups x 16 x 2 elements of 4 bytes a token."""
    needed = 2 * 2 * 2 * 16 * 4 * 40
    assert not list(engines_fit_model(recipe(Path("model"), pipeline=2, kv_cache_bytes=needed), SHAPES["dense"]))
    (short,) = engines_fit_model(recipe(Path("model"), pipeline=2, kv_cache_bytes=needed - 1), SHAPES["dense"])
    assert short.nearest == str(needed)
    wide = recipe(Path("model"), tensor=4, pipeline=3)
    tight = wide.model_copy(update={"weight_sync": wide.weight_sync.model_copy(update={"bucket_bytes": 64 * 4 + 255})})
    assert not list(weight_sync_fits_model(wide, SHAPES["dense"]))
    assert [one.nearest for one in weight_sync_fits_model(tight, SHAPES["dense"])] == [str(64 * 4 + 256)]


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("lora", [None, LoraSection(rank=4, alpha=8.0)])
def test_weights_that_are_made_while_they_are_sent_cannot_be_mapped(
    quantization: str | None, lora: LoraSection | None
) -> None:
    made = recipe(Path("model"), quantization=quantization, precision="bf16")
    made = made.model_copy(update={"actor": made.actor.model_copy(update={"lora": lora})})
    for transport in ("auto", "group", "mapped"):
        section = made.weight_sync.model_copy(update={"transport": transport})
        violations = list(weight_sync_rules(made.model_copy(update={"weight_sync": section})))
        is_refused = transport == "mapped" and (quantization is not None or lora is not None)
        assert [(one.key, one.nearest) for one in violations] == [("weight_sync.transport", "auto or group")] * is_refused


def test_checkpoint_mode_takes_no_dealt_experts() -> None:
    for mode, dealt, refused in (("checkpoint", True, True), ("checkpoint", False, False), ("reshard", True, False)):
        one = recipe(Path("model"), tensor=2, expert_parallel=dealt)
        one = one.model_copy(update={"weight_sync": one.weight_sync.model_copy(update={"mode": mode})})
        assert bool(list(weight_sync_rules(one))) == refused


def test_a_family_without_a_table_of_vllm_takes_whole_tensors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path, monkeypatch)
    whole = edited(("weight_sync", {"mode": "checkpoint"}))
    load_recipe(write(folder, edited()))
    with without_vllm_table("qwen3"):
        with pytest.raises(RecipeError) as refused:
            load_recipe(write(folder, edited()))
        (found,) = refused.value.violations
        assert (found.key, found.nearest) == ("weight_sync.mode", "checkpoint") and "qwen3" in found.rule
        load_recipe(write(folder, whole))
        with pytest.raises(ValueError, match=r"where vLLM holds input_layernorm\.weight; weight_sync\.mode: checkpoint"):
            vllm_boxes(ModelShape.from_config(CONFIG), RolloutLayout())
    small = {"mode": "checkpoint", "bucket_bytes": 300}
    with pytest.raises(RecipeError, match="must hold a row of"):
        load_recipe(write(folder, edited(("weight_sync", small))))


ON_EXPERTS = [("model.path", "experts"), ("actor.layout.tensor", 1), ("actor.layout.expert_tensor", 1)]
ROUTING = [*ON_EXPERTS, ("actor.router_replay", True)]
LATENT = [("model.path", "latent"), ("actor.layout.tensor", 1)]
ROTARY = {"custom_ops": ["-rotary_embedding"]}
# (edits, the key that a run on CPUs refuses, or None for a legal value)
ON_CPUS: dict[str, tuple[list[tuple[str, Any]], str | None]] = {
    "cut prompts": (
        [("rollout.engine_args", {"enable_chunked_prefill": True})],
        "rollout.engine_args.enable_chunked_prefill",
    ),
    "whole prompts": ([("rollout.engine_args", {"enable_chunked_prefill": False})], None),
    "a cache of routing": (
        [*ROUTING, ("rollout.engine_args", {"enable_prefix_caching": True})],
        "rollout.engine_args.enable_prefix_caching",
    ),
    "no cache of routing": ([*ROUTING, ("rollout.engine_args", {"enable_prefix_caching": False})], None),
    "a cache": ([("rollout.engine_args", {"enable_prefix_caching": True})], None),
    "vLLM's rotary kernel": (
        [*LATENT, ("rollout.engine_args", {"compilation_config": {"custom_ops": ["all"]}})],
        "rollout.engine_args.compilation_config",
    ),
    "torch's rotation": ([*LATENT, ("rollout.engine_args", {"compilation_config": ROTARY})], None),
    "FP8 blocks": ([("model.path", "blocks"), ("rollout.quantization", "fp8"), ("rollout.precision", "bf16")],
                   "rollout.quantization"),
    "FP8 products": ([("trainer.fp8", "mxfp8"), ("trainer.precision", "bf16"), ("actor.layout.tensor", 1)], "trainer.fp8"),
    "dealt experts": (
        [*ON_EXPERTS, ("rollout.expert_parallel", True), ("rollout.tensor", 2), ("rollout.data", 2)],
        "rollout.expert_parallel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_CPUS)
def test_a_check_asks_the_recipe_s_device_and_a_start_asks_its_machine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine has no GPU. Its check of a recipe for GPUs, or for an unknown device, passes; its start does not."""
    from megarl.build import check_models

    edits, refused = ON_CPUS[name]
    folder = make_folder(tmp_path, monkeypatch)
    for model, config in (("latent", DEEPSEEK), ("blocks", BLOCKS)):
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(config))
    file = write(folder, edited(*edits))
    for device in ("device=null", "device={memory_gib: 80, kind: gpu}"):
        with pytest.raises(RecipeError) as at_start:
            check_models(load_recipe(file, [device]))
        assert {one.key for one in at_start.value.violations} - {"model.path"} == {refused} - {None}
    on_cpus = "device={memory_gib: 80, kind: cpu}"
    if refused is None:
        load_recipe(file, [on_cpus])
        return
    with pytest.raises(RecipeError) as at_check:
        load_recipe(file, [on_cpus])
    assert [one.key for one in at_check.value.violations] == [refused]


def test_engines_are_named_by_what_is_cut() -> None:
    assert engine_name(RolloutLayout(2)) == "TP2"
    assert engine_name(RolloutLayout(1, 2, 4, True)) == "TP1 x PP2 x DP4 x EP"
    assert not list(rollout_and_reward_phases(recipe(Path("model"), data=7)))


# What a run that samples ahead says, and GPUs for it.
AHEAD = ["rollout.max_staleness=2", "weight_sync.in_flight=keep", "algorithm.mismatch={correction: truncate}"]
ON_GPUS = "device={memory_gib: 80, kind: gpu}"
ABORT = "weight_sync.in_flight=abort"
REPLAY_EXPERTS = ["model.path=experts", "actor.layout={expert_tensor: 1}", "actor.router_replay=true", *AHEAD]
# The recipe has 8 prompts a step. (overrides, the key that is refused or None, parts of the rule and of the way out)
STREAMS: dict[str, tuple[list[str], str | None, list[str]]] = {
    "the prompts of a step alone, without staleness": (["rollout.window=8"], None, []),
    "less than a step": (["rollout.window=7"], "rollout.window", ["phases.rollout.prompts = 8", "nearest: 8"]),
    "two steps without staleness": (["rollout.window=16"], "rollout.window", ["= 8 groups are under way", "nearest: 8"]),
    "all that are under way": ([*AHEAD, "rollout.window=24"], None, []),
    "more than are under way": ([*AHEAD, "rollout.window=25"], "rollout.window", ["= 24 groups", "nearest: 24"]),
    "on the trainer's CPUs": ([*AHEAD, "device={memory_gib: 80, kind: cpu}"], None, []),
    "on the trainer's GPUs": ([*AHEAD, ON_GPUS], "rollout.placement", ["sleep", "separate, or rollout.max_staleness: 0"]),
    "on the trainer's GPUs, without staleness": ([ON_GPUS], None, []),
    "on other GPUs": ([*AHEAD, ON_GPUS, "rollout.placement=separate"], None, []),
    "engines that run empty at a sync": (
        [*AHEAD, "weight_sync.in_flight=wait"], "weight_sync.in_flight", ["longest completion", "keep or abort"]
    ),
    "one choice of experts, kept": (REPLAY_EXPERTS, "weight_sync.in_flight", ["two versions", "nearest: abort, or"]),
    "one choice of experts, begun again": ([*REPLAY_EXPERTS, ABORT], None, []),
    "fixed batches": ([*AHEAD, "rollout.replay=."], "rollout.max_staleness", ["fixed batch", "nearest: 0, or remove"]),
    "batches to fix": ([*AHEAD, "run.dump_rollouts=true"], "run.dump_rollouts", ["knows no staleness", "nearest: false"]),
    "values of parts": (["phases.critic_value.start=early"], None, []),
    "values of parts of what is sampled ahead": (
        [*AHEAD, "phases.critic_value.start=early"], "phases.critic_value.start", ["sampled ahead", "nearest: whole"]
    ),
    "parts on the engines' GPUs": (
        [ON_GPUS, "phases.critic_value.start=early"], "phases.critic_value.start", ["take turns", "nearest: whole"]
    ),
    "parts of ten groups": (
        ["phases.rollout.prompts=10", "phases.critic_update.mini_batch=20", "phases.actor_update.mini_batch=10",
         "phases.critic_value.start=early"],
        "phases.critic_value.start", ["no 4 equal parts", "nearest: whole"]
    ),
    "steps to abandon": ([*AHEAD, "run.preemption=abandon"], "run.preemption", ["before each step", "nearest: finish, or"]),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_sampling_ahead_is_refused_where_it_cannot_work(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, key, parts = STREAMS[name]
    file = write(make_folder(tmp_path, monkeypatch), edited())
    if key is None:
        load_recipe(file, overrides)
        return
    with pytest.raises(RecipeError) as refused:
        load_recipe(file, overrides)
    (violation,) = refused.value.violations
    assert violation.key == key and all(part in str(violation) for part in parts), str(violation)


@pytest.mark.parametrize(("overrides", "window"), [([], 8), (AHEAD, 16), ([*AHEAD, "rollout.window=11"], 11)])
def test_the_window_is_of_one_step_or_two_unless_it_is_set(
    overrides: list[str], window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_recipe(write(make_folder(tmp_path, monkeypatch), edited()), overrides)
    assert loaded.window == window
    assert f"of the oldest {window} (rollout.window)" in stream_line(loaded)
