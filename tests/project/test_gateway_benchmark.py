"""The benchmark of the endpoint, small: every request is answered, by its own session, and missed targets are named."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.gateway import Sizes, measure, missed

pytestmark = pytest.mark.agent


def test_each_request_is_answered_by_its_own_session() -> None:
    result = asyncio.run(measure(Sizes(rate=20.0, talking=10, seconds=2.0, sessions=100)))
    load = result["load"]
    assert load["requests"] == 41 and load["wrong"] == 0, "ten sessions, a request each half a second"
    assert load["segments_a_session"] == 1.0 and load["added_p50_s"] > 0
    assert result["memory"]["sessions"] == 100


def test_missed_targets_are_named() -> None:
    load = {"rate": 500.0, "wrong": 0, "segments_a_session": 1.0, "added_p99_s": 0.02}
    reached = {"load": load, "memory": {"sessions": 100_000, "growth": 0.01}}
    assert missed(reached, Sizes()) == []
    slow = {"rate": 400.0, "wrong": 2, "segments_a_session": 1.5, "added_p99_s": 0.03}
    names = missed({"load": slow, "memory": {"sessions": 100_000, "growth": 0.1}}, Sizes())
    assert [name.split()[0] for name in names] == ["2", "400", "added", "1.50", "memory"]
