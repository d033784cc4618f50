"""An engine that dies or hangs is brought back with its weights, or ends the run with its name."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megarl.rollout import RolloutError
from megarl.rollout.groups import RolloutBatch
from megarl.rollout.pool import EnginePool
from megarl.weight_sync.buckets import NUM_BUCKETS
from tests.rollout.conftest import Engines
from tests.rollout_cases import Publisher, generate, huggingface_logprobs, prompts, same

pytestmark = [pytest.mark.hang, pytest.mark.slow]

TRIES = 5

Faulty = tuple[EnginePool, Publisher, Path]


@pytest.fixture(scope="module")
def faulty(engines: Engines) -> Iterator[Faulty]:
    """One engine that has taken a version, and the model of that version; completions long enough to interrupt. An engine's
    start is most of what a test takes, so each test leaves an engine that answers to the next; the last one ends it."""
    publisher, pool = Publisher(engines.new, transport="group"), engines.pool(0, new_tokens=220, stops=(), max_restarts=9)
    publisher.publish(1, engines.new, pool)
    yield pool, publisher, engines.new
    publisher.close()


def change_rollout(pool: EnginePool, **values: object) -> None:
    """Another `rollout` section from here on."""
    section = pool._recipe.rollout.model_copy(update=values)
    pool._recipe = pool._recipe.model_copy(update={"rollout": section})


def sample(faulty: Faulty, step: int) -> RolloutBatch:
    pool, publisher, _ = faulty
    return generate(pool, prompts(), step, publisher.resync)


def processes(pool: EnginePool) -> list[psutil.Process]:
    """The actor, then vLLM's processes."""
    facts = pool.engines[0].process
    assert facts is not None
    return [psutil.Process(pid) for pid, _ in facts.pids]


def busiest_child(pool: EnginePool) -> psutil.Process:
    """The engine core: the child that has worked most."""
    return max(processes(pool)[1:], key=lambda child: sum(child.cpu_times()[:2]))


def interrupt(core: psutil.Process, number: signal.Signals) -> threading.Thread:
    """Send a signal as soon as an engine core has decoded for a while."""
    idle = sum(core.cpu_times()[:2])

    def watch() -> None:
        deadline = time.monotonic() + 60
        while sum(core.cpu_times()[:2]) < idle + 0.3 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(core.pid, number)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def generate_killed(faulty: Faulty, step: int) -> RolloutBatch:
    """A rollout in whose middle the engine core is killed. On a busy machine it may have ended before: then the next
    one meets the dead engine."""
    pool = faulty[0]
    restarts = pool.engines[0].restarts
    killer = interrupt(busiest_child(pool), signal.SIGKILL)
    batch = sample(faulty, step)
    killer.join()
    return batch if pool.engines[0].restarts > restarts else sample(faulty, step)


def generate_stopped(faulty: Faulty, step: int, core: psutil.Process) -> str:
    """What a rollout says in whose middle the engine core is stopped, for good; one that had ended before is done again."""
    for _ in range(TRIES):
        stopper = interrupt(core, signal.SIGSTOP)
        try:
            sample(faulty, step)
        except RolloutError as error:
            return str(error)
        finally:
            stopper.join()
        os.kill(core.pid, signal.SIGCONT)
    raise AssertionError(f"{TRIES} rollouts ended before their engine was stopped")


def kill_in_the_middle(publisher: Publisher, victim: psutil.Process) -> None:
    """In the next sync, before the middle one of its rounds of buckets is sent. There is room for it where the engine has
    read all but the last one before it, so it is about to wait for this one."""
    sender: Any = publisher.sync._sender
    middle = len(publisher.sync._rounds) // 2
    assert middle > NUM_BUCKETS
    send, num_sent = sender.send, itertools.count()

    def send_to_the_dead(entries: Any, written: Any) -> None:
        if next(num_sent) == middle:
            sender.send = send
            victim.kill()
        send(entries, written)

    sender.send = send_to_the_dead


def assert_drawn_from(model: Path, batch: RolloutBatch) -> None:
    drawn = batch.payload.fetch(range(16))
    reference = huggingface_logprobs(model, drawn, 1.0)
    assert max(float(np.abs(reference[s] - drawn[s].completion.logprobs).max()) for s in drawn) < 1e-4


