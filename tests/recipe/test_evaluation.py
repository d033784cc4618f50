"""Rules on what a run is measured by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.recipe import Recipe, RecipeError
from tests.recipe_cases import load_edited

HELD_OUT = {"prompts": {"kind": "reasoning_gym", "task": "chain_sum", "size": 8, "seed": 2}}


def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *edits: tuple[str, Any], **changes: Any) -> Recipe:
    return load_edited(tmp_path, monkeypatch, ("evaluation", HELD_OUT | changes), *edits)


def test_a_run_is_measured_before_the_first_step_and_after_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = loaded(tmp_path, monkeypatch, every=2, completions=4, pass_at=[1, 4])
    assert [recipe.evaluates_after(step) for step in range(4)] == [True, False, True, True]
    ends = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"every": 0})})  # type: ignore[union-attr]
    assert [ends.evaluates_after(step) for step in range(4)] == [True, False, False, True]
    assert not any(recipe.model_copy(update={"evaluation": None}).evaluates_after(step) for step in range(4))


@pytest.mark.parametrize(("edits", "changes", "key", "rule"), [
    ((), {"completions": 2, "pass_at": [1, 4]}, "evaluation.pass_at", "needs k completions"),
    ((), {"completions": 2, "temperature": 0.0}, "evaluation.temperature", "the same"),
    ((), {"temperature": 0.005}, "evaluation.temperature", "at least 0.01"),
    ((), {"completions": 64}, "evaluation.completions", "16 sequences of a step"),
    ((("rollout.replay", "somewhere"),), {}, "evaluation", "no engines"),
    ((("reward", [{"kind": "model"}]), ("reward_model", {"path": "tiny"}),
      ("phases.reward_model", {"micro_batch": {"sequences": 2}})), {}, "evaluation", "judge texts"),
])  # fmt: skip
def test_what_cannot_be_measured_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edits: Any, changes: Any, key: str, rule: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        loaded(tmp_path, monkeypatch, *edits, **changes)
    assert any(one.key == key and rule in one.rule for one in raised.value.violations), raised.value
