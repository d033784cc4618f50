"""A run over a mixture with a curriculum, judged by code, a service and a function, resumes bit for bit."""

import json
import shutil

import pytest

from tests.reward.test_service import Judge
from tests.runs import fake_rollouts, metrics_of, tiny_recipe, tiny_run, train_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
STEPS, MIDDLE = 4, 2


@pytest.fixture(scope="module")
def judge():
    judge = Judge()
    yield judge
    judge.server.shutdown()
    judge.server.server_close()
    judge.thread.join()


def test_a_run_over_a_mixture_with_a_curriculum_resumes_exactly(tmp_path, judge, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tiny_run(tmp_path)
    # All rows have one question: a replay needs the prompts of its recording, but here rewards decide the next row.
    (tmp_path / "prompts.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    rollouts = fake_rollouts(tmp_path, STEPS)
    tests = [{"question": "1+1", "answer": [f"assert {n + 1}"]} for n in range(3)] + [{"question": "1+1", "answer": [1]}]
    (tmp_path / "tests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tests))
    (tmp_path / "more.jsonl").write_text("".join(f'{{"question": "1+1", "answer": "f({n})"}}\n' for n in range(3)))
    fields = {"kind": "jsonl", "prompt_field": "question", "answer_field": "answer"}
    weights = {"tests.jsonl": 3.0, "more.jsonl": 1.0}
    parts = [fields | {"path": str(tmp_path / name), "weight": weight} for name, weight in weights.items()]
    reward = [{"kind": "function", "target": "tests.rewards:digits"}, {"kind": "code", "credit": "share", "timeout_s": 30.0},
              {"kind": "http", "url": judge.url, "batch": 3, "weight": 0.01}]  # fmt: skip
    changes = {
        "data__prompts": {"kind": "mixture", "parts": parts}, "data__answer_format": "json", "data__on_bad_row": "skip",
        "data__curriculum": {"low": 0.3, "high": 0.7, "pass_reward": 0.2, "revisit": 1}, "reward": reward,
        "phases__reward": {"sequences": 4, "timeout_s": 130.0}, "rollout__replay": str(rollouts),
        "run__checkpoint_every": MIDDLE,
    }  # fmt: skip
    train_on_ranks(tiny_recipe(tmp_path, "whole", False, 1, 1, 1, STEPS, **changes))
    recipe = tiny_recipe(tmp_path, "resumed", False, 1, 1, 1, STEPS, **changes)
    whole, resumed = tmp_path / "runs" / "whole", tmp_path / "runs" / "resumed"
    checkpoint = f"checkpoints/step-{MIDDLE:06d}"
    shutil.copytree(whole / checkpoint, resumed / checkpoint)
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (resumed / "metrics.jsonl").write_text("".join(lines[:MIDDLE]))
    train_on_ranks(recipe, resume=True)
    assert metrics_of(tmp_path, "resumed") == metrics_of(tmp_path, "whole")
    last = metrics_of(tmp_path, "whole")[-1]
    assert last["data/num_bad_rows"] == 1 and last["data/num_rows"] == 6 and last["data/num_passed_over"] > 0
    assert last["data/part_0_epochs"] > last["data/part_1_epochs"] > 0
    assert last["reward/http_num_answered"] == 16 and last["reward/num_masked"] == 0
    judged = sum(last[f"reward/code_num_{reason}"] for reason in ("passed", "failed"))
    assert judged == 16 and {"reward/digits", "reward/code", "reward/http"} <= last.keys()
