"""An engine that shares a GPU sleeps while the trainer works, and is woken in the order that a sync needs its memory."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.models.layout import RolloutLayout
from megarl.rollout import EngineDied, EngineDirty
from megarl.rollout import engine as engine_module
from megarl.rollout import pool as pool_module
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.pool import EnginePool
from megarl.weight_sync.manifest import SyncError
from tests.rollout_cases import recipe, save_model


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
    monkeypatch.setattr(engine_module, "WeightManifest", SimpleNamespace(from_dict=lambda values: SimpleNamespace(**values)))

    async def turn() -> list[str]:
        heard: list[str] = []
        settings: Any = SimpleNamespace(index=0, layout=RolloutLayout())
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


def test_an_engine_stands_still_from_its_first_pause_until_a_sync_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WeightManifest", SimpleNamespace(from_dict=lambda values: SimpleNamespace(**values)))
    real, ahead_s = time.perf_counter, [0.0]
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: real() + ahead_s[0]))

    async def syncs() -> list[dict[str, float]]:
        settings: Any = SimpleNamespace(index=0, layout=RolloutLayout())
        engine = RolloutEngine(settings)
        engine._engine = Recorder([])  # type: ignore[assignment]
        await engine.pause(3, "keep")
        with pytest.raises(SyncError):  # the worker took version 3
            await engine.receive({"version": 4})
        ahead_s[0] += 1000.0
        await engine.pause(3, "keep")
        first = await engine.receive({"version": 3})
        await engine.pause(3, "keep")
        return [first, await engine.receive({"version": 3})]

    first, second = asyncio.run(syncs())
    assert first["standstill_s"] > 1000.0 > second["standstill_s"] > second["receive_s"] + second["resume_s"]


def test_colocated_engines_rest_on_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "m", "llama", True, 0, layers=1)

    def turns(placement: str, gpus: int | None) -> list[bool]:
        device = SimpleNamespace(num_devices=gpus, device_variable=None)
        monkeypatch.setattr(pool_module, "platform", device)
        monkeypatch.setattr("megarl.cluster.engine_nodes.platform", device)
        pool = EnginePool(recipe(model, placement=placement, engines=2), str(model), (), seed=0)
        return [engine.settings.takes_turns for engine in pool._engines]

    assert turns("colocated", 4) == [True, True]
    assert turns("separate", 4) == turns("colocated", None) == [False, False]


def test_an_engine_that_dies_while_it_falls_asleep_is_left_to_the_sync() -> None:
    called: list[str] = []

    def ends(reference: str, phase: str) -> None:
        called.append(reference)
        raise EngineDied("its process is gone")

    def one(turns: bool, name: str) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(takes_turns=turns), call=lambda method: f"{name} {method}", get=ends)

    pool: Any = SimpleNamespace(_engines=[one(True, "a"), one(False, "b"), one(True, "c")])
    EnginePool.rest(pool)
    assert called == ["a sleep", "c sleep"]
