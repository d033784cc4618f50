"""Processes of a run that are made to hang. Trainer ranks come from a fork server, so that a case does not wait for
everybody's imports; rank 0 does something to an engine or a reward worker when it has begun a call to it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import ray

from megarl.telemetry.stacks import MARK, marked_processes
from tests.gated_reward import GATE
from tests.ports import unused_port
from tests.stream_hang_cases import StreamFault
from tests.stream_hang_cases import plant as plant_in_stream

CASE = "MEGARL_TEST_CASE"
# Deadlines of the watchdog in these runs, and what the rest of a machine under load may add to them in a test.
STEP_S, FIRST_STEP_S, STACKS_S = 8.0, 60.0, 5.0
DETECTION_S = 10.0
# What is said of a fault first, whatever becomes of it.
SAID = re.compile("watchdog: |engine 0 is lost|completions scored 0|judged once more|reward worker 0 was lost")
END_S = 120.0
SLEEP, STOP, KILL = "sleep", "SIGSTOP", "SIGKILL"
# What the watchdog calls them, with the numbers of a run that has one of each.
CORE, ACTOR, WORKER = "engine-0 EngineCore", "engine-0 actor", "reward-worker-0"
# Of a run that replays rollouts: it has no Ray, so that it starts in a fraction of the time.
VERIFIERS = "child of rank 0 verifiers"
# Deadlines of calls to them, in seconds. That of a rollout is this only once the fault is there: engines start under it too.
ROLLOUT_S, SYNC_S, REWARD_S = 8.0, 5.0, 7.0  # a killed reward worker is there again within twice that and STEP_S


@dataclass(frozen=True)
class Fault:
    """What happens to a rank when it enters a phase, or the first span of that name in it, in a step; or to another process
    when rank 0 has begun a call to it there, where engines may be started again `restarts` times."""

    rank: int
    phase: str
    kind: str
    span: str | None = None
    nodes: int = 1
    step: int = 2
    process: str | None = None
    restarts: int = 1

    @property
    def name(self) -> str:
        who = f"rank{self.rank}" if self.process is None else self.process.replace(" ", "-")
        others = [self.span, f"{self.nodes}nodes" if self.nodes > 1 else "", "" if self.restarts else "norestart"]
        return "-".join([self.kind, who, self.phase, *filter(None, others)])

    @property
    def recovers(self) -> bool:
        """Whether the run goes on without the process."""
        ended = self.kind == KILL or self.process == VERIFIERS
        return self.process is not None and (ended or (self.phase == "weight_sync" and self.restarts > 0))

    @property
    def deadline_s(self) -> float:
        """How long the process may be silent; rank 0 says what it has done without a reward's when all are there."""
        if self.kind == KILL:
            return 0.0
        if self.process == WORKER:
            return 2 * REWARD_S + STEP_S  # there are two tasks
        if self.process == VERIFIERS:
            return REWARD_S / 2  # the rest is for the completions behind
        answer_s = 3 * SYNC_S  # `WeightManifest.report_waits` of mapped weights
        return {"rollout": ROLLOUT_S, "weight_sync": answer_s, "reward": REWARD_S}[self.phase]

    @property
    def says(self) -> str:
        """Of one that the run goes on without, the pattern of what is said."""
        if self.process == WORKER:
            return r"the process \d+ of reward worker 0 was lost; process \d+ took its place"
        if self.process == VERIFIERS and self.kind == KILL:
            return r"1 completions judged once more; .*the verifiers' process \d+ died with signal 9 .*takes its place"
        if self.process == VERIFIERS:
            return r"1 completions scored 0; .*timeout: the verifiers' process had no answer .*takes its place"
        gone = "vLLM's engine process is gone" if self.process == CORE else "the actor's process is gone"
        cause = gone if self.kind == KILL else f"no answer of rollout engine 0 in phase {self.phase} within"
        return rf"rollout engine 0 is lost in phase {self.phase} .*restart 1 of rollout.max_restarts = 1\): {cause}"


@dataclass(frozen=True)
class Outcome:
    """Exit codes by rank, the output of all ranks, and the seconds from the fault until the first line about it."""

    codes: list[int | None]
    output: str
    detected_s: float


def run_with_fault(recipe: Path, ranks: int, fault: Fault | StreamFault, folder: Path) -> Outcome:
    """Run with a fault to the end of all processes. Raises AssertionError if a process is left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks // fault.nodes), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(unused_port()), CASE: str(folder), GATE: str(folder / "gate")}  # fmt: skip
    processes: list[Any] = [
        context.Process(target=_rank, args=(rank, str(recipe), environment, fault)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        reached = folder / "reached"
        _wait(
            lambda: reached.exists() or any(process.exitcode is not None for process in processes),
            END_S,
            f"{fault.name}: the fault's place",
        )
        begun = time.monotonic()
        if fault.process is None and fault.kind != SLEEP and reached.exists():
            os.kill(processes[fault.rank].pid, getattr(signal, fault.kind))
        detected = begun

        def ended() -> bool:
            nonlocal detected
            if detected == begun and SAID.search(_output(folder, ranks)):
                detected = time.monotonic()
            return all(process.exitcode is not None for process in processes)

        _wait(ended, END_S, f"{fault.name}: the end of all ranks")
        end = time.monotonic() + DETECTION_S
        while left := case_processes(folder):
            assert time.monotonic() < end, f"{fault.name} has left {left}: {_output(folder, ranks)[-6000:]}"
            time.sleep(0.05)
    finally:
        for process in [*processes, *case_processes(folder)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    for process in processes:
        process.join()
    outcome = Outcome([process.exitcode for process in processes], _output(folder, ranks), detected - begun)
    print(f"{fault.name}: {outcome.codes}, named {outcome.detected_s:.1f} s after it")
    return outcome


def _output(folder: Path, ranks: int) -> str:
    return "\n".join((folder / f"output-{rank}").read_text() for rank in range(ranks))


def case_processes(folder: Path) -> list[psutil.Process]:
    """Programs that a case has started and that run still."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(CASE) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def _wait(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} not within {deadline_s} s"
        time.sleep(0.05)


