"""Laws of the router, with engines that answer, preempt, die, break or start again when the test says so."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megarl.rollout import EngineDied, EngineDirty, EngineSilent, RolloutError
from megarl.rollout.router import Router
from tests.scripted_stream import ROUTER_TIMEOUT_S as TIMEOUT_S
from tests.scripted_stream import ScriptedPool, clock, in_loop, lose, request, router, run, settle

pytestmark = [pytest.mark.stream, pytest.mark.timeout(120)]  # a loop whose clock stands still may wait for ever


Answers = list[asyncio.Future[Any]]


async def submit(routes: Router, groups: Iterable[int], step: int = 1) -> Answers:
    """Give the router a request of each group, and let it do all that it can do now."""
    answers = [routes.sample(request(group), step) for group in groups]
    await settle()
    return answers


async def groups_of(answers: Sequence[asyncio.Future[Any]]) -> list[int]:
    """Wait for all answers, and return the groups that they are for."""
    return [facts.group for facts, _ in await asyncio.gather(*answers)]


@in_loop
async def test_requests_that_come_together_go_out_in_one_call_the_last_ones_behind() -> None:
    pool = ScriptedPool.of(1)
    routes = router(pool)
    answers = [routes.sample(request(group), 1, is_last=group % 2 == 0) for group in range(5)]
    await settle()
    assert pool.engines[0].groups == [[1, 3, 0, 2, 4]]
    pool.engines[0].finish_all()
    assert await groups_of(answers) == [0, 1, 2, 3, 4]


# The depth, requests, the groups that the first and the second engine get, and those that the second gets when its first
# request has ended.
CHOICES: dict[str, tuple[int | None, list[dict[str, int]], list[int], list[int], list[list[int]]]] = {
    # Prompt and longest completion of each member: 404 tokens, 2 x 101, 101, 101, 10 + 1.
    "the engine with the fewest tokens": (
        None, [{"members": 4}, {"members": 2}, {}, {}, {"max_new_tokens": 10}], [0, 4], [1, 2, 3], []
    ),
    "the engine that has room first": (4, [{"members": 2}] * 6, [0, 2], [1, 3], [[4]]),
    "an idle engine, for a group above the depth": (2, [{"members": 8}] * 3, [0], [1], [[2]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
@in_loop
async def test_a_request_goes_to(name: str) -> None:
    depth, requests, first, second, later = CHOICES[name]
    pool = ScriptedPool.of(2)
    routes = router(pool, depth)
    for group, more in enumerate(requests):
        routes.sample(request(group, **more), 1)
    await settle()
    assert [engine.groups for engine in pool.engines] == [[first], [second]]
    pool.engines[1].finish(next(iter(pool.engines[1].work)))
    await settle()
    assert [engine.groups for engine in pool.engines] == [[first], [second, *later]]


@pytest.mark.parametrize("sessions", [False, True])
@in_loop
async def test_requests_above_those_that_an_engine_takes_wait_in_the_router(sessions: bool) -> None:
    """Calls beyond the slots of an actor would wait inside Ray, in front of a sync's. Those of a session wait for its own
    engine, and those of others take what room there is."""
    pool = ScriptedPool.of(2)
    first, second = pool.engines
    first.max_requests, second.max_requests = 2, 4
    routes = router(pool)
    names = iter("abaab" if sessions else [None] * 5)
    answers = [routes.sample(request(group), 1, session=name) for group, name in enumerate(names)]
    await settle()
    sticky = [[0, 2]], [[1, 4]]  # the third request of session a waits for the first engine
    assert (first.groups, second.groups) == (sticky if sessions else ([[0, 2]], [[1, 3, 4]]))
    assert not any(answer.done() for answer in answers)
    more = await submit(routes, range(5, 9))
    assert len(first.work) == 2 and len(second.work) == 4
    while first.work or second.work:
        for engine in pool.engines:
            for position in list(engine.work)[:1]:
                engine.finish(position)
            await settle()
            assert len(engine.work) <= engine.max_requests
    assert await groups_of([*answers, *more]) == list(range(9))
    if sessions:
        assert 3 in sum(first.groups, []), "a session's request goes to the engine that has its tokens"


@in_loop
async def test_a_session_stays_with_its_engine_until_it_dies() -> None:
    pool = ScriptedPool.of(2)
    first, second = pool.engines
    routes = router(pool)

    async def turn(group: int) -> int:
        answer = routes.sample(request(group), 1, session="a", continues=group > 0)
        await settle()
        engine = next(engine for engine in pool.engines if engine.work)
        engine.finish(next(iter(engine.work)))
        await answer
        return engine.index

    assert [await turn(group) for group in range(3)] == [0, 0, 0]
    assert first.continued == [False, True, True]
    routes.sample(request(9, members=9), 1, session="b")  # most tokens by far
    await settle()
    assert first.work and not second.work
    routes.sample(request(3), 1, session="b")
    await settle()
    assert first.groups[-1] == [3], "the engine with more tokens has the prefix"
    first.die()
    await settle()
    assert {work.request.group for work in second.work.values()} == {9, 3}
    await routes.pause()
    routes.resume(None)
    second.finish_all()
    await settle()
    routes.sample(request(4), 1, session="b")
    await settle()
    assert second.groups[-1] == [4], "the prefix is on the second engine now"
    routes.end_session("b")
    routes.sample(request(5), 1, session="b")
    await settle()
    assert first.groups[-1] == [5], "nothing binds a session that ended"


@pytest.mark.parametrize("at_submit", [False, True])
@in_loop
async def test_the_requests_of_a_dead_engine_go_to_others_at_once_and_it_serves_again_after_a_sync(at_submit: bool) -> None:
    pool = ScriptedPool.of(2)
    pool.may_restart.clear()
    dead, other = pool.engines
    dead.holds_submissions = at_submit
    routes = router(pool)
    answers = await submit(routes, range(4))
    dead.die()
    await settle()
    assert other.groups == [[1, 3], [0, 2]], "in their order, although the dead engine is not up"
    pool.may_restart.set()
    other.finish_all()
    assert await groups_of(answers) == [0, 1, 2, 3]
    await routes.pause()
    assert pool.restarted == [0], "once, however many requests it had"
    assert not routes.unserved
    routes.resume([1])  # a sync of other engines
    await submit(routes, [4, 5])
    assert other.groups[-1] == [4, 5], "an engine without weights gets nothing"
    await routes.pause()
    routes.resume(None)
    await submit(routes, [6])
    assert dead.groups[1:] == [[6]]


@in_loop
async def test_the_errors_of_an_engine_name_it_and_fail_its_requests_alone() -> None:
    pool = ScriptedPool.of(1)
    routes = router(pool)
    wrong, dirty, right = (routes.sample(request(group), 3) for group in range(3))
    await settle()
    engine = pool.engines[0]
    engine.finish(0, RolloutError("a token is no number"))
    with pytest.raises(RolloutError, match=r"rollout engine 0, phase rollout, step 3: a token is no number"):
        await wrong
    engine.finish(1, EngineDirty("its sync failed"))
    with pytest.raises(RolloutError, match="rollout engine 0 refuses phase rollout: its sync failed"):
        await dirty
    engine.finish(2)
    await right


@in_loop
async def test_a_silent_engine_ends_its_requests_at_a_deadline_that_answers_alone_renew() -> None:
    pool = ScriptedPool.of(2)
    routes = router(pool)
    answers = await submit(routes, range(6), step=5)
    for engine in pool.engines:  # with groups 0, 2, 4 and 1, 3, 5
        engine.finish(next(iter(engine.work)))
    await settle()
    clock().now += TIMEOUT_S - 1
    await routes.pause()
    clock().now += 10 * TIMEOUT_S  # it stands still
    await settle()
    routes.resume(None)
    clock().now += TIMEOUT_S - 1
    await settle()
    pool.engines[0].finish(2)
    await settle()
    late = await submit(routes, range(6, 9), step=6)
    assert [len(engine.work) for engine in pool.engines] == [3, 3], "each engine has a new request"
    clock().now += 2
    await settle()
    assert [answer.done() for answer in answers] == [True, True, True, True, False, True]
    with pytest.raises(EngineSilent) as error:
        await answers[3]
    for words in ("rollout engine 1", "step 5", "phase rollout", "rollout.timeout_s = 30", "3 groups"):
        assert words in str(error.value)
    assert answers[5].exception() is late[2].exception() is error.value
    pool.engines[0].finish_all()
    assert await groups_of([answers[4], *late[:2]]) == [4, 6, 7]


@in_loop
async def test_pause_waits_for_submissions_and_restarts_and_sends_nothing_until_resume() -> None:
    pool = ScriptedPool.of(2)
    pool.may_restart.clear()
    first, second = pool.engines
    second.holds_submissions = True
    routes = router(pool)
    await submit(routes, range(2))
    pause = asyncio.ensure_future(routes.pause())
    await settle()
    assert not pause.done()
    second.submissions[0].set_result(None)
    await pause
    second.holds_submissions = False
    routes.resume(None)
    first.die()
    await settle()
    pause = asyncio.ensure_future(routes.pause())
    await submit(routes, [2])
    assert not pause.done(), "an engine starts again"
    pool.may_restart.set()
    await pause
    assert pool.restarted == [0]
    sent = len(first.calls), len(second.calls)
    await settle()
    assert (len(first.calls), len(second.calls)) == sent
    routes.resume(None)
    await settle()
    assert first.groups[-1] == [2]


@in_loop
async def test_close_ends_all_tasks_and_sends_nothing_more() -> None:
    pool = ScriptedPool.of(2, holds_submissions=True)
    pool.may_restart.clear()
    routes = router(pool, depth=1)
    await submit(routes, range(6))
    pool.engines[1].die()
    await settle()
    calls = [len(engine.calls) for engine in pool.engines]
    await asyncio.wait_for(routes.close(), 60)  # although a thread still starts an engine
    clock().now += 2 * TIMEOUT_S
    await settle()
    assert [len(engine.calls) for engine in pool.engines] == calls


@in_loop
async def test_an_engine_that_preempts_requests_gets_fewer_sequences_and_slowly_more_again() -> None:
    pool = ScriptedPool.of(2)
    routes = router(pool, depth=4)
    routes.follow({0: 3, 1: 0})
    await submit(routes, range(12))
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
    assert await groups_of(answers) == [0, 1]


@in_loop
async def test_an_engine_that_does_not_cut_its_requests_is_named_at_the_deadline() -> None:
    pool = ScriptedPool.of(1)
    routes = router(pool)
    [answer] = await submit(routes, [0], step=7)
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
    answers = await submit(routes, range(2))
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
    await submit(routes, [2])
    assert broken.groups[-1] == [2], "it serves again after a sync"


@pytest.mark.parametrize(("engines", "is_busy"), [(1, True), (2, True), (2, False)])
@in_loop
async def test_an_engine_that_cannot_be_started_again_ends_all_requests_at_once(engines: int, is_busy: bool) -> None:
    pool = ScriptedPool.of(engines)
    errors: list[Exception] = []
    unserved: list[list[int]] = []
    pool.restart_error = RolloutError("rollout.max_restarts = 0")
    routes = router(pool, unserved=unserved, errors=errors)
    answers = await submit(routes, range(2))
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
    await settle()
    assert unserved == [], "the other ranks would begin a sync that never comes"


@in_loop
async def test_a_restarted_engine_serves_at_once_while_no_weights_were_published() -> None:
    pool = ScriptedPool.of(2)
    pool.has_published = False
    routes = router(pool)
    await submit(routes, [0])
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
    answers = await submit(routes, range(4))
    lost.is_lost = True
    lost.die()
    while not pool.restarted:
        await asyncio.sleep(0)
    await routes.pause()
    routes.resume(None)  # a sync of all engines that are left
    answers += await submit(routes, range(4, 6))
    assert sorted(work.request.group for work in other.work.values()) == list(range(6)) and not lost.work
    other.finish_all()
    assert await groups_of(answers) == list(range(6))
    [answer] = await submit(routes, [6])
    other.die()
    while not unserved:
        await asyncio.sleep(0)
    assert unserved[0] == [1], "no weights are sent to it"
    await routes.pause()
    routes.resume([1])
    await settle()
    other.finish(next(iter(other.work)))
    await answer


NUM_SCHEDULES = 500


async def schedule(seed: int) -> None:
    """Random arrivals, answers, deaths (also at submission), pauses and syncs: each request is answered exactly once."""
    chance = random.Random(seed)
    pool = ScriptedPool.of(chance.randint(1, 3))
    unserved: list[list[int]] = []
    routes = router(pool, chance.choice([None, 2, 5]), unserved)
    answers: list[asyncio.Future[Any]] = []
    late: list[Any] = []  # requests of dead processes, which nobody knows to be lost
    is_paused = False

    async def sync(engines: list[int] | None) -> None:
        for engine in pool.engines:
            engine.accept()
        await routes.pause()
        for engine in pool.engines:
            if engine.is_dead and (engines is None or engine.index in engines):
                engine.start()
                engine.version += 1

    for _ in range(50):
        event, engine = chance.random(), chance.choice(pool.engines)
        if event < 0.3:
            for _ in range(chance.randint(1, 3)):
                session = chance.choice([None, None, 1, 2])
                answers.append(
                    routes.sample(
                        request(len(answers), chance.randint(1, 3)), 1, session=session, is_last=chance.random() < 0.2
                    )
                )
        elif event < 0.6 and engine.work:
            engine.finish(chance.choice(list(engine.work)))
        elif event < 0.70 and not engine.is_dead:
            late += engine.die(tells=chance.random() < 0.7)
        elif event < 0.75:
            holds, engine.holds_submissions = engine.holds_submissions, True
            if holds:
                engine.accept()
        elif event < 0.85 and not is_paused:
            await sync(None)
            is_paused = True
        elif event < 0.95 and is_paused:
            routes.resume(None)
            is_paused = False
        elif late and not late[0].facts.done():
            lose(late.pop(0))
        if chance.random() < 0.7:
            await settle()
    for work in late:
        if not work.facts.done():
            lose(work)
    for _ in range(200):  # all go on, with a sync whenever no engine is left
        if routes.unserved or is_paused or any(engine.is_dead for engine in pool.engines):
            await sync(None)
            routes.resume(None)
            is_paused = False
        for engine in pool.engines:
            engine.accept()
        await settle()
        for engine in pool.engines:
            engine.finish_all()
        await settle()
        if all(answer.done() for answer in answers):
            break
    else:
        raise AssertionError(f"not answered: {[group for group, answer in enumerate(answers) if not answer.done()]}")
    results = await groups_of(answers)
    assert results == list(range(len(answers)))
    submitted = Counter(request.group for engine in pool.engines for call in engine.calls for request in call)
    assert set(submitted) == set(results)
    await routes.close()


def test_random_schedules_answer_each_request_exactly_once() -> None:
    for seed in range(NUM_SCHEDULES):
        try:
            run(schedule(seed))
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error
