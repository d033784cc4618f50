"""One engine over a scripted vLLM: it handles one call after the other, generates nothing between a pause and the new
weights, wakes in the order that a sync needs its memory, and reports the failures of its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.models.layout import RolloutLayout
from megarl.rollout import EngineDirty
from megarl.rollout import engine as engine_module
from megarl.rollout.engine import GroupRequest, RolloutEngine

pytestmark = pytest.mark.sync

TURNS = 100  # of the event loop, in which whatever waits for nothing but the loop goes on


class Core:
    """In place of vLLM: it says whether it generates, and holds up the first of some call until `go_on` is set."""

    errored = False

    def __init__(self, held_up: str) -> None:
        self.engine_core, self._held_up = self, held_up
        self.generates, self.version = False, 0
        self.generated: list[int] = []  # the version at each resumption
        self.reached, self.go_on, self.takes = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.in_flight: dict[str, asyncio.Future[Any]] = {}

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        await self._meet("pause")
        self.generates = False

    async def add_request(self, *arguments: Any, **options: Any) -> Any:
        await self._meet("add")
        aborted: asyncio.Future[Any] = asyncio.Future()
        self.in_flight[arguments[0]] = aborted
        return SimpleNamespace(get=lambda: aborted)  # no completion ever ends by itself

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            output = SimpleNamespace(finish_reason="abort", token_ids=[])
            self.in_flight.pop(name).set_result(SimpleNamespace(outputs=[output]))

    async def resume_generation(self) -> None:
        await self._meet("resume")
        self.generates = len(self.in_flight) > 0
        self.generated.append(self.version)

    async def call_utility_all_async(self, *arguments: Any) -> Any:
        await self.takes.wait()
        return [[{"version": 3, "received_bytes": 8.0}]]

    async def update_weight_version(self, version: str) -> None:
        self.version = int(version)

    async def _meet(self, call: str) -> None:
        if call == self._held_up and not self.go_on.is_set():
            self.reached.set()
            await self.go_on.wait()


def begin(call: Awaitable[Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(call)


async def let_go_on() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def an_engine(held_up: str) -> tuple[RolloutEngine, Core]:
    settings: Any = SimpleNamespace(
        index=0, layout=RolloutLayout(), temperature=1.0, max_new_tokens=4, stop_token_ids=(), record_routing=False
    )
    engine, core = RolloutEngine(settings), Core(held_up)
    engine._engine = core  # type: ignore[assignment]
    return engine, core


BATCH = [GroupRequest(position, position, np.array([3, 5], np.int32), ((1,), (2,))) for position in range(2)]


@pytest.fixture(autouse=True)
def manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WeightManifest", SimpleNamespace(from_dict=lambda values: SimpleNamespace(**values)))


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
@pytest.mark.parametrize("held_up", ["pause", "add", "resume"])
def test_a_batch_that_a_sync_overtakes_generates_nothing_before_the_new_weights(held_up: str, in_flight: str) -> None:
    async def overtaken() -> None:
        engine, core = an_engine(held_up)
        batch = begin(engine.submit(BATCH))
        await core.reached.wait()
        pause = begin(engine.pause(3, in_flight))
        await let_go_on()
        core.go_on.set()
        said = await pause
        await let_go_on()
        assert batch.done(), "the pause did not wait for the batch that came before it"
        assert not core.generates, "it generates between the pause and the new weights"
        assert said["in_flight"] == 4.0
        resumed = len(core.generated)
        receive = begin(engine.receive({"version": 3}))
        late = begin(engine.submit([replace(request, position=request.position + 2) for request in BATCH]))
        await let_go_on()
        assert not core.generates and not late.done()
        core.takes.set()
        await asyncio.gather(receive, late)
        assert core.generates and core.generated[resumed:] == [3]
        assert len(core.in_flight) == 8, "the late batch joins the first, of which nothing is lost"

    asyncio.run(overtaken())


def test_a_batch_that_comes_behind_a_pause_is_refused() -> None:
    async def refused() -> None:
        engine, core = an_engine("pause")
        pause = begin(engine.pause(3, "keep"))
        await core.reached.wait()
        batch = begin(engine.submit(BATCH))
        await let_go_on()
        core.go_on.set()
        await pause
        with pytest.raises(EngineDirty, match="the sync of version 3 did not finish"):
            await batch
        assert core.generated == []

    asyncio.run(refused())


class Recorder:
    """In place of vLLM: every call is noted and answered."""

    errored = False

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard
        self.engine_core = self

    def __getattr__(self, name: str) -> Any:
        async def answer(*arguments: Any, **options: Any) -> Any:
            self._heard.append(" ".join([name, *map(str, [*arguments, *options.values()])]))
            if name == "call_utility_all_async":
                return [[{"version": 3, "received_bytes": 8.0}]]

        return answer


def test_an_engine_wakes_for_the_weights_first_and_answers_only_then(monkeypatch: pytest.MonkeyPatch) -> None:

    async def turn() -> list[str]:
        heard: list[str] = []
        settings: Any = SimpleNamespace(index=0, layout=RolloutLayout(), adapter=None)
        engine = RolloutEngine(settings)
        engine._engine = Recorder(heard)  # type: ignore[assignment]
        await engine.sleep()
        with pytest.raises(EngineDirty, match="it sleeps, without weights"):
            await engine.submit([])
        await engine.pause(3, "wait")
        await engine.receive({"version": 3})
        await engine.pause(4, "wait")  # awake: nothing to wake
        return heard

    heard = asyncio.run(turn())
    assert heard == [
        "sleep 2",
        "pause_scheduler_async wait True",
        "wake_up ['weights']",
        "call_utility_all_async collective_rpc megarl_take_weights None ({'version': 3}, 0)",
        "update_weight_version 3",
        "wake_up ['kv_cache']",
        "pause_scheduler_async abort True",
        "resume_generation",
        "pause_scheduler_async wait True",
    ]
