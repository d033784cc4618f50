"""Laws of `Admission` under random schedules, against a book that is kept apart from it."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from megarl.algorithm.advantage import choose_groups
from megarl.rollout.admission import Admission

pytestmark = pytest.mark.stream

NUM_SCHEDULES = 10_000  # also in CI


@dataclass
class Entry:
    """A group in the book. `status` is running, sampled, finished, taken or removed."""

    number: int
    version: int  # of the engines at its start
    status: str = "running"
    place: int = -1  # in the order of completion
    is_informative: bool = True
    overtaken: int = 0


@dataclass
class Schedule:
    """Drives an `Admission` at random, and checks each of its answers."""

    seed: int
    book: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.per_step, self.staleness = self.random.randint(1, 4), self.random.choice([0, 0, 1, 2, 4])
        self.window = self.random.randint(self.per_step, (1 + self.staleness) * self.per_step)
        self.max_rounds = self.random.choice([1, 1, 2, 3])
        self.informative_share = self.random.choice([0.0, 0.3, 0.8]) if self.max_rounds > 1 else 1.0
        self.slow_share = self.random.choice([0.0, 0.2])  # of groups that stay behind
        self.admission = self._new()
        self.version = self.steps = self.num_finished = 0
        self.removed: Counter[str] = Counter()
        self.slow: set[int] = set()

    def _new(self) -> Admission:
        return Admission(self.per_step, self.staleness, self.window, self.max_rounds)

    def with_status(self, *statuses: str) -> list[Entry]:
        return [entry for entry in self.book if entry.status in statuses]

    def run(self, num_events: int) -> None:
        self.begin()
        for _ in range(num_events):
            event = self.random.random()
            if event < 0.45:
                self.advance()
            elif event < 0.75:
                self.start(self.random.randint(1, 2))
            elif event < 0.94 and self.version < self.steps:
                self.begin()
            elif event < 0.94:
                if self.staleness == 0:  # the stream starts all groups of a round at once
                    self.start(1000)
                self.take()
            elif event < 0.96:
                self.remove()
            elif event < 0.98:
                self.kill_and_resume()
            self.check()
        self.drain()

    def begin(self) -> None:
        """The engines receive the weights of all steps."""
        self.version = self.steps
        self.admission.begin()

    def start(self, most: int) -> None:
        for _ in range(min(most, self.admission.num_to_start())):
            number = self.admission.start()
            assert number == len(self.book), "groups are numbered in the order of their prompts"
            self.book.append(Entry(number, self.version))
            if self.random.random() < self.slow_share:
                self.slow.add(number)
        kept = sum(entry.status != "removed" for entry in self.book)
        most_replaced = (self.max_rounds - 1) * self.per_step
        assert kept <= (self.version + 1 + self.staleness) * self.per_step + most_replaced

    def advance(self, with_slow: bool = False) -> bool:
        """Let some group be sampled, or scored; return whether there was one."""
        under_way = self.with_status("running", "sampled")
        fast = [entry for entry in under_way if entry.number not in self.slow]
        if not (choices := fast or (under_way if with_slow or self.random.random() < 0.1 else [])):
            return False
        entry = self.random.choice(choices)
        if entry.status == "running" and self.random.random() < 0.7:
            entry.status = "sampled"
            self.admission.sampled(entry.number)
        else:
            entry.status, entry.place = "finished", self.num_finished
            entry.is_informative = self.random.random() < self.informative_share
            self.num_finished += 1
            self.admission.finish(entry.number, entry.is_informative)
        return True

    def remove(self) -> None:
        if choices := self.with_status("running", "sampled", "finished"):
            entry = self.random.choice(choices)
            entry.status = "removed"
            self.removed["lost"] += 1
            self.admission.remove(entry.number, "lost")

    def kill_and_resume(self) -> None:
        """Groups without rewards are sampled again from their start."""
        state = json.loads(json.dumps(self.admission.state()))
        self.admission = self._new()
        self.admission.restore(state)
        for entry in self.with_status("sampled"):
            entry.status = "running"

    def take(self) -> bool:
        waiting = self.with_status("running", "sampled", "finished")
        was_sampled, may_start = self.admission.is_sampled, self.admission.num_to_start() > 0
        taken = self.admission.take()
        if taken is None:
            pending = any(entry.status == "sampled" for entry in waiting)
            assert not was_sampled or pending or may_start, "a step waits for groups that nobody will finish"
            return False
        assert was_sampled, "a step took groups before its completions were there"
        numbers, dropped = taken
        chosen = [self.book[number] for number in numbers]
        assert len(chosen) == self.per_step and numbers == sorted(set(numbers))
        assert all(entry.status == "finished" for entry in [*chosen, *(self.book[number] for number in dropped)])
        assert all(self.steps - entry.version <= self.staleness for entry in chosen), "a token is too old"
        if self.staleness == 0:
            self.check_synchronous(waiting, numbers)
        elif all(entry.status == "finished" for entry in waiting):
            self.check_order(waiting, chosen)
        for entry in chosen:
            entry.status = "taken"
        for number in dropped:
            entry = self.book[number]
            entry.status = "removed"
            if entry.is_informative:
                assert entry.version + self.staleness <= self.steps, "a group was removed that the next step could take"
            self.removed["too_old" if entry.is_informative else "uninformative"] += 1
        for entry in self.with_status("running", "sampled", "finished"):
            entry.overtaken += sum(number > entry.number for number in numbers)
            assert entry.overtaken < self.window, "a group was overtaken too often"
        self.steps += 1
        return True

    def check_synchronous(self, waiting: list[Entry], numbers: list[int]) -> None:
        """A step takes its groups in the order of their prompts, those with information first."""
        informative = torch.tensor([entry.is_informative for entry in waiting])
        places = choose_groups(informative, self.per_step)
        assert numbers == [waiting[place].number for place in places]
        if not self.removed["lost"]:
            rounds = len(waiting) / self.per_step
            assert rounds == self.admission.num_rounds or self.admission.num_rounds == 1  # of the next step
            wanted = next(
                (n for n in range(1, self.max_rounds) if informative[: n * self.per_step].sum() >= self.per_step),
                self.max_rounds,
            )
            assert rounds == wanted, "groups start in whole rounds until there are enough"

    def check_order(self, waiting: list[Entry], chosen: list[Entry]) -> None:
        """Where all have finished, a step takes those that finished first, and before them those that cannot wait."""
        left = [entry.place for entry in waiting if entry not in chosen and entry.is_informative]
        for entry in chosen:
            is_due = entry.version + self.staleness <= self.steps
            is_last_chance = entry.overtaken + self.per_step >= self.window
            assert is_due or is_last_chance or not entry.is_informative or all(entry.place < place for place in left)

    def check(self) -> None:
        """Every group that started waits, was taken once, or was removed with a reason."""
        counts = Counter(entry.status for entry in self.book)
        waiting = [entry.number for entry in self.with_status("running", "sampled", "finished")]
        assert self.admission.waiting == waiting
        assert self.admission.num_started == len(self.book) == len(waiting) + counts["taken"] + counts["removed"]
        assert self.admission.steps == self.steps and counts["taken"] == self.steps * self.per_step
        assert dict(self.admission.removed) == {reason: count for reason, count in self.removed.items() if count}

    def drain(self) -> None:
        """Two more steps come, whatever the state: there is no deadlock."""
        for _ in range(2):
            self.begin()
            for _ in range(1000):
                self.start(1000)
                if self.take():
                    break
                if not self.advance(with_slow=True):
                    assert self.admission.is_sampled
                    assert self.admission.num_to_start() or self.take(), "all groups have finished, and no step begins"
                    break
            else:
                raise AssertionError("no step came")
            self.check()


def test_random_schedules_keep_the_laws_of_admission() -> None:
    for seed in range(NUM_SCHEDULES):
        try:
            Schedule(seed).run(60)
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error
