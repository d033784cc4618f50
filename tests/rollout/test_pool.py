"""Which engines rank 0 restarts, to which it sends weights again, and when it gives up; with scripted engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megarl.rollout import EngineDied, RolloutError, handle
from megarl.rollout.engine_report import EngineProcess
from megarl.rollout.groups import GroupFacts
from megarl.rollout.handle import EngineHandle
from megarl.rollout.pool import EnginePool
from megarl.weight_sync.manifest import SyncAborted, SyncError, WeightManifest
from tests.rollout_cases import recipe, save_model

pytestmark = pytest.mark.sync

PAUSED = {"pause_s": 0.25, "in_flight": 16.0}
RECEIVED = {"received_bytes": 8.0, "transfer_s": 1.0}
DEAD, SILENT = EngineDied("its process is gone"), RolloutError("no answer")
ABORTED, WRONG = SyncAborted("trainer rank 0 left the group"), SyncError("wrong bytes in bucket 1")

Said = dict[str, float] | Exception


class Scripted(EngineHandle):
    """An engine that answers each call from a list, then from the last entry; starting it takes no time."""

    def __init__(self, index: int, pauses: list[Said], reports: list[Said]) -> None:
        super().__init__(SimpleNamespace(index=index, takes_turns=False, name=f"rollout engine {index}", teacher=""), 1.0, 1)  # type: ignore[arg-type]
        self._said = {"pause": pauses, "receive": reports}

    def call(self, method: str, *arguments: Any) -> Any:
        left = self._said[method]
        return left.pop(0) if len(left) > 1 else left[0]

    def get(self, reference: Any, phase: str, timeout_s: float | None = None, rule: str = "") -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    def begin_start(self, version: int | None = None) -> None:
        return None

    def finish_start(self, reference: Any) -> None:
        return None


Pools = Callable[..., EnginePool]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama", True, 0, layers=1)


@pytest.fixture
def pools(model: Path) -> Pools:
    """A pool of scripted engines, with no second chance for one that took wrong bytes."""

    def of(*engines: Scripted, **section: Any) -> EnginePool:
        pool_recipe = recipe(model, ("weight_sync", {"retries": 0} | section), max_restarts=2)
        pool = EnginePool(pool_recipe, str(model), (), seed=0)
        pool.engines = list(engines)
        return pool

    return of


MANIFEST = WeightManifest(
    version=1, attempt=1, plan_hash="", layout=None, rollout=None, mode="reshard",  # type: ignore[arg-type]
    precision="fp32", bucket_bytes=1, timeout_s=1.0, num_engines=2, engines=(0, 1), transport="group", port=0, groups=(1, 1),
)  # fmt: skip


def sync(pool: EnginePool) -> tuple[int, dict[str, float]]:
    """As the trainer ranks do: until no engine has to be served again. The attempts, and the metrics."""
    wanted: tuple[int, ...] = (0, 1)
    metrics: dict[str, float] = {}
    attempt = 0
    while wanted:
        attempt += 1
        assert attempt < 9, "no end to it"
        if attempt == 1:
            pool.ask(1, wanted)
        starts = pool.pause(1, attempt, wanted)
        wanted = tuple(engine for engine in wanted if starts[engine] >= 0)
        pool.begin(replace(MANIFEST, attempt=attempt, engines=wanted))
        wanted, metrics = pool.finish()
    return attempt, metrics


def test_an_engine_is_not_blamed_for_another_engine_that_died(pools: Pools) -> None:
    dies = Scripted(0, [PAUSED], [DEAD, DEAD, RECEIVED])
    pool = pools(dies, Scripted(1, [PAUSED], [ABORTED, ABORTED, RECEIVED]))
    assert sync(pool)[0] == 3 and dies.restarts == 2


@pytest.mark.parametrize("moment", ["pause", "receive"])
def test_syncs_go_on_without_an_engine_that_died_too_often(
    pools: Pools, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    dies = Scripted(0, [DEAD], [RECEIVED]) if moment == "pause" else Scripted(0, [PAUSED], [DEAD])
    other = Scripted(1, [PAUSED], [ABORTED, ABORTED, RECEIVED] if moment == "receive" else [RECEIVED])
    pool = pools(dies, other)
    assert sync(pool)[1]["sync/received_bytes"] == 8.0 and dies.is_lost and dies.restarts == 2
    assert caplog.text.count("the run goes on with 1 of 2 engines: rollout engine 0 died in phase weight_sync") == 1
    assert sync(pool)[0] == 1, "nobody waits for it again"
    other._said["receive"] = [DEAD]
    with pytest.raises(RolloutError, match="rollout engine 1 died in phase weight_sync after 2 restarts"):
        sync(pool)


def test_the_engine_that_took_wrong_bytes_is_named_and_no_other_engine(pools: Pools) -> None:
    pool = pools(Scripted(0, [PAUSED], [WRONG]), Scripted(1, [PAUSED], [ABORTED]))
    with pytest.raises(SyncError, match="rollout engine 0, phase weight_sync: wrong bytes"):
        sync(pool)
    pool = pools(Scripted(0, [PAUSED], [WRONG, RECEIVED]), Scripted(1, [PAUSED], [ABORTED, ABORTED, RECEIVED]), retries=1)
    assert sync(pool)[0] == 3


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_an_engine_that_hangs_in_the_pause_is_started_again(pools: Pools, in_flight: str) -> None:
    hangs = Scripted(0, [SILENT, DEAD, PAUSED], [RECEIVED])
    assert sync(pools(hangs, Scripted(1, [PAUSED], [RECEIVED]), in_flight=in_flight))[0] == 1
    assert hangs.restarts == 2


def test_what_an_engine_leaves_behind_is_removed_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(node: int) -> None:
        calls.append("there")
        raise RolloutError("its node is gone")

    calls: list[str] = []
    monkeypatch.setattr(handle, "clear_away", lambda process: calls.append("here"))
    monkeypatch.setattr(handle, "node_share", gone)
    for node in (0, 1):
        engine = EngineHandle(SimpleNamespace(name="", place=SimpleNamespace(node=node)), 1.0, 1)  # type: ignore[arg-type]
        engine.process = EngineProcess("node0", (), (), 4)
        engine.kill()
    assert calls == ["here", "there"]


def test_colocated_engines_rest_on_gpus_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def turns(placement: str, gpus: int | None) -> list[bool]:
        device = SimpleNamespace(num_devices=gpus, device_variable=None)
        monkeypatch.setattr("megarl.rollout.pool.platform", device)
        monkeypatch.setattr("megarl.cluster.engine_nodes.platform", device)
        pool = EnginePool(recipe(model, placement=placement, engines=2), str(model), (), seed=0)
        return [engine.settings.takes_turns for engine in pool.engines]

    assert turns("colocated", 4) == [True, True]
    assert turns("separate", 4) == turns("colocated", None) == [False, False]


def test_an_engine_that_dies_while_it_falls_asleep_is_left_to_the_sync() -> None:
    called: list[str] = []

    def ends(reference: str, phase: str) -> None:
        called.append(reference)
        raise EngineDied("its process is gone")

    def make_engine(turns: bool, name: str) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(takes_turns=turns), call=lambda method: f"{name} {method}", get=ends)

    pool: Any = SimpleNamespace(engines=[make_engine(True, "a"), make_engine(False, "b"), make_engine(True, "c")])
    EnginePool.rest(pool)
    assert called == ["a sleep", "c sleep"]


def test_a_restart_of_a_pool_that_ends_is_given_up_and_none_begins(pools: Pools) -> None:
    """The engine would start for minutes, in a thread that nobody can end."""
    starting, ended = threading.Event(), threading.Event()

    class Slow(Scripted):
        def finish_start(self, reference: Any) -> None:
            starting.set()
            assert ended.wait(60)
            raise DEAD

        def kill(self) -> None:
            if starting.is_set():
                ended.set()

    engine = Slow(0, [PAUSED], [RECEIVED])
    pool = pools(engine)
    with ThreadPoolExecutor(1) as thread:
        restart = thread.submit(pool.restart, engine, "rollout", DEAD)
        assert starting.wait(60)
        pool.end_restarts(True)
        with pytest.raises(EngineDied):
            restart.result(60)
    with pytest.raises(RolloutError, match="is not started again: the run ends"):
        pool.restart(engine, "rollout", DEAD)


@pytest.mark.parametrize("error", [TimeoutError(), ray.exceptions.RayActorError()], ids=["silent", "gone"])
def test_a_store_of_rollouts_that_does_not_answer_is_named(pools: Pools, error: Exception) -> None:
    async def add(*_: Any) -> None:
        raise error

    pool = pools(Scripted(0, [PAUSED], [RECEIVED]))
    pool._store = SimpleNamespace(add=SimpleNamespace(remote=add))
    facts = GroupFacts(0, (0,), (0,), (1,), (1,), (1,), ("stop",), (0,), (0,))
    with pytest.raises(RolloutError, match=r"the store of rollouts.* did not take batch 1 within rollout.timeout_s"):
        asyncio.run(pool.store_batch([facts], [None]))


def test_preemptions_are_counted_where_concurrency_follows_them_even_without_a_trace(model: Path) -> None:
    for trace, staleness, counts in (("none", 0, False), ("none", 1, True), ("phases", 0, True)):
        pool_recipe = recipe(model, ("run.trace", trace), engines=2, max_staleness=staleness)
        pool = EnginePool(pool_recipe, str(model), (), seed=0)
        assert {engine.settings.times_requests for engine in pool.engines} == {counts}
