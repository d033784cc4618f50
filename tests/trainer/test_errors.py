"""What a user gets wrong is answered by one sentence that names it, on whichever rank it shows."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from megarl import build
from megarl.cluster.engine_nodes import Stage
from megarl.models.layout import Layout
from megarl.planner.placement import Transport
from megarl.recipe import load_recipe, recipe_yaml
from megarl.telemetry.run_directory import Resume, RunDirectory, RunDirectoryError
from tests.ranks import run_ranks
from tests.runs import _train, megarl, replayed_recipe, tiny_recipe


def failure_of(recipe):
    """What a rank says of a run that it ends."""
    with pytest.raises(ValueError) as failure:
        _train(recipe, False)
    return "\n".join([str(failure.value), *failure.value.__notes__])


def test_a_reward_that_always_fails_ends_the_run_with_its_reason(folder):
    reward = [{"kind": "function", "target": "tests.rewards:boom"}]
    recipe = replayed_recipe(folder, "boom", False, 1, 1, 1, 1, reward=reward)
    (message,) = run_ranks(failure_of, 1, str(recipe))
    assert re.search(r"(?s)no completion could be scored.*answer key.*in phase reward on rank 0", message), message


def test_whole_models_for_every_worker_are_announced(folder, monkeypatch, caplog):
    monkeypatch.setattr(build, "WeightSync", lambda *_: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place: Any = SimpleNamespace(rank=0, layout=Layout())
    stage = Stage((), Transport("mapped", ""))
    shown = {}
    for mode in ("checkpoint", "reshard"):
        recipe = load_recipe(tiny_recipe(folder, f"mode-{mode}", False, 1, 1, 1, 1, weight_sync={"mode": mode}))
        build.build_weight_sync(recipe, place, None, stage)
        shown[mode] = [record.getMessage() for record in caplog.records]
        caplog.clear()
    assert shown["reshard"] == []
    assert shown["checkpoint"] == [
        "weight_sync.mode = checkpoint: every worker of an engine receives the whole model at each sync"
    ]


def test_a_run_never_writes_over_another_and_resumes_only_what_it_was(folder):
    file = replayed_recipe(folder, "taken", False, 1, 1, 1, 1)
    recipe = load_recipe(file)
    run = RunDirectory.of(recipe)
    (run.checkpoints / "step-000001").mkdir(parents=True)
    run.metrics.write_text('{"step": 1}\n')
    refused = megarl("train", str(file), check=False)
    assert refused.returncode == 2 and "holds a run already" in refused.stderr
    run.recipe.write_text(recipe_yaml(load_recipe(file, ["run.seed=7"])))
    with pytest.raises(RunDirectoryError, match="run.seed was 7 and is 1 now"):
        run.check(recipe, Resume.ALWAYS)
