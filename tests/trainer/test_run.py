"""A whole run of PPO under TP2 x PP2 (fp32) with a real vLLM engine, measured on held-out prompts: sizes, agreement,
evaluations and `megarl eval`, exact resume, export.

GRPO with engines, under other layouts: test_faults.py, test_turns.py and tests/cluster/test_launch_slurm_run.py.
"""

import asyncio
import json
import re
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from megarl.cli import app
from megarl.telemetry.disk import read_lines
from megarl.telemetry.trace import FIRST_PROCESS, merge
from tests.ranks import run_ranks
from tests.runs import (
    RUN_DEADLINE_S,
    _train,
    copy_until,
    evaluations_of,
    megarl,
    metrics_of,
    tiny_recipe,
    tiny_run,
    train_on_ranks,
)
from tests.span_sums import check_spans

pytestmark = [pytest.mark.sync, pytest.mark.slow]
STEPS, MIDDLE = 4, 2
SIZES = {"actor_logprob": 3, "reference_logprob": 5, "critic_value": 7, "critic_update": 2, "actor_update": 4}
REWARD_SEQUENCES, MAX_CONCURRENT = 6, 9
HELD_OUT, COMPLETIONS = 7, 6
# The engine takes so much longer to receive that version.
SLOW_VERSION, SLOW_S = 2, 3.0


def train_with_a_slow_receiver(recipe, note):
    """`note` is a file, in which the engine writes from when to when it slept."""
    from megarl.rollout import handle

    class Slow(handle.RolloutEngine):
        async def receive(self, manifest_values):
            if manifest_values["version"] == SLOW_VERSION:
                begun = time.time()
                await asyncio.sleep(SLOW_S)
                Path(note).write_text(json.dumps([begun, time.time()]))
            return await super().receive(manifest_values)

    with mock.patch.object(handle, "RolloutEngine", Slow):
        _train(recipe, False)


CHANGES = {
    "run__checkpoint_every": MIDDLE, "run__dump_rollouts": True, "run__trace": "spans", "telemetry__peak_tflops": 1.0,
    "reward": [{"kind": "function", "target": "tests.rewards:digits"}, {"kind": "last_number", "weight": 0.0}],
    "phases__reward": {"sequences": REWARD_SEQUENCES},
    "phases__rollout": {"prompts": 4, "max_concurrent": MAX_CONCURRENT},  # so that an evaluation takes several rounds
    **{f"phases__{phase}__micro_batch": {"sequences": size} for phase, size in SIZES.items()},
}  # fmt: skip


def measured(folder):
    """The changes of a run that is evaluated before, in the middle and at the end."""
    prompts = {"kind": "jsonl", "path": str(folder / "held_out.jsonl"), "prompt_field": "question", "answer_field": "answer"}
    evaluation = {
        "prompts": prompts, "every": MIDDLE, "completions": COMPLETIONS, "pass_at": [1, 4], "pass_reward": 0.2,
    }  # fmt: skip
    return CHANGES | {"evaluation": evaluation}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run with a checkpoint in the middle. One of its held-out prompts is a prompt that it trains on."""
    folder = tmp_path_factory.mktemp("ppo")
    tiny_run(folder)
    rows = [{"question": f"{number}*{number}", "answer": str(number)} for number in range(HELD_OUT)]
    rows.append(json.loads((folder / "prompts.jsonl").read_text().splitlines()[3]))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tiny_recipe(folder, "whole", True, 4, 2, 2, STEPS, **measured(folder))
    run_ranks(train_with_a_slow_receiver, 4, str(recipe), str(folder / "slept"), deadline_s=RUN_DEADLINE_S)
    return folder


@pytest.fixture
def slices(folder):
    """The spans of the run's trace."""
    return [event for event in merge(folder / "runs" / "whole")["traceEvents"] if event["ph"] == "X"]


@pytest.fixture
def lines(folder):
    """All metrics of the run, by step."""
    return read_lines(folder / "runs" / "whole" / "metrics.jsonl")


def test_every_phase_runs_the_size_of_its_own_section_and_no_other_phase_runs(folder):
    for line in metrics_of(folder, "whole"):
        ran = {phase: line[f"schedule/{phase}/sequences"] for phase in SIZES if f"schedule/{phase}/sequences" in line}
        assert ran == SIZES
        assert line["schedule/reward/sequences"] == REWARD_SEQUENCES
        assert line["schedule/rollout/max_concurrent"] == MAX_CONCURRENT


def test_every_phase_executes_what_was_planned_and_the_metrics_show_both(folder):
    for line in metrics_of(folder, "whole"):
        assert line["actor/ratio_drift_exceeded"] == 0, "rounding is far below the default bound"
        for phase in SIZES:
            at = f"schedule/{phase}/"
            for name in ("micro_batches", "tokens", "slots", "max_tokens"):
                assert line[at + name] == line[f"{at}planned_{name}"] > 0, (phase, name)
            assert (
                line[at + "tokens"] == (line["tokens/prompt"] + line["tokens/completion"]) * line.get(at + "updates", 2) / 2
            )
            assert line[at + "useful_share"] == line[at + "tokens"] / line[at + "slots"] == 1.0
            assert line[at + "imbalance"] == 1.0, "one data-parallel rank"
            assert 0 < line[at + "bubble_share"] < 1
        # the first stage waits for the last one: fewer micro-batches, more idle time
        assert line["schedule/critic_value/bubble_share"] > line["schedule/critic_update/bubble_share"]


