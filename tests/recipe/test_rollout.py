"""What an engine's layout may be, and the form of weights on their way to it, is said before anything starts, and agrees
with what the reshard plan cuts."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.vllm_weights import check_layout, vllm_boxes
from megarl.planner.check import engine_name, stream_line
from megarl.recipe import RecipeError, load_recipe
from megarl.recipe.phases_section import rollout_and_reward_phases
from megarl.recipe.recipe import Recipe
from megarl.recipe.role_sections import LoraSection, adapters_fit_model
from megarl.recipe.rollout_section import engines_fit_model, rollout_rules
from megarl.recipe.weight_sync_section import weight_sync_fits_model, weight_sync_rules
from tests.recipe_cases import CONFIG, edited, refusals, write
from tests.rollout_cases import recipe, without_vllm_table
from tests.weight_sync.test_buckets import BLOCKS, MOE
from tests.weight_sync.test_fp8_experts import DEEPSEEK

MODEL = Path("model")  # no rule here reads it
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
        violations = list(engines_fit_model(recipe(MODEL, **asdict(layout)), shape))
        try:
            check_layout(shape, layout)
            legal = True
        except ValueError:
            legal = False
        legal &= not (shape.experts is None and data > 1)  # more engines do the same
        legal &= not (name.startswith("the first") and pipeline > 1)  # [0], [1], [2] or [0, 1], [2]
        assert legal == (not violations), (layout, violations)
        assert all(
            violation.key in ("rollout." + key for key in asdict(layout)) and violation.nearest for violation in violations
        )


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
def test_a_layout_that_cannot_run_is_named_with_a_way_out(name: str, folder: Path) -> None:
    model, rollout, expected = BROKEN[name]
    keys = [("model.path", model), *((f"rollout.{key}", value) for key, value in rollout.items())]
    refused = refusals(*keys, ("phases.rollout.max_concurrent", 64))
    refused = {key: text for key, text in refused.items() if "rollout" in key}
    assert refused.keys() == expected.keys()
    for key, text in expected.items():
        assert text in refused[key], refused[key]


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_engines_that_sleep_have_what_they_keep_on_every_stage(kind: str) -> None:
    """Experts in the last of three layers alone, and their bias, which no sync sends."""
    shape = ModelShape.from_config(DEEPSEEK | {"num_hidden_layers": 3, "first_k_dense_replace": 2})
    two_stages = recipe(MODEL, ("device", {"memory_gib": 80, "kind": kind}), pipeline=2)
    faults = [f"{violation.key} {violation.rule}" for violation in engines_fit_model(two_stages, shape)]
    refused = "rollout.pipeline leaves a stage with layers 0 to 1, none with experts, where vLLM does not sleep"
    assert faults == ([refused] if kind == "gpu" else [])


def test_recorded_experts_need_all_layers_and_tokens_in_one_place() -> None:
    assert not list(rollout_rules(recipe(MODEL, pipeline=2, data=2)))
    recorded = recipe(MODEL, ("actor.router_replay", True), pipeline=2, data=2)
    assert {violation.key for violation in rollout_rules(recorded)} == {"rollout.pipeline", "rollout.data"}


def test_a_stage_caches_its_own_layers_and_sends_its_own_rows() -> None:
    """Two of three layers: 2 groups x 16 x 2 elements of 4 bytes a token."""
    needed = 2 * 2 * 2 * 16 * 4 * 40
    assert not list(engines_fit_model(recipe(MODEL, pipeline=2, kv_cache_bytes=needed), SHAPES["dense"]))
    (short,) = engines_fit_model(recipe(MODEL, pipeline=2, kv_cache_bytes=needed - 1), SHAPES["dense"])
    assert short.nearest == str(needed)
    wide = recipe(MODEL, tensor=4, pipeline=3)
    tight = recipe(MODEL, ("weight_sync.bucket_bytes", 64 * 4 + 255), tensor=4, pipeline=3)
    assert not list(weight_sync_fits_model(wide, SHAPES["dense"]))
    assert [violation.nearest for violation in weight_sync_fits_model(tight, SHAPES["dense"])] == [str(64 * 4 + 256)]


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("lora", [None, LoraSection(rank=4, alpha=8.0)])
def test_weights_that_are_made_while_they_are_sent_cannot_be_mapped(
    quantization: str | None, lora: LoraSection | None
) -> None:
    for transport in ("auto", "group", "mapped"):
        edits = ("actor.lora", lora), ("weight_sync.transport", transport)
        violations = list(weight_sync_rules(recipe(MODEL, *edits, quantization=quantization, precision="bf16")))
        is_refused = transport == "mapped" and (quantization is not None or lora is not None)
        assert [(violation.key, violation.nearest) for violation in violations] == [
            ("weight_sync.transport", "auto or group")
        ] * is_refused


def test_checkpoint_mode_takes_no_dealt_experts() -> None:
    for mode, dealt, refused in (("checkpoint", True, True), ("checkpoint", False, False), ("reshard", True, False)):
        checked = recipe(MODEL, ("weight_sync.mode", mode), tensor=2, expert_parallel=dealt)
        assert bool(list(weight_sync_rules(checked))) == refused


def test_a_family_without_a_table_of_vllm_takes_whole_tensors_alone(folder: Path) -> None:
    load_recipe(write(folder, edited()))
    with without_vllm_table("qwen3"):
        ((key, rule),) = refusals().items()
        assert key == "weight_sync.mode" and "qwen3" in rule and rule.endswith(" checkpoint")
        load_recipe(write(folder, edited(("weight_sync", {"mode": "checkpoint"}))))
        with pytest.raises(ValueError, match=r"where vLLM holds input_layernorm\.weight; weight_sync\.mode: checkpoint"):
            vllm_boxes(ModelShape.from_config(CONFIG), RolloutLayout())
    assert "must hold a row of" in str(refusals(("weight_sync", {"mode": "checkpoint", "bucket_bytes": 300})))


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
def test_a_check_asks_the_recipe_s_device_and_a_start_asks_its_machine(name: str, folder: Path) -> None:
    """This machine has no GPU. Its check of a recipe for GPUs, or for an unknown device, passes; its start does not."""
    from megarl.build import check_models

    edits, refused = ON_CPUS[name]
    for model, config in (("latent", DEEPSEEK), ("blocks", BLOCKS)):
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(config))
    file = write(folder, edited(*edits))
    for device in ("device=null", "device={memory_gib: 80, kind: gpu}"):
        with pytest.raises(RecipeError) as at_start:
            check_models(load_recipe(file, [device]))
        assert {violation.key for violation in at_start.value.violations} - {"model.path"} == {refused} - {None}
    on_cpus = "device={memory_gib: 80, kind: cpu}"
    if refused is None:
        load_recipe(file, [on_cpus])
        return
    assert [*refusals(*edits, overrides=[on_cpus])] == [refused]


@pytest.mark.parametrize(("kind", "least"), [("gpu", 6), ("cpu", 64)])
def test_a_batch_of_an_engine_holds_its_sequences_and_on_cpus_a_whole_one(kind: str, least: int, folder: Path) -> None:
    def edits(tokens: int) -> list[tuple[str, Any]]:
        return [("rollout.engine_args", {"max_num_batched_tokens": tokens}), ("phases.rollout.max_concurrent", 6)]

    device = f"device={{memory_gib: 80, kind: {kind}}}"
    load_recipe(write(folder, edited(*edits(least))), [device])
    (text,) = refusals(*edits(least - 1), overrides=[device]).values()
    assert text.startswith("an engine holds 6 sequences at a time") and text.endswith(f" {least}")


def test_engines_are_named_by_what_is_cut() -> None:
    assert engine_name(RolloutLayout(2)) == "TP2"
    assert engine_name(RolloutLayout(1, 2, 4, True)) == "TP1 x PP2 x DP4 x EP"
    assert not list(rollout_and_reward_phases(recipe(MODEL, data=7)))


# What a run that samples ahead says, and GPUs for it.
AHEAD = ["rollout.max_staleness=2", "weight_sync.in_flight=keep", "algorithm.mismatch={correction: truncate}"]
ON_GPUS = "device={memory_gib: 80, kind: gpu}"
ABORT = "weight_sync.in_flight=abort"
REPLAY_EXPERTS = ["model.path=experts", "actor.layout={expert_tensor: 1}", "actor.router_replay=true", *AHEAD]
# The recipe has 8 prompts a step. (overrides, the key that is refused or None, parts of the rule and of the way out)
STREAMS: dict[str, tuple[list[str], str | None, list[str]]] = {
    "the prompts of a step alone, without staleness": (["rollout.window=8"], None, []),
    "less than a step": (["rollout.window=7"], "rollout.window", ["phases.rollout.prompts = 8", "8"]),
    "two steps without staleness": (["rollout.window=16"], "rollout.window", ["= 8 groups are under way", "8"]),
    "all that are under way": ([*AHEAD, "rollout.window=24"], None, []),
    "more than are under way": ([*AHEAD, "rollout.window=25"], "rollout.window", ["= 24 groups", "24"]),
    "on the trainer's CPUs": ([*AHEAD, "device={memory_gib: 80, kind: cpu}"], None, []),
    "on the trainer's GPUs": ([*AHEAD, ON_GPUS], "rollout.placement", ["sleep", "separate, or rollout.max_staleness: 0"]),
    "on the trainer's GPUs, without staleness": ([ON_GPUS], None, []),
    "on other GPUs": ([*AHEAD, ON_GPUS, "rollout.placement=separate"], None, []),
    "engines that run empty at a sync": (
        [*AHEAD, "weight_sync.in_flight=wait"], "weight_sync.in_flight", ["longest completion", "keep or abort"]
    ),
    "one choice of experts, kept": (REPLAY_EXPERTS, "weight_sync.in_flight", ["two versions", "abort, or"]),
    "one choice of experts, begun again": ([*REPLAY_EXPERTS, ABORT], None, []),
    "fixed batches": ([*AHEAD, "rollout.replay=."], "rollout.max_staleness", ["fixed batch", "0, or remove"]),
    "batches to fix": ([*AHEAD, "run.dump_rollouts=true"], "run.dump_rollouts", ["knows no staleness", "false"]),
    "values of parts": (["phases.critic_value.start=early"], None, []),
    "values of parts of what is sampled ahead": (
        [*AHEAD, "phases.critic_value.start=early"], "phases.critic_value.start", ["sampled ahead", "whole"]
    ),
    "parts on the engines' GPUs": (
        [ON_GPUS, "phases.critic_value.start=early"], "phases.critic_value.start", ["take turns", "whole"]
    ),
    "parts of ten groups": (
        ["phases.rollout.prompts=10", "phases.critic_update.mini_batch=20", "phases.actor_update.mini_batch=10",
         "phases.critic_value.start=early"],
        "phases.critic_value.start", ["no 4 equal parts", "whole"]
    ),
    "steps to abandon": ([*AHEAD, "run.preemption=abandon"], "run.preemption", ["before each step", "finish, or"]),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_sampling_ahead_is_refused_where_it_cannot_work(name: str, folder: Path) -> None:
    overrides, key, parts = STREAMS[name]
    if key is None:
        load_recipe(write(folder, edited()), overrides)
        return
    refused = refusals(overrides=overrides)
    assert [*refused] == [key] and all(part in refused[key] for part in parts), refused


@pytest.mark.parametrize(
    ("overrides", "under_way"), [([], 8), (AHEAD, 24), ([*AHEAD, "run.steps=2"], 16), ([*AHEAD, "run.steps=1"], 8)]
)
def test_no_more_groups_are_under_way_than_the_run_has(overrides: list[str], under_way: int, folder: Path) -> None:
    assert f"at most {under_way} groups under way" in stream_line(load_recipe(write(folder, edited()), overrides))


@pytest.mark.parametrize(("overrides", "window"), [([], 8), (AHEAD, 16), ([*AHEAD, "rollout.window=11"], 11)])
def test_the_window_is_of_one_step_or_two_unless_it_is_set(overrides: list[str], window: int, folder: Path) -> None:
    loaded = load_recipe(write(folder, edited()), overrides)
    assert loaded.window == window
    assert f"of the oldest {window} (rollout.window)" in stream_line(loaded)


def fp8_recipe(*edits: tuple[str, Any], **changes: Any) -> Recipe:
    return recipe(
        MODEL, ("weight_sync.bucket_bytes", 1 << 17), *edits, **{"quantization": "fp8", "precision": "bf16"} | changes
    )


def messages(checked: Recipe, config: dict[str, Any]) -> list[str]:
    violations = [*rollout_rules(checked), *weight_sync_fits_model(checked, ModelShape.from_config(config))]
    return [f"{violation.key}: {violation.rule}; {violation.nearest}" for violation in violations]


def test_blocks_that_stay_whole_are_legal() -> None:
    assert messages(fp8_recipe(), BLOCKS) == []
    assert messages(fp8_recipe(tensor=2), BLOCKS) == []
    assert messages(fp8_recipe(tensor=2, expert_parallel=True), BLOCKS | MOE) == []
    assert messages(fp8_recipe(), DEEPSEEK) == [], "a latent vector of 192 rows ends inside its second block"
    assert messages(recipe(MODEL), BLOCKS | {"head_dim": 64}) == [], "without quantisation nothing is asked"


@pytest.mark.parametrize(
    ("changes", "config", "text"),
    [
        ({"precision": "fp32"}, {}, "rollout.quantization: FP8 weights work with activations of 16 bits"),
        ({}, {"head_dim": 64}, "rollout.quantization: FP8 weights have one scale .*k_proj.weight cuts a block"),
        ({"tensor": 2}, {"intermediate_size": 384}, "worker 0's part .*0:192.* of model.layers.0.mlp.gate_proj.weight"),
        ({}, {"intermediate_size": 2048}, "weight_sync.bucket_bytes: must hold a row of FP8 blocks of 2048 columns"),
        (
            {},
            MOE | {"moe_intermediate_size": 192},
            "rollout.quantization: .*worker 0's part .* starts inside a block of .*w13",
        ),
    ],
)
def test_what_blocks_do_not_go_with_is_named(changes: dict[str, Any], config: dict[str, Any], text: str) -> None:
    (message,) = messages(fp8_recipe(**changes), BLOCKS | config)
    assert re.search(text, message), message


def test_adapters_that_travel_alone_have_a_rank_that_vllm_takes() -> None:
    """Merged ones may be wider, and so may those of a run that reads its rollouts."""
    shape = ModelShape.from_config(BLOCKS | {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8})
    for send, rank, replay, refused in (
        ("adapter", 512, None, []),
        ("adapter", 513, None, ["512, or actor.lora.send: merged"]),
        ("merged", 513, None, []),
        ("adapter", 513, ".", []),
    ):
        checked = recipe(
            MODEL, ("actor.lora", {"rank": rank, "alpha": 1.0, "targets": ["proj"], "send": send}), replay=replay
        )
        assert [violation.nearest for violation in adapters_fit_model(checked, shape)] == refused, (send, rank)


def test_whole_tensors_are_not_quantised() -> None:
    (message,) = messages(fp8_recipe(("weight_sync.mode", "checkpoint")), BLOCKS)
    assert "weight_sync.mode checkpoint" in message
