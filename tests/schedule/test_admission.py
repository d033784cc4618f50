"""Laws of `Admission` under random schedules, against a book that is kept apart from it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations

import pytest

from megarl.schedule.admission import Admission

pytestmark = pytest.mark.stream

NUM_SCHEDULES = 10_000  # also in CI


@dataclass
class Entry:
    """A group in the book. `status` is waiting (for an engine), running, sampled, finished, taken or removed."""

    number: int
    version: int | None = None  # of the engine that got it
    status: str = "waiting"
    place: int = -1  # in the order of completion
    is_informative: bool = True


UNDER_WAY = ("waiting", "running", "sampled", "finished")


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
            elif event < 0.90 and self.version == self.steps:
                self.take()
            elif event < 0.94 and self.version < self.steps:
                self.begin()
            elif event < 0.96:
                self.remove()
            elif event < 0.98 and self.version == self.steps and (self.staleness or not self.with_status(*UNDER_WAY)):
                self.kill_and_resume()
            elif event >= 0.98:
                self.lose()
            self.check()
        self.drain()

    def begin(self) -> None:
        """The engines receive the weights of all steps."""
        self.version = self.steps
        self.admission.begin(self.version)

    def start(self, most: int) -> None:
        for _ in range(min(most, self.admission.num_to_start())):
            number = self.admission.start()
            assert number == len(self.book), "groups are numbered in the order of their prompts"
            self.book.append(Entry(number))
            if self.random.random() < self.slow_share:
                self.slow.add(number)
        num_admitted = sum(entry.status != "removed" for entry in self.book)
        most_replaced = (self.max_rounds - 1) * self.per_step
        assert num_admitted <= (self.version + 1 + self.staleness) * self.per_step + most_replaced

    def advance(self, with_slow: bool = False) -> bool:
        """Let some group be sent to an engine, sampled, or scored; return whether there was one."""
        under_way = self.with_status("waiting", "running", "sampled")
        fast = [entry for entry in under_way if entry.number not in self.slow]
        if not (choices := fast or (under_way if with_slow or self.random.random() < 0.1 else [])):
            return False
        entry = self.random.choice(choices)
        if entry.status == "waiting":
            entry.status, entry.version = "running", self.version if entry.version is None else entry.version
            self.admission.send(entry.number)
        elif entry.status == "running":
            entry.status = "sampled"
            assert entry.version is not None
            if self.random.random() < 0.2:  # its first token came later
                entry.version = self.random.randint(entry.version, self.version)
            self.admission.sampled(entry.number, entry.version)
        else:
            entry.status, entry.place = "finished", self.num_finished
            entry.is_informative = self.random.random() < self.informative_share
            self.num_finished += 1
            self.admission.finish(entry.number, entry.is_informative)
        return True

    def remove(self) -> None:
        if choices := self.with_status(*UNDER_WAY):
            entry = self.random.choice(choices)
            entry.status = "removed"
            self.removed["lost"] += 1
            self.admission.remove(entry.number, "lost")

    def lose(self) -> None:
        """The tokens of a sampled group are lost: it waits for an engine again, as if it had just started."""
        if choices := self.with_status("sampled"):
            entry = self.random.choice(choices)
            entry.status, entry.version = "waiting", None
            self.admission.lose(entry.number)

    def kill_and_resume(self) -> None:
        """All groups are sent again, and those with tokens have their age. Groups without information are given up."""
        state = json.loads(json.dumps(self.admission.state()))
        self.admission = self._new()
        self.admission.restore(state)
        self.admission.begin(self.version)
        for entry in self.with_status(*UNDER_WAY):
            entry.status = "waiting" if entry.is_informative else "removed"
            self.removed["uninformative"] += not entry.is_informative

    def take(self) -> bool:
        waiting = self.with_status(*UNDER_WAY)
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
        assert all(self.steps - self.age(entry) <= self.staleness for entry in chosen), "a token is too old"
        if self.staleness == 0:
            self.check_synchronous(waiting, numbers)
        else:
            self.check_order(waiting, chosen)
        for entry in chosen:
            entry.status = "taken"
        for number in dropped:
            entry = self.book[number]
            entry.status = "removed"
            if entry.is_informative:
                assert self.staleness == 0, "a group was removed that a step could take"
            self.removed["too_old" if entry.is_informative else "uninformative"] += 1
        self.steps += 1
        return True

    def age(self, entry: Entry) -> int:
        return self.steps if entry.version is None else entry.version

    def leaves_room(self, waiting: Iterable[Entry], chosen: Iterable[Entry]) -> bool:
        """Whether each later step, of P groups, comes in time for the groups that are left."""
        left = sorted(self.age(entry) for entry in waiting if entry.is_informative and entry not in chosen)
        return all(
            sum(age <= old for age in left) <= (old + self.staleness - self.steps) * self.per_step
            for old in {age for age in left if age < self.steps}
        )

    def check_synchronous(self, waiting: list[Entry], numbers: list[int]) -> None:
        """A step takes its groups in the order of their prompts, those with information first."""
        informative = [entry.is_informative for entry in waiting]
        first = [entry.number for entry in waiting if entry.is_informative][: self.per_step]
        rest = [entry.number for entry in waiting if not entry.is_informative]
        assert numbers == sorted([*first, *rest[: self.per_step - len(first)]])
        if not self.removed["lost"]:
            rounds = len(waiting) / self.per_step
            assert rounds == self.admission.num_rounds or self.admission.num_rounds == 1  # of the next step
            wanted = next(
                (n for n in range(1, self.max_rounds) if sum(informative[: n * self.per_step]) >= self.per_step),
                self.max_rounds,
            )
            assert rounds == wanted, "groups start in whole rounds until there are enough"

    def check_order(self, waiting: list[Entry], chosen: list[Entry]) -> None:
        """A step takes the groups that finished first within the window, as far as none of the others gets too old."""
        ordered = [entry for entry in waiting if entry.is_informative]
        window = [
            entry for n, entry in enumerate(ordered) if n < self.window or self.age(entry) + self.staleness <= self.steps
        ]
        fillers = [entry for entry in chosen if not entry.is_informative]
        if fillers:
            assert all(entry.status == "finished" for entry in ordered), "groups without information are a last resort"
            return
        assert all(entry in window for entry in chosen), "a group overtook more than the window"
        assert self.leaves_room(waiting, chosen)
        ready = sorted((entry for entry in window if entry.status == "finished"), key=lambda entry: entry.place)
        if len(ready) <= 8:
            best = next(some for some in combinations(ready, self.per_step) if self.leaves_room(waiting, some))
            assert sorted(entry.number for entry in best) == [entry.number for entry in chosen]

    def check(self) -> None:
        """Every group that started waits, was taken once, or was removed with a reason."""
        counts = Counter(entry.status for entry in self.book)
        waiting = [entry.number for entry in self.with_status(*UNDER_WAY)]
        assert self.admission.waiting == waiting
        assert self.admission.num_started == len(self.book) == len(waiting) + counts["taken"] + counts["removed"]
        assert self.admission.steps == self.version and counts["taken"] == self.steps * self.per_step
        assert dict(self.admission.removed) == {reason: count for reason, count in self.removed.items() if count}

    def drain(self) -> None:
        """Two more steps come, whatever the state: there is no deadlock."""
        for _ in range(2):
            self.begin()
            # A group that starts in the place of another one may be removed again only at random, and never here.
            for _ in range(1000):
                if self.take():
                    break
                self.start(1000)
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


def test_groups_under_way_are_given_up_where_a_resumed_run_allows_less_staleness() -> None:
    before = Admission(2, 2, 4)
    for _ in range(before.num_to_start()):
        before.send(before.start())
    resumed = Admission(2, 1, 4)
    resumed.restore(json.loads(json.dumps(before.state())))
    resumed.begin(0)
    assert resumed.waiting == [] and resumed.removed == {"too_old": 6}
    assert [resumed.start() for _ in range(resumed.num_to_start())] == [6, 7, 8, 9]
    again = Admission(2, 2, 4)
    again.restore(before.state())
    assert again.waiting == list(range(6)) and not again.removed