def test_rollout_and_trainer_agree_after_every_sync(folder):
    lines = metrics_of(folder, "whole")
    assert [line["rollout/version"] for line in lines] == list(range(STEPS))
    assert all(0 < line["mismatch/logprob_max"] <= 1e-4 for line in lines)
    assert len({line["actor/entropy"] for line in lines}) == STEPS, "the weights move"


def test_every_second_of_every_rank_is_in_a_phase_and_waits_are_seen(folder, slices, lines):
    check_spans(folder / "runs" / "whole", ranks=4)
    assert {event["pid"] for event in slices} == {*range(4), FIRST_PROCESS}
    for rank in range(4):
        rank_slices = [event for event in slices if event["pid"] == rank]
        steps = [event for event in rank_slices if event["cat"] == "step"]
        assert [event["name"] for event in steps] == [f"step {number}" for number in range(1, STEPS + 1)]
        parts = [event for event in rank_slices if event["cat"] == "part"]
        assert [event["name"] for event in parts] == ["start", "end"]
        assert parts[0]["ts"] < steps[0]["ts"] and parts[1]["ts"] > steps[-1]["ts"]
        wall = sum(event["dur"] for event in (*parts, *steps))
        assert sum(event["dur"] for event in rank_slices if event["cat"] == "phase") > 0.95 * wall
        seen = {event["name"] for event in rank_slices}
        assert {"forward", "backward", "optimizer", "wait_pipeline", "wait_engines", "wait_rewards", "wait_ranks"} <= seen
        assert "critic_update" in seen
    for line in lines:
        causes = [line[key] for key in line if re.fullmatch(r"idle/\w+_share", key) and key != "idle/unaccounted_share"]
        assert (
            0 < line["idle/share"] == pytest.approx(sum(causes)) and line["idle/share"] + line["idle/unaccounted_share"] < 1
        )
        assert line["idle/straggler_rank"] in range(4)
        assert sum(value for key, value in line.items() if key.startswith("idle/engines/")) == pytest.approx(1.0)
        assert 0 < line["idle/actor_update/bubble_share"] < 1
        assert line["tokens/useful"] == line["tokens/prompt"] + line["tokens/completion"]
        assert 0 < line["mfu/actor_update"] < 1 and 0 < line["mfu/rollout"] < 1


def test_every_request_is_in_the_trace_in_a_rollout_of_rank_0(folder, slices):
    requests = [event for event in slices if event["cat"] == "request" and event["name"].startswith("group")]
    lines = metrics_of(folder, "whole")
    assert len(requests) == 16 * STEPS
    assert sum(event["args"]["tokens"] for event in requests) == sum(line["tokens/completion"] for line in lines)
    assert [event["args"]["version"] for event in requests] == [step for step in range(STEPS) for _ in range(16)]
    phases = [(event["ts"], event["ts"] + event["dur"]) for event in slices if event["name"] == "rollout"]
    late = 2_000_000  # the engine's clock is rank 0's here, but for what a call takes to come back on a busy machine
    for event in requests:
        assert any(begun - late <= event["ts"] <= ended + late for begun, ended in phases)


def test_a_slow_weight_sync_is_found_in_weight_sync_and_names_the_engines(folder, slices, lines):
    begun, ended = (1e6 * at for at in json.loads((folder / "slept").read_text()))
    middle = (begun + ended) / 2  # of the sleep; the ranks' clocks differ by far less than a half of it
    for rank in range(4):
        running = [event for event in slices if event["pid"] == rank and event["ts"] <= middle < event["ts"] + event["dur"]]
        assert [event["name"] for event in running if event["cat"] == "phase"] == ["weight_sync"], "no update's seconds"
    slow = lines[SLOW_VERSION - 1]
    assert slow["time/weight_sync"] > SLOW_S
    assert slow["idle/engines_share"] * slow["time/step"] > SLOW_S / 4, "at least rank 0, of four, waited for the engine"


def test_a_sync_writes_the_figures_of_the_page_and_moves_the_least(lines):
    page = (Path(__file__).resolve().parents[2] / "docs" / "reading-a-run.md").read_text(encoding="utf-8")
    section = page.split("## What does a weight sync measure?")[1].split("\n## ")[0]
    rows = "".join(row for row in section.splitlines() if row.startswith("| `sync/"))
    assert not [key for line in lines[1:] for key in line if key.startswith("start_")]
    start = {key.removeprefix("start_"): value for key, value in lines[0].items() if key.startswith("start_")}
    assert start["sync/version"] == 0
    for line in (start, *lines):
        assert {key for key in line if key.startswith("sync/")} == set(re.findall(r"`(sync/\w+)`", rows))
        assert not [key for key in line if key.startswith("resync/")]
        assert line["sync/received_bytes"] == line["sync/bound_bytes"] > 0 and line["sync/attempts"] == 1
        assert line["sync/total_s"] > line["sync/transfer_s"] + line["sync/repack_s"] + line["sync/pause_s"]
        # Of one engine: each figure is that of the slowest.
        stages = line["sync/pause_s"] + line["sync/receive_s"] + line["sync/resume_s"]
        assert line["sync/total_s"] > line["sync/standstill_s"] > stages