@pytest.mark.nightly  # in CI an actor is killed in a run
def test_a_killed_engine_core_comes_back_with_its_weights(faulty: Faulty) -> None:
    pool, _, new = faulty
    first = sample(faulty, 1)
    undisturbed = first.payload.fetch(range(16))

    batch = generate_killed(faulty, 2)
    assert batch.metrics["rollout/num_restarts"] == first.metrics["rollout/num_restarts"] + 1
    assert set(batch.first_version) == set(first.first_version)
    assert_drawn_from(new, batch)

    assert same(undisturbed, sample(faulty, 1).payload.fetch(range(16))), "a fresh engine drew otherwise"


@pytest.mark.parametrize(
    ("victim", "state"),
    [
        ("core", "receive"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("actor", "receive"), ("core", "pause"), ("actor", "pause"))
        ),
    ],
)
def test_an_engine_that_dies_in_a_sync_takes_the_new_version_when_it_is_back(
    faulty: Faulty, victim: str, state: str
) -> None:
    """Before it is asked to pause, or while it takes buckets."""
    pool, publisher, new = faulty
    family, restarts = processes(pool), pool.engines[0].restarts
    dying = family[0] if victim == "actor" else busiest_child(pool)
    if state == "pause":
        dying.kill()
    else:
        kill_in_the_middle(publisher, dying)
    version = publisher._last[0] + 1
    figures = publisher.publish(version, new, pool)
    assert figures["sync/received_bytes"] > 0 and figures["sync/attempts"] == (1 if state == "pause" else 2)
    batch = sample(faulty, 1)
    assert set(batch.first_version) == {version} and pool.engines[0].restarts == restarts + 1
    assert_drawn_from(new, batch)
    assert not [process for process in family if process.is_running()], "the dead engine's processes live on"


@pytest.mark.nightly  # in CI without restarts
def test_an_engine_whose_logprobs_are_no_numbers_is_started_again_and_its_prompts_too(faulty: Faulty) -> None:
    """What it computes with is broken, and not what the trainer would send: that is what the new engine gets."""
    pool, publisher, new = faulty
    restarts = pool.engines[0].restarts
    broken = publisher.shards(new)
    broken["decoder.final_layernorm.weight"][0] = torch.nan
    version = publisher._last[0] + 1
    publisher.publish_shards(version, broken, pool)
    publisher._last = (version, publisher.shards(new), pool)
    batch = sample(faulty, 5)
    assert pool.engines[0].restarts == restarts + 1 == batch.metrics["rollout/num_restarts"]
    assert len(batch) == 16 and set(batch.first_version) == {version}
    assert_drawn_from(new, batch)


def test_an_engine_that_hangs_is_named_at_the_deadline_and_one_that_died_too_often_ends_the_run(faulty: Faulty) -> None:
    pool, _, _ = faulty
    patient_s, restarts = pool._recipe.rollout.timeout_s, pool.engines[0].restarts
    change_rollout(pool, timeout_s=4.0)
    core = busiest_child(pool)
    message = generate_stopped(faulty, 1, core)
    assert re.search(r"rollout engine 0: .* groups of step 1 .*phase rollout.*timeout_s = 4", message), message

    change_rollout(pool, timeout_s=patient_s, max_restarts=restarts)
    core.kill()
    rule = rf"rollout engine 0 died in phase rollout after {restarts} restarts.*max_restarts = {restarts}"
    with pytest.raises(RolloutError, match=rule):
        sample(faulty, 4)


def test_an_engine_without_restarts_left_whose_logprobs_are_no_numbers_ends_the_run(engines: Engines) -> None:
    """The other engine: the tests above end theirs."""
    pool, publisher = engines.pool(1, max_restarts=0), Publisher(engines.new)
    broken = publisher.shards(engines.new)
    broken["decoder.final_layernorm.weight"][0] = torch.nan
    publisher.publish_shards(5, broken, pool)
    rule = (
        r"rollout engine 1 died in phase rollout after 0 restarts .*: a log-probability of group \d is nan, under version 5"
    )
    with pytest.raises(RolloutError, match=rule):
        generate(pool, prompts(), 1)
    publisher.close()
