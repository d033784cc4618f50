"""Suggestions are legal, fit, and are no more than the model needs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megarl.planner.check import suggestion_lines
from megarl.planner.forecast import job_of
from megarl.planner.suggest import NODE_RANKS, NothingFits, Suggestion, layout_values, layouts_of, suggest
from megarl.recipe import load_recipe
from tests.planner_cases import forecast_of, write_qwen, write_small
from tests.recipe_cases import CONFIG

# A critic, and everything PPO needs, beside the actor and the reference.
PPO = [
    "algorithm.advantage=gae", "algorithm.gae={}", "algorithm.value_loss={}", "critic={optimizer: {lr: 1e-6}}",
    "phases.critic_value={micro_batch: {max_tokens: 8192}}",
    "phases.critic_update={mini_batch: 64, micro_batch: {max_tokens: 8192}}",
]  # fmt: skip
# Sequences of 17,408 tokens on 16 ranks: a pipeline that holds one for each stage is too much for 40 GiB.
CASES: dict[str, list[str]] = {
    "8 x 80 GiB": [], "8 x 141 GiB": ["device.memory_gib=141"], "16 x 80 GiB": ["trainer.ranks=16"],
    "64 x 80 GiB": ["trainer.ranks=64"], "ppo, 16 x 80 GiB": ["trainer.ranks=16", *PPO], "replay": ["rollout.replay=."],
    "a virtual pipeline": ["actor.layout={tensor: 1, pipeline: 4, virtual_pipeline: 7}"],
    "a reference that follows the actor": ["reference={refresh_every: 10}"],
    "one update a batch": ["phases.actor_update.mini_batch=128", "phases.actor_logprob=null"],
}  # fmt: skip


def suggestions_of(file: Path, overrides: list[str]) -> list[Suggestion]:
    return suggest(job_of(load_recipe(file, overrides)))


def as_overrides(suggestions: list[Suggestion]) -> list[str]:
    """What a shell makes of the printed lines."""
    return [word for line in suggestion_lines(suggestions) for word in shlex.split(line, comments=True)]


def by_key(suggestions: list[Suggestion]) -> dict[str, Any]:
    return {suggestion.key: suggestion.value for suggestion in suggestions}


@pytest.mark.parametrize("name", CASES)
def test_what_is_suggested_is_legal_and_fits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_qwen(tmp_path)
    suggested = suggestions_of(file, CASES[name])
    for line, suggestion in zip(suggestion_lines(suggested), suggested, strict=True):
        assert suggestion.reason and line.endswith(f"  # {suggestion.reason}")
    taken = forecast_of(file, [*CASES[name], *as_overrides(suggested)])
    assert taken.fits, taken.device_peak
    recipe = load_recipe(file, [*CASES[name], *as_overrides(suggested)])
    for phase in taken.phases:
        layout = phase.role.layout
        assert layout.tensor <= NODE_RANKS
        cap = phase.schedule.max_tokens
        assert cap is not None and recipe.max_sequence_tokens <= cap <= (phase.largest_cap or 0)
    engines = taken.job.engines
    if engines is None:
        assert not any(suggestion.key.startswith("rollout.") for suggestion in suggested)
        return
    assert engines.count * engines.layout.workers <= recipe.trainer.ranks
    assert engines.utilization is not None and taken.safe_utilization is not None
    assert engines.memory.total / (taken.job.device_bytes or 0) <= engines.utilization <= taken.safe_utilization + 1e-9
    # Suggestions are where the search ends: asked again, it has nothing else to say.
    again = suggestions_of(file, [*CASES[name], *as_overrides(suggested)])
    assert by_key(again) == {key: value for key, value in by_key(suggested).items() if value is not None}


def test_qwen_7b_on_eight_devices_of_80_gib(tmp_path: Path) -> None:
    """What people run: no pipeline, two or four tensor ranks for the actor, small engines with a cache that serves them."""
    values = by_key(suggestions_of(write_qwen(tmp_path), []))
    assert values["actor.layout"]["pipeline"] == 1 and values["actor.layout"]["tensor"] in (2, 4)
    assert values["actor.layout"]["sequence_parallel"] is True
    assert values["rollout.tensor"] == 1 and values["rollout.engines"] == 8
    assert 0.2 < values["rollout.memory_utilization"] < 0.6
    # Of the 16 concurrent sequences at least 8 at their longest: 28 layers x 4 groups x 128 x 2 x 2 bytes a token.
    assert values["rollout.kv_cache_bytes"] >= 8 * 5120 * 57344
    assert values["phases.actor_logprob.micro_batch"] == values["phases.actor_update.micro_batch"]


def test_engines_that_sample_ahead_have_a_cache_for_the_sequences_of_each_step(tmp_path: Path) -> None:
    """With S above 0 the groups of 1 + S steps may be under way: 8 engines, 128 sequences a step, 64 at a time an engine."""
    stale = ["weight_sync.in_flight=keep", "algorithm.mismatch={correction: truncate}", "device.memory_gib=141"]
    separate = ["rollout.placement=separate", "rollout.kv_cache_bytes=null", "phases.rollout.max_concurrent=64"]
    for staleness, at_a_time in ((0, 16), (1, 32), (3, 64)):
        overrides = [*(stale if staleness else stale[2:]), *separate, f"rollout.max_staleness={staleness}"]
        suggested = suggestions_of(write_qwen(tmp_path), overrides)
        values, reasons = by_key(suggested), {suggestion.key: suggestion.reason for suggestion in suggested}
        assert values["rollout.engines"] == 8
        assert values["rollout.kv_cache_bytes"] == at_a_time * 5120 * 57344
        assert f" {at_a_time} longest sequences, of {at_a_time} at a time" in reasons["rollout.kv_cache_bytes"]
        assert f"up to 512 at a time, of {(1 + staleness) * 128} in " in reasons["phases.rollout.max_concurrent"]


def test_a_suggested_cap_holds_the_segments_of_a_rollout(tmp_path: Path) -> None:
    """A loss with terms of a whole rollout needs its 4 segments in one micro-batch."""
    agent = {"kind": "agent", "target": "recipes.agents.calculator:run", "max_turns": 8, "max_episode_tokens": 7168}
    file = write_qwen(tmp_path, environment=agent | {"max_segments": 4}, reward=[])
    overrides = ["algorithm.policy_loss={kind: gspo}", "rollout.max_new_tokens=1024"]
    overrides += ["phases.actor_update.micro_batch.max_tokens=auto", "actor.layout.sequence_parallel=true"]
    suggested = suggestions_of(file, overrides)
    assert by_key(suggested)["phases.actor_update.micro_batch"]["max_tokens"] >= 4 * (1024 + 7168)
    assert forecast_of(file, [*overrides, *as_overrides(suggested)]).fits


def test_more_memory_never_asks_for_more_cutting(tmp_path: Path) -> None:
    file, last = write_qwen(tmp_path), 64
    for memory_gib in (50, 80, 288):
        try:
            suggested = suggestions_of(file, [f"device.memory_gib={memory_gib}"])
        except NothingFits:
            assert last == 64
            continue
        values = by_key(suggested)
        assert forecast_of(file, [f"device.memory_gib={memory_gib}", *as_overrides(suggested)]).fits
        layout = values["actor.layout"]
        cut = layout["tensor"] * layout["pipeline"] * values["rollout.tensor"]
        assert cut <= last
        last = cut
    assert last == 1


def test_where_no_layout_fits_memory_is_saved_by_the_mildest_setting(tmp_path: Path) -> None:
    file = write_qwen(tmp_path)
    # Selective recompute of attention alone saves nothing where attention is fused.
    expected = {28: {}, 27: {"recompute": "full"}, 24: {"recompute": "full", "offload": "all"}}
    for memory_gib, settings in expected.items():
        stated = [f"device.memory_gib={memory_gib}"]
        suggested = suggestions_of(file, stated)
        assert forecast_of(file, [*stated, *as_overrides(suggested)]).fits
        prefix = "actor.memory."
        memory = {key.removeprefix(prefix): value for key, value in by_key(suggested).items() if key.startswith(prefix)}
        assert memory == settings


def test_layouts_divide_what_they_must_and_the_simplest_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_of(load_recipe(write_small(tmp_path), ["device.memory_gib=1"]))
    for role in ("actor", "reference", "critic"):
        layouts = layouts_of(job, role)
        sizes = [layout.tensor * layout.pipeline for layout in layouts]
        assert sizes == sorted(sizes) and len(set(layouts)) == len(layouts)
        for layout in layouts:
            assert layout.ranks == 8 and 4 % layout.pipeline == 0 and 4 % layout.tensor == 0
            assert layout.sequence_parallel == (layout.tensor > 1)
    wide = CONFIG | {"num_attention_heads": 16, "num_key_value_heads": 16}
    ranks = ["trainer.ranks=16", "rollout.kv_cache_bytes=100000000"]
    on_two_machines = job_of(load_recipe(write_small(tmp_path, model=wide), ranks))
    assert max(layout.tensor for layout in layouts_of(on_two_machines, "actor")) == NODE_RANKS
    # actor_update has mini-batches of 8 sequences, critic_update of 16, the batch 16: data-parallel sizes divide them.
    few = job_of(load_recipe(write_small(tmp_path), ["phases.actor_update.mini_batch=2"]))
    assert {layout.data for layout in layouts_of(few, "actor")} == {1, 2}


def test_experts_are_dealt_over_ranks_of_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
    file = write_small(
        tmp_path, ("actor.layout.sequence_parallel", True), model=CONFIG | {"model_type": "qwen3_moe"} | experts
    )
    layouts = layouts_of(job_of(load_recipe(file)), "actor")
    assert {layout.expert for layout in layouts} == {1, 2}
    for layout in layouts:
        assert layout.tensor * layout.data % (layout.expert * layout.expert_tensor_size) == 0
        assert layout.expert_tensor_size == (1 if layout.expert > 1 else layout.tensor)
        text = f"actor.layout={json.dumps(layout_values(layout))}"
        assert load_recipe(file, [text]).layout("actor") == layout
