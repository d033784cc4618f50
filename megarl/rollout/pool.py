"""The engines of a run, seen from rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.sample import Prompt
from megarl.recipe.recipe import Recipe
from megarl.rollout.batch import RolloutBatch
from megarl.rollout.replay import ReplayPool
from megarl.sync.manifest import WeightManifest


class EnginePool:
    """vLLM engines behind Ray actors; used on rank 0 only."""

    def __init__(
        self,
        recipe: Recipe,
        model_path: str,
        stop_token_ids: Sequence[int],
        seed: int,
        ray_address: str | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def address(self) -> str | None:
        """Address of the Ray cluster, for `join_cluster` in other ranks."""
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def generate(self, prompts: Sequence[Prompt], step: int) -> RolloutBatch:
        raise NotImplementedError

    def apply(self, manifest: WeightManifest) -> dict[str, float]:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError


def open_pool(
    recipe: Recipe,
    model_path: str,
    stop_token_ids: Sequence[int],
    seed: int,
    ray_address: str | None = None,
) -> EnginePool | ReplayPool:
    """Engines, or the replay that the recipe names in their place; not started yet."""
    if recipe.rollout.replay is not None:
        section = recipe.phases.rollout
        return ReplayPool(recipe.rollout.replay, recipe.algorithm.group_size, section.max_concurrent)
    return EnginePool(recipe, model_path, stop_token_ids, seed, ray_address)
