"""A recipe as the planner sees it: roles, schedules, lengths, engines and a device, and nothing else of the recipe."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.estimate import RESERVE, Memory, Role, engine_memory
from megarl.planner.lengths import Lengths, Limits, find_lengths
from megarl.recipe import ENGINE_PHASES, Recipe
from megarl.recipe.memory import GIB, memory_roles
from megarl.recipe.recipe import ROLE_OF
from megarl.reshard.boxes import ModelShape
from megarl.schedule import Schedule

DEFAULT_LENGTHS = "log-normal"


@dataclass(frozen=True)
class Engines:
    """The rollout engines: `count` of `tensor` ranks each; `utilization` is the recipe's `rollout.memory_utilization`."""

    shape: ModelShape
    count: int
    tensor: int
    precision: str
    kv_cache_bytes: int
    max_concurrent: int
    batched_tokens: int
    utilization: float | None

    @property
    def memory(self) -> Memory:
        """What one rank of an engine needs: its weights, its KV cache (in `engine`) and working memory."""
        return engine_memory(
            self.shape, self.tensor, self.precision, self.kv_cache_bytes, self.max_concurrent, self.batched_tokens
        )

    def per_device(self, devices: int) -> int:
        """Engine ranks on the fullest of `devices` devices."""
        return -(-self.count * self.tensor // devices)


@dataclass(frozen=True)
class Job:
    """One step to forecast.

    `schedules` are those of the engine phases that run, in order. `engines` is None where rollouts are replayed.
    `kl_in_reward` says that the reward reads actor_logprob. `device_bytes` and `tflops` are of one trainer rank's device,
    None where nobody said.
    """

    roles: tuple[Role, ...]
    schedules: tuple[Schedule, ...]
    lengths: Lengths
    limits: Limits
    seed: int
    engines: Engines | None
    kl_in_reward: bool = False
    device_bytes: int | None = None
    tflops: float | None = None

    def role(self, phase: str) -> Role:
        """The role that runs an engine phase."""
        return next(role for role in self.roles if role.name == ROLE_OF[phase])

    def schedule(self, phase: str) -> Schedule | None:
        """The schedule of a phase; None where it does not run."""
        return next((one for one in self.schedules if one.phase == phase), None)

    @property
    def ranks(self) -> int:
        """Trainer ranks."""
        return self.roles[0].layout.ranks

    @property
    def groups(self) -> tuple[int, ...]:
        """Group of each sequence: the completions of one prompt lie side by side."""
        return tuple(sample // self.limits.group_size for sample in range(self.limits.num_sequences))

    @property
    def engine_bytes(self) -> int:
        """What engines take of one trainer rank's device: what they need, or the share that the recipe gives them, which
        must be free for them to start.

        Trainer and engines share the devices.
        """
        if self.engines is None:
            return 0
        each: float = self.engines.memory.total
        if self.engines.utilization is not None and self.device_bytes is not None:
            each = self.engines.utilization * self.device_bytes
        return int(self.engines.per_device(self.ranks) * each)

    @property
    def usable_bytes(self) -> int | None:
        """The device without the reserve."""
        return None if self.device_bytes is None else int(self.device_bytes * (1 - RESERVE))

    @property
    def budget_bytes(self) -> int | None:
        """What a trainer rank may hold: the device without the reserve and without the engines."""
        return None if self.usable_bytes is None else self.usable_bytes - self.engine_bytes


def job_of(recipe: Recipe, lengths: str = DEFAULT_LENGTHS, seed: int = 1, tflops: float | None = None) -> Job:
    """The planner's view of a loaded recipe, for lengths as `find_lengths` takes them.

    `tflops` goes before the recipe's `device.tflops`. Raises ValueError for lengths that are none.
    """
    roles = memory_roles(recipe)
    limits = Limits(
        recipe.num_sequences, recipe.algorithm.group_size, recipe.data.max_prompt_tokens, recipe.rollout.max_new_tokens
    )
    device = recipe.device
    return Job(
        roles=tuple(roles.values()),
        schedules=tuple(recipe.schedule(phase) for phase in ENGINE_PHASES if recipe.runs(phase)),
        lengths=find_lengths(lengths, limits, seed),
        limits=limits,
        seed=seed,
        engines=None if recipe.rollout.replay else _engines(recipe, roles["actor"].shape),
        kl_in_reward=recipe.algorithm.kl is not None and recipe.algorithm.kl.place == "reward",
        device_bytes=None if device is None else int(device.memory_gib * GIB),
        tflops=tflops if tflops is not None or device is None else device.tflops,
    )


def _engines(recipe: Recipe, shape: ModelShape) -> Engines:
    rollout = recipe.rollout
    return Engines(
        shape,
        rollout.engines,
        rollout.tensor,
        recipe.rollout_precision,
        rollout.kv_cache_bytes,
        recipe.phases.rollout.max_concurrent,
        recipe.batched_tokens,
        rollout.memory_utilization,
    )
