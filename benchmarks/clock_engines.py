"""Engines that complete by the clock: what `stream.py` puts in the place of vLLM engines.

A Ray actor serves all engines of a run. An engine has slots and a queue, first come, first served; a slot decodes a token in
a fixed time. Only lengths are as long as a GPU's: what reaches the trainer has one random token for `TOKENS_EACH` of them.
"""

from __future__ import annotations

import asyncio
import pickle
import platform
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from megarl.data.sample import Completion, Prompt
from megarl.rollout.engine import BatchPart, GroupRequest
from megarl.rollout.engine_report import EngineProcess, RequestLog
from megarl.rollout.groups import GroupFacts, GroupResult
from megarl.rollout.handle import EngineHandle
from megarl.telemetry.trace import EngineReport
from megarl.weight_sync.manifest import AdapterManifest

LONGEST, MEDIAN, DEVIATION = 32_768, 2500.0, 1.0  # tokens of a completion; deviation of their logarithm
TOKENS_EACH = 4096


def lengths_of(group: int, members: int) -> np.ndarray:
    """Return the tokens of each completion of a prompt, int64 [members], log-normal and cut at the longest."""
    drawn = MEDIAN * np.random.default_rng((7, group)).lognormal(0.0, DEVIATION, members)
    return np.clip(drawn, 1, LONGEST).astype(np.int64)


def timed_reward(text: str, prompt: Prompt) -> float:
    """Return the share of digits, after the seconds that the prompt's answer says."""
    time.sleep(float(prompt.answer or "0"))
    return sum(character.isdigit() for character in text) / max(1, len(text))


@dataclass(eq=False)
class ClockCompletion:
    """A completion in a queue or a slot. `spans` holds (tokens so far, version that sampled them) at each pause."""

    group: ClockGroup
    tokens: int
    done: float = 0.0
    spans: list[tuple[float, int]] = field(default_factory=list)
    begun: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def sampled(self) -> Completion:
        """Return what reaches the trainer."""
        ends, versions = zip(*self.spans, strict=True)
        starts = np.arange(0, self.tokens, TOKENS_EACH)
        ids = np.random.default_rng(self.tokens).integers(2, 97, len(starts)).astype(np.int32)
        chosen = np.array(versions, np.int64)[np.searchsorted(ends, starts, side="right").clip(max=len(ends) - 1)]
        reason = "length" if self.tokens == LONGEST else "stop"
        return Completion(ids, np.full(len(ids), -4.6, np.float32), reason, chosen)


@dataclass(eq=False)
class ClockGroup:
    """A request and its completions."""

    request: GroupRequest
    completions: list[ClockCompletion]
    num_left: int
    result: asyncio.Future[GroupResult]


