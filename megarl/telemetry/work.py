"""How far the running phase is: those who do its work count it here, and whoever watches is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Called with the unit, how many are done and how many there are; a unit may be done in parts.
Tell = Callable[[str, float, int], None]
_tell: Tell | None = None
_unit, _total, _parts, _done = "", 0, 1, 0


@contextmanager
def watching(tell: Tell) -> Iterator[None]:
    """Within this, `tell` hears of the work of this process."""
    global _tell
    before, _tell = _tell, tell
    try:
        yield
    finally:
        _tell = before


def begin(unit: str, total: int, parts: int = 1) -> None:
    """The phase that runs has `total` of `unit` to do, each in so many parts."""
    global _unit, _total, _parts, _done
    _unit, _total, _parts, _done = unit, total, parts, 0
    advance(0)


def advance(parts: int = 1) -> None:
    """So many parts more are done. Where nobody has said how much there is to do, nothing."""
    global _done
    _done += parts
    if _tell is not None and _done <= _total * _parts:
        _tell(_unit, _done / _parts, _total)
