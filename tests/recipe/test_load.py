"""A legal recipe says what it says: overrides, defaults, what follows from it, and the table that shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pydantic
import pytest
import yaml
from typer.testing import CliRunner

from megarl.cli import app
from megarl.planner.check import phase_table
from megarl.recipe import ENGINE_PHASES, Recipe, RecipeError, load_recipe, parse_recipe, recipe_yaml
from megarl.recipe.phases_section import role_of
from megarl.recipe.section import Section
from megarl.recipe.yaml_text import parse_yaml
from megarl.schedule import plan_phase
from tests.recipe.test_broken import BROKEN
from tests.recipe_cases import edited, make_folder, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


def test_overrides_reach_their_field_and_only_that(folder: Path) -> None:
    file = write(folder, edited())
    plain = load_recipe(file)
    changed = load_recipe(
        file, ["run.steps=7", "actor.optimizer.lr=1e-5", "reward.1.weight=0.5", "algorithm.gae.discount=0.9", "run.steps=9"]
    )
    assert changed.run.steps == 9
    assert changed.actor.optimizer.lr == 1e-5
    assert changed.reward[1].weight == 0.5
    assert changed.algorithm.gae is not None and changed.algorithm.gae.discount == 0.9
    expected = plain.model_dump(mode="json")
    expected["run"]["steps"], expected["actor"]["optimizer"]["lr"] = 9, 1e-5
    expected["reward"][1]["weight"], expected["algorithm"]["gae"]["discount"] = 0.5, 0.9
    assert changed.model_dump(mode="json") == expected


def test_a_null_override_removes_a_section_and_a_dotted_one_makes_it(folder: Path) -> None:
    file = write(folder, edited())
    without = load_recipe(file, ["algorithm.kl=null", "phases.reference_logprob="])
    assert without.algorithm.kl is None
    again = load_recipe(write(folder, edited(("critic", None))), ["critic.optimizer.lr=3e-4"])
    assert again.critic is not None and again.critic.optimizer.lr == 3e-4


def test_the_resolved_recipe_reads_back_to_the_same(folder: Path) -> None:
    recipe = load_recipe(write(folder, edited()), ["actor.optimizer.epsilon=1e-8", "rollout.replay=null"])
    assert parse_recipe(parse_yaml(recipe_yaml(recipe))) == recipe
    assert parse_recipe(yaml.safe_load(recipe_yaml(recipe))) == recipe


def test_a_loaded_recipe_is_frozen(folder: Path) -> None:
    recipe = load_recipe(write(folder, edited()))
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        recipe.run.steps = 5


def test_a_phase_runs_only_when_something_reads_it(folder: Path) -> None:
    ppo = load_recipe(write(folder, edited()))
    assert ppo.running_phases == (
        "rollout", "reward", "actor_logprob", "reference_logprob", "critic_value", "advantage", "critic_update",
        "actor_update",
        "weight_sync",
    )  # fmt: skip
    gone = [("critic", None), ("algorithm.gae", None), ("algorithm.value_loss", None), ("algorithm.advantage", "grpo"),
            ("phases.critic_value", None), ("phases.critic_update", None)]  # fmt: skip
    grpo = load_recipe(write(folder, edited(*gone)))
    assert grpo.running_phases == ("rollout", "reward", "actor_logprob", "reference_logprob", "advantage", "actor_update",
                                   "weight_sync")  # fmt: skip
    once = [*gone, ("phases.actor_update.mini_batch", 16), ("phases.actor_logprob", None)]
    assert "actor_logprob" not in load_recipe(write(folder, edited(*once))).running_phases
    # One update but two epochs, or a KL term in the reward: the log-probabilities before the update are needed again.
    twice = [*gone, ("phases.actor_update.mini_batch", 16), ("phases.actor_update.epochs", 2)]
    assert "actor_logprob" in load_recipe(write(folder, edited(*twice))).running_phases
    in_reward = [*gone, ("phases.actor_update.mini_batch", 16), ("algorithm.kl.place", "reward")]
    assert "actor_logprob" in load_recipe(write(folder, edited(*in_reward))).running_phases


def test_each_phase_has_the_schedule_of_its_own_section(folder: Path) -> None:
    """A different size in every section, and each comes back from its own phase (verl #1028, #7462)."""
    file = write(folder, edited())
    phases = [phase for phase in ENGINE_PHASES if phase not in ("reward_model", "teacher_logprob")]  # it has neither
    sizes = {phase: 101 + number for number, phase in enumerate(phases)}
    overrides = [f"phases.{phase}.micro_batch={{max_tokens: {size}}}" for phase, size in sizes.items()]
    recipe = load_recipe(file, overrides)
    assert {phase: recipe.schedule(phase).max_tokens for phase in phases} == sizes
    assert recipe.schedule("critic_update").mini_batch == 16
    assert recipe.schedule("actor_update").mini_batch == 8
    assert recipe.schedule("critic_value").mini_batch is None
    for phase in phases:
        changed = load_recipe(file, [*overrides, f"phases.{phase}.micro_batch={{sequences: 1}}"])
        different = [one for one in phases if changed.schedule(one) != recipe.schedule(one)]
        assert different == [phase]


def test_check_prints_the_phase_table(folder: Path) -> None:
    file = write(folder, edited())
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 0, result.output
    recipe = load_recipe(file)
    for row in phase_table(recipe):
        line = next(line for line in result.output.splitlines() if row.phase in line)
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        assert cells == [row.phase, row.role, row.layout, row.micro_batch, row.mini_batch, row.data_parallel, row.worst_case,
                         row.bubble_share]  # fmt: skip
    update = next(row for row in phase_table(recipe) if row.phase == "actor_update")
    # 8 sequences of 64 tokens under a cap of 64, over 2 data-parallel ranks
    assert (update.micro_batch, update.data_parallel, update.worst_case) == ("max_tokens 64", "2", "4")
    assert update.bubble_share == "20%"


def test_check_imports_nothing_heavy(folder: Path) -> None:
    """This, and not a stopwatch, is what keeps `megarl check` under a second."""
    good, bad = write(folder, edited()), folder / "bad.yaml"
    bad.write_text("run: 3\n")
    heavy = ["torch", "transformers", "ray", "vllm", "megatron", "numpy", "datasets", "reasoning_gym", "huggingface_hub"]
    program = f"""
import sys
from megarl.cli import app
for file, status in (({str(good)!r}, 0), ({str(bad)!r}, 2)):
    try:
        app(["check", file])
    except SystemExit as end:
        assert (end.code or 0) == status, end.code
print("HEAVY", [name for name in {heavy} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "HEAVY []" in result.stdout


def test_export_and_report_name_a_run_that_is_not_there(tmp_path: Path) -> None:
    for command in (["export", str(tmp_path / "none"), str(tmp_path / "out")], ["report", str(tmp_path / "none")]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert "no such directory" in result.output


def test_every_field_is_explained() -> None:
    from megarl.recipe.load import sections_of

    todo: list[type[Section]] = [Recipe]
    seen = set()
    while todo:
        section = todo.pop()
        seen.add(section)
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no explanation under it"
            todo += [inner for inner in sections_of(field.annotation) if inner not in seen]


def test_an_automatic_cap_becomes_a_number_that_the_resolved_recipe_shows(folder: Path) -> None:
    """None while nothing fits, then more memory, larger cap, up to the whole mini-batch; read back, the same recipe."""
    automatic = ("phases.actor_update.micro_batch", {"max_tokens": "auto"})

    def cap(memory_gib: float) -> int | None:
        device = ("device", {"memory_gib": memory_gib})
        try:
            recipe = load_recipe(write(folder, edited(automatic, device, ("rollout.replay", str(folder)))))
        except RecipeError as error:
            assert [one.key for one in error.violations] == ["phases.actor_update.micro_batch.max_tokens"]
            return None
        text = recipe_yaml(recipe)
        assert "max_tokens: auto" not in text
        file = folder / "resolved.yaml"
        file.write_text(text)
        assert load_recipe(file) == recipe
        return recipe.schedule("actor_update").max_tokens

    caps = [cap(1e-3 * 1.4**step) for step in range(13)]
    found = [one for one in caps if one is not None]
    longest = load_recipe(write(folder, edited())).max_sequence_tokens
    assert caps[0] is None and caps == [None] * (len(caps) - len(found)) + found
    assert found == sorted(found) and len(set(found)) >= 3
    assert longest <= found[0] and found[-1] == 8 * longest


def test_a_hub_name_is_fetched_only_where_asked(folder: Path) -> None:
    def unreachable(name: str) -> Path:
        raise ValueError(f"{name} is out of reach")

    file = write(folder, edited())
    with pytest.raises(RecipeError, match="hf download someone/model"):
        load_recipe(file, ["model.path=someone/model"])
    with pytest.raises(RecipeError, match="fetching it failed: someone/model is out of reach"):
        load_recipe(file, ["model.path=someone/model"], fetch=unreachable)
    recipe = load_recipe(file, ["model.path=someone/model"], fetch=lambda name: folder / "tiny")
    assert recipe.model.path == "someone/model"


COUNTS = ("counts that a virtual pipeline cannot run", "a cap that can need more micro-batches than a virtual pipeline has")


@pytest.mark.parametrize("name", COUNTS)
def test_the_nearest_count_is_one_that_the_virtual_pipeline_runs(name: str, folder: Path) -> None:
    file = write(folder, BROKEN[name][0])
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    recipe = load_recipe(file, [f"{one.key}={one.nearest}" for one in caught.value.violations])
    for phase in (phase for phase in ENGINE_PHASES if recipe.runs(phase)):
        lengths = [recipe.max_sequence_tokens] * recipe.num_sequences
        layout = recipe.layout(role_of(phase))
        for mini_batch in plan_phase(recipe.schedule(phase), lengths, layout, seed=0).mini_batches:
            assert mini_batch.num_micro_batches % layout.micro_batch_step == 0