def _rank(rank: int, recipe: str, environment: dict[str, str], fault: Fault | StreamFault) -> None:
    node, local_rank = divmod(rank, int(environment["LOCAL_WORLD_SIZE"]))
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(local_rank), GROUP_RANK=str(node))
    os.environ["GROUP_WORLD_SIZE"] = str(fault.nodes)
    folder = Path(environment[CASE])
    output = os.open(folder / f"output-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setpgid(0, 0)
    if isinstance(fault, StreamFault):
        if rank == 0:
            plant_in_stream(fault, folder)
    elif fault.process is not None and rank == 0:
        _plant_elsewhere(fault, folder)
    elif rank == fault.rank:
        _plant(fault, folder / "reached")
    from megarl.build import main

    status = main([recipe])
    sys.stdout.flush()
    sys.exit(status)


def _plant(fault: Fault, reached: Path) -> None:
    """Have this rank come to the fault's place and stay there: asleep, or at work until the test's signal."""
    from megarl.cluster.watched import Watch

    beat, steps, before = Watch.beat, 0, ("", "")

    def beat_and_stay(watch: Watch, phase: str | None, span: str | None) -> None:
        nonlocal steps, before
        beat(watch, phase, span)
        place = phase or "", span or ""
        steps += place == ("agree", "") and before == ("", "")
        before = place
        if place == (fault.phase, fault.span or "") and steps == fault.step:
            reached.touch()
            if fault.kind == SLEEP:
                time.sleep(1e6)
            while True:
                sum(range(1000))

    Watch.beat = beat_and_stay  # type: ignore[method-assign,assignment]


def _plant_elsewhere(fault: Fault, folder: Path) -> None:
    """Have rank 0 strike the fault's process in the middle of a call to it."""
    from megarl.reward.workers import RewardWorkers
    from megarl.rollout.handle import EngineHandle
    from megarl.trainer import Trainer

    call, score_group, step, struck = EngineHandle.call, RewardWorkers.score_group, Trainer.step, False
    pipeline: Any = None
    method = {"rollout": "sample", "weight_sync": "receive"}.get(fault.phase)

    def strike() -> None:
        nonlocal struck
        if not struck and pipeline is not None and pipeline.number == fault.step:
            struck = True
            _strike(fault, folder, pipeline)
            (folder / "reached").touch()

    def noting_step(trainer: Any, number: int) -> Any:
        nonlocal pipeline
        pipeline = trainer
        return step(trainer, number)

    def call_and_strike(handle: Any, name: str, *arguments: Any, **settings: Any) -> Any:
        reference = call(handle, name, *arguments, **settings)
        if name == method:
            strike()
        return reference

    def strike_and_score(workers: Any, *arguments: Any) -> Any:
        if fault.phase == "reward":
            strike()
        return score_group(workers, *arguments)

    Trainer.step = noting_step  # type: ignore[method-assign,assignment]
    EngineHandle.call = call_and_strike  # type: ignore[method-assign,assignment]
    RewardWorkers.score_group = strike_and_score  # type: ignore[method-assign,assignment]


def _strike(fault: Fault, folder: Path, pipeline: Any) -> None:
    pool, stream = pipeline.parts.engines, pipeline.parts.rollouts
    if fault.phase == "rollout":  # in the stream's loop
        stream._router._timeout_s = ROLLOUT_S
        for lane in stream._router._lanes.values():
            stream._router._renew_deadline(lane)
    names = {name: pid for pid, (name, _) in marked_processes(os.environ[MARK].partition("/")[0]).items()}
    assert fault.process in names, names
    for library in (cloudpickle, ray.cloudpickle):
        library.register_pickle_by_value(sys.modules[__name__])
    if fault.kind != SLEEP:
        os.kill(names[fault.process], getattr(signal, fault.kind))
    elif fault.process == VERIFIERS:
        (folder / "gate").touch()
    else:
        actor = stream._rewards._actors[0] if fault.process == WORKER else pool.engines[0]._actor
        does = {CORE: _put_core_to_sleep, ACTOR: _put_loop_to_sleep, WORKER: _fall_asleep}[fault.process]
        reference = actor.__ray_call__.remote(does)
        if fault.process != WORKER:
            ray.get(reference)


def _fall_asleep(worker: Any = None) -> None:
    time.sleep(1e6)


def _put_loop_to_sleep(engine: Any) -> None:
    """In an engine's actor, beside the one loop for all its calls."""
    engine._engine.output_handler.get_loop().call_soon_threadsafe(_fall_asleep)


def _put_core_to_sleep(engine: Any) -> None:
    """In an engine's actor too."""
    call = engine._engine.engine_core.call_utility_async("collective_rpc", cloudpickle.dumps(_fall_asleep))
    engine.sleeping = asyncio.run_coroutine_threadsafe(call, engine._engine.output_handler.get_loop())


def named(output: str) -> list[tuple[int, int, str]]:
    """Rank, step and phase of whom the watchdog has named as the one who did not arrive."""
    matches = re.findall(r"watchdog: rank (\d+) .*did not arrive: step (\d+), in phase (\w+)", output)
    return [(int(rank), int(step), phase) for rank, step, phase in matches]
