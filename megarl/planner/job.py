"""A recipe as the planner sees it: roles, schedules, lengths, engines and a device, and nothing else of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megarl.planner.cap import usable_bytes
from megarl.planner.engine_memory import Engines
from megarl.planner.lengths import Lengths, Limits, find_lengths
from megarl.planner.roles import Role
from megarl.recipe import ENGINE_PHASES, Recipe
from megarl.recipe.phases_section import ROLE_OF
from megarl.recipe.sizes import engines_of, memory_roles
from megarl.schedule import Schedule, violations

DEFAULT_LENGTHS = "log-normal"


@dataclass(frozen=True)
class Job:
    """One step to forecast.

    `schedules` are those of the engine phases that run, in order. `engines` is None where rollouts are replayed.
    `kl_in_reward` says that the reward reads actor_logprob. `device_bytes` and `tflops` are of one trainer rank's device,
    None where nobody said. `rates` are measured operations a second of a rank by phase, which go before `tflops`.
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
    rates: Mapping[str, float] = field(default_factory=dict)

    def role(self, phase: str) -> Role:
        """The role that runs an engine phase."""
        return next(role for role in self.roles if role.name == ROLE_OF[phase])

    def schedule(self, phase: str) -> Schedule | None:
        """The schedule of a phase; None where it does not run."""
        return next((one for one in self.schedules if one.phase == phase), None)

    def runs(self, schedule: Schedule) -> bool:
        """Whether its role's layout runs a schedule for every batch that the recipe allows."""
        layout = self.role(schedule.phase).layout
        return not violations(schedule, self.limits.num_sequences, layout, self.limits.longest)

    def rate(self, phase: str) -> float | None:
        """Operations a second of one rank at efficiency 1; None where nobody said."""
        stated = None if self.tflops is None else self.tflops * 1e12
        return self.rates.get(phase, stated)

    @property
    def engine_share(self) -> float | None:
        """Share of a device that must be free for an engine to start (vLLM's `gpu_memory_utilization`); None without
        engines or a device, and on CPUs."""
        if self.engines is None or self.engines.shared or self.device_bytes is None:
            return None
        return self.engine_bytes / self.device_bytes

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
        """What engines that work take of one device; on a CPU, of one trainer rank's share of the machine."""
        return 0 if self.engines is None else self.engines.awake_bytes(self.ranks, self.device_bytes)

    @property
    def beside_bytes(self) -> int:
        """What of that lies on the device of a trainer rank that works."""
        return 0 if self.engines is None else self.engines.beside_bytes(self.ranks)

    @property
    def usable_bytes(self) -> int | None:
        """The device without the reserve."""
        return None if self.device_bytes is None else usable_bytes(self.device_bytes)

    @property
    def budget_bytes(self) -> int | None:
        """What a trainer rank that works may hold: the device without the reserve and what engines take beside it."""
        return None if self.usable_bytes is None else self.usable_bytes - self.beside_bytes


def job_of(recipe: Recipe, lengths: str = DEFAULT_LENGTHS, seed: int = 1, tflops: float | None = None) -> Job:
    """The planner's view of a loaded recipe, for lengths as `find_lengths` takes them.

    `tflops` goes before the recipe's `device.tflops`. Raises what `find_lengths` raises.
    """
    roles = memory_roles(recipe)
    limits = Limits(
        recipe.num_sequences, recipe.algorithm.group_size, recipe.data.max_prompt_tokens, recipe.max_completion_tokens
    )
    device = recipe.device
    return Job(
        roles=tuple(roles.values()),
        schedules=tuple(recipe.schedule(phase) for phase in ENGINE_PHASES if recipe.runs(phase)),
        lengths=find_lengths(lengths, limits, seed),
        limits=limits,
        seed=seed,
        engines=engines_of(recipe, roles["actor"].shape),
        kl_in_reward=recipe.algorithm.kl is not None and recipe.algorithm.kl.place == "reward",
        device_bytes=None if recipe.device is None else recipe.device.memory_bytes,
        tflops=tflops if tflops is not None or device is None else device.tflops,
    )
