"""Sends requests to engines: which engine, when, and what becomes of the requests of an engine that died.

Runs on the event loop of the stream. A request whose engine died goes to another engine at once. The dead engine is started
again in the background and takes requests once it has received weights, in the next sync.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Protocol

from megarl.rollout import EngineDied, EngineDirty, EngineSilent, RolloutError
from megarl.rollout.engine import GroupRequest
from megarl.rollout.groups import GroupFacts, Partial
from megarl.rollout.handle import EngineHandle


class Engines(Protocol):
    """What a router needs of an `EnginePool`."""

    engines: list[EngineHandle]

    def restart(self, engine: EngineHandle, phase: str, cause: Exception) -> None:
        """Start a dead engine again, without the published weights. Raises RolloutError if that was done too often."""


@dataclass(eq=False)
class _Entry:
    """A request, and where it is. `cost` counts the most tokens that its engine may have to compute; `restarts` are those of
    the engine when it got the request."""

    request: GroupRequest
    step: int
    send: Callable[[], None]
    owner: Any
    session: Any
    is_last: bool
    continues: bool
    cost: int
    answer: asyncio.Future[tuple[GroupFacts, Any]]
    restarts: int = 0

    @property
    def size(self) -> int:
        return len(self.request.seeds)


@dataclass
class _Lane:
    """An engine with its requests, their cost and sequences, and the most sequences that it may hold (None: any number).
    `timer` ends the run if the engine finishes no request in time."""

    engine: EngineHandle
    depth: float | None
    entries: dict[_Entry, None] = field(default_factory=dict)  # an ordered set
    is_live: bool = True
    timer: asyncio.TimerHandle | None = None
    cause: Exception | None = None  # why the engine died while the router was paused
    tokens: int = 0
    num_sequences: int = 0

    def add(self, entry: _Entry) -> None:
        self.entries[entry] = None
        self.tokens, self.num_sequences = self.tokens + entry.cost, self.num_sequences + entry.size

    def remove(self, entry: _Entry) -> None:
        del self.entries[entry]
        self.tokens, self.num_sequences = self.tokens - entry.cost, self.num_sequences - entry.size


class Router:
    """Gives each request to the live engine with the fewest tokens to compute; requests of one session stay together."""

    def __init__(
        self, pool: Engines, timeout_s: float, max_tokens: int, depth: int | None, on_unserved: Callable[[], None]
    ) -> None:
        """`max_tokens` is the longest completion. An engine holds up to `depth` sequences, others wait here for the engine
        that has room first; None gives engines all requests at once. `on_unserved` is called when no live engine is left."""
        self._pool, self._timeout_s, self._max_tokens = pool, timeout_s, max_tokens
        # With one engine there is nothing to choose: vLLM's own queue serves best.
        self._depth = depth if len(pool.engines) > 1 else None
        self._on_unserved = on_unserved
        self._lanes = {engine.settings.index: _Lane(engine, self._depth) for engine in pool.engines}
        self._sessions: dict[Any, int] = {}  # engine of each session
        self._waiting: deque[_Entry] = deque()
        self._tasks: set[asyncio.Task[None]] = set()  # submissions, answers, restarts
        self._submissions: set[asyncio.Task[None]] = set()
        self._restarts: set[asyncio.Task[None]] = set()
        self._is_scheduled = self._is_paused = False
        self._next_position = 0

    @property
    def unserved(self) -> list[int]:
        """Engines that need weights before any request can go on; empty while a live engine is left."""
        if self._is_paused or any(lane.is_live for lane in self._lanes.values()) or self._restarts:
            return []
        return list(self._lanes)

    def sample(
        self,
        request: GroupRequest,
        step: int,
        send: Callable[[], None] = lambda: None,
        owner: Any = None,
        session: Any = None,
        is_last: bool = False,
        continues: bool = False,
    ) -> asyncio.Future[tuple[GroupFacts, Any]]:
        """Return facts and the reference of the tokens of a request, when an engine has answered. `step` names the request
        in errors, and `send` is called when an engine gets it. Requests that come together go out together, those with
        `is_last` behind all others. `continues` as in `RolloutEngine.submit`; `cut` tells requests apart by `owner`."""
        request = replace(request, position=self._next_position)
        self._next_position += 1
        longest = self._max_tokens if request.max_new_tokens is None else request.max_new_tokens
        cost = len(request.seeds) * (len(request.prompt_ids) + longest)
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(_Entry(request, step, send, owner, session, is_last, continues, cost, answer))
        self._schedule()
        return answer

    async def cut(self) -> dict[Any, tuple[Partial, ...]]:
        """Return what engines have sampled so far, by the owner of the request, and let them go on; an engine that dies has
        nothing. Raises EngineSilent."""
        partials = {entry.owner: entry.request.partials for entry in self._waiting}

        async def cut_lane(lane: _Lane) -> None:
            owners, restarts = {entry.request.position: entry.owner for entry in lane.entries}, lane.engine.restarts
            try:
                answer = lane.engine.answer(lane.engine.call("cut", list(owners)))
                parts = await asyncio.wait_for(answer, self._timeout_s)
            except EngineDied as error:
                self._lose(lane, restarts, error)
            except TimeoutError:
                raise self._silent(lane, list(lane.entries)) from None
            else:
                partials.update({owners[position]: part for position, part in parts.items()})

        await asyncio.gather(*(cut_lane(lane) for lane in self._lanes.values() if lane.is_live and lane.entries))
        return partials

    def follow(self, num_preempted: dict[int, int]) -> None:
        """Give fewer sequences to engines that preempted requests, whose caches they outgrew, and slowly more again to
        others."""
        for index, count in num_preempted.items():
            lane = self._lanes[index]
            if lane.depth is not None and self._depth is not None:
                lane.depth = max(1.0, 0.75 * lane.depth) if count else min(self._depth, 1.05 * lane.depth)

    def end_session(self, session: Any) -> None:
        """Forget which engine has the prefix of a session."""
        self._sessions.pop(session, None)

    async def pause(self) -> None:
        """Send nothing more, and wait until engines hold what was sent and dead engines have started again."""
        self._is_paused = True
        for lane in self._lanes.values():
            self._renew_deadline(lane)
        while self._submissions or self._restarts:
            await asyncio.wait(self._submissions | self._restarts)

    def resume(self, engines: Sequence[int] | None) -> None:
        """Go on with the engines that are live and with those that have received weights, all if None. Engines that died
        meanwhile are started again."""
        self._is_paused = False
        for index, lane in self._lanes.items():
            lane.is_live |= engines is None or index in engines
            cause, lane.cause = lane.cause, None
            if cause is not None and not lane.is_live:
                self._spawn(self._restart(lane, cause), self._restarts)
            self._renew_deadline(lane)
        self._schedule()

    async def close(self) -> None:
        """Send nothing more and wait for no engine, but for those that start again: threads start them."""
        self._is_paused = True
        for lane in self._lanes.values():
            self._renew_deadline(lane)
        for task in self._tasks - self._restarts:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _schedule(self) -> None:
        """Send requests in the loop's next round, when all that come together are here."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_scheduled = False
        if self._is_paused:
            return
        pending = [entry for entry in self._waiting if not entry.answer.done()]
        waiting = deque(sorted(pending, key=attrgetter("is_last")))  # stable
        self._waiting.clear()
        batches: dict[int, list[_Entry]] = {}
        while waiting:
            entry = waiting.popleft()
            index = self._choose(entry)
            if index is None:
                self._waiting.append(entry)
                if self._sessions:
                    continue  # the engine of a session takes its requests at once
                break
            lane = self._lanes[index]
            entry.restarts = lane.engine.restarts
            entry.send()
            lane.add(entry)
            batches.setdefault(index, []).append(entry)
        self._waiting += waiting
        for index, entries in batches.items():
            self._spawn(self._submit(self._lanes[index], entries), self._submissions)
        if self._waiting and self.unserved:
            self._on_unserved()

    def _choose(self, entry: _Entry) -> int | None:
        sticky = self._sessions.get(entry.session)
        if sticky is not None and self._lanes[sticky].is_live:
            return sticky
        free = [
            (lane.tokens, index)
            for index, lane in self._lanes.items()
            if lane.is_live and (lane.depth is None or not lane.entries or lane.num_sequences + entry.size <= lane.depth)
        ]
        if not free:
            return None
        _, chosen = min(free)
        if entry.session is not None:
            self._sessions[entry.session] = chosen
        return chosen

    async def _submit(self, lane: _Lane, entries: list[_Entry]) -> None:
        engine, restarts = lane.engine, entries[0].restarts
        if lane.timer is None:  # else the engine owes an answer already
            self._renew_deadline(lane)
        try:
            continues = any(entry.continues for entry in entries)
            accepted = engine.answer(engine.call("submit", [entry.request for entry in entries], continues))
            await asyncio.wait_for(accepted, self._timeout_s)  # a deadline for `pause`, too
            if engine.restarts != restarts:
                raise EngineDied("it was started again, without these requests")
            for entry in entries:
                facts, tokens = engine.call("result", entry.request.position, num_returns=2)
                self._spawn(self._wait(lane, entry, restarts, facts, tokens))
        except EngineDied as error:
            self._lose(lane, restarts, error)
        except TimeoutError:
            self._fail(entries, self._silent(lane, entries))
        except EngineDirty as error:
            self._fail(entries, RolloutError(f"{engine.name} refuses phase rollout: {error}"))
        except Exception as error:  # whatever it is, whoever waits for the requests raises it
            self._fail(entries, error)

    async def _wait(self, lane: _Lane, entry: _Entry, restarts: int, facts: Any, tokens: Any) -> None:
        """Pass the answer of an engine on, which got the request after so many restarts."""
        try:
            answer = await lane.engine.answer(facts)
        except EngineDied as error:
            self._lose(lane, restarts, error)
            return
        except RolloutError as error:
            self._fail([entry], type(error)(f"{lane.engine.name}, phase rollout, step {entry.step}: {error}"))
        except Exception as error:  # as above
            self._fail([entry], error)
        if entry in lane.entries:  # else another engine has the request by now
            lane.remove(entry)
            if not entry.answer.done():
                entry.answer.set_result((answer, tokens))
        self._renew_deadline(lane)
        self._schedule()

    def _renew_deadline(self, lane: _Lane) -> None:
        """An engine has `timeout_s` from its last answer to the next one."""
        if lane.timer is not None:
            lane.timer.cancel()
        waits = lane.entries and not self._is_paused
        lane.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._end_silent, lane) if waits else None

    def _end_silent(self, lane: _Lane) -> None:
        lane.timer = None
        entries = list(lane.entries)
        self._fail(entries, self._silent(lane, entries))

    def _silent(self, lane: _Lane, entries: list[_Entry]) -> EngineSilent:
        step = min(entry.step for entry in entries)
        return EngineSilent(
            f"{lane.engine.name}: {len(entries)} groups of step {step} not finished in phase rollout within "
            f"rollout.timeout_s = {self._timeout_s:g}"
        )

    def _lose(self, lane: _Lane, restarts: int, cause: Exception) -> None:
        """Let other engines do what a dead engine was to do, and start the dead one again unless a sync did."""
        lost = [entry for entry in lane.entries if entry.restarts == restarts]
        for entry in lost:
            lane.remove(entry)
        self._waiting.extendleft(reversed([entry for entry in lost if not entry.answer.done()]))
        self._renew_deadline(lane)
        if lane.is_live and lane.engine.restarts == restarts:
            lane.is_live = False
            index = lane.engine.settings.index
            self._sessions = {session: engine for session, engine in self._sessions.items() if engine != index}
            if self._is_paused:  # a sync starts the engine again, or `resume` does
                lane.cause = cause
            else:
                self._spawn(self._restart(lane, cause), self._restarts)
        self._schedule()

    async def _restart(self, lane: _Lane, cause: Exception) -> None:
        try:
            await asyncio.to_thread(self._pool.restart, lane.engine, "rollout", cause)
        except Exception as error:  # an engine that cannot be started again ends the run
            self._fail([*self._waiting, *(entry for other in self._lanes.values() for entry in other.entries)], error)

    def _fail(self, entries: list[_Entry], error: Exception) -> None:
        for entry in entries:
            if not entry.answer.done():
                entry.answer.set_exception(error)

    def _spawn(self, work: Any, *kinds: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        for tasks in (self._tasks, *kinds):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if kinds:
            task.add_done_callback(lambda _: self._schedule())
