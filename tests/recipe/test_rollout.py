"""What an engine's layout may be is said before anything starts, and agrees with what the reshard plan cuts."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.vllm_weights import check_layout, vllm_segments
from megarl.recipe import RecipeError, load_recipe, rollout_rules
from megarl.recipe.rollout_rules import bucket, concurrent, cut, kv_cache, own_devices, reload, routed_experts
from megarl.recipe.sections import DeviceSection
from megarl.recipe.table import engine_name
from tests.recipe_cases import CONFIG, edited, make_folder, write
from tests.rollout.test_fp8_experts import DEEPSEEK
from tests.rollout_cases import recipe, without_vllm_table

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
        found = list(cut(recipe(Path("model"), **asdict(layout)), shape))
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
    "experts of a model without any": (
        "tiny",
        {"data": 2, "expert_parallel": True, "engines": 3},
        {"rollout.expert_parallel": "no experts false", "rollout.data": "1, and rollout.engines: 6"},
    ),
    "experts dealt over one rank": ("experts", {"expert_parallel": True}, {"rollout.expert_parallel": "there is one false"}),
    "experts cut too finely": (
        "experts",
        {"tensor": 4, "data": 2},
        {"rollout.data": "rollout.tensor x rollout.data = 8, which must divide the 36 rows of an expert 1"},
    ),
    "fewer experts than ranks": (
        "experts",
        {"tensor": 4, "data": 4, "expert_parallel": True},
        {
            "rollout.data": "rollout.tensor x rollout.data = 16, and the model has 8 experts 2",
            "rollout.expert_parallel": "CPUs",
        },
    ),
    "a stage without experts": (
        "late experts",
        {"pipeline": 4},
        {"rollout.pipeline": "leaves a stage with layers 0 to 0, none with experts, where vLLM does not start 2"},
    ),
    "uneven shares of the sequences": (
        "experts",
        {"tensor": 4, "data": 3, "expert_parallel": True},
        {
            "phases.rollout.max_concurrent": "a multiple of the 3 data-parallel ranks",
            "rollout.data": "12",
            "rollout.expert_parallel": "CPUs",
        },
    ),
}


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
    found = [f"{one.key} {one.rule}" for one in cut(made, shape)]
    refused = "rollout.pipeline leaves a stage with layers 0 to 1, none with experts, where vLLM does not sleep"
    assert found == ([refused] if kind == "gpu" else [])


def test_recorded_experts_need_all_layers_and_tokens_in_one_place() -> None:
    wanted = recipe(Path("model"), pipeline=2, data=2)
    assert not list(routed_experts(wanted))
    wanted = wanted.model_copy(update={"actor": wanted.actor.model_copy(update={"router_replay": True})})
    assert {one.key for one in routed_experts(wanted)} == {"rollout.pipeline", "rollout.data"}


def test_a_stage_caches_its_own_layers_and_sends_its_own_rows() -> None:
    """Two of three layers: 2 groups x 16 x 2 elements of 4 bytes a token."""
    needed = 2 * 2 * 2 * 16 * 4 * 40
    assert not list(kv_cache(recipe(Path("model"), pipeline=2, kv_cache_bytes=needed), SHAPES["dense"]))
    (short,) = kv_cache(recipe(Path("model"), pipeline=2, kv_cache_bytes=needed - 1), SHAPES["dense"])
    assert short.nearest == str(needed)
    wide = recipe(Path("model"), tensor=4, pipeline=3)
    tight = wide.model_copy(update={"weight_sync": wide.weight_sync.model_copy(update={"bucket_bytes": 64 * 4 + 255})})
    assert not list(bucket(wide, SHAPES["dense"]))
    assert [one.nearest for one in bucket(tight, SHAPES["dense"])] == [str(64 * 4 + 256)]


def test_nccl_needs_devices_that_no_rank_has() -> None:
    for transport, placement, refused in (("nccl", "colocated", 1), ("nccl", "separate", 0), ("auto", "colocated", 0)):
        one = recipe(Path("model"), placement=placement)
        one = one.model_copy(update={"weight_sync": one.weight_sync.model_copy(update={"transport": transport})})
        assert [found.key for found in own_devices(one)] == ["weight_sync.transport"] * refused


def test_checkpoint_mode_takes_no_dealt_experts() -> None:
    for mode, dealt, refused in (("checkpoint", True, True), ("checkpoint", False, False), ("reshard", True, False)):
        one = recipe(Path("model"), tensor=2, expert_parallel=dealt)
        one = one.model_copy(update={"weight_sync": one.weight_sync.model_copy(update={"mode": mode})})
        assert bool(list(reload(one))) == refused


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
            vllm_segments(ModelShape.from_config(CONFIG), RolloutLayout())
    small = {"mode": "checkpoint", "bucket_bytes": 300}
    with pytest.raises(RecipeError, match="must hold a row of"):
        load_recipe(write(folder, edited(("weight_sync", small))))


def test_experts_dealt_over_tensor_and_data_parallel_ranks_are_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rollout_rules.vllm_is_for_cpus()  # as the lock says
    both = {"tensor": 2, "data": 2, "expert_parallel": True}
    (found,) = rollout_rules.on_cpu(recipe(Path("model"), **both))
    assert found.key == "rollout.expert_parallel"
    for change in ({"tensor": 1}, {"data": 1}, {"expert_parallel": False}):
        assert not list(rollout_rules.on_cpu(recipe(Path("model"), **both | change)))
    monkeypatch.setattr(rollout_rules, "vllm_is_for_cpus", lambda: False)
    assert not list(rollout_rules.on_cpu(recipe(Path("model"), **both)))


def test_engines_are_named_by_what_is_cut() -> None:
    assert engine_name(RolloutLayout(2)) == "TP2"
    assert engine_name(RolloutLayout(1, 2, 4, True)) == "TP1 x PP2 x DP4 x EP"
    assert not list(concurrent(recipe(Path("model"), data=7)))
