"""Sends requests to engines: which engine, when, and what becomes of the requests of an engine that died.

Runs on the event loop of the stream. A request whose engine died goes to another engine at once. The dead engine is started
again in the background and takes requests once it has received weights, in the next sync.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.data.sample import Completion
from megarl.rollout import EngineDied, EngineDirty, EngineSilent, RolloutError
from megarl.rollout.engine import BatchPart, GroupRequest
from megarl.rollout.groups import GroupFacts
from megarl.rollout.handle import EngineHandle
from megarl.rollout.pool import EnginePool


@dataclass(eq=False)
class _Entry:
    """A request, and where it is. `cost` counts the most tokens that its engine may have to compute; `restarts` are those of
    the engine when it got the request."""

    request: GroupRequest
    step: int
    send: Callable[[], None]
    owner: Any
    session: Any
    order: int  # of its queue
    continues: bool
    cost: int
    answer: asyncio.Future[tuple[GroupFacts, Any]]
    restarts: int = 0

    @property
    def size(self) -> int:
        return len(self.request.seeds)


@dataclass
class _Lane:
    """An engine with its requests, their cost and sequences, and the most sequences that it may hold (None: any number). No
    lane has more requests than its engine takes calls.
    `timer` ends the run if the engine finishes no request in time. `num_batches` were sent after `restarts` restarts."""

    engine: EngineHandle
    depth: float | None
    entries: dict[_Entry, None] = field(default_factory=dict)  # an ordered set
    is_live: bool = True
    timer: asyncio.TimerHandle | None = None
    cause: Exception | None = None  # why the engine died while the router was paused
    tokens: int = 0
    num_sequences: int = 0
    num_batches: int = 0
    restarts: int = 0

    @property
    def is_open(self) -> bool:
        return self.is_live and len(self.entries) < self.engine.max_requests

    def add(self, entry: _Entry) -> None:
        self.entries[entry] = None
        self.tokens, self.num_sequences = self.tokens + entry.cost, self.num_sequences + entry.size

    def remove(self, entry: _Entry) -> None:
        del self.entries[entry]
        self.tokens, self.num_sequences = self.tokens - entry.cost, self.num_sequences - entry.size


class Router:
    """Gives each request to the live engine with the fewest tokens to compute; requests of one session stay together."""

    def __init__(
        self,
        pool: EnginePool,
        timeout_s: float,
        max_tokens: int,
        depth: int | None,
        on_unserved: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """`max_tokens` is the longest completion. An engine holds up to `depth` sequences, others wait here for the engine
        that has room first; None gives engines all requests that they take. `on_unserved` is called when no live engine is
        left, `on_error` if an engine cannot be started again."""
        self._pool, self._timeout_s, self._max_tokens = pool, timeout_s, max_tokens
        # With one engine there is nothing to choose: vLLM's own queue serves best.
        self._depth = depth if len(pool.engines) > 1 else None
        self._on_unserved, self._on_error = on_unserved, on_error
        self._lanes = {engine.settings.index: _Lane(engine, self._depth) for engine in pool.engines}
        self._sessions: dict[Any, int] = {}  # engine of each session
        # Evaluations, the others, and those that go behind them.
        self._waiting: tuple[deque[_Entry], ...] = (deque(), deque(), deque())
        self._tasks: set[asyncio.Task[None]] = set()  # answers and restarts
        self._restarts: set[asyncio.Task[None]] = set()
        self._is_scheduled = self.is_paused = False
        self._next_position = 0
        self.progressed_at = 0.0  # on the loop's clock: the last answer or restart of an engine

    @property
    def unserved(self) -> list[int]:
        """Engines that need weights before any request can go on; empty while a live engine is left."""
        if self.is_paused or any(lane.is_live for lane in self._lanes.values()) or self._restarts:
            return []
        return [index for index, lane in self._lanes.items() if not lane.engine.is_lost]

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
        in errors, and `send` is called when an engine gets it. Requests that come together go out together, those of an
        evaluation first, those with `is_last` behind all others. `continues` as in `RolloutEngine.submit`; `cut` tells
        requests apart by `owner`."""
        longest = self._max_tokens if request.max_new_tokens is None else request.max_new_tokens
        cost = len(request.seeds) * (len(request.prompt_ids) + longest)
        answer = asyncio.get_running_loop().create_future()
        order = 0 if request.is_evaluation else 1 + is_last
        self._waiting[order].append(_Entry(request, step, send, owner, session, order, continues, cost, answer))
        self._schedule()
        return answer

    async def cut(self) -> dict[Any, tuple[Completion, ...]]:
        """Return what engines have sampled so far, by the owner of the request, and let them go on; an engine that dies has
        nothing. Raises EngineSilent."""
        partials = {entry.owner: entry.request.partials for waiting in self._waiting for entry in waiting}

        async def cut_lane(lane: _Lane) -> None:
            owners = {entry.request.position: entry.owner for entry in lane.entries}
            parts = await self._ask(lane, "cut", list(owners))
            partials.update({owners[position]: part for position, part in (parts or {}).items()})

        await asyncio.gather(*map(cut_lane, self._at_work()))
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
        """Send nothing more, and wait until engines hold what was sent and dead engines have started again. Raises
        EngineSilent."""
        self.is_paused = True
        for lane in self._lanes.values():
            self._renew_deadline(lane)
        await asyncio.gather(*(self._ask(lane, "holds", lane.num_batches) for lane in self._at_work()))
        while self._restarts:
            await asyncio.wait(self._restarts)

    def resume(self, engines: Sequence[int] | None) -> None:
        """Go on with the engines that are live and with those that have received weights, all if None. Engines that died
        meanwhile are started again."""
        self.is_paused = False
        for index, lane in self._lanes.items():
            lane.is_live = (lane.is_live or engines is None or index in engines) and not lane.engine.is_lost
            cause, lane.cause = lane.cause, None
            # Nobody started it again.
            if cause is not None and lane.restarts == lane.engine.restarts and not lane.engine.is_lost:
                lane.is_live = False
                self._spawn(self._restart(lane, cause), self._restarts)
            self._renew_deadline(lane)
        self._schedule()

    async def close(self) -> None:
        """Send nothing more, and wait for no engine."""
        self.is_paused = True
        for lane in self._lanes.values():
            self._renew_deadline(lane)
        for task in self._tasks - self._restarts:
            task.cancel()
        self._pool.end_restarts(True)  # they are in threads, which cannot be cancelled
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.end_restarts(False)

    def _schedule(self) -> None:
        """Send requests in the loop's next round, when all that come together are here."""
        if not self._is_scheduled and any(self._waiting):
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_scheduled = False
        if self.is_paused:
            return
        batches: dict[int, list[_Entry]] = {}
        for waiting in self._waiting:
            kept = []
            while waiting:
                entry = waiting.popleft()
                if entry.answer.done():
                    continue
                index = self._choose(entry)
                if index is None:
                    kept.append(entry)
                    if self._sessions:
                        continue  # the engine of another session may have room
                    break
                lane = self._lanes[index]
                entry.restarts = lane.engine.restarts
                entry.request = replace(entry.request, position=self._next_position)
                self._next_position += 1
                entry.send()
                lane.add(entry)
                batches.setdefault(index, []).append(entry)
            waiting.extendleft(reversed(kept))
            if kept and not self._sessions:
                break
        for index, entries in batches.items():
            self._send(self._lanes[index], entries)
        if any(self._waiting) and self.unserved:
            self._on_unserved()

    def _choose(self, entry: _Entry) -> int | None:
        sticky = self._sessions.get(entry.session)
        if sticky is not None and self._lanes[sticky].is_live:
            return sticky if self._lanes[sticky].is_open else None
        free = [
            (lane.tokens, index)
            for index, lane in self._lanes.items()
            if lane.is_open and (lane.depth is None or not lane.entries or lane.num_sequences + entry.size <= lane.depth)
        ]
        if not free:
            return None
        _, chosen = min(free)
        if entry.session is not None:
            self._sessions[entry.session] = chosen
        return chosen

    def _send(self, lane: _Lane, entries: list[_Entry]) -> None:
        """Let an engine complete requests, which it queues together."""
        engine = lane.engine
        if lane.restarts != engine.restarts:
            lane.restarts, lane.num_batches = engine.restarts, 0
        if lane.timer is None:  # else the engine owes an answer already
            self._renew_deadline(lane)
        continues, batch = any(entry.continues for entry in entries), lane.num_batches
        lane.num_batches += 1
        try:
            for entry in entries:
                # Ray's own pickler takes five times as long.
                part = pickle.dumps(BatchPart(entry.request, batch, len(entries), continues))
                facts, tokens = engine.call("sample", part)
                self._spawn(self._wait(lane, entry, facts, tokens))
        except EngineDied as error:
            self._lose(lane, engine.restarts, error)

    async def _wait(self, lane: _Lane, entry: _Entry, facts: Any, tokens: Any) -> None:
        """Pass the answer of an engine on."""
        restarts = entry.restarts
        try:
            answer = await lane.engine.answer(facts)
        except EngineDied as error:
            self._lose(lane, restarts, error)
            return
        except EngineDirty as error:
            self._fail([entry], RolloutError(f"{lane.engine.name} refuses phase rollout: {error}"))
        except RolloutError as error:
            self._fail([entry], type(error)(f"{lane.engine.name}, phase rollout, step {entry.step}: {error}"))
        except Exception as error:  # whatever it is, whoever waits for the request raises it
            self._fail([entry], error)
        if entry in lane.entries:  # else another engine has the request by now
            lane.remove(entry)
            if not entry.answer.done():
                entry.answer.set_result((answer, tokens))
        self._renew_deadline(lane)
        self._schedule()

    def _at_work(self) -> list[_Lane]:
        """Return the engines that hold requests."""
        return [lane for lane in self._lanes.values() if lane.entries and lane.restarts == lane.engine.restarts]

    async def _ask(self, lane: _Lane, method: str, argument: Any) -> Any:
        """Return an engine's answer, None if it dies, which loses its requests. Raises EngineSilent."""
        restarts = lane.restarts
        try:
            return await asyncio.wait_for(lane.engine.answer(lane.engine.call(method, argument)), self._timeout_s)
        except EngineDied as error:
            self._lose(lane, restarts, error)
        except TimeoutError:
            raise self._silent(lane, list(lane.entries)) from None

    def _renew_deadline(self, lane: _Lane) -> None:
        """An engine has `timeout_s` from its last answer to the next one."""
        self.progressed_at = asyncio.get_running_loop().time()
        if lane.timer is not None:
            lane.timer.cancel()
        waits = lane.entries and not self.is_paused
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
        for entry in reversed(lost):
            self._waiting[entry.order].appendleft(entry)
        self._renew_deadline(lane)
        if lane.is_live and lane.engine.restarts == restarts:
            lane.is_live = False
            index = lane.engine.settings.index
            self._sessions = {session: engine for session, engine in self._sessions.items() if engine != index}
            if self.is_paused:  # a sync starts the engine again, or `resume` does
                lane.cause = cause
            else:
                self._spawn(self._restart(lane, cause), self._restarts)
        self._schedule()

    async def _restart(self, lane: _Lane, cause: Exception) -> None:
        try:
            lane.is_live |= await asyncio.to_thread(self._pool.restart, lane.engine, "rollout", cause)
            self._renew_deadline(lane)
        except Exception as error:  # an engine that cannot be started again ends the run
            lanes = [lane.entries for lane in self._lanes.values()]
            self._fail([entry for entries in (*self._waiting, *lanes) for entry in entries], error)
            self._on_error(error)

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
