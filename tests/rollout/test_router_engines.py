"""Laws of the router about engines that preempt, die, break or start again, and about evaluations, on scripted engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from megarl.rollout import EngineDied, EngineSilent, RolloutError
from tests.scripted_stream import ROUTER_TIMEOUT_S as TIMEOUT_S
from tests.scripted_stream import ScriptedPool, clock, in_loop, request, router, settle

pytestmark = [pytest.mark.stream, pytest.mark.timeout(120)]  # a loop whose clock stands still may wait for ever


@in_loop
async def test_an_engine_that_preempts_requests_gets_fewer_sequences_and_slowly_more_again() -> None:
    pool = ScriptedPool.of(2)
    routes = router(pool, depth=4)
    routes.follow({0: 3, 1: 0})
    for group in range(12):
        routes.sample(request(group), 1)
    await settle()
    assert [len(engine.work) for engine in pool.engines] == [3, 4]
    for _ in range(6):
        routes.follow({0: 0, 1: 0})
    pool.engines[0].finish_all()
    await settle()
    assert [len(engine.work) for engine in pool.engines] == [4, 4], "never more than the depth"


@in_loop
async def test_an_engine_that_dies_while_requests_are_cut_loses_none_and_is_started_again() -> None:
    pool = ScriptedPool.of(2)
    routes = router(pool)
    answers = [routes.sample(request(group), 1, owner=group) for group in range(2)]
    await settle()
    await routes.pause()
    pool.engines[1].die(tells=False)
    partials = await routes.cut()
    assert partials[0] == () and 1 not in partials
    routes.resume([])
    await settle()
    while not pool.restarted:
        await asyncio.sleep(0)
    assert pool.restarted == [1]
    assert pool.engines[0].groups == [[0], [1]], "the other engine has the request"
    pool.engines[0].finish_all()
    assert [facts.group for facts, _ in await asyncio.gather(*answers)] == [0, 1]


@in_loop
async def test_an_engine_that_does_not_cut_its_requests_is_named_at_the_deadline() -> None:
    pool = ScriptedPool.of(1)
    routes = router(pool)
    answer = routes.sample(request(), 7)
    await settle()
    await routes.pause()
    pool.engines[0].is_silent = True
    cutting = asyncio.ensure_future(routes.cut())
    await settle()
    clock().now += TIMEOUT_S + 1
    with pytest.raises(EngineSilent, match=r"rollout engine 0: 1 groups of step 7 .* rollout\.timeout_s = 30"):
        await cutting
    answer.cancel()


@in_loop
async def test_the_requests_of_an_evaluation_go_before_those_that_wait() -> None:
    pool = ScriptedPool.of(2)
    routes = router(pool, depth=1)
    for group in range(6):
        routes.sample(request(group), 1, is_last=group == 2)
    await settle()
    routes.sample(replace(request(100), is_evaluation=True), 1)
    await settle()
    pool.engines[0].finish(0)
    await settle()
    assert pool.engines[0].groups == [[0], [100]]
    pool.engines[0].finish(next(iter(pool.engines[0].work)))
    await settle()
    assert pool.engines[0].groups == [[0], [100], [3]]


@pytest.mark.parametrize("synced", [None, [1]], ids=["all", "others"])
@in_loop
async def test_an_engine_that_calls_itself_broken_while_paused_is_started_again(synced: list[int] | None) -> None:
    """A sync does not, as its process answers."""
    pool = ScriptedPool.of(2)
    broken, other = pool.engines
    routes = router(pool)
    answers = [routes.sample(request(group), 1) for group in range(2)]
    await settle()
    await routes.pause()
    broken.finish(0, EngineDied("it is broken: a log-probability of group 0 is nan"))
    await settle()
    routes.resume(synced)
    await settle()
    assert other.groups == [[1], [0]], "what it was to do"
    await routes.pause()
    assert pool.restarted == [0]
    routes.resume(None)
    other.finish_all()
    await asyncio.gather(*answers)
    routes.sample(request(2), 1)
    await settle()
    assert broken.groups[-1] == [2], "it serves again after a sync"


@pytest.mark.parametrize("is_busy", [False, True])
@in_loop
async def test_an_engine_that_cannot_be_started_again_is_an_error_at_once_for_all_requests(is_busy: bool) -> None:
    pool, errors = ScriptedPool.of(2), []  # type: ignore[var-annotated]
    pool.restart_error = RolloutError("rollout.max_restarts = 0")
    routes = router(pool, errors=errors)
    answers = [routes.sample(request(group), 1) for group in range(2)]
    await settle()
    pool.may_restart.clear()
    pool.engines[0].die()
    await settle()
    if not is_busy:
        pool.engines[1].finish_all()
        await asyncio.gather(*answers)
    pool.may_restart.set()
    while not errors:
        await asyncio.sleep(0)
    assert errors == [pool.restart_error]
    if is_busy:
        assert await asyncio.gather(*answers, return_exceptions=True) == [pool.restart_error] * 2


@in_loop
async def test_a_restarted_engine_serves_at_once_while_no_weights_were_published() -> None:
    pool = ScriptedPool.of(2)
    pool.has_published = False
    routes = router(pool)
    routes.sample(request(0), 1)
    await settle()
    pool.engines[0].die()
    while not pool.restarted:
        await asyncio.sleep(0)
    while not pool.engines[0].work:  # the other one has the request
        routes.sample(request(1), 1)
        await settle()


@in_loop
async def test_an_engine_that_is_lost_for_good_gets_nothing_more_and_the_others_go_on() -> None:
    pool = ScriptedPool.of(2)
    lost, other = pool.engines
    unserved: list[list[int]] = []
    routes = router(pool, unserved=unserved)
    answers = [routes.sample(request(group), 1) for group in range(4)]
    await settle()
    lost.is_lost = True
    lost.die()
    while not pool.restarted:
        await asyncio.sleep(0)
    await routes.pause()
    routes.resume(None)  # a sync of all engines that are left
    answers += [routes.sample(request(group), 1) for group in range(4, 6)]
    await settle()
    assert sorted(work.request.group for work in other.work.values()) == list(range(6)) and not lost.work
    other.finish_all()
    assert [facts.group for facts, _ in await asyncio.gather(*answers)] == list(range(6))
    answer = routes.sample(request(6), 1)
    await settle()
    other.die()
    while not unserved:
        await asyncio.sleep(0)
    assert unserved[0] == [1], "no weights are sent to it"
    await routes.pause()
    routes.resume([1])
    await settle()
    other.finish(next(iter(other.work)))
    await answer
