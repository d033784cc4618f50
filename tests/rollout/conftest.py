"""Two vLLM engines that the tests of this folder share: to start them takes longer than most of what is tested."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from megarl.cluster.ray_cluster import start_cluster, stop_cluster
from megarl.rollout.pool import EnginePool
from tests.rollout_cases import STOP, recipe, save_model

# Variables of a trainer rank, which engines must not see.
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
POSITIONS = 256  # of the models: the longest prompt and completion together


class Engines:
    """Two engines that hold the weights `old`; `new` is a second model of the same shape."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = (save_model(folder / name, "llama", True, seed) for seed, name in enumerate(("old", "new")))
        self._pool = EnginePool(self._recipe(POSITIONS // 2, POSITIONS // 2, engines=2), str(self.old), (), seed=3)
        self._pool.start()

    def pool(
        self, *which: int, prompt_tokens: int = 16, new_tokens: int = 24, stops: tuple[int, ...] = STOP, **rollout: Any
    ) -> EnginePool:
        """Return a pool of some of the engines, which sample as this recipe says. A dead engine is started again."""
        pool = copy(self._pool)
        pool._recipe = self._recipe(prompt_tokens, new_tokens, engines=len(which), **rollout)
        pool.engines = [self._pool.engines[engine] for engine in which]
        for index, engine in enumerate(pool.engines):
            engine.restarts = 0  # of this pool
            engine.settings = replace(engine.settings, index=index, max_new_tokens=new_tokens, stop_token_ids=stops)
            if engine._actor is None:
                engine.finish_start(engine.begin_start())
            ray.get(engine._actor.__ray_call__.remote(_change_settings, engine.settings))
        return pool

    def close(self) -> None:
        self._pool.shutdown()

    def _recipe(self, prompt_tokens: int, new_tokens: int, **rollout: Any) -> Any:
        return recipe(self.old, ("data.max_prompt_tokens", prompt_tokens), max_new_tokens=new_tokens, **rollout)


def _change_settings(engine: Any, settings: Any) -> None:
    """Runs in an engine's actor."""
    engine._settings = settings


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """One Ray for all pools."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TORCHRUN.items():
            patch.setenv(name, value)
        start_cluster()
        yield
        stop_cluster()


@pytest.fixture(scope="package")
def engines(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("models"))
    yield engines
    engines.close()
