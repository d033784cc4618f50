"""The recipe as a whole, and what follows from it without looking at a model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megarl.models.layout import Layout
from megarl.recipe.algorithm_sections import AlgorithmSection
from megarl.recipe.data_sections import DataSection
from megarl.recipe.environment_section import EnvironmentSection
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.recipe.reward_sections import JudgeSection, RewardSection
from megarl.recipe.sections import (
    ActorSection,
    CriticSection,
    DeviceSection,
    ForwardPhaseSection,
    LayoutSection,
    ModelSection,
    PhasesSection,
    ReferenceSection,
    RewardModelSection,
    RolloutSection,
    RunSection,
    Section,
    TrainerSection,
    UpdatePhaseSection,
    WeightSyncSection,
)
from megarl.recipe.telemetry_sections import TelemetrySection
from megarl.recipe.watchdog_section import FIRST_STEP_SHARE, STEP_SHARE, WatchdogSection
from megarl.schedule.schedule import Schedule

# Every phase, in the order of a step.
PHASES = (
    "rollout",
    "reward",
    "reward_model",
    "actor_logprob",
    "reference_logprob",
    "critic_value",
    "advantage",
    "critic_update",
    "actor_update",
    "weight_sync",
)
# Phases an engine runs by micro-batches; each has a section of its own under `phases`.
FORWARD_PHASES = ("reward_model", "actor_logprob", "reference_logprob", "critic_value")
UPDATE_PHASES = ("critic_update", "actor_update")
ENGINE_PHASES = (*FORWARD_PHASES, *UPDATE_PHASES)
# Which role runs an engine phase.
ROLE_OF = {
    "reward_model": "reward_model",
    "actor_logprob": "actor",
    "reference_logprob": "reference",
    "critic_value": "critic",
    "critic_update": "critic",
    "actor_update": "actor",
}


class Recipe(Section):
    """One run. Frozen; a loaded recipe has passed every rule of `rules.py`."""

    run: RunSection
    """Name, length and seed of the run."""
    model: ModelSection
    """The model to train."""
    algorithm: AlgorithmSection
    """Advantages and losses."""
    data: DataSection
    """Prompts."""
    reward: Annotated[tuple[RewardSection, ...], Field(strict=False)] = ()
    """Parts of the reward; it is their weighted sum, and that of what an environment gives. Of an episode they see what the
    policy said last."""
    environment: EnvironmentSection | None = None
    """What answers the policy, turn by turn; null for completions of one turn."""
    trainer: TrainerSection
    """Trainer processes."""
    actor: ActorSection
    """The model that is trained."""
    reference: ReferenceSection | None = None
    """The actor as it was at the start; with `algorithm.kl` only."""
    critic: CriticSection | None = None
    """The value model; with `algorithm.advantage: gae` only."""
    reward_model: RewardModelSection | None = None
    """The model that scores completions; with a `reward` part of `kind: model` only."""
    rollout: RolloutSection
    """Rollout engines."""
    phases: PhasesSection
    """How each phase cuts its batch."""
    device: DeviceSection | None = None
    """The devices of the trainer ranks, for `max_tokens: auto` and for the estimates of `megarl check --plan`."""
    weight_sync: WeightSyncSection = WeightSyncSection()
    """How new weights reach the rollout engines."""
    evaluation: EvaluationSection | None = None
    """How the run is measured on prompts that it does not train on; null for not at all."""
    telemetry: TelemetrySection = TelemetrySection()
    """What the run measures of itself, and where it says so."""
    watchdog: WatchdogSection = WatchdogSection()
    """How long a rank may stand still before the run is ended."""

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each role that runs, over the same trainer ranks."""
        return {role: self.layout(role) for role in self.roles}

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that run, the actor first."""
        return tuple(dict.fromkeys(ROLE_OF[phase] for phase in ("actor_update", *ENGINE_PHASES) if self.runs(phase)))

    def layout(self, role: str) -> Layout:
        """How a role is cut; the data-parallel size is what the other cuts leave of the trainer ranks."""
        cut = self.layout_section(role)
        return Layout(
            cut.tensor,
            cut.pipeline,
            self.trainer.ranks // cut.ranks,
            sequence_parallel=cut.sequence_parallel,
            virtual_pipeline=cut.virtual_pipeline,
            context=cut.context,
            expert=cut.expert,
            expert_tensor=cut.expert_tensor,
            stages=cut.stages,
            token_multiple=self.trainer.token_multiple,
        )

    def layout_section(self, role: str) -> LayoutSection:
        """The section that cuts a role: its own, else the actor's."""
        owners = {
            "actor": self.actor,
            "reference": self.reference,
            "critic": self.critic,
            "reward_model": self.reward_model,
        }
        owner = owners[role]
        own = owner.layout if owner is not None else None
        return own or self.actor.layout

    @property
    def num_sequences(self) -> int:
        """Sequences of one step."""
        return self.phases.rollout.prompts * self.algorithm.group_size

    @property
    def max_completion_tokens(self) -> int:
        """Most tokens behind a prompt: those of one turn, or of an episode's turns with the observations between them."""
        section, turn = self.environment, self.rollout.max_new_tokens
        if section is None:
            return turn
        longest = section.most_tokens(turn)
        return longest if section.max_episode_tokens is None else min(longest, section.max_episode_tokens)

    @property
    def max_own_tokens(self) -> int:
        """Most tokens that the policy samples behind a prompt."""
        turns = 1 if self.environment is None else self.environment.max_turns
        return min(turns * self.rollout.max_new_tokens, self.max_completion_tokens)

    @property
    def completion_key(self) -> str:
        """The keys that `max_completion_tokens` is made of, for errors."""
        section = self.environment
        if section is None:
            return "rollout.max_new_tokens"
        if section.max_episode_tokens == self.max_completion_tokens:
            return "environment.max_episode_tokens"
        turns = f"environment.max_turns {section.max_turns} x rollout.max_new_tokens {self.rollout.max_new_tokens}"
        between = f"{section.max_turns - 1} x environment.max_observation_tokens {section.max_observation_tokens}"
        return f"({turns} + {between})"

    @property
    def max_sequence_tokens(self) -> int:
        """Longest possible sequence: prompt and completion."""
        return self.data.max_prompt_tokens + self.max_completion_tokens

    @property
    def updates_per_batch(self) -> int:
        """Optimizer updates of the actor in one step."""
        update = self.phases.actor_update
        return self.num_sequences // update.mini_batch * update.epochs

    @property
    def critic_warmup_steps(self) -> int:
        """First steps that do not update the actor."""
        return self.critic.warmup_steps if self.critic is not None else 0

    @property
    def rollout_precision(self) -> str:
        """Number format in the rollout engines."""
        return self.rollout.precision or self.trainer.precision

    def evaluates_after(self, step: int) -> bool:
        """Whether the policy is measured after a step; 0 is before the first."""
        section = self.evaluation
        if section is None:
            return False
        return step in (0, self.run.steps) or (section.every > 0 and step % section.every == 0)

    @property
    def standing_s(self) -> tuple[float, float]:
        """How long a rank may stand in one place, in seconds: in the first step of a start, and in later ones."""
        section, trainer = self.watchdog, self.trainer
        first, step = section.first_step_s, section.step_s
        if first is None:
            first = FIRST_STEP_SHARE * trainer.collective_timeout_s
        if step is None:
            step = min(first, STEP_SHARE * trainer.collective_timeout_s)
        return first, step

    def path(self, role: str) -> str:
        """The model that a role starts from."""
        owner = {"reference": self.reference, "critic": self.critic, "reward_model": self.reward_model}.get(role)
        own = owner.path if owner is not None else None
        return own or self.model.path

    @property
    def verifiers(self) -> tuple[JudgeSection, ...]:
        """Parts of the reward that are computed from a completion's text."""
        return tuple(part for part in self.reward if part.kind != "model")

    @property
    def reward_model_weight(self) -> float:
        """Factor of the reward model's score in the reward."""
        return sum(part.weight for part in self.reward if part.kind == "model")

    @property
    def reference_is_base(self) -> bool:
        """The reference is the actor with its adapters switched off; read it only with a reference."""
        same = self.path("reference") == self.model.path and self.layout("reference") == self.layout("actor")
        return self.actor.lora is not None and same

    @property
    def refresh_every(self) -> int | None:
        """After how many steps the reference takes the actor's weights, over and over; None for never."""
        return self.reference.refresh_every if self.reference is not None else None

    @property
    def running_phases(self) -> tuple[str, ...]:
        """Phases of one step, in order."""
        return tuple(phase for phase in PHASES if self.runs(phase))

    @property
    def warmup_phases(self) -> tuple[str, ...]:
        """Phases of one of the first `critic.warmup_steps` steps, in order: the actor stays as it is, and log-probabilities
        that its update alone would read are not computed. Engines that have slept take its weights again even so."""
        kl = self.algorithm.kl
        idle = {"actor_update", "weight_sync"}
        if kl is None or kl.place != "reward":  # where advantages read none
            idle |= {"actor_logprob", "reference_logprob"}
        return tuple(phase for phase in self.running_phases if phase not in idle)

    def runs(self, phase: str) -> bool:
        """A phase that nothing needs does not run."""
        kl = self.algorithm.kl
        if phase == "actor_logprob":
            # With one update per batch the training forward itself gives the old log-probabilities.
            return (kl is not None and kl.place == "reward") or self.updates_per_batch > 1
        if phase == "reference_logprob":
            return kl is not None
        if phase == "reward_model":
            return self.reward_model is not None
        if phase in ("critic_value", "critic_update"):
            return self.algorithm.advantage == "gae"
        return True

    def phase_section(self, phase: str) -> ForwardPhaseSection | UpdatePhaseSection | None:
        """The section of an engine phase; no phase reads another's."""
        sections = {
            "reward_model": self.phases.reward_model,
            "actor_logprob": self.phases.actor_logprob,
            "reference_logprob": self.phases.reference_logprob,
            "critic_value": self.phases.critic_value,
            "critic_update": self.phases.critic_update,
            "actor_update": self.phases.actor_update,
        }
        return sections[phase]

    def schedule(self, phase: str) -> Schedule:
        """The schedule of an engine phase. Raises ValueError for a phase without a section."""
        section = self.phase_section(phase)
        if section is None:
            raise ValueError(f"phases.{phase} is not in the recipe; add the section")
        rule = section.micro_batch
        cap = rule.max_tokens
        if isinstance(cap, str):
            raise ValueError(
                f"phases.{phase}.micro_batch.max_tokens = {cap} is not resolved; load the recipe with load_recipe"
            )
        if isinstance(section, UpdatePhaseSection):
            return Schedule(phase, rule.sequences, cap, section.mini_batch, section.epochs, section.share_prompts)
        return Schedule(phase, rule.sequences, cap, share_prompts=section.share_prompts)
