"""Which of many calls has answered next."""

from __future__ import annotations

import queue
from collections.abc import Collection
from typing import Any, TypeVar

Expected = TypeVar("Expected", bound=Collection[Any])


class Arrivals:
    """References of calls in the order in which their answers come.

    `ray.wait` looks at every reference that it is given, at each call: to take thousands of answers one by one it would look
    at millions. Here Ray tells of each of them once, in a thread of its own.
    """

    def __init__(self) -> None:
        self._answered: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def expect(self, references: Expected) -> Expected:
        """Wait for these as well, each of them once; gives them back."""
        for reference in references:
            reference.future().add_done_callback(lambda _, which=reference: self._answered.put(which))
        return references

    def next(self, timeout_s: float) -> Any:
        """The reference of a call that has answered, or failed; None where there is none within the time."""
        try:
            return self._answered.get(timeout=timeout_s)
        except queue.Empty:
            return None
