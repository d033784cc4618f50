"""The recipe as a whole, and what follows from it without looking at a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megarl.models.layout import Layout
from megarl.recipe.algorithm_section import AlgorithmSection
from megarl.recipe.data_section import DataSection
from megarl.recipe.device_section import DeviceSection
from megarl.recipe.environment_section import AnyEnvironment
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.recipe.layout_section import LayoutSection
from megarl.recipe.model_section import ModelSection
from megarl.recipe.phases_section import (
    ENGINE_PHASES,
    PHASES,
    ForwardPhaseSection,
    PhasesSection,
    UpdatePhaseSection,
    kind_of,
    role_of,
)
from megarl.recipe.reward_section import JudgeSection, RewardSection
from megarl.recipe.role_sections import (
    ActorSection,
    CriticSection,
    LoraSection,
    ReferenceSection,
    RewardModelSection,
    TeacherEngineSection,
    TeacherSection,
)
from megarl.recipe.rollout_section import RolloutSection
from megarl.recipe.run_section import FIRST_STEP_SHARE, STEP_SHARE, RunSection, WatchdogSection
from megarl.recipe.section import Name, Section
from megarl.recipe.supervised_section import WarmupSection, fill_sections
from megarl.recipe.telemetry_section import TelemetrySection
from megarl.recipe.trainer_section import TrainerSection
from megarl.recipe.weight_sync_section import WeightSyncSection
from megarl.schedule.schedule import Schedule


class Recipe(Section):
    """One run. A loaded recipe has passed every rule of `load.py`."""

    run: RunSection
    """Name, length and seed of the run."""
    model: ModelSection
    """The model to train."""
    algorithm: AlgorithmSection
    """Advantages and losses."""
    data: DataSection
    """Prompts."""
    reward: Annotated[tuple[RewardSection, ...], Field(strict=False)] = ()
    """Parts of the reward, which is their weighted sum plus the rewards of an environment. Of an episode they see the last
    message of the policy."""
    environment: AnyEnvironment | None = None
    """What answers the policy, turn by turn, or the agent that asks it; null for completions of one turn."""
    trainer: TrainerSection
    """Trainer processes."""
    actor: ActorSection
    """The model that is trained."""
    warmup: WarmupSection | None = None
    """Supervised steps ahead of the first rollout; null for none."""
    reference: ReferenceSection | None = None
    """The actor as it was at the start, or after `warmup`; with `algorithm.kl` or `run.kind: dpo` only."""
    teachers: dict[Name, TeacherSection] = {}
    """Frozen models that the actor learns from, by a name of your choice; with `algorithm.distillation` only."""
    critic: CriticSection | None = None
    """The value model; with `algorithm.advantage: gae` only."""
    reward_model: RewardModelSection | None = None
    """The model that scores completions; with a `reward` part of `kind: model` only."""
    rollout: RolloutSection
    """Rollout engines."""
    phases: PhasesSection
    """How each phase divides its batch."""
    device: DeviceSection | None = None
    """The devices of the trainer ranks, for `max_tokens: auto` and for the estimates of `megarl check --plan`."""
    weight_sync: WeightSyncSection = WeightSyncSection()
    """How new weights reach the rollout engines."""
    evaluation: EvaluationSection | None = None
    """How the run is measured on prompts that it does not train on; null for not at all."""
    telemetry: TelemetrySection = TelemetrySection()
    """What the run measures of itself, and where it writes that."""
    watchdog: WatchdogSection = WatchdogSection()
    """How long a rank may stand still before the run is ended."""

    @model_validator(mode="before")
    @classmethod
    def _has_all_sections(cls, given: Any) -> Any:
        return fill_sections(given)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each role that runs, over the same trainer ranks."""
        return {role: self.layout(role) for role in self.roles}

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that run, the actor first."""
        return tuple(dict.fromkeys(role_of(phase) for phase in ("actor_update", *self.engine_phases) if self.runs(phase)))

    @property
    def engine_phases(self) -> tuple[str, ...]:
        """Phases that a Megatron role may run, in order; one for each teacher on the trainer's ranks."""
        return self._for_each_teacher(ENGINE_PHASES, [name for name in self.teachers if name not in self.served])

    @property
    def served(self) -> dict[str, TeacherEngineSection]:
        """The engines of the teachers that no trainer rank holds, by the teacher's name."""
        return {name: section.engine for name, section in self.teachers.items() if section.engine is not None}

    def _for_each_teacher(self, phases: tuple[str, ...], teachers: Iterable[str]) -> tuple[str, ...]:
        of_teachers = tuple(f"teacher_logprob.{name}" for name in teachers) or ("teacher_logprob",)
        return tuple(one for phase in phases for one in (of_teachers if phase == "teacher_logprob" else (phase,)))

    def layout(self, role: str) -> Layout:
        """The layout of a role; the data-parallel size is what the other sizes leave of the trainer ranks."""
        section = self.layout_section(role)
        return Layout(
            section.tensor,
            section.pipeline,
            self.trainer.ranks // section.ranks,
            sequence_parallel=section.sequence_parallel,
            virtual_pipeline=section.virtual_pipeline,
            context=section.context,
            expert=section.expert,
            expert_tensor=section.expert_tensor,
            stages=section.stages,
            token_multiple=self.trainer.token_multiple,
        )

    def layout_section(self, role: str) -> LayoutSection:
        """The section that shards a role: its own, else the actor's."""
        section = self.other_roles.get(role)
        return section.layout if section is not None and section.layout is not None else self.actor.layout

    @property
    def other_roles(self) -> dict[str, ReferenceSection | TeacherSection | CriticSection | RewardModelSection]:
        """The sections of roles beside the actor that the recipe has."""
        sections: dict[str, ReferenceSection | TeacherSection | CriticSection | RewardModelSection | None]
        sections = {"reference": self.reference, "critic": self.critic, "reward_model": self.reward_model}
        sections |= {f"teachers.{name}": section for name, section in self.teachers.items()}
        return {role: section for role, section in sections.items() if section is not None}

    @property
    def model_paths(self) -> dict[str, str]:
        """The models of the recipe by the key that names them."""
        paths = {f"{role}.path": section.path for role, section in self.other_roles.items()}
        return {"model.path": self.model.path} | {key: path for key, path in paths.items() if path is not None}

    @property
    def num_rollouts(self) -> int:
        """Rollouts of one step."""
        return self.phases.rollout.prompts * self.algorithm.group_size

    @property
    def max_segments(self) -> int:
        """Most sequences of one rollout."""
        section = self.environment
        return 1 if section is None or section.kind == "class" else section.max_segments

    @property
    def num_sequences(self) -> int:
        """Most sequences of one step."""
        return self.num_rollouts * self.max_segments

    def starts_early(self, phase: str) -> bool:
        """Return whether a phase runs on parts of the batch while the rest is sampled."""
        section = self.phase_section(phase)
        return isinstance(section, ForwardPhaseSection) and section.start == "early" and self.runs(phase)

    @property
    def window(self) -> int:
        """Groups, in the order of their prompts, among which a step takes those that finish first."""
        return self.rollout.window or self.phases.rollout.prompts * min(2, 1 + self.rollout.max_staleness)

    @property
    def max_completion_tokens(self) -> int:
        """Most tokens after a prompt: those of one turn, or of an episode's turns with the observations between them."""
        section, turn = self.environment, self.rollout.max_new_tokens
        if section is None:
            return turn
        return section.most_tokens(turn) if section.kind == "class" else section.max_episode_tokens

    @property
    def max_own_tokens(self) -> int:
        """Most tokens that the policy samples in a rollout."""
        turns = 1 if self.environment is None else self.environment.max_turns
        return min(turns * self.rollout.max_new_tokens, self.max_segments * self.max_completion_tokens)

    @property
    def completion_key(self) -> str:
        """The keys that `max_completion_tokens` is made of, for errors."""
        section = self.environment
        if section is None:
            return "rollout.max_new_tokens"
        if section.kind != "class" or section.max_episode_tokens == self.max_completion_tokens:
            return "environment.max_episode_tokens"
        turns = f"environment.max_turns {section.max_turns} x rollout.max_new_tokens {self.rollout.max_new_tokens}"
        between = f"{section.max_turns - 1} x environment.max_observation_tokens {section.max_observation_tokens}"
        return f"({turns} + {between})"

    @property
    def truncation_key(self) -> str:
        """The keys and values that cut a completion, for errors."""
        limit = f"{self.completion_key} = {self.max_completion_tokens}"
        return limit if self.environment is None else f"environment.max_turns = {self.environment.max_turns}, or {limit}"

    @property
    def max_sequence_tokens(self) -> int:
        """Longest possible sequence: prompt and completion, or a row of a supervised run."""
        if self.run.is_supervised and self.data.max_tokens is not None:
            return self.data.max_tokens
        return self.data.max_prompt_tokens + self.max_completion_tokens

    @property
    def updates_per_batch(self) -> int:
        """Optimizer updates of the actor in one step."""
        update = self.phases.actor_update
        return self.num_rollouts // update.mini_batch * update.epochs

    @property
    def sft_steps(self) -> int:
        """First steps of the run, which are supervised (`warmup.sft`)."""
        return 0 if self.warmup is None else self.warmup.sft.steps

    @property
    def rollout_steps(self) -> int:
        """Steps of the run after the supervised ones."""
        return self.run.steps - self.sft_steps

    @property
    def supervised(self) -> Recipe | None:
        """The first `sft_steps` steps as a run of `run.kind: sft`; None without any."""
        return None if self.warmup is None else self.warmup.sft.run_of(self)

    @property
    def critic_warmup_steps(self) -> int:
        """First steps with rollouts that do not update the actor."""
        return self.critic.warmup_steps if self.critic is not None else 0

    @property
    def trained_role(self) -> Literal["actor", "reward_model"]:
        """What the actor's model is built as: with one score a sequence where the run trains a reward model."""
        return "reward_model" if self.run.kind == "reward_model" else "actor"

    @property
    def has_engines(self) -> bool:
        """Whether engines run: rollouts are sampled, neither replayed nor replaced by data."""
        return not self.run.is_supervised and self.rollout.replay is None

    @property
    def rollout_precision(self) -> str:
        """Number format in the rollout engines."""
        return self.rollout.precision or self.trainer.precision

    def evaluates_after(self, step: int) -> bool:
        """Whether the policy is measured after a step; 0 is before the first."""
        section = self.evaluation
        if section is None:
            return False
        return step in (0, self.sft_steps, self.run.steps) or (section.every > 0 and step % section.every == 0)

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
        return self.model_paths.get(f"{role}.path", self.model.path)

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
        return self.actor.lora is not None and same and not self.reference_is_warm

    @property
    def reference_is_warm(self) -> bool:
        """The reference is the actor as it is after the supervised steps, unless `reference.path` names its model."""
        named = self.reference is not None and self.reference.path is not None
        return self.warmup is not None and not named and self.runs("reference_logprob")

    @property
    def reference_follows(self) -> bool:
        """Whether the reference takes weights of the actor during the run."""
        return self.reference_is_warm or self.refresh_every is not None

    @property
    def sent_adapter(self) -> LoraSection | None:
        """The adapters that a sync sends instead of weights; None if it sends weights, or if there is no sync."""
        lora = self.actor.lora
        return lora if lora is not None and lora.send == "adapter" and self.has_engines else None

    @property
    def refresh_every(self) -> int | None:
        """The reference takes the actor's weights every this many steps; None for never."""
        return self.reference.refresh_every if self.reference is not None else None

    @property
    def running_phases(self) -> tuple[str, ...]:
        """Phases of one step, in order."""
        return tuple(phase for phase in self._for_each_teacher(PHASES, self.teachers) if self.runs(phase))

    @property
    def warmup_phases(self) -> tuple[str, ...]:
        """Phases of one of the first `critic.warmup_steps` steps, in order.

        The actor is not updated, and log-probabilities that only its update would read are not computed. Engines that slept
        still take its weights again.
        """
        kl = self.algorithm.kl
        idle = {"actor_update", "weight_sync", "teacher_logprob"}
        if kl is None or kl.place != "reward":  # where advantages read none
            idle |= {"actor_logprob", "reference_logprob"}
        return tuple(phase for phase in self.running_phases if kind_of(phase) not in idle)

    def runs(self, phase: str) -> bool:
        """A phase that nothing needs does not run."""
        kl = self.algorithm.kl
        if self.run.is_supervised and phase in ("rollout", "reward", "weight_sync"):
            return False
        if self.run.is_supervised and phase == "actor_logprob":
            return self.run.learns_from_pairs  # the margins that the update is weighted by
        if phase == "actor_logprob" and not self.algorithm.has_policy_loss:
            return self.algorithm.early_stop is not None
        if phase == "actor_logprob":
            # With one update per batch the training forward itself gives the old log-probabilities; but where older weights
            # sampled, the ratio's denominator is never left to it.
            return (kl is not None and kl.place == "reward") or self.updates_per_batch > 1 or self.rollout.max_staleness > 0
        if phase == "reference_logprob":
            return kl is not None or self.run.kind == "dpo"
        if kind_of(phase) == "teacher_logprob":
            return phase.partition(".")[2] in self.teachers and self.algorithm.distillation is not None
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
            "teacher_logprob": self.phases.teacher_logprob,
            "critic_value": self.phases.critic_value,
            "critic_update": self.phases.critic_update,
            "actor_update": self.phases.actor_update,
        }
        return sections[kind_of(phase)]

    def schedule(self, phase: str, automatic_cap: int | None = None) -> Schedule:
        """The schedule of an engine phase, with `automatic_cap` for `max_tokens: auto`. Raises ValueError for a phase
        without a section, and for `auto` without a cap."""
        section = self.phase_section(phase)
        if section is None:
            raise ValueError(f"phases.{kind_of(phase)} is not in the recipe; add the section")
        rule = section.micro_batch
        cap = automatic_cap if isinstance(rule.max_tokens, str) else rule.max_tokens
        if cap is None and rule.sequences is None:
            raise ValueError(
                f"phases.{kind_of(phase)}.micro_batch.max_tokens = auto is not resolved; load the recipe with load_recipe"
            )
        if isinstance(section, UpdatePhaseSection):
            # The loss of the actor alone may have terms of whole rollouts.
            together = self.max_segments if phase == "actor_update" and self.algorithm.has_rollout_terms else 1
            size, epochs, shares = section.mini_batch, section.epochs, section.share_prompts
            return Schedule(phase, rule.sequences, cap, size, epochs, shares, together)
        return Schedule(phase, rule.sequences, cap, share_prompts=section.share_prompts)
