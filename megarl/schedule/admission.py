"""Which groups start, and which a step trains on: what bounds the staleness of every token. Owns no clock and no I/O.

With P groups a step and a `max_staleness` of S:
- Groups are numbered in the order of their prompts. The n-th group that is kept starts only while n < (steps + 1 + S) * P,
  where `steps` are over and the engines have their weights.
- Every group is taken by exactly one step, or removed for a reason that is counted.
- A step takes the groups that finished first among the first `window` that wait, as far as no other group becomes too old
  for that: each later step takes P groups, too.
- With S = 0 a step takes the groups that started in it, in the order of their prompts.

A group ages from the version that samples its first token, not while it waits for an engine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass
class _Waiting:
    """A group that started and was not taken. `version` is that of its first token, None until an engine has the group;
    `finished` is its number in the order of completion."""

    number: int
    version: int | None = None
    is_sampled: bool = False
    finished: int | None = None
    is_informative: bool = True


class Admission:
    """Counts groups from their start until a step takes them."""

    def __init__(
        self, groups_per_step: int, max_staleness: int, window: int, max_rounds: int = 1, num_steps: int | None = None
    ) -> None:
        """With `max_rounds` above 1 groups without information are replaced, up to (max_rounds - 1) * P of them a step.
        `num_steps` is the last step of the run: no group starts that no step would take."""
        self._per_step, self._staleness, self._window = groups_per_step, max_staleness, window
        self._max_rounds, self._num_steps = max_rounds, num_steps
        self._waiting: dict[int, _Waiting] = {}  # by number, in order
        self._num_finished = self._num_taken = 0  # groups; steps that have taken theirs
        self.num_rounds = 1  # batches of groups that this step has started, with S = 0
        self._was_sampled = False  # `is_sampled`, as long as nothing has happened that may end it
        self.steps = self.version = self.num_started = 0
        self.removed: Counter[str] = Counter()  # groups by reason

    @property
    def waiting(self) -> list[int]:
        """The numbers of the groups that started and were neither taken nor removed."""
        return list(self._waiting)

    def begin(self, version: int) -> None:
        """The steps that have taken their groups are over: from here on engines sample with `version`."""
        self.steps, self.version, self._was_sampled = self._num_taken, version, False

    def num_to_start(self) -> int:
        """Return how many groups may start now."""
        steps = self.steps + 1 + self._staleness
        steps = steps if self._num_steps is None else min(steps, self._num_steps)
        allowed = steps * self._per_step + self.removed.total() + self._num_replaced()
        return max(0, allowed - self.num_started)

    def start(self) -> int:
        """Start the next group; return its number."""
        assert self.num_to_start() > 0, "a group starts that would be too old"
        number, self.num_started = self.num_started, self.num_started + 1
        self._waiting[number] = _Waiting(number)
        self._was_sampled = False
        return number

    def send(self, number: int) -> None:
        """An engine has the group."""
        group = self._waiting[number]
        group.version = self.version if group.version is None else group.version

    def sampled(self, number: int, first_version: int) -> None:
        """All completions of a group are there; its rewards are not. `first_version` is that of its oldest token."""
        group = self._waiting[number]
        self._was_sampled &= group.version == first_version
        group.is_sampled, group.version = True, first_version

    def lose(self, number: int) -> None:
        """The completions of a sampled group are lost: it is sampled again, and ages from its new first token."""
        self._waiting[number].is_sampled, self._waiting[number].version = False, None
        self._was_sampled = False

    def finish(self, number: int, is_informative: bool = True) -> None:
        """A sampled group can be trained on. One that is not informative waits as a last resort, and may be replaced."""
        group = self._waiting[number]
        group.finished, group.is_informative = self._num_finished, is_informative
        self._was_sampled &= is_informative
        self._num_finished += 1
        self._begin_round()

    def remove(self, number: int, reason: str) -> None:
        """Give up a group; another one starts in its place."""
        del self._waiting[number]
        self.removed[reason] += 1
        self._was_sampled = False
        self._begin_round()

    @property
    def is_sampled(self) -> bool:
        """Whether the next step waits for no completion any more, but for rewards at most."""
        if not self._was_sampled:
            all_are = all(group.is_sampled for group in self._waiting.values())
            may_pick = not all_are and self._staleness > 0
            self._was_sampled = all_are or (may_pick and len(self._pick(scored=False)) == self._per_step)
        return self._was_sampled

    def take(self) -> tuple[list[int], list[int]] | None:
        """Take the groups of the next step. Returns their numbers, in order, and the numbers of groups that are removed as
        no step needs them or may have them; None until there are enough."""
        chosen = self._choose()
        if chosen is None:
            return None
        for group in chosen:
            del self._waiting[group.number]
        finished = [group for group in self._waiting.values() if group.finished is not None]
        dropped = [group for group in finished if self._is_due(group) or not group.is_informative]
        for group in dropped:
            del self._waiting[group.number]
            self.removed["too_old" if group.is_informative else "uninformative"] += 1
        self._num_taken, self.num_rounds, self._was_sampled = self._num_taken + 1, 1, False
        return sorted(group.number for group in chosen), [group.number for group in dropped]

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain values, between two steps. Groups without information were replaced, so they
        are given up."""
        waiting = [(group.number, group.version) for group in self._waiting.values() if group.is_informative]
        removed = self.removed + Counter(uninformative=len(self._waiting) - len(waiting))
        known = {"steps": self._num_taken, "num_started": self.num_started, "max_staleness": self._staleness}
        return known | {"removed": dict(removed), "waiting": waiting}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. All groups that waited have to finish again; if tokens may be less stale than
        before, they are given up, as not all of them could be trained on in time."""
        self.steps = self._num_taken = state["steps"]
        self.num_started, self.removed = state["num_started"], Counter(state["removed"])
        if state["max_staleness"] > self._staleness:
            self.removed["too_old"] += len(state["waiting"])
        else:
            self._waiting = {number: _Waiting(number, version) for number, version in state["waiting"]}

    def _is_due(self, group: _Waiting) -> bool:
        """Whether the group would be too old for the step after the next."""
        is_old = group.version is not None and group.version + self._staleness <= self.version
        return self._staleness == 0 or is_old

    def _num_replaced(self) -> int:
        """Return how many groups start in the place of others that are not informative."""
        if not self._staleness:
            return (self.num_rounds - 1) * self._per_step
        most = (self._max_rounds - 1) * self._per_step
        return min(most, sum(not group.is_informative for group in self._waiting.values())) if most else 0

    def _begin_round(self) -> None:
        """With S = 0, groups are replaced in whole batches when all have finished: an engine repeats a batch bit for bit."""
        if self._staleness or any(group.finished is None for group in self._waiting.values()):
            return
        num_informative = sum(group.is_informative for group in self._waiting.values())
        if num_informative < self._per_step and not self.num_to_start() and self.num_rounds < self._max_rounds:
            self.num_rounds += 1

    def _choose(self) -> list[_Waiting] | None:
        if self._staleness:
            chosen = self._pick(scored=True)
            if len(chosen) == self._per_step:
                return chosen
        if self.num_to_start() > 0 or any(group.finished is None for group in self._waiting.values()):
            return None
        if not self._staleness:
            chosen = [group for group in self._waiting.values() if group.is_informative][: self._per_step]
        # Groups without information fill the batch.
        chosen += [group for group in self._waiting.values() if not group.is_informative]
        return chosen[: self._per_step] if len(chosen) >= self._per_step else None

    def _pick(self, scored: bool) -> list[_Waiting]:
        """Return the ready groups that the next step can take, at most P, in the order in which they finished. A group is
        ready when it is sampled, and with `scored` when it has finished.

        Of the groups with tokens of version u or before, all but (u + S - version) * P must be taken now, as each step takes
        P groups. A younger group is taken only where that leaves room for them.
        """
        waiting = [group for group in self._waiting.values() if group.is_informative]
        ready = {group.number: group for group in waiting if group.is_sampled and not (scored and group.finished is None)}
        if len(ready) < self._per_step:
            return list(ready.values())
        due = [group.number for group in waiting if self._is_due(group)]
        if len(due) <= self._per_step and not ready.keys() >= set(due):
            return []  # all of them must be taken now: the same comes out below, but takes longer
        versions = [group.version for group in waiting if group.version is not None and group.version < self.version]
        must = {
            old: sum(version <= old for version in versions) - (old + self._staleness - self.version) * self._per_step
            for old in range(self.version - self._staleness, self.version)
        }
        must = {old: count for old, count in must.items() if count > 0}
        in_window = {group.number for group in waiting[: self._window]} | set(due)
        window = [group for number, group in ready.items() if number in in_window]
        window.sort(key=lambda group: (group.finished is None, group.finished, group.number))  # first those with rewards
        chosen: list[_Waiting] = []
        for group in window:
            version = self.version if group.version is None else group.version
            if all(count < self._per_step - len(chosen) for old, count in must.items() if old < version):
                chosen.append(group)
                must = {old: count - (old >= version) for old, count in must.items()} if must else must
            if len(chosen) == self._per_step:
                break
        return chosen
