"""New weights in the middle of a rollout: what is in flight is waited for, kept, or aborted and
continued, as the recipe says."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from unittest import mock

import numpy as np
import psutil
import pytest

from megarl.data.sample import Prompt, Sample
from megarl.rollout import RolloutError
from megarl.rollout.groups import RolloutBatch
from megarl.weight_sync.manifest import SyncError
from tests.rollout.conftest import Engines
from tests.rollout_cases import VOCAB, Publisher, corrupt, generate, huggingface_logprobs, same

pytestmark = [pytest.mark.sync, pytest.mark.slow]

# Longer than a block of vLLM's prefix cache on a CPU: members of a group share one.
PROMPT_TOKENS = 140
NEW_TOKENS = 100
OLD, NEW = 0, 1
STEP = 1
ALL = 16  # completions of a rollout
TRIES = 10


class Flight:
    """An engine, and a publisher of the old and of the new weights. 7 of 16 completions run at a time, and none stops early.
    What it answers undisturbed after a sync is what an engine answers that loaded the weights (`test_sync.py`)."""

    def __init__(self, engines: Engines) -> None:
        self.models = [engines.old, engines.new]
        self.pool = engines.pool(0, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, stops=())
        self.publisher = Publisher(self.models[OLD])
        # Cut beforehand: in the middle of a rollout there is no time for it.
        self._shards = [self.publisher.shards(model) for model in self.models]
        self.version = 0
        self._threads = ThreadPoolExecutor(1)
        self.undisturbed = [self.after_sync(OLD), self.after_sync(NEW)]
        idle_s = self._worked_s()
        self.generate()
        # Of the first of three rounds of completions about the middle, however fast this machine is.
        self._middle_s = (self._worked_s() - idle_s) / 6

    def after_sync(self, model: int) -> dict[int, Sample]:
        self.publish(model)
        return drawn(self.generate())

    def publish(self, model: int) -> dict[str, float]:
        self.version += 1
        return self.publisher.publish_shards(self.version, self._shards[model], self.pool)

    def generate(self) -> RolloutBatch:
        ids = [np.random.default_rng(index).integers(0, VOCAB, PROMPT_TOKENS).astype(np.int32) for index in range(4)]
        return generate(self.pool, [Prompt(index, token_ids, "", "", {}) for index, token_ids in enumerate(ids)], STEP)

    def in_the_middle(self, in_flight: str, sync: Callable[[], float]) -> tuple[Future[RolloutBatch], int]:
        """A rollout that decoded for a while under the old weights until `sync` came, before any group was complete, and the
        version of these weights. `sync` says how many completions it met. A machine that is busy may let some end before it
        comes: then it is all done once more."""
        for _ in range(TRIES):
            rollout = self._begun(in_flight)
            begun = self.version
            if sync() == ALL:
                return rollout, begun
            self.publish(OLD)  # what a torn version holds up goes on
            rollout.result()
        raise AssertionError(f"in none of {TRIES} rollouts a sync met all {ALL} completions")

    def _begun(self, in_flight: str) -> Future[RolloutBatch]:
        self.publish(OLD)
        section = self.pool._recipe.weight_sync.model_copy(update={"in_flight": in_flight})
        self.pool._recipe = self.pool._recipe.model_copy(update={"weight_sync": section})
        worked_s = self._worked_s()
        rollout = self._threads.submit(self.generate)
        deadline = time.monotonic() + 60
        while self._worked_s() < worked_s + self._middle_s and time.monotonic() < deadline:
            time.sleep(0.01)
        return rollout

    def _worked_s(self) -> float:
        """Seconds that the engine's busiest process has worked."""
        facts = self.pool.engines[0].process
        assert facts is not None
        return max(sum(psutil.Process(pid).cpu_times()[:2]) for pid, _ in facts.pids[1:])

    def close(self) -> None:
        self._threads.shutdown()
        self.publisher.close()


@pytest.fixture(scope="module")
def flight(engines: Engines) -> Iterator[Flight]:
    flight = Flight(engines)
    yield flight
    flight.close()


def drawn(batch: RolloutBatch) -> dict[int, Sample]:
    return batch.payload.fetch(range(16))


def assert_continued(flight: Flight, batch: RolloutBatch, first: int, last: int) -> None:
    """What ran at the pause went on under the new weights, and what had not begun is all theirs: every token has the
    log-probability of the weights of its version."""
    samples = drawn(batch)
    old, new = (huggingface_logprobs(model, samples, 1.0) for model in flight.models)
    switches = {s: int((sample.completion.versions == first).sum()) for s, sample in samples.items()}
    mixed = [s for s, tokens in switches.items() if tokens]
    assert 0 < len(mixed) <= 7, switches  # seven run, of which the last ones may have had no token yet
    for s, sample in samples.items():
        completion, before = sample.completion, slice(switches[s])
        assert completion.versions.tolist() == [first] * switches[s] + [last] * (NEW_TOKENS - switches[s]), s
        expected = np.where(completion.versions == first, old[s], new[s])
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, err_msg=f"completion {s}, {switches[s]} old")
        assert np.array_equal(completion.token_ids[before], flight.undisturbed[OLD][s].completion.token_ids[before])


def test_completions_that_are_waited_for_have_the_weights_they_began_with(flight: Flight) -> None:
    """Those that had to queue, too, and where a sync waited too long, which names the keys, before the next one."""
    messages: list[str] = []

    def too_long() -> float:
        recipe = flight.pool._recipe
        impatient = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"timeout_s": 0.01})})
        with mock.patch.object(flight.pool, "_recipe", impatient):
            try:
                return flight.publish(NEW)["sync/in_flight"]
            except RolloutError as error:
                messages.append(str(error))
                return ALL

    rollout, begun = flight.in_the_middle("wait", too_long)
    assert len(messages) == 1
    rule = r"rollout engine 0 in phase weight_sync within rollout\.timeout_s = 0\.01: weight_sync\.in_flight = wait"
    assert re.search(rule, messages[0]), messages
    flight.publish(NEW)
    batch = rollout.result()
    assert same(drawn(batch), flight.undisturbed[OLD])
    assert set(batch.first_version) == set(batch.last_version) == {begun}
    assert same(drawn(flight.generate()), flight.undisturbed[NEW])


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_completions_go_on_under_the_new_weights_and_not_under_torn_ones(flight: Flight, in_flight: str) -> None:
    def torn() -> float:
        corrupt(flight.publisher, times=2)
        with pytest.raises(SyncError, match="wrong bytes in piece 0"):
            flight.publish(NEW)
        return flight.pool._reports[0]["in_flight"]

    rollout, begun = flight.in_the_middle(in_flight, torn)
    assert not rollout.done()
    assert flight.publish(NEW)["sync/attempts"] == 1
    assert_continued(flight, rollout.result(), begun, flight.version)
    assert same(drawn(flight.generate()), flight.undisturbed[NEW])
