"""Teachers and distillation in a recipe: what runs, what is refused, and who judges which prompt."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.routing import takes_answer, teachers_of
from megarl.data.sample import Prompt
from megarl.recipe import load_recipe
from tests.recipe_cases import CONFIG, edited, faults_in, refusals, write

TEACHERS = {"math": {"path": "deep"}, "code": {"path": "tiny", "layout": {"tensor": 1}}}
SERVED = ("teachers", {"math": {"path": "deep", "engine": {"tensor": 2}}, "code": {"path": "tiny"}})
SECTION = {"micro_batch": {"max_tokens": 128}}


@pytest.fixture(autouse=True)
def other_models(folder: Path) -> None:
    for name, sizes in (
        ("wide", {"vocab_size": 300}),
        ("narrow", {"vocab_size": 200}),
        ("sixty-four", {"max_position_embeddings": 64}),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(CONFIG | sizes))


def changes(*more: tuple[str, Any], **distillation: Any) -> list[tuple[str, Any]]:
    """Edits of a legal recipe with two teachers; later edits win."""
    section = {"place": "advantage"} | distillation
    new = (("teachers", TEACHERS), ("algorithm.distillation", section), ("phases.teacher_logprob", SECTION))
    return copy.deepcopy([*new, *more])


def test_each_teacher_has_a_phase_and_a_layout(folder: Path) -> None:
    recipe = load_recipe(write(folder, edited(*changes())))
    phases = recipe.running_phases
    assert phases.index("teacher_logprob.code") + 1 == phases.index("teacher_logprob.math")
    layouts = recipe.layouts
    assert layouts["teachers.math"] == layouts["actor"] and layouts["teachers.code"].tensor == 1
    assert "teacher_logprob.math" not in recipe.warmup_phases
    assert recipe.schedule("teacher_logprob.code").max_tokens == 128


@pytest.mark.parametrize(
    ("edits", "key", "rule"),
    [
        ([("algorithm.distillation", None), ("phases.teacher_logprob", None)], "teachers", "nothing reads them"),
        ([("teachers", {})], "teachers", "required"),
        ([("phases.teacher_logprob", None)], "phases.teacher_logprob", "required"),
        ([("phases.teacher_logprob.start", "early")], "phases.teacher_logprob.start", "whole batches"),
        ([("phases.teacher_logprob.micro_batch.max_tokens", 8)], "phases.teacher_logprob.micro_batch.max_tokens", "below"),
        ([("teachers.code.layout.tensor", 3)], "teachers.code.layout.pipeline", "divide"),
        ([("teachers.code.path", "short")], "rollout.max_new_tokens", "teachers.code's model has 16 positions"),
        ([("teachers.code.path", "narrow")], "teachers.code.path", "200 tokens, that of model.path 256"),
        ([("teachers.code.weight", 2.0), ("algorithm.distillation.route", "kind")], "teachers.code.weight", "route"),
        ([("teachers", {"math": {"path": "deep"}}), ("algorithm.distillation.route", "kind")],
         "algorithm.distillation.route", "one teacher"),
        ([("algorithm.policy_loss", {"kind": "gmpo"}), ("algorithm.advantage", "none"), ("algorithm.gae", None),
          ("algorithm.value_loss", None), ("critic", None), ("phases.critic_value", None), ("phases.critic_update", None)],
         "algorithm.policy_loss.kind", "one advantage a sequence"),
        # What an engine cannot give.
        ([SERVED, ("algorithm.distillation", {"place": "loss", "over": "top_k", "top_k": 4})], "teachers.math.engine",
         "over = top_k compares more tokens remove teachers.math.engine, or over: sampled"),
        ([SERVED, ("rollout.temperature", 0.7)], "rollout.temperature", "temperature 1 1.0, or remove"),
        ([SERVED, ("rollout.replay", ".")], "teachers.math.engine", "no engines are started remove"),
        ([SERVED, ("teachers.math.engine.tensor", 3)], "teachers.math.engine.tensor", "divide"),
        ([SERVED, ("teachers.math.layout", {"tensor": 2})], "teachers.math.engine", "its layout and its memory remove"),
        ([SERVED, ("teachers.math.memory", {"offload": "all"})], "teachers.math.engine", "its layout and its memory remove"),
        ([SERVED, ("teachers.code", ...)], "phases.teacher_logprob", "never runs"),
        ([SERVED, ("teachers.math.path", "sixty-four")], "teachers.math.engine", "64 positions a shorter rollout"),
        ([SERVED, ("device", {"memory_gib": 0.05})], "teachers.math.engine.tensor", "a worker needs"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(folder: Path, edits: list[tuple[str, Any]], key: str, rule: str) -> None:
    faults = faults_in(write(folder, edited(*changes(*edits))))
    assert any(fault == key and rule in text for fault, text in faults), faults


def test_a_served_teacher_has_a_phase_and_no_rank(folder: Path) -> None:
    recipe = load_recipe(write(folder, edited(*changes(SERVED))))
    assert {"teacher_logprob.code", "teacher_logprob.math"} <= set(recipe.running_phases)
    assert "teachers.code" in recipe.roles and "teachers.math" not in recipe.roles
    assert "teacher_logprob.math" not in recipe.engine_phases and list(recipe.served) == ["math"]
    alone = (("teachers", {"math": SERVED[1]["math"]}), ("phases.teacher_logprob", ...))
    assert load_recipe(write(folder, edited(*changes(*alone)))).roles == tuple(
        role for role in recipe.roles if role != "teachers.code"
    )


@pytest.mark.parametrize("distillation", [{"over": "vocabulary"}, {"over": "top_k", "top_k": 4}])
def test_a_wider_vocabulary_is_refused_where_all_of_it_is_compared(folder: Path, distillation: dict[str, Any]) -> None:
    refused = refusals(*changes(("teachers.code.path", "wide"), place="loss", **distillation))
    assert "300 tokens, that of model.path 256" in refused["teachers.code.path"]


@pytest.mark.parametrize(
    "section",
    [
        {"place": "advantage", "divergence": "forward_kl"},
        {"place": "advantage", "over": "vocabulary"},
        {"place": "loss", "over": "top_k"},
        {"place": "loss", "over": "vocabulary", "top_k": 3},
        {"place": "loss", "over": "vocabulary", "mixture": 0.4},
        {"place": "loss", "data_share": 0.5},
    ],
)
def test_keys_that_do_not_go_together_are_refused(folder: Path, section: dict[str, Any]) -> None:
    refused = refusals(*changes(("algorithm.distillation", section)))
    assert {key.removesuffix(".data_share") for key in refused} == {"algorithm.distillation"}


NO_REWARDS: list[tuple[str, Any]] = [
    ("algorithm.advantage", "none"), ("algorithm.gae", ...), ("algorithm.value_loss", ...), ("algorithm.kl", ...),
    ("critic", ...), ("phases.critic_value", ...), ("phases.critic_update", ...), ("phases.reference_logprob", ...),
    ("phases.actor_logprob", ...),
]  # fmt: skip
FROM_DATA = {"place": "loss", "over": "vocabulary", "data_share": 0.3}


@pytest.mark.parametrize(
    ("edits", "rule"),
    [
        ([], "policy loss of algorithm.advantage = gae"),
        ([*NO_REWARDS, ("algorithm.kl", {"place": "loss", "coefficient": 0.1, "estimator": "k3"}),
          ("phases.reference_logprob", SECTION)], "algorithm.kl is estimated"),
        ([*NO_REWARDS, ("algorithm.early_stop", {"target_kl": 0.1})], "algorithm.early_stop is estimated"),
        ([*NO_REWARDS, ("data.curriculum", {"low": 0.1, "high": 0.9})], "pass rates"),
        ([*NO_REWARDS, ("environment", {"target": "json:Game", "max_turns": 2, "max_observation_tokens": 8})], "turns"),
        ([*NO_REWARDS, ("data.prompt_format", "token_ids"), ("data.prompts", {
            "kind": "jsonl", "path": "qa.jsonl", "prompt_field": "q", "answer_field": "a"})], "token ids"),
    ],
)  # fmt: skip
def test_answers_of_the_data_teach_by_the_divergence_alone(folder: Path, edits: list[tuple[str, Any]], rule: str) -> None:
    faults = faults_in(write(folder, edited(*changes(*edits, **FROM_DATA))))
    assert any(fault == "algorithm.distillation.data_share" and rule in text for fault, text in faults), faults


@pytest.mark.parametrize(
    ("edits", "text"),
    [
        ([("algorithm.kl", {"place": "reward", "coefficient": 0.1, "estimator": "k1"}),
          ("phases.reference_logprob", SECTION)],
         "algorithm.kl.place algorithm.kl.place: loss, or remove algorithm.kl"),
        ([("algorithm.overlong", {"buffer": 4})], "algorithm.overlong.buffer remove algorithm.overlong"),
        ([("algorithm.overlong", {"buffer": 4, "mask": True})],
         "algorithm.overlong.buffer remove algorithm.overlong.buffer"),
    ],
)  # fmt: skip
def test_what_would_only_change_rewards_is_refused(folder: Path, edits: list[tuple[str, Any]], text: str) -> None:
    refused = refusals(*changes(*NO_REWARDS, *edits, place="loss", over="vocabulary"))
    assert refused == {"algorithm.advantage": f"learns from no reward, and nothing reads {text}"}


def test_a_share_of_the_prompts_has_the_answers_of_the_data(folder: Path) -> None:
    """Each by its number and the seed, whatever its teacher."""

    def drawn(**run: Any) -> list[bool]:
        edits = [(f"run.{key}", value) for key, value in run.items()]
        recipe = load_recipe(write(folder, edited(*changes(*NO_REWARDS, *edits, **FROM_DATA))))
        for share in (0.0, 1.0):
            algorithm = recipe.algorithm.model_copy(
                update={"distillation": recipe.algorithm.distillation.model_copy(update={"data_share": share})}  # type: ignore[union-attr]
            )
            every = recipe.model_copy(update={"algorithm": algorithm})
            assert {takes_answer(every, index) for index in range(100)} == {share == 1.0}
        teachers = teachers_of(recipe, map(prompt, range(4000)))
        taken = [takes_answer(recipe, index) for index in range(4000)]
        for name in recipe.teachers:
            of_teacher = [taken[index] for index, teacher in teachers.items() if teacher == name]
            assert sum(of_teacher) / len(of_teacher) == pytest.approx(0.3, abs=0.03)
        return taken

    assert drawn() == drawn() != drawn(seed=5)


def prompt(index: int, **row: Any) -> Prompt:
    return Prompt(index, np.zeros(2, np.int32), "", "", row, where=f"qa.jsonl, row {index}")


def test_rows_or_weights_choose_the_teacher(folder: Path) -> None:
    weighted = load_recipe(write(folder, edited(*changes(("teachers.math.weight", 3.0)))))
    prompts = [prompt(index) for index in range(4000)]
    drawn = teachers_of(weighted, prompts)
    assert list(drawn.values()).count("math") / 4000 == pytest.approx(0.75, abs=0.03)
    assert drawn == dict(reversed(teachers_of(weighted, reversed(prompts)).items())), "whatever the order"
    routed = load_recipe(write(folder, edited(*changes(route="kind"))))
    assert teachers_of(routed, [prompt(7, kind="code"), prompt(9, kind="math")]) == {7: "code", 9: "math"}
    with pytest.raises(ValueError, match=r"qa.jsonl, row 3: kind = 'art' names no teacher .* code, math"):
        teachers_of(routed, [prompt(3, kind="art")])
