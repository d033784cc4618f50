"""What a user gets wrong is answered by one sentence that names it, on whichever rank it shows."""

import json
from unittest import mock

import pytest

from megarl.recipe import load_recipe, recipe_yaml
from tests.ranks import run_ranks
from tests.runs import megarl, replayed_recipe, tiny_recipe, train_on_ranks


def _train(folder, name, *arguments, ranks=1, pipeline=1, **changes):
    recipe = replayed_recipe(folder, name, False, ranks, 1, pipeline, 1, **changes)
    return megarl("train", str(recipe), *arguments, check=False)


def test_a_reward_that_always_fails_ends_the_run_with_its_reason(folder):
    reward = [{"kind": "function", "target": "tests.rewards:boom"}]
    with pytest.raises(AssertionError, match=r"(?s)no completion could be scored.*answer key.*in phase reward on rank 0"):
        train_on_ranks(replayed_recipe(folder, "boom", False, 1, 1, 1, 1, reward=reward))


def test_a_checkpoint_of_another_shape_is_named_before_a_rank_starts(folder):
    config = json.loads((folder / "model" / "config.json").read_text())
    original = json.dumps(config)
    (folder / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    try:
        done = _train(folder, "shape", ranks=2, pipeline=2)
    finally:
        (folder / "model" / "config.json").write_text(original)
    assert done.returncode == 2
    message = " ".join(done.stderr.split())
    assert "model.path" in message and "model.safetensors: model.embed_tokens.weight has shape 131 x 32" in message
    assert "expected 100 x 32 by config.json" in message


def said_before_engines_start(recipe):
    """What a rank warns of until it would start engines."""
    from megarl import build as run
    from megarl.telemetry.run_directory import Resume

    class BeginsEngines(Exception):
        pass

    with (
        mock.patch.object(run, "EnginePool", side_effect=BeginsEngines),
        mock.patch.object(run.logger, "warning") as warning,
        pytest.raises(BeginsEngines),
    ):
        run.train(load_recipe(recipe), Resume.NEVER)
    return [call.args[0] for call in warning.call_args_list]


def test_whole_models_for_every_worker_are_announced(folder):
    warnings = {}
    for mode in ("checkpoint", "reshard"):
        recipe = tiny_recipe(folder, f"mode-{mode}", False, 1, 1, 1, 1, weight_sync={"mode": mode})
        (warnings[mode],) = run_ranks(said_before_engines_start, 1, str(recipe))
    assert warnings["reshard"] == []
    assert warnings["checkpoint"] == [
        "weight_sync.mode = checkpoint: every worker of an engine receives the whole model at each sync"
    ]


def test_a_run_never_writes_over_another_and_resumes_only_what_it_was(folder):
    run = folder / "runs" / "taken"
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "holds a run already" in _train(folder, "taken").stderr
    old = load_recipe(tiny_recipe(folder, "taken", False, 1, 1, 1, 1, run__seed=7))
    (run / "recipe.yaml").write_text(recipe_yaml(old))
    refused = _train(folder, "taken", "--resume")
    assert refused.returncode == 2
    assert "run.seed was 7 and is 1 now" in refused.stderr
    assert "no complete checkpoint" in _train(folder, "absent", "--resume").stderr