class ClockEngine:
    """Answers as a `RolloutEngine` with `weight_sync.in_flight: keep`."""

    def __init__(self, slots: int, token_s: float) -> None:
        self._slots, self._token_s = slots, token_s
        self._queue: deque[ClockCompletion] = deque()
        self._running: set[ClockCompletion] = set()
        self._version, self._is_paused = 0, False
        self._num_batches = 0
        self._log = RequestLog()

    async def sample(self, pickled_part: bytes) -> tuple[GroupFacts, GroupResult]:
        """As `RolloutEngine.sample`, but a batch need not be whole."""
        part: BatchPart = pickle.loads(pickled_part)
        request = part.request
        group = ClockGroup(request, [], len(request.seeds), asyncio.get_running_loop().create_future())
        lengths = lengths_of(request.group, len(request.seeds)).tolist()
        group.completions = [ClockCompletion(group, length) for length in lengths]
        self._num_batches = max(self._num_batches, part.batch + 1)
        self._queue += group.completions
        self._fill()
        with self._log.in_flight():
            result = await group.result
        return GroupFacts.of(result), result

    async def holds(self, num_batches: int) -> None:
        """As `RolloutEngine.holds`."""
        while self._num_batches < num_batches:
            await asyncio.sleep(0.001)

    async def pause(self, version: int, in_flight: str) -> dict[str, float]:
        """As `RolloutEngine.pause`; completions are kept."""
        assert in_flight == "keep" or not self._running, "the benchmark keeps completions over a sync"
        self._is_paused = True
        for completion in self._running:
            assert completion.timer is not None
            completion.timer.cancel()
            self._advance(completion)
        return {"pause_s": 0.0, "in_flight": float(len(self._running) + len(self._queue))}

    async def receive_adapter(self, manifest: AdapterManifest) -> dict[str, float]:
        """As `RolloutEngine.receive_adapter`; the adapters are verified and not used."""
        begun = time.perf_counter()
        manifest.check()
        self._version, self._is_paused = manifest.version, False
        for completion in self._running:
            self._decode(completion)
        self._fill()
        verify_s = time.perf_counter() - begun
        return {"verify_s": verify_s, "transfer_s": verify_s, "received_bytes": float(manifest.num_bytes)}

    async def report(self) -> EngineReport:
        """As `RolloutEngine.report`."""
        return self._log.take()

    def _fill(self) -> None:
        while self._queue and len(self._running) < self._slots and not self._is_paused:
            completion = self._queue.popleft()
            self._running.add(completion)
            self._decode(completion)

    def _decode(self, completion: ClockCompletion) -> None:
        loop = asyncio.get_running_loop()
        completion.begun = loop.time()
        left_s = (completion.tokens - completion.done) * self._token_s
        completion.timer = loop.call_at(completion.begun + left_s, self._end, completion)

    def _advance(self, completion: ClockCompletion) -> None:
        completion.done += (asyncio.get_running_loop().time() - completion.begun) / self._token_s
        completion.spans.append((completion.done, self._version))

    def _end(self, completion: ClockCompletion) -> None:
        self._advance(completion)
        self._running.remove(completion)
        group, request = completion.group, completion.group.request
        group.num_left -= 1
        if not group.num_left:
            members = [member.sampled() for member in group.completions]
            group.result.set_result(GroupResult.of(request.group, request.prompt_ids, members))
        self._fill()


class ClockEngines:
    """Ray actor of all engines."""

    def __init__(self) -> None:
        self._engines: dict[int, ClockEngine] = {}

    async def start(self, index: int, slots: int, token_s: float) -> EngineProcess:
        """Start an engine in the place of the last one of this number."""
        self._engines[index] = ClockEngine(slots, token_s)
        return EngineProcess(platform.node(), (), (), slots)

    async def sample(self, index_and_part: bytes) -> tuple[GroupFacts, GroupResult]:
        """Let an engine sample. One argument of bytes, as a `RolloutEngine` has: Ray takes longer for any other."""
        return await self._engines[index_and_part[0]].sample(index_and_part[1:])

    async def call(self, call: tuple[Any, ...]) -> Any:
        """Call another method of an engine. Index, name and arguments are one argument, as Ray takes time for each."""
        index, method, *arguments = [await value if isinstance(value, ray.ObjectRef) else value for value in call]
        return await getattr(self._engines[index], method)(*arguments)


class ClockHandle(EngineHandle):
    """Calls an engine of a `ClockEngines`, which outlives the run."""

    def __init__(self, *arguments: Any, engines: Any, token_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._engines, self._token_s = engines, token_s
        self._sample = engines.sample.options(num_returns=2)  # as with `ray.method` in `RolloutEngine`, once

    def begin_start(self, version: int | None = None) -> Any:
        """As `EngineHandle.begin_start`."""
        return self._engines.start.remote(self.settings.index, self.settings.planned.max_concurrent, self._token_s)

    def call(self, method: str, *arguments: Any) -> Any:
        """As `EngineHandle.call`."""
        if method == "sample":
            [pickled_part] = arguments
            return self._sample.remote(bytes([self.settings.index]) + pickled_part)
        return self._engines.call.remote((self.settings.index, method, *arguments))

    def stop(self) -> None:
        """The next run starts it anew."""