def test_a_run_is_measured_before_while_and_after_it_trains(folder):
    lines = evaluations_of(folder, "whole")
    assert [line["step"] for line in lines] == [line["sync/version"] for line in lines] == [0, MIDDLE, STEPS]
    assert len({line["evaluation/mean"] for line in lines}) == 3, "weights change, and with them what is answered"
    for line in lines:
        assert (line["evaluation/num_prompts"], line["evaluation/num_left_out"]) == (HELD_OUT, 1)
        assert 0 < line["evaluation/pass_at_1"] <= line["evaluation/pass_at_4"] <= 1
        assert 0 <= line["evaluation/majority_at_6"] <= 1 and line["evaluation/mean_error"] > 0
    steps = {line["step"]: line for line in metrics_of(folder, "whole")}
    assert steps[MIDDLE]["evaluation/mean"] == lines[1]["evaluation/mean"] and "evaluation/mean" not in steps[1]
    table = read_lines(folder / "runs" / "whole" / "evaluations" / f"step-{STEPS:06d}.jsonl")
    assert [len(line["rewards"]) for line in table] == [COMPLETIONS] * HELD_OUT
    rewards = [reward for line in table for reward in line["rewards"]]
    assert sum(rewards) / len(rewards) == pytest.approx(lines[-1]["evaluation/mean"], rel=1e-6)
    assert sum(reward >= 0.2 for reward in rewards) / len(rewards) == pytest.approx(lines[-1]["evaluation/pass_at_1"])


def evaluated(run):
    """What `megarl eval` prints, where Ray runs already."""
    from megarl.cluster.ray_cluster import start_cluster

    start_cluster()
    result = CliRunner().invoke(app, ["eval", run, "--json"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_eval_command_finds_what_the_run_found_after_its_last_step(folder):
    """The same draws, by engines that loaded the exported checkpoint in place of receiving its weights."""
    (printed,) = run_ranks(evaluated, 1, str(folder / "runs" / "whole"), deadline_s=RUN_DEADLINE_S)
    last = evaluations_of(folder, "whole")[-1]
    assert json.loads(printed) == {key: value for key, value in last.items() if key.startswith("evaluation/")}


@pytest.mark.nightly
def test_training_does_not_depend_on_being_measured(folder):
    train_on_ranks(tiny_recipe(folder, "unmeasured", True, 4, 2, 2, STEPS, **CHANGES))
    without = [
        {key: value for key, value in line.items() if not key.startswith("evaluation/")}
        for line in metrics_of(folder, "whole")
    ]
    assert without == metrics_of(folder, "unmeasured")


def test_a_resumed_run_equals_one_that_never_stopped(folder):
    copy_until(folder, "whole", MIDDLE, "resumed")
    train_on_ranks(tiny_recipe(folder, "resumed", True, 4, 2, 2, STEPS, **measured(folder)), resume=True)
    assert metrics_of(folder, "resumed") == metrics_of(folder, "whole")


def test_a_run_resumes_under_another_layout(folder):
    copy_until(folder, "whole", MIDDLE, "other")
    # The same rollouts: one flipped last bit could sample another token.
    changes = CHANGES | {"rollout__replay": str(folder / "runs" / "whole" / "rollouts"), "run__dump_rollouts": False}
    train_on_ranks(tiny_recipe(folder, "other", True, 2, 1, 2, STEPS, **changes), resume=True)
    resumed, whole = metrics_of(folder, "other"), metrics_of(folder, "whole")
    assert len(resumed) == STEPS
    keys = [key for key in whole[0] if key.split("/")[-1] in ("loss", "policy_loss", "grad_norm", "entropy", "value_mean")]
    assert len(keys) >= 6
    for line, expected in zip(resumed, whole, strict=True):
        for key in keys:
            assert line[key] == pytest.approx(expected[key], rel=1e-4), (line["step"], key)


def test_an_export_loads_in_transformers(folder, tmp_path):
    """An engine loads one in the test of `megarl eval`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    megarl("export", str(folder / "runs" / "whole"), str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    start = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.dtype == torch.float32
    moved = [float((new - old).abs().max()) for new, old in zip(model.parameters(), start.parameters(), strict=True)]
    assert all(0 < distance < 0.2 for distance in moved)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([18, 19]) == "01"
    assert not np.isnan(model(torch.tensor([[3, 4, 5]])).logits.detach().numpy()).any()
