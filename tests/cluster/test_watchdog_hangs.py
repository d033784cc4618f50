"""The watchdog names a hanging trainer rank with its phase by the deadline, and ends all processes of the run."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.telemetry.exit_status import HUNG
from tests.hang_cases import (
    ACTOR,
    CASE,
    CORE,
    DETECTION_S,
    END_S,
    FIRST_STEP_S,
    KILL,
    REWARD_S,
    SLEEP,
    STACKS_S,
    STEP_S,
    STOP,
    SYNC_S,
    VERIFIERS,
    WORKER,
    Fault,
    case_processes,
    named,
    run_with_fault,
)
from tests.runs import fake_rollouts, tiny_recipe, tiny_run
from tests.sink_cases import wait_for
from tests.stream_hang_cases import FAULTS, FILES_S, TIMEOUT_S

pytestmark = [pytest.mark.hang, pytest.mark.diagnosis, pytest.mark.slow]
RANKS, STEPS = 6, 3  # 3 pipeline stages, each of 2 data-parallel ranks: ranks 0 and 1 are the first stage
FIRST, MIDDLE, LAST, PEER = 0, 2, 4, 3
ENGINE_STEPS, COLLECTIVE_S = 2, 30
GATED = "tests.gated_reward:digits_after_one_sleep"
# How long a run may take to report a lost reward worker, because its successor must score first.
RECOVERY_S = 20.0
# These cases also run in CI.
OFTEN = {"sleep-rank2-actor_update-forward", "SIGSTOP-rank0-reward", "SIGSTOP-child-of-rank-0-verifiers-reward",
         "environment-sleeps-in-the-loop", "engine-without-progress", "ledger-is-not-written"}  # fmt: skip
WATCHDOG = {"step_s": STEP_S, "first_step_s": FIRST_STEP_S, "stacks_s": STACKS_S}
PHASES = ("rollout", "reward", "actor_logprob", "reference_logprob", "critic_value", "advantage", "critic_update",
          "actor_update", "weight_sync")  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hangs")
    tiny_run(folder, "qwen3", layers=3)
    replay = str(fake_rollouts(folder, STEPS))

    def write(name, **changes):
        return tiny_recipe(
            folder, name, True, RANKS, 1, 3, STEPS, rollout__replay=replay, watchdog=dict(WATCHDOG), **changes
        )

    return write


def hang_folder(run, fault):
    """Return the run's only folder of a hang, which is named after the fault's step and phase."""
    (folder,) = run.glob("hang-*")
    assert folder.name == f"hang-{fault.step}-{fault.phase}"
    return folder


@pytest.mark.nightly
def test_a_collective_that_passes_its_own_deadline_is_a_hang_too(recipe, tmp_path):
    """While a rank writes files it may be silent for longer than other ranks may wait for it."""
    fault = Fault(MIDDLE, "checkpoint", SLEEP)
    changes = {"trainer__collective_timeout_s": COLLECTIVE_S, "run__checkpoint_every": 1}
    file = recipe("collective", watchdog__first_step_s=COLLECTIVE_S - 5, **changes)
    outcome = run_with_fault(file, RANKS, fault, tmp_path / "case")
    output, run = outcome.output, Path(file).parent / "runs" / "collective"
    assert outcome.codes == [HUNG] * RANKS, output[-6000:]
    assert named(output)[:1] == [(MIDDLE, 2, "checkpoint")], output[-6000:]
    assert f"Timed out waiting {1000 * COLLECTIVE_S}ms" in output
    (folder,) = run.glob("hang-*")
    assert all("most recent call first" in (folder / f"rank-{rank:05d}.txt").read_text() for rank in range(RANKS))


@pytest.fixture(scope="module")
def engine_recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine-hangs")
    tiny_run(folder, "qwen3", layers=2)
    replay = str(fake_rollouts(folder, ENGINE_STEPS))

    def write(fault):
        # The completions are so long that the fault comes in their middle.
        changes = {
            "data__max_prompt_tokens": 8, "rollout__max_new_tokens": 100, "rollout__max_restarts": fault.restarts,
            "phases__actor_update__micro_batch": {"max_tokens": 500},
            "phases__reward": {"sequences": 8, "timeout_s": REWARD_S},
            "weight_sync": {"timeout_s": SYNC_S}, "reward": [{"kind": "function", "target": GATED}],
            "watchdog": WATCHDOG,
        }  # fmt: skip
        if fault.process == VERIFIERS:
            changes["rollout__replay"] = replay
        return tiny_recipe(folder, fault.name, False, 2, 1, 2, ENGINE_STEPS, **changes)

    return write


@pytest.mark.nightly
def test_a_killed_rank_0_leaves_no_engine_and_no_ray(engine_recipe, tmp_path):
    fault = Fault(0, "rollout", KILL, "wait_engines")
    outcome = run_with_fault(engine_recipe(fault), 2, fault, tmp_path / "case")
    output = outcome.output
    assert outcome.codes == [-signal.SIGKILL, 1], output[-6000:]
    assert named(output)[:1] == [(0, 2, "rollout")] and "its process is gone" in output, output[-6000:]


KINDS = (SLEEP, STOP, KILL)
OTHERS = [Fault(0, phase, kind, process=process) for process, phase in (
    (CORE, "rollout"), (ACTOR, "rollout"), (CORE, "weight_sync"), (ACTOR, "weight_sync"), (WORKER, "reward"),
    (VERIFIERS, "reward")) for kind in KINDS] + [
    Fault(0, "weight_sync", SLEEP, process=CORE, restarts=0),
    Fault(0, "weight_sync", STOP, process=ACTOR, restarts=0),
]  # fmt: skip


@pytest.mark.parametrize(
    "fault", [pytest.param(item, id=item.name, marks=() if item.name in OFTEN else pytest.mark.nightly) for item in OTHERS]
)
def test_a_run_recovers_from_a_hanging_engine_or_reward_worker_or_names_it(engine_recipe, tmp_path, fault):
    """The run recovers and reports the fault, or ends as a hang."""
    file = engine_recipe(fault)
    outcome = run_with_fault(file, 2, fault, tmp_path / "case")
    late_s = outcome.detected_s - fault.deadline_s
    output, run = outcome.output, Path(file).parent / "runs" / fault.name
    assert outcome.detected_s > 0 and late_s < DETECTION_S + (RECOVERY_S if fault.recovers else 0), output[-6000:]
    if fault.recovers:
        assert outcome.codes == [0, 0], output[-6000:]
        assert re.search(fault.says, output), output[-6000:]
        assert not list(run.glob("hang-*"))
        return
    assert outcome.codes == [HUNG, HUNG], output[-6000:]
    folder = hang_folder(run, fault)
    assert json.loads((run / "ended.json").read_text())["how"] == "hung"
    verdict = (folder / "verdict.txt").read_text()
    assert "did not arrive" not in verdict, "no rank is at fault"
    whom = "reward workers" if fault.process == WORKER else "rollout engines"
    assert f"the {whom} did not answer rank 0, step {fault.step}, in phase {fault.phase}" in verdict, verdict
    stands = r"is stopped \(SIGSTOP\)" if fault.kind == STOP else "stands in _fall_asleep"
    assert re.findall(r"^(.*) \(process \d+\) (?:stands|is stopped)", verdict, re.M) == [fault.process], verdict
    assert re.search(rf"{fault.process} \(process \d+\) {stands}", verdict), verdict
    assert "others waited: rank 1" in verdict
    assert {item.name.rpartition("-")[0] for item in folder.glob("*-[0-9]*.txt") if "rank" not in item.name} == {
        name.replace(" ", "-") for name in (CORE, ACTOR, WORKER, f"{WORKER} verifiers")
    }
    for item in [*folder.glob("rank-*"), *folder.glob("engine-*"), *folder.glob("reward-*")]:
        is_stopped = fault.kind == STOP and item.name.rpartition("-")[0] == fault.process.replace(" ", "-")
        assert ("it is stopped" if is_stopped else "most recent call first") in item.read_text(), item


@pytest.mark.stream
@pytest.mark.parametrize(
    "fault", [pytest.param(item, id=item.name, marks=() if item.name in OFTEN else pytest.mark.nightly) for item in FAULTS]
)
def test_a_part_of_the_stream_that_never_comes_back_is_named_and_nothing_is_left(tmp_path, fault):
    tiny_run(tmp_path, "qwen3", layers=2)
    changes = {
        "rollout__replay": str(tmp_path), "rollout__timeout_s": TIMEOUT_S, "run__checkpoint_every": 1,
        "phases__reward": {"sequences": 16, "timeout_s": TIMEOUT_S},
        "watchdog": WATCHDOG | {"step_s": END_S / 2},
    }  # fmt: skip
    if fault.phase == "checkpoint":
        changes["watchdog__files_s"] = FILES_S
    file = tiny_recipe(tmp_path, fault.name, False, 2, 1, 1, STEPS, **changes)
    outcome = run_with_fault(file, 2, fault, tmp_path / "case")
    assert outcome.codes == [HUNG, HUNG], outcome.output[-6000:]
    assert 0 < outcome.detected_s < fault.deadline_s + DETECTION_S, outcome.output[-6000:]
    verdict = (hang_folder(tmp_path / "runs" / fault.name, fault) / "verdict.txt").read_text()
    assert re.search(fault.says, verdict), verdict


CASES = [
    Fault(rank, phase, KINDS[(number + place) % 3])
    for number, phase in enumerate(PHASES)
    for place, rank in enumerate((FIRST, MIDDLE, LAST, PEER))
] + [
    Fault(MIDDLE, "actor_update", SLEEP, "forward"),
    Fault(LAST, "critic_update", STOP, "backward"),
    Fault(PEER, "actor_update", STOP, "optimizer"),
    Fault(FIRST, "agree", SLEEP),
    Fault(LAST, "metrics", STOP),
    Fault(PEER, "actor_update", STOP, nodes=2),
    Fault(LAST, "critic_update", SLEEP, "forward", nodes=2),
]  # fmt: skip


@pytest.mark.parametrize(
    "fault", [pytest.param(item, id=item.name, marks=() if item.name in OFTEN else pytest.mark.nightly) for item in CASES]
)
def test_a_rank_that_hangs_is_named_and_nothing_is_left(recipe, tmp_path, fault):
    file = recipe(fault.name)
    outcome = run_with_fault(file, RANKS, fault, tmp_path / "case")
    output = outcome.output
    assert named(output)[:1] == [(fault.rank, fault.step, fault.phase)], output[-6000:]
    if fault.kind == KILL:
        assert "its process is gone" in output
        return
    silent_s = float(re.findall(r"silent for ([\d.]+) s", output)[0])  # when all stacks were there
    assert STEP_S <= silent_s < STEP_S + DETECTION_S
    run = Path(file).parent / "runs" / fault.name
    folder = hang_folder(run, fault)
    texts = [(folder / f"rank-{rank:05d}.txt").read_text() for rank in range(RANKS)]
    for rank, text in enumerate(texts):
        if rank != fault.rank or fault.kind == SLEEP:
            assert "most recent call first" in text, text
            assert json.loads((folder / f"flight-recorder-{rank}.json").read_text())
            assert outcome.codes[rank] == HUNG
    if fault.kind == STOP:
        assert "is stopped (SIGSTOP), and can write no stack" in texts[fault.rank]
    else:
        assert "hang_cases.py" in texts[fault.rank]
    assert "others waited: rank" in output
    assert json.loads((run / "ended.json").read_text())["how"] == "hung"


@pytest.mark.nightly  # in CI test_node_agent.py has the status of an agent whose ranks hung
@pytest.mark.parametrize(
    ("launcher", "status"),
    [
        (["megarl.cli", "train"], HUNG),
        # torchrun always ends with status 1, and prints the status of its ranks.
        (["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megarl"], 1),
    ],
)
def test_a_job_with_a_stopped_rank_ends_with_its_own_status(tmp_path, launcher, status):
    tiny_run(tmp_path, "qwen3", layers=2)
    steps = 200  # the run never gets so far
    replay = str(fake_rollouts(tmp_path, steps))
    recipe = tiny_recipe(tmp_path, "stopped", False, 2, 1, 2, steps, rollout__replay=replay, watchdog=WATCHDOG)
    environment = os.environ | {CASE: str(tmp_path)}
    with (tmp_path / "output").open("w") as log:
        command = [sys.executable, "-m", *launcher, str(recipe)]
        run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    metrics = tmp_path / "runs" / "stopped" / "metrics.jsonl"

    def has_a_step():
        assert run.poll() is None, (tmp_path / "output").read_text()
        return metrics.is_file() and metrics.read_text()

    try:
        wait_for(has_a_step)
        (rank,) = [item for item in case_processes(tmp_path) if item.environ().get("RANK") == "1" and item.ppid() == run.pid]
        rank.send_signal(signal.SIGSTOP)
        run.wait(END_S)
        wait_for(lambda: not case_processes(tmp_path))
    finally:
        for process in case_processes(tmp_path):
            process.kill()
    output = (tmp_path / "output").read_text()
    assert run.returncode == status, output
    assert "watchdog: rank 1 (pipeline stage 1 of 2) did not arrive" in output and "is stopped (SIGSTOP)" in output
    assert "exitcode  : 76" in output if status == 1 else f"exit status {HUNG}" in output
