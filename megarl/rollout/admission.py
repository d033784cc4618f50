"""Which groups start, and which a step trains on: what bounds the staleness of every token. Owns no clock and no I/O.

With P groups a step and a `max_staleness` of S:
- Groups are numbered in the order of their prompts. The n-th group that is kept starts only while n < (v + 1 + S) * P,
  where v steps are over and the engines have their weights (`begin`). A step that has taken its groups is not over.
- Every group is taken by exactly one step, or removed for a reason that is counted.
- A step takes every group that would be too old for the next one. Of all others it takes those that finished first, while
  fewer than `window` later groups overtake any group, in this step and all steps before.
- With S = 0 a step takes the groups that started in it, in the order of their prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class _Waiting:
    """A group that started and was not taken. `finished` is its number in the order of completion."""

    number: int
    step: int  # steps that were over at its start, so that its oldest token is at most `steps - step` versions old
    is_sampled: bool = False
    finished: int | None = None
    is_informative: bool = True
    overtaken: int = 0  # later groups that were taken


class Admission:
    """Counts groups from their start until a step takes them."""

    def __init__(self, groups_per_step: int, max_staleness: int, window: int, max_rounds: int = 1) -> None:
        """With `max_rounds` above 1 groups without information are replaced, up to (max_rounds - 1) * P of them a step."""
        self._per_step, self._staleness, self._window = groups_per_step, max_staleness, window
        self._max_rounds = max_rounds
        self._waiting: dict[int, _Waiting] = {}  # by number, in order
        self._num_finished = 0
        self._rounds = 1  # of this step, with S = 0
        self.steps = self.num_started = 0  # steps that have taken their groups; groups
        self._steps_over = 0
        self.removed: Counter[str] = Counter()  # groups by reason

    @property
    def waiting(self) -> list[int]:
        """The numbers of the groups that started and were neither taken nor removed."""
        return list(self._waiting)

    def begin(self) -> None:
        """All steps that have taken their groups are over, and the engines have their weights."""
        self._steps_over = self.steps

    def num_to_start(self) -> int:
        """Return how many groups may start now."""
        allowed = (self._steps_over + 1 + self._staleness) * self._per_step + sum(self.removed.values())
        return max(0, allowed + self._num_replaced() - self.num_started)

    def start(self) -> int:
        """Start the next group; return its number."""
        assert self.num_to_start() > 0, "a group starts that would be too old"
        number, self.num_started = self.num_started, self.num_started + 1
        self._waiting[number] = _Waiting(number, self._steps_over)
        return number

    def sampled(self, number: int) -> None:
        """All completions of a group are there; its rewards are not."""
        self._waiting[number].is_sampled = True

    def finish(self, number: int, is_informative: bool = True) -> None:
        """A group can be trained on. One that is not informative waits as a last resort, and may be replaced."""
        group = self._waiting[number]
        group.is_sampled, group.finished, group.is_informative = True, self._num_finished, is_informative
        self._num_finished += 1
        self._begin_round()

    def remove(self, number: int, reason: str) -> None:
        """Give up a group; another one starts in its place."""
        del self._waiting[number]
        self.removed[reason] += 1
        self._begin_round()

    @property
    def num_rounds(self) -> int:
        """Batches of groups that this step has started."""
        return self._rounds

    @property
    def is_sampled(self) -> bool:
        """Whether the next step waits for no completion any more, but for rewards at most."""
        waiting = list(self._waiting.values())
        if not all(group.is_sampled for group in waiting if self._is_due(group)):
            return False
        ready = self._within_window(lambda group: group.is_sampled)
        return len(ready) >= self._per_step or all(group.is_sampled for group in waiting)

    def take(self) -> tuple[list[int], list[int]] | None:
        """Take the groups of the next step. Returns their numbers, in order, and the numbers of groups that are removed as
        they could only be trained on too late; None until there are enough."""
        chosen = self._choose()
        if chosen is None:
            return None
        for group in chosen:
            del self._waiting[group.number]
        for group in self._waiting.values():
            group.overtaken += sum(other.number > group.number for other in chosen)
        dropped = [group for group in self._waiting.values() if self._is_due(group) or not group.is_informative]
        for group in dropped:
            del self._waiting[group.number]
            self.removed["too_old" if group.is_informative else "uninformative"] += 1
        self.steps, self._rounds = self.steps + 1, 1
        return sorted(group.number for group in chosen), [group.number for group in dropped]

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain values. Groups that did not finish start again in their place."""
        groups = [
            vars(group) | ({} if group.finished is not None else {"is_sampled": False}) for group in self._waiting.values()
        ]
        return {
            "steps": self.steps, "steps_over": self._steps_over, "rounds": self._rounds, "num_started": self.num_started,
            "num_finished": self._num_finished, "removed": dict(self.removed), "waiting": groups,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.steps, self._steps_over, self._rounds = state["steps"], state["steps_over"], state["rounds"]
        self.num_started, self._num_finished = state["num_started"], state["num_finished"]
        self.removed = Counter(state["removed"])
        self._waiting = {group["number"]: _Waiting(**group) for group in state["waiting"]}

    def _is_due(self, group: _Waiting) -> bool:
        """Whether the group would be too old for the step after the next."""
        return group.step + self._staleness <= self.steps

    def _num_replaced(self) -> int:
        """Return how many groups start in the place of others that are not informative."""
        if not self._staleness:
            return (self._rounds - 1) * self._per_step
        num_uninformative = sum(not group.is_informative for group in self._waiting.values())
        return min(num_uninformative, (self._max_rounds - 1) * self._per_step)

    def _begin_round(self) -> None:
        """With S = 0, groups are replaced in whole batches when all have finished: an engine repeats a batch bit for bit."""
        if self._staleness or any(group.finished is None for group in self._waiting.values()):
            return
        num_informative = sum(group.is_informative for group in self._waiting.values())
        if num_informative < self._per_step and not self.num_to_start() and self._rounds < self._max_rounds:
            self._rounds += 1

    def _within_window(self, is_ready: Callable[[_Waiting], bool]) -> list[_Waiting]:
        """Return the groups that are ready, without those that finished in vain and those that would overtake too many."""
        candidates = [group for group in self._waiting.values() if group.finished is None or group.is_informative]
        first = next((place for place, group in enumerate(candidates) if not is_ready(group)), None)
        if first is not None:
            del candidates[first + self._window - candidates[first].overtaken :]
        return [group for group in candidates if is_ready(group)]

    def _choose(self) -> list[_Waiting] | None:
        waiting = list(self._waiting.values())
        if any(group.finished is None for group in waiting if self._is_due(group)):
            return None
        ready = self._within_window(lambda group: group.finished is not None)

        def order(group: _Waiting) -> tuple[int, int]:
            assert group.finished is not None
            # This step could overtake a ready group P times.
            is_last_chance = self._is_due(group) or group.overtaken + self._per_step >= self._window
            return (0, group.number) if is_last_chance else (1, group.finished)

        ready.sort(key=order)
        no_more_come = not self.num_to_start() and all(group.finished is not None for group in waiting)
        if len(ready) < self._per_step and no_more_come:
            # Groups without information fill the batch.
            ready += [group for group in waiting if not group.is_informative]
        return ready[: self._per_step] if len(ready) >= self._per_step else None
