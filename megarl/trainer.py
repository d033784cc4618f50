"""One step of a run, top to bottom. The same loop serves GRPO and PPO, one update a batch or many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megarl.algorithm.estimate import Scored, estimate, explained_variance
from megarl.algorithm.kl import adapted, kl
from megarl.algorithm.overlong import overlong_penalties
from megarl.data.sample import Sample
from megarl.megatron.batch import Batch
from megarl.megatron.non_finite import FiniteGuard
from megarl.megatron.objective import PolicyObjective, ValueObjective, token_weights
from megarl.megatron.parallel import (
    Place,
    broadcast_from_first,
    distribute_samples,
    gather_to_all,
    reduce_scalars,
    same_everywhere,
)
from megarl.megatron.role import Role, Update, share_results
from megarl.megatron.step_metrics import add_scores, rollout_figures, schedule_figures, update_figures
from megarl.planner.flops import sequence_cost
from megarl.platform import current as platform
from megarl.recipe import ENGINE_PHASES, ROLE_OF, Recipe
from megarl.recipe.algorithm_sections import OverlongSection
from megarl.reward.workers import add_episodes
from megarl.rollout.dynamic_sampling import Rounds
from megarl.rollout.evaluation import Judged
from megarl.schedule import Executed, Plan, PlanMismatch, Summary, Turn, compare, plan_phase, refuse_unlike
from megarl.telemetry import PhaseClock, work
from megarl.telemetry.clock import span
from megarl.telemetry.step_figures import Sizes

Figures = dict[str, Any]
logger = logging.getLogger(__name__)
# Of a weight sync, what is not added up over several: the last one's are kept.
NOT_ADDED = ("sync/in_place", "sync/changed_share", "sync/bytes_per_s", "sync/memcpy_bytes_per_s")


@dataclass
class Parts:
    """What a step works with. Rollouts, rewards and prompts live on rank 0 and are None elsewhere."""

    actor: Role
    reference: Role | None  # the actor itself, where it is the base model without its adapters
    critic: Role | None
    reward_model: Role | None
    prompts: Any
    rollouts: Any
    rewards: Any
    weights: Any  # None where rollouts are replayed: nobody takes new weights
    dump: Any  # called with (step, rollouts) on rank 0 to keep them; None to keep none
    samples: Any  # the SampleTable of rank 0; None to write none
    held_out: Any = None  # the HeldOut of rank 0; None to evaluate nothing
    refreshes: bool = False  # the reference takes the actor's weights from time to time
    engines_sleep: bool = False  # from the end of a rollout to the next sync, and forget their weights

    @property
    def engines(self) -> dict[str, Role]:
        """Roles that run."""
        engines = {
            "actor": self.actor,
            "reference": self.reference,
            "critic": self.critic,
            "reward_model": self.reward_model,
        }
        return {role: engine for role, engine in engines.items() if engine is not None}

    @property
    def moving(self) -> dict[str, Role]:
        """Roles whose weights move, and so go into a checkpoint: those with an optimizer, and a reference that follows."""
        engines = {role: engine for role, engine in self.engines.items() if role == engine.role}
        return {
            role: engine
            for role, engine in engines.items()
            if engine.optimizer is not None or (role == "reference" and self.refreshes)
        }


@dataclass(frozen=True)
class Resync:
    """Said by rank 0 in place of a rollout that is not complete: these engines need the weights once more."""

    engines: tuple[int, ...]


class Pipeline:
    """Runs steps. `version` counts weight syncs; it and the prompt position are what a resume needs besides the roles."""

    def __init__(
        self,
        recipe: Recipe,
        rank: int,
        parts: Parts,
        clock: PhaseClock,
        boundary: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`boundary` is called with each phase of a step before it begins, on all ranks, and may raise."""
        self.recipe, self.rank, self.parts, self.clock, self.boundary = recipe, rank, parts, clock, boundary
        self.costs = {role: sequence_cost(engine.shape) for role, engine in parts.engines.items()}
        self.algorithm = recipe.algorithm  # with the KL coefficient of this step
        self.guard = FiniteGuard(recipe.run.on_not_finite, rank)
        self.number = self.version = 0
        self.figures: Figures = {}
        self.resyncs: Figures = {}  # of engines that were started again, since they were last taken
        self.sizes = Sizes((), (), ())  # of the last step
        self.warned_of_drift = False

    def step(self, number: int) -> Figures:
        """One step: rollouts in, updated and synchronised weights out. Returns its figures, the same on every rank."""
        self.number, self.figures = number, {}
        runs = self.recipe.warmup_phases if self._warms_up(number) else self.recipe.running_phases
        rounds = Rounds(self.recipe)
        while not rounds.complete:
            with self._phase("rollout"):
                rollouts, prompts = self._rollout(number)
            with self._phase("reward"):
                scored = self._score(rollouts, prompts)
                if self.rank == 0:
                    self.parts.prompts.learn(prompts, scored.rewards, scored.valid)
                rounds.add(rollouts, scored)
        with self._phase("reward"):
            rollouts, scored, figures = rounds.chosen()
            self.figures |= figures
            batch = self._batch(rollouts, scored)
            if rollouts.greedy is not None:
                self._compare_with_greedy(batch, rollouts.greedy, self._score(rollouts.greedy, prompts))
        with self.clock.phase("plan"), span("planning"):
            plans = {phase: self._plan(phase, batch, number) for phase in ENGINE_PHASES if phase in runs}
        with self._phase("rollout"):
            if self.rank == 0:
                with span("wait_engines"):
                    self.parts.rollouts.rest()
            batch.samples = self._samples(rollouts.payload, plans)
        if self.parts.reward_model is not None:
            with self._phase("reward_model"):
                scores = self._forward(self.parts.reward_model, plans["reward_model"], batch, "scores")
                self.figures |= add_scores(batch, torch.cat(scores).numpy(), self.recipe.reward_model_weight)
        if "actor_logprob" in runs:
            with self._phase("actor_logprob"):
                batch.fields["logprobs"] = self._forward(self.parts.actor, plans["actor_logprob"], batch, "logprobs")
        if self.parts.reference is not None and "reference_logprob" in runs:
            with self._phase("reference_logprob"):
                plan = plans["reference_logprob"]
                batch.fields["reference_logprobs"] = self._forward(self.parts.reference, plan, batch, "logprobs")
        if self.parts.critic is not None:
            with self._phase("critic_value"):
                batch.fields["values"] = self._forward(self.parts.critic, plans["critic_value"], batch, "values")
        with self._phase("advantage"), span("advantages"):
            self._advantages(batch)
            if self.parts.samples is not None:
                with span("samples"):
                    self.parts.samples.write(number, rollouts, scored, batch)
        if self.parts.critic is not None:
            with self._phase("critic_update"):
                self._update(self.parts.critic, plans["critic_update"], batch, ValueObjective)
        if "actor_update" in runs:
            with self._phase("actor_update"):
                self._update(self.parts.actor, plans["actor_update"], batch, PolicyObjective)
                self._refresh_reference(number)
        if "weight_sync" in runs:
            with self._phase("weight_sync"):
                self.sync(self.version + 1)
        else:
            self._keep_actor()
        return self.figures | self.guard.take_figures()

    def evaluate(self, step: int, leaves: Callable[[], bool]) -> Any:
        """Measure the weights that the engines have on the held-out prompts: an Evaluation on rank 0, None elsewhere. Where
        the run `leaves`, which is asked on all ranks before each round, None everywhere."""
        judged, more = Judged(), True
        with self.clock.phase("evaluation"):
            while more:
                if leaves():
                    return None
                answer: Any = None
                if self.rank == 0:
                    answer = self.parts.held_out.go_on(judged, self.parts.rollouts, self.parts.rewards, step, self._resync)
                with span("wait_engines"):
                    while isinstance(answer := broadcast_from_first(answer), Resync):  # while they work, and one was lost
                        self._bring_again(answer.engines)
                        answer = None
                more = answer
        return self.parts.held_out.result(judged) if self.rank == 0 else None

    # The phases ---------------------------------------------------------------------------------------------------

    def _rollout(self, number: int) -> tuple[Any, Any]:
        """Rank 0 has the engines complete the next prompts; every rank learns the metadata, rank 0 keeps the prompts."""
        rollouts = prompts = None
        if self.rank == 0:
            with span("data"):
                prompts = self.parts.prompts.take(self.recipe.phases.rollout.prompts)
            with span("wait_engines"):
                rollouts = self.parts.rollouts.generate(prompts, number, self._resync)
            if self.parts.dump is not None:
                self.parts.dump(number, rollouts)
        with span("wait_engines"):
            while isinstance(rollouts := broadcast_from_first(rollouts), Resync):  # while they work, and one was lost
                self._bring_again(rollouts.engines)
                rollouts = None
        sections = self.recipe.phases.rollout
        planned = (sections.prompts, self.recipe.num_sequences, sections.max_concurrent)
        ran = (rollouts.executed.prompts, len(rollouts), rollouts.executed.max_concurrent)
        if ran != planned:
            raise PlanMismatch(f"phase rollout: planned (prompts, sequences, max_concurrent) {planned}, executed {ran}")
        self._refuse_overlong(rollouts)
        if self.recipe.algorithm.advantage == "remax":
            beside = 0 if rollouts.greedy is None else len(rollouts.greedy)
            if beside != sections.prompts:
                raise PlanMismatch(f"phase rollout: planned {sections.prompts} greedy completions, executed {beside}")
            self._refuse_overlong(rollouts.greedy)
        return rollouts, prompts

    def _refuse_overlong(self, rollouts: Any) -> None:
        """A sequence longer than the recipe allows is a fault upstream: named, never cut. Caps were proved without it."""
        for part, found, key, limit in (
            ("prompt", rollouts.prompt_lengths, "data.max_prompt_tokens", self.recipe.data.max_prompt_tokens),
            ("completion", rollouts.completion_lengths, self.recipe.completion_key, self.recipe.max_completion_tokens),
        ):
            sample = int(np.argmax(found))
            if found[sample] > limit:
                raise ValueError(
                    f"phase rollout: sample {sample} (group {rollouts.groups[sample]}) has a {part} of {found[sample]} "
                    f"tokens, and {key} = {limit}; whatever made it does not keep to the recipe"
                )

    def _score(self, rollouts: Any, prompts: Any) -> Any:
        """Rank 0 has the completions scored; every rank learns the rewards, and what else was said of them."""
        scored = None
        if self.rank == 0:
            with span("wait_rewards"):
                size = rollouts.executed.group_size
                scored = self.parts.rewards.score(rollouts.payload, prompts, len(rollouts), size)
                scored = add_episodes(scored, rollouts.episodes)
            if not scored.valid.any():
                sample, reason = next(iter(scored.failures.items()))
                raise ValueError(f"no completion could be scored; sample {sample}: {reason}")
            for sample, reason in list(scored.failures.items())[:1]:
                logger.warning("%d rewards masked; sample %d: %s", len(scored.failures), sample, reason)
        with span("wait_rewards"):
            scored = broadcast_from_first(scored)
        count, task = len(rollouts), self.recipe.phases.reward.sequences
        tasks = tuple(min(task, count - first) for first in range(0, count, task))
        if scored.task_sequences != tasks:
            raise PlanMismatch(f"phase reward: planned tasks of {tasks} sequences, executed {scored.task_sequences}")
        return scored

    def _batch(self, rollouts: Any, scored: Any) -> Batch:
        """What the step trains on, with its figures."""
        self.figures |= rollout_figures(rollouts)
        self.sizes = Sizes(rollouts.prompt_lengths, rollouts.completion_lengths, scored.valid)
        batch = Batch(
            prompt_lengths=rollouts.prompt_lengths,
            completion_lengths=rollouts.completion_lengths,
            groups=rollouts.groups,
            rewards=scored.rewards,
            valid=scored.valid,
            truncated=np.array([reason == "length" for reason in rollouts.finish_reasons]),
            own_lengths=rollouts.own_lengths,
        )
        self.guard.rewards(batch)  # before the figures, which are of what still counts
        self.figures |= scored.metrics() | {"schedule/reward/sequences": max(scored.task_sequences)}
        return batch

    def _compare_with_greedy(self, batch: Batch, greedy: Any, scored: Any) -> None:
        """The baseline of each sequence: the reward of its prompt's greedy completion, which is in no batch. Without one a
        sequence does not count."""
        size, known = self.recipe.algorithm.group_size, scored.valid & np.isfinite(scored.rewards)
        batch.baselines = np.repeat(np.where(known, scored.rewards, 0.0).astype(np.float32), size)
        batch.valid = batch.valid & np.repeat(known, size)
        if not batch.valid.any():
            raise ValueError("no prompt has both a completion and a greedy completion that could be scored")
        self.sizes = replace(self.sizes, valid=batch.valid.tolist())
        self.figures |= {
            "rollout/greedy_tokens": int(greedy.own_lengths.sum()),
            "reward/greedy_mean": float(scored.rewards[known].mean()),
            "reward/num_greedy_masked": int((~known).sum()),
            "reward/busy_s": self.figures["reward/busy_s"] + scored.busy_s,
        }

    def _plan(self, phase: str, batch: Batch, number: int) -> Plan:
        """The plan of one engine phase, from its own section and its role's layout alone; the same on every rank."""
        role = ROLE_OF[phase]
        return plan_phase(
            self.recipe.schedule(phase),
            batch.lengths.tolist(),
            self.parts.engines[role].place.layout,
            # A new order of mini-batches in every step, the same one after a resume.
            seed=self.recipe.run.seed * 1_000_003 + number,
            cost=self.costs[role],
            groups=batch.groups.tolist(),
            prompts=batch.prompt_lengths.tolist(),
        )

    def _samples(self, payload: Any, plans: dict[str, Plan]) -> dict[int, Sample]:
        """The tokens that this rank needs: roles with unlike layouts run unlike sequences on it."""
        samples: dict[int, Sample] = {}
        for place in dict.fromkeys(engine.place for engine in self.parts.engines.values()):
            own = [plan for phase, plan in plans.items() if self.parts.engines[ROLE_OF[phase]].place == place]
            samples |= distribute_samples(payload, own, place)
        return samples

    def _forward(self, engine: Role, plan: Plan, batch: Batch, name: str) -> list[torch.Tensor]:
        self._agree(plan)
        (mini_batch,) = plan.mini_batches
        _announce(engine, plan)
        with engine.present():
            results, executed = engine.forward(batch, mini_batch, adapted=ROLE_OF[plan.phase] == engine.role)
        compare(mini_batch, engine.place.data_rank, executed)
        self._prove(engine.place, plan, batch, [executed])
        one_each = engine.role == "reward_model"
        shared = share_results(results.get(name, {}), mini_batch, batch, engine.place, one_each)
        return self.guard.results(engine, mini_batch, name, shared, batch)

    def _agree(self, plan: Plan) -> None:
        """All ranks are about to run this plan: an error with both values instead of ranks that wait for each other."""
        turn = Turn(self.number, plan.phase, Summary.of(plan))
        if not same_everywhere(turn.digest):
            refuse_unlike(gather_to_all(turn))

    def _prove(self, place: Place, plan: Plan, batch: Batch, executed: list[Executed]) -> None:
        """Every rank compares what every data-parallel rank executed in each mini-batch with the plan, and logs both.

        Each rank has compared its own after each mini-batch; this is the proof for metrics.jsonl.
        """
        everywhere = gather_to_all(executed)
        ranks = [everywhere[place.source_of(data_rank)] for data_rank in range(place.layout.data)]
        # All of them, but where an early stop has skipped the last ones: on every rank as many.
        planned = plan.mini_batches[: len(executed)]
        for data_rank, ran in enumerate(ranks):
            if len(ran) != len(planned):
                raise PlanMismatch(
                    f"phase {plan.phase}: data-parallel rank {data_rank} executed {len(ran)} of {len(plan.mini_batches)} "
                    f"mini-batches, and rank {place.rank} {len(planned)}"
                )
            for mini_batch, shapes in zip(planned, ran, strict=True):
                compare(mini_batch, data_rank, shapes)
        cost, lengths, prompts = self.costs[ROLE_OF[plan.phase]], batch.lengths.tolist(), batch.prompt_lengths.tolist()
        self.figures |= schedule_figures(plan, ranks, lengths, cost, prompts)
        self.sizes.ran[plan.phase] = planned

    def _advantages(self, batch: Batch) -> None:
        """Every rank computes them for every sequence: the same sum in the same order under every layout."""
        settings = self.algorithm
        added = 0.0 if settings.overlong is None else self._overlong(settings.overlong, batch)  # first: it masks some
        valid = torch.from_numpy(batch.valid)
        rewards = torch.where(valid, torch.from_numpy(batch.rewards).float() + added, 0.0)
        penalties = [torch.zeros(length) for length in batch.own_lengths.tolist()]
        coefficient = 0.0
        if settings.kl is not None and settings.kl.place == "reward":
            coefficient = settings.kl.coefficient
            pairs = zip(batch.fields["logprobs"], batch.fields["reference_logprobs"], strict=True)
            penalties = [kl(policy, reference, settings.kl.estimator) for policy, reference in pairs]
        groups, values = torch.from_numpy(batch.groups), batch.fields.get("values")
        baselines = None if batch.baselines is None else torch.from_numpy(batch.baselines)
        found = estimate(Scored(rewards, groups, valid, penalties, values, baselines), coefficient, settings)
        batch.fields["advantages"] = found.advantages
        if found.returns is not None:
            assert values is not None, "returns are what values are compared with"
            batch.fields["returns"] = found.returns
            known = [value for value, counts in zip(values, batch.valid, strict=True) if counts]
            self.figures["critic/value_mean"] = float(torch.cat(known).mean())
            self.figures["critic/explained_variance"] = explained_variance(values, found.returns, valid)

    def _overlong(self, section: OverlongSection, batch: Batch) -> torch.Tensor:
        """What is added to the rewards of completions near the limit; those that reached it are masked where the recipe asks
        for it. Raises ValueError where none is left: an update of nothing would still move weights, by its momentum."""
        lengths, longest = torch.from_numpy(batch.own_lengths), self.recipe.max_own_tokens
        penalties = overlong_penalties(lengths, longest, section.buffer, section.penalty).float()
        self.figures["reward/overlong_penalty_mean"] = float(penalties.mean())
        if section.mask:
            assert batch.truncated is not None
            masked = int((batch.truncated & batch.valid).sum())
            self.figures["reward/overlong_masked"] = masked
            batch.valid = batch.valid & ~batch.truncated
            if not batch.valid.any():
                limit, turns = f"{self.recipe.completion_key} = {self.recipe.max_completion_tokens}", self.recipe.environment
                if turns is not None:
                    limit = f"environment.max_turns = {turns.max_turns}, or {limit}"
                raise ValueError(
                    f"no completion is left to train on: the {masked} that still counted reached {limit}, and "
                    "algorithm.overlong.mask = true leaves these out; raise that limit, or take algorithm.overlong.buffer "
                    "in the place of the mask"
                )
            self.sizes = replace(self.sizes, valid=batch.valid.tolist())
        return penalties

    def _refresh_reference(self, number: int) -> None:
        """Behind the updates of some steps the reference becomes the actor. The figure is the step that its weights are of,
        0 for those of the start."""
        every = self.recipe.refresh_every
        if every is None:
            return
        if number % every == 0:
            actor, reference = self.parts.actor, self.parts.reference
            assert reference is not None and reference is not actor, "a reference of its own"
            with span("refresh"), actor.present(), reference.present():
                actor.gather_weights()
                reference.take_weights(actor)
        self.figures["reference/of_step"] = number // every * every

    def _warms_up(self, number: int) -> bool:
        """Whether a step updates the critic alone."""
        warmup = self.recipe.critic_warmup_steps
        if warmup:
            self.figures["critic/warmup"] = int(number <= warmup)
        return number <= warmup

    def _keep_actor(self) -> None:
        """In place of a weight sync, where the actor was not updated: engines go on with the weights they have. Those that
        have slept have none, and take the same version again."""
        self.figures["sync/version"] = self.version
        if self.parts.engines_sleep:
            with self._phase("weight_sync"):
                self.sync(self.version)

    def _update(self, engine: Role, plan: Plan, batch: Batch, objective: type) -> None:
        settings, longest = self.algorithm, self.recipe.max_own_tokens
        updates = []
        self._agree(plan)
        _announce(engine, plan, passes=2)
        with engine.present(training=True):
            for number, mini_batch in enumerate(plan.mini_batches):
                weights = token_weights(batch, mini_batch, settings.aggregation, longest)
                update = engine.update(batch, mini_batch, objective(settings, batch, weights))
                compare(mini_batch, engine.place.data_rank, update.executed)
                self.guard.update(engine, number, mini_batch, update)
                updates.append(update)
                if engine.role == "actor" and self._is_beyond_target(update, engine.place):
                    engine.skip_updates(len(plan.mini_batches) - len(updates))
                    break
            self.guard.weights(engine, plan.phase)
        self._prove(engine.place, plan, batch, [update.executed for update in updates])
        with span("figures"):
            self.figures |= update_figures(engine.role, plan, updates, engine.place)
        if engine.router_replay is not None:
            self.figures |= engine.router_replay.take_figures()
        if engine.role == "actor":
            if settings.early_stop is not None:
                self.figures["actor/early_stopped_updates"] = len(plan.mini_batches) - len(updates)
            self._check_drift()
            self._adapt()

    def _is_beyond_target(self, update: Update, place: Place) -> bool:
        """Whether the policy, before this update, had moved beyond `algorithm.early_stop` since the step began; over the
        tokens of all ranks, and the same on each of them."""
        section = self.algorithm.early_stop
        if section is None or update.refused is not None:
            return False
        own = {name: value for name, value in update.sums.items() if name in ("moved_kl_sum", "tokens")}
        total = reduce_scalars(own, place, "sum")
        return total["moved_kl_sum"] / max(total["tokens"], 1.0) > section.target_kl

    def _check_drift(self) -> None:
        """Before the first update the policy has not moved, so a ratio other than 1 comes from unlike micro-batches."""
        if "actor/ratio_drift_max" not in self.figures:  # the first update was refused, or all of it masked
            return
        drift, bound = self.figures["actor/ratio_drift_max"], self.recipe.algorithm.max_ratio_drift
        self.figures["actor/ratio_drift_exceeded"] = int(drift > bound)
        if drift > bound and self.rank == 0 and not self.warned_of_drift:
            logger.warning(
                "before the first update a policy ratio is %.3g away from 1, more than algorithm.max_ratio_drift = %.3g: "
                "actor_logprob and actor_update cut the batch unlike and their kernels round unlike; make their "
                "micro-batches more alike in size, or use a finer trainer.precision (said once; see actor/ratio_drift_max)",
                drift,
                bound,
            )
            self.warned_of_drift = True

    def _adapt(self) -> None:
        """The KL coefficient of the next step, where it is steered."""
        section = self.algorithm.kl
        if section is None or section.adaptive is None or "actor/kl" not in self.figures:  # all were refused, or masked
            return
        self.figures["actor/kl_coefficient"] = section.coefficient
        steering = section.adaptive
        self._set_coefficient(adapted(section.coefficient, self.figures["actor/kl"], steering.target, steering.rate))

    def _set_coefficient(self, coefficient: float) -> None:
        assert self.algorithm.kl is not None
        section = self.algorithm.kl.model_copy(update={"coefficient": coefficient})
        self.algorithm = self.algorithm.model_copy(update={"kl": section})

    def sync(self, version: int) -> None:
        """Bring the actor's weights to all engines, as `version`."""
        if self.parts.weights is not None:
            self.figures |= self._publish(version, None)
        self.version = version
        self.figures["sync/version"] = version

    def _resync(self, engines: Sequence[int]) -> None:
        """Rank 0, in a rollout: engines were started again. The other ranks wait for the rollout, and learn of it there."""
        broadcast_from_first(Resync(tuple(engines)))
        self._bring_again(engines)

    def _bring_again(self, engines: Sequence[int]) -> None:
        """Bring the version that the others have to some engines; what that takes is added up. On all ranks."""
        found = self._publish(self.version, engines)
        before = {name: 0 for name in found} | self.resyncs
        self.resyncs |= {name: value if name in NOT_ADDED else before[name] + value for name, value in found.items()}
        self.resyncs["sync/count"] = before.get("sync/count", 0) + 1

    def take_resyncs(self) -> Figures:
        """`resync/...`: the figures of all syncs to engines that were started again since this was last asked, none if none
        was; the same on every rank."""
        taken, self.resyncs = self.resyncs, {}
        return {f"re{name}": value for name, value in taken.items()}

    def _publish(self, version: int, engines: Sequence[int] | None) -> Figures:
        with self.parts.actor.present():
            shards = self.parts.actor.shards()
            if self.parts.engines_sleep:  # they wake when every rank has come to the sync, and map what is free by then
                platform.release_memory()
            return self.parts.weights.publish(version, shards, self.parts.rollouts, engines)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.boundary(name)
        with self.clock.phase(name):
            yield

    # What a resume needs -------------------------------------------------------------------------------------------

    def state(self, number: int) -> dict[str, Any]:
        """Everything a resume needs besides the roles that move; collective."""
        position = broadcast_from_first(None if self.parts.prompts is None else self.parts.prompts.state())
        section = self.algorithm.kl
        coefficient = section.coefficient if section is not None and section.adaptive is not None else None
        state = {"step": number, "version": self.version, "prompts": position, "random": torch.get_rng_state()}
        return state | {"kl_coefficient": coefficient}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue behind the step that `state` was taken after."""
        self.version = state["version"]
        torch.set_rng_state(state["random"])
        steered = self.algorithm.kl is not None and self.algorithm.kl.adaptive is not None
        # None where the run was not steered so far; checkpoints of older versions do not have it.
        if steered and state.get("kl_coefficient") is not None:
            self._set_coefficient(state["kl_coefficient"])
        if self.parts.prompts is not None:
            self.parts.prompts.restore(state["prompts"])


def _announce(engine: Role, plan: Plan, passes: int = 1) -> None:
    """Say how many micro-batches this rank will run, each through its chunks in so many passes: `timers` counts them."""
    own = sum(len(mini_batch.micro_batches[engine.place.data_rank]) for mini_batch in plan.mini_batches)
    work.begin("micro-batches", own, passes * len(engine.chunks))
