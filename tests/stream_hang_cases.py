"""Parts of the rollout stream, and the files of a checkpoint, that never come back in rank 0 of a run. Scripted engines
stand in for vLLM, so that a case takes seconds; the stream, its loop, the trainer and the watchdog are real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 4.0  # rollout.timeout_s and phases.reward.timeout_s of these runs
FILES_S = 45.0  # watchdog.files_s; a checkpoint without a fault takes up to 22 s beside other work
STEP = 2  # the faulty one
STALLED_S = TIMEOUT_S  # half of it to notice, half of it to be sure
STARVED_S = 4 * TIMEOUT_S  # three times the rollout's and once the reward's; `TASK_GRACE_S` is 0 here


@dataclass(frozen=True)
class StreamFault:
    """A part of the stream that comes to a halt; the run has to end `deadline_s` later, in `phase`, with `says` as a pattern
    of what is said."""

    name: str
    deadline_s: float
    phase: str
    says: str
    step: int = STEP
    kind: str = "sleep"
    process: None = None
    rank: int = 0
    nodes: int = 1


STANDS = rf"loop of the stream has stood still for {TIMEOUT_S / 2:g} s in(.|\n)*in "
WAITS = rf"step {STEP} waits for groups, .* within {STARVED_S:g} s; "
FAULTS = [
    StreamFault("environment-sleeps-in-the-loop", STALLED_S, "rollout", STANDS + "ask_and_sleep", step=1),
    StreamFault("reward-sleeps-in-the-loop", STALLED_S, "rollout", STANDS + "score_and_sleep"),
    StreamFault("engine-without-progress", TIMEOUT_S, "rollout", r"rollout engine \d: .* not finished in phase rollout"),
    StreamFault("groups-do-not-start", STARVED_S, "rollout", WAITS + ".* of 4 wait for completions"),
    StreamFault("rewards-do-not-come", STARVED_S, "reward", WAITS + ".* of 4 for rewards"),
    StreamFault("paused-and-not-resumed", STARVED_S, "rollout", WAITS + "the stream is paused"),
    StreamFault("ledger-is-not-written", FILES_S, "checkpoint", "rank 0 .*did not arrive: step 2, .* write_and_sleep"),
]


def plant(fault: StreamFault, folder: Path) -> None:
    """Have the stream of this process come to a halt in the fault's step."""
    from megarl import build
    from megarl.megatron import checkpoint
    from megarl.reward import workers as reward_workers
    from megarl.reward.verifiers import TextScore
    from megarl.reward.workers import RewardWorkers
    from megarl.rollout import stream as streams
    from megarl.rollout.engine import GroupRequest
    from tests.scripted_stream import ScriptedPool, ScriptedScorer, scripted_environments

    current: list[streams.RolloutStream] = []

    def strikes(name: str) -> bool:
        """Whether the fault is this one, and it is time for it."""
        is_time = fault.name == name and bool(current) and current[0]._step >= fault.step
        if is_time and not (folder / "reached").exists():
            (folder / "reached").touch()
        return is_time

    async def ask_and_sleep(question: Any) -> Any:
        if strikes("environment-sleeps-in-the-loop"):
            time.sleep(1e6)

    def delay(request: GroupRequest) -> float | None:
        return None if strikes("engine-without-progress") else 0.0

    def open_stream(recipe: Any, prompts: Any, rewards: Any) -> streams.RolloutStream:
        environments = scripted_environments(ask_and_sleep, TIMEOUT_S) if fault.name.startswith("environment") else None
        scripted: Any = ScriptedPool.of(2, delay=delay)
        scripted.max_concurrent = recipe.phases.rollout.max_concurrent
        current.append(streams.RolloutStream(recipe, scripted, recipe.run.seed, prompts, rewards, environments))
        return current[0]

    score_group, begin, start = RewardWorkers.score_group, streams.RolloutStream.begin, streams.RolloutStream._start
    save = checkpoint.torch.save

    def score_and_sleep(workers: Any, *arguments: Any) -> Any:
        if strikes("reward-sleeps-in-the-loop"):
            time.sleep(1e6)
        return (
            asyncio.get_running_loop().create_future()
            if strikes("rewards-do-not-come")
            else score_group(workers, *arguments)
        )

    def begin_paused(stream: Any, step: int) -> None:
        if step == fault.step and fault.name == "paused-and-not-resumed":
            stream.pause()
        begin(stream, step)
        strikes("paused-and-not-resumed")

    def do_not_start(stream: Any, group: Any) -> None:
        if not strikes("groups-do-not-start"):
            start(stream, group)

    def write_and_sleep(content: Any, file: Any, *arguments: Any, **settings: Any) -> None:
        if str(file).endswith("rollouts.pt") and strikes("ledger-is-not-written"):
            time.sleep(1e6)
        save(content, file, *arguments, **settings)

    scorer = ScriptedScorer(lambda prompt, member, tokens: TextScore({"digits": float(member)}))
    replaced: dict[tuple[Any, str], Callable[..., Any] | float] = {
        (build, "check_dumps"): lambda recipe: None,
        (build, "ReplayStream"): open_stream,
        (reward_workers, "Scorer"): lambda *_: scorer,
        (RewardWorkers, "score_group"): score_and_sleep,
        (streams.RolloutStream, "begin"): begin_paused,
        (streams.RolloutStream, "_start"): do_not_start,
        (streams, "TASK_GRACE_S"): 0.0,
        (checkpoint.torch, "save"): write_and_sleep,
    }
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
