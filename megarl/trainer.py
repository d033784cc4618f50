"""The step of a run, top to bottom, and the loop over steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.algorithm.control import KLControl, RatioDrift
from megarl.algorithm.estimate import evaluation_loss, step_advantages
from megarl.cluster.preemption import Abandoned, Preemption
from megarl.cluster.watched import Watch
from megarl.data.sample import Sample
from megarl.megatron.batch import Batch
from megarl.megatron.checkpoint import load_checkpoint, load_rollouts, save_checkpoint
from megarl.megatron.early import EarlyPart, Forward, join_parts, results_of
from megarl.megatron.non_finite import FiniteGuard
from megarl.megatron.objective import OBJECTIVES, token_weights
from megarl.megatron.parallel import (
    broadcast_from_first,
    distribute_samples,
    gather_to_all,
    same_everywhere,
)
from megarl.megatron.role import Role, Update, share_results
from megarl.megatron.step_metrics import prove, stops_early, update_metrics
from megarl.megatron.teaching import ask_engines, samples_of, take_judgement
from megarl.planner.flops import sequence_cost
from megarl.platform import current as platform
from megarl.recipe import Recipe, kind_of, role_of
from megarl.recipe.phases_section import EARLY_PARTS
from megarl.rollout.evaluation import Evaluation, HeldOut, held_out_loss
from megarl.rollout.groups import RolloutBatch, rollout_metrics
from megarl.rollout.pool import EnginePool
from megarl.rollout.replay import ReplayStream
from megarl.rollout.stream import RolloutStream
from megarl.rollout.taken import DatasetStream, Taken
from megarl.schedule import MiniBatch, PhaseStart, Plan, Summary, compare, plan_phase, refuse_unlike
from megarl.schedule.phase_plan import join_plans
from megarl.schedule.schedule import Schedule
from megarl.telemetry.clock import PhaseClock, span
from megarl.telemetry.exit_status import Preempted
from megarl.telemetry.run_directory import RunDirectory, step_of
from megarl.telemetry.run_writer import EvaluationResult, RunWriter
from megarl.telemetry.samples import SampleTable
from megarl.telemetry.time_metrics import Sizes
from megarl.weight_sync.adapter import AdapterSync
from megarl.weight_sync.canary import CANARY_METRICS, Canary
from megarl.weight_sync.publish import WeightSync

Metrics = dict[str, Any]
MiniBatches = tuple[MiniBatch, ...]
logger = logging.getLogger(__name__)
# Weight-sync metrics that are not summed when a step syncs several times; the last value wins.
NOT_SUMMED = ("sync/mapped", "sync/changed_share", "sync/bytes_per_s", *CANARY_METRICS)
# Forward phases in their order: the name of the role's result, and of the batch's field for it.
FORWARD_PHASES = {
    "actor_logprob": ("logprobs", "logprobs"),
    "reference_logprob": ("logprobs", "reference_logprobs"),
    "teacher_logprob": ("logprobs", "teacher_logprobs"),
    "critic_value": ("values", "values"),
}


@dataclass
class RunParts:
    """What a step works with. Engines, rollouts, samples and held-out prompts are on rank 0 only."""

    roles: dict[str, Role]  # by name; the reference is the actor itself if it is the base model without adapters
    weights: WeightSync | AdapterSync | None  # None if rollouts are replayed
    engines: EnginePool | None = None
    rollouts: RolloutStream | ReplayStream | DatasetStream | None = None
    rows: DatasetStream | None = None  # of the supervised steps of a warm-up
    held_out_rows: HeldOut | None = None  # of those steps
    dump: Callable[[int, RolloutBatch], Any] | None = None  # writes the rollouts of a step to a file
    samples: SampleTable | None = None
    held_out: HeldOut | None = None
    refreshes: bool = False  # whether the reference takes weights of the actor (`Recipe.reference_follows`)
    engines_sleep: bool = False  # without weights, from the end of a rollout to the next sync

    @property
    def moving(self) -> dict[str, Role]:
        """The roles that go into a checkpoint: those with an optimizer, and a reference that follows the actor."""
        return {
            role.role: role
            for name, role in self.roles.items()
            if name in ("actor", role.role) and (role.optimizer is not None or (name == "reference" and self.refreshes))
        }


@dataclass(frozen=True)
class Restarted:
    """What rank 0 broadcasts during a rollout when restarted engines need the weights."""

    engines: tuple[int, ...]


class Trainer:
    """Runs steps. `version` counts weight syncs."""

    def __init__(
        self, recipe: Recipe, rank: int, parts: RunParts, clock: PhaseClock, boundary: Callable[[str], None] = lambda _: None
    ) -> None:
        """`boundary` is called before each phase of a step, on all ranks, and may raise."""
        self.recipe, self.rank, self.parts, self.clock, self.boundary = recipe, rank, parts, clock, boundary
        self.costs = {name: sequence_cost(role.shape) for name, role in parts.roles.items()}
        self.kl = KLControl(recipe.algorithm)
        self.drift = RatioDrift(recipe.algorithm.max_ratio_drift, warns=rank == 0)
        self.guard = FiniteGuard(recipe.run.on_not_finite, rank)
        self.canary = None if parts.weights is None else Canary.of(recipe, parts.roles["actor"].shape.vocab)
        self.number = self.version = 0
        self.sizes = Sizes((), (), ())  # of the last step
        self.restart_metrics: Metrics = {}  # of syncs to restarted engines since the last step
        self.supervised: Trainer | None = None  # runs the supervised steps of a warm-up, with the same roles
        if recipe.supervised is not None:
            # The engines only sleep, if they do at all.
            held_out = parts.held_out_rows
            rows = replace(parts, weights=None, rollouts=parts.rows, dump=None, held_out=held_out, engines_sleep=False)
            self.supervised = Trainer(recipe.supervised, rank, rows, clock, boundary)

    def step(self, number: int) -> Metrics:
        """Run one step: rollouts in, updated and synchronised weights out. Returns its metrics, the same on every rank."""
        self.number = number
        if self.supervised is not None and number <= self.recipe.sft_steps:
            return self._supervised_step(self.supervised, number)
        warms_up = number <= self.recipe.sft_steps + self.recipe.critic_warmup_steps
        phases = self.recipe.warmup_phases if warms_up else self.recipe.running_phases
        metrics: Metrics = {"critic/warmup": int(warms_up)} if self.recipe.critic_warmup_steps else {}
        metrics |= {} if self.supervised is None else {"actor/warmup": 0}

        taken, parts = self._sample(number)
        batch, plans, phase_metrics = self._batch(taken, parts, phases)
        metrics |= taken.metrics | phase_metrics
        if "reward_model" in plans:
            batch, phase_metrics = self._reward_model(plans["reward_model"], batch)
            metrics |= phase_metrics
        forward_plans = {phase: plan for phase, plan in plans.items() if kind_of(phase) in FORWARD_PHASES}
        for phase, plan in forward_plans.items():
            with self._phase(phase):
                result, field = FORWARD_PHASES[kind_of(phase)]
                forward = results_of(parts, phase, batch) or self._forward(plan, batch, result)
                results, batch, phase_metrics = self._accept(plan, batch, result, forward)
                if kind_of(phase) == "teacher_logprob":
                    batch = take_judgement(batch, self.parts.roles, results, forward.rows, plan, plans["actor_update"])
                else:
                    batch = batch.with_fields(**{field: results})
                metrics |= phase_metrics
        with self._phase("advantage"), span("advantages"):
            batch, phase_metrics = self._advantages(batch)
            metrics |= phase_metrics
            if self.parts.samples is not None:
                with span("samples"):
                    self.parts.samples.write(number, taken.rollouts, taken.rewards, batch)
        ran: dict[str, Sequence[MiniBatch]] = {phase: plan.mini_batches for phase, plan in plans.items()}
        if "critic_update" in plans:
            with self._phase("critic_update"):
                ran["critic_update"], phase_metrics = self._update(plans["critic_update"], batch)
                metrics |= phase_metrics
        if "actor_update" in plans:
            with self._phase("actor_update"):
                ran["actor_update"], phase_metrics = self._update(plans["actor_update"], batch)
                metrics |= (
                    phase_metrics
                    | self.drift.check(phase_metrics.get("actor/ratio_drift_max"))
                    | self.kl.adapt(phase_metrics.get("actor/kl"))
                )
                metrics |= self._refresh_reference(number)
        metrics |= self._sync_engines("weight_sync" in phases)
        lengths = batch.prompt_lengths.tolist(), batch.completion_lengths.tolist()
        self.sizes = Sizes(*lengths, batch.valid.tolist(), ran)
        return metrics | self.guard.take_metrics()

    def _supervised_step(self, supervised: Trainer, number: int) -> Metrics:
        """Run a step of a warm-up. Engines get weights only for an evaluation and for the first rollout."""
        metrics = {"actor/warmup": 1} | supervised.step(number)
        self.sizes = supervised.sizes
        if number == self.recipe.sft_steps:
            with self._phase("actor_update"), span("warmup_end"):
                self.parts.roles["actor"].end_supervised()
                if self.recipe.reference_is_warm:
                    self.parts.roles["reference"].take_weights(self.parts.roles["actor"])
        if number == self.recipe.sft_steps or self.recipe.evaluates_after(number):
            return metrics | self._sync_engines(True)
        return metrics | {"sync/version": self.version}

    # Phases: from inputs to outputs and metrics ---------------------------------------------------------------------

    def _sample(self, number: int) -> tuple[Taken, list[EarlyPart]]:
        """Run the phases rollout and reward, and phases that start early. `algorithm.dynamic_sampling` may take several
        rounds. Returns lengths and rewards on every rank."""
        stream, taken, parts = self.parts.rollouts, None, []
        with self._phase("rollout"):
            if stream is not None:
                with span("data"):
                    stream.begin(number)
        if early := [phase for phase in FORWARD_PHASES if self.recipe.starts_early(phase)]:
            parts = [self._part(early) for _ in range(EARLY_PARTS)]
        while taken is None:
            with self._phase("rollout"):
                if stream is not None:
                    with span("wait_engines"):
                        stream.wait_sampled(self._sync_restarted_from_first)
                self._broadcast_from_engines(None)
            with self._phase("reward"):
                with span("wait_rewards"):
                    taken = broadcast_from_first(None if stream is None else stream.take())
                if taken is not None:
                    taken.check(self.recipe)
        for sample, reason in list(taken.rewards.failures.items())[:1] if self.rank == 0 else ():
            logger.warning("%d rewards masked; sample %d: %s", len(taken.rewards.failures), sample, reason)
        if self.parts.dump is not None:
            self.parts.dump(number, taken.rollouts)
        return taken, parts

    def _part(self, phases: Sequence[str]) -> EarlyPart:
        """Run phases on the part of the step's groups that is sampled next."""
        rollouts: RolloutBatch | None = None
        with self._phase("rollout"):
            if self.parts.rollouts is not None:
                num_groups = self.recipe.phases.rollout.prompts // EARLY_PARTS
                with span("wait_engines"):
                    rollouts = self.parts.rollouts.next_part(num_groups, self._sync_restarted_from_first)
            rollouts = self._broadcast_from_engines(rollouts)
            assert rollouts is not None
            unknown = np.zeros(len(rollouts.last_segments), np.float32)
            batch = self._empty_batch(rollouts, unknown, unknown == 0)
        part = EarlyPart(rollouts.groups)
        for phase in phases:
            with self._phase(phase):
                plan = part.plans[phase] = self._plan(phase, batch)
                samples = distribute_samples(rollouts.payload, [plan], self.parts.roles[role_of(phase)].place)
                part.ran[phase] = self._forward(plan, replace(batch, samples=samples), FORWARD_PHASES[phase][0])
        return part

    def _empty_batch(self, rollouts: RolloutBatch, rewards: np.ndarray, valid: np.ndarray) -> Batch:
        """Make a batch without tokens, from what each rollout got."""
        of = rollouts.rollouts
        return Batch(
            prompt_lengths=rollouts.prompt_lengths,
            completion_lengths=rollouts.completion_lengths,
            groups=rollouts.groups,
            rewards=rewards[of],
            valid=valid[of],
            truncated=rollouts.truncated[of],
            own_lengths=rollouts.own_lengths,
            rollouts=of,
            prefixes=rollouts.prefixes,
            sampled=not self.recipe.run.is_supervised,
            version=self.version,
            max_staleness=self.recipe.rollout.max_staleness,
        )

    def _batch(
        self, taken: Taken, parts: Sequence[EarlyPart], phases: Sequence[str]
    ) -> tuple[Batch, dict[str, Plan], Metrics]:
        """Make the step's batch with the tokens of this rank, and the plan of each Megatron phase."""
        rollouts, rewards = taken.rollouts, taken.rewards
        with self._phase("reward"):
            batch = self._empty_batch(rollouts, rewards.rewards, rewards.valid)
            batch = self.guard.rewards(batch)
            metrics: Metrics = rollouts.metrics
            if not self.recipe.run.is_supervised:
                counted = replace(rewards, valid=batch.valid[batch.ends])
                metrics = rollout_metrics(rollouts) | counted.select(rollouts.sampled.tolist()).metrics()
                metrics["schedule/reward/sequences"] = max(rewards.task_sequences, default=0)
            if rollouts.greedy is not None:
                baselines, valid, greedy_metrics = taken.baselines(batch.valid[batch.ends])
                batch = replace(batch, baselines=baselines[batch.rollouts], valid=valid[batch.rollouts])
                metrics |= greedy_metrics
        batch = replace(batch, teachers=np.array([taken.teachers.get(int(group), "") for group in batch.groups]))
        idle = {f"teacher_logprob.{name}" for name in self.recipe.teachers if name not in batch.teachers}
        with self.clock.phase("plan"), span("planning"):
            plans = {
                phase: join_parts(parts, phase, batch) if self.recipe.starts_early(phase) else self._plan(phase, batch)
                for phase in self.recipe.engine_phases
                if phase in phases and phase not in idle
            }
        with self._phase("rollout"):
            if self.parts.engines is not None:
                with span("wait_engines"):
                    self.parts.engines.rest()
            samples: dict[int, Sample] = {}
            # Roles with different layouts run different sequences on this rank.
            for place in dict.fromkeys(role.place for role in self.parts.roles.values()):
                of_place = [plan for phase, plan in plans.items() if self.parts.roles[role_of(phase)].place == place]
                samples |= distribute_samples(rollouts.payload, of_place, place)
        batch, judged = ask_engines(self.recipe.served, phases, batch, rollouts.payload, self.parts.engines, self._phase)
        return replace(batch, samples=samples), plans, metrics | judged

    def _plan(self, phase: str, batch: Batch, schedule: Schedule | None = None) -> Plan:
        """Plan a phase from its section, or `schedule`, and its role's layout; the same on every rank."""
        role, schedule = role_of(phase), schedule or self.recipe.schedule(phase)
        layout = self.parts.roles[role].place.layout
        samples = samples_of(role, batch, schedule, layout, self.recipe.max_sequence_tokens)
        plan = plan_phase(
            schedule,
            batch.lengths[samples].tolist(),
            layout,
            # Each step has another order of mini-batches, which a resume repeats.
            seed=self.recipe.run.seed * 1_000_003 + self.number,
            cost=self.costs[role],
            groups=batch.groups[samples].tolist(),
            prompts=batch.prompt_lengths[samples].tolist(),
            rollouts=batch.rollouts[samples].tolist(),
            prefixes=batch.prefixes[samples].tolist(),
        )
        return plan if len(samples) == len(batch.lengths) else join_plans([plan], [samples])

    def _reward_model(self, plan: Plan, batch: Batch) -> tuple[Batch, Metrics]:
        """Add the reward model's scores to the verifiers' rewards. Masked samples stay masked."""
        with self._phase("reward_model"):
            results, batch, metrics = self._accept(plan, batch, "scores", self._forward(plan, batch, "scores"))
            scores, valid = torch.cat(results).numpy()[batch.ends], batch.valid[batch.ends]  # [rollouts]
            rewards = (batch.rewards[batch.ends] + self.recipe.reward_model_weight * scores).astype(np.float32)
            counted = rewards[valid]
            return replace(batch, rewards=rewards[batch.rollouts]), metrics | {
                "reward/model_mean": float(scores[valid].mean()),
                "reward/mean": float(counted.mean()),
                "reward/deviation": float(counted.std()),
            }

    def _forward(self, plan: Plan, batch: Batch, name: str) -> Forward:
        """Run a forward phase; returns the result `name` of every sequence, and what this rank executed."""
        role = self.parts.roles[role_of(plan.phase)]
        self._agree(plan)
        (mini_batch,) = plan.mini_batches
        role.announce(plan)
        with role.present():
            results, executed = role.forward(batch, mini_batch, adapted=role_of(plan.phase) == role.role)
        compare(mini_batch, role.place.data_rank, executed)
        one_each = role.role == "reward_model"
        shared = share_results(results.get(name, results.get("scores", {})), mini_batch, batch, role.place, one_each)
        return Forward(shared, executed, results.get("rows", {}))

    def _accept(self, plan: Plan, batch: Batch, name: str, ran: Forward) -> tuple[list[torch.Tensor], Batch, Metrics]:
        """Check what a forward phase gave; returns the results, and the batch with NaN samples masked."""
        role = self.parts.roles[role_of(plan.phase)]
        _, metrics = prove(plan, role.place, batch, self.costs[role_of(plan.phase)], [ran.executed])
        return *self.guard.results(role, plan.mini_batches[0], name, ran.results, batch), metrics

    def _advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Compute the advantages of every sequence on every rank: the same sum in the same order under every layout."""
        step = batch.step_rewards(self.recipe.max_own_tokens, self.recipe.truncation_key)
        advantages, returns, valid, metrics = step_advantages(self.kl.settings, step)
        learned = {"advantages": advantages} | ({} if returns is None else {"returns": returns})
        return replace(batch.with_fields(**learned), valid=valid.numpy()[batch.rollouts]), metrics

    def _update(self, plan: Plan, batch: Batch) -> tuple[MiniBatches, Metrics]:
        """Take the updates of a phase; returns the mini-batches that ran, fewer than planned after an early stop."""
        role, settings = self.parts.roles[role_of(plan.phase)], self.kl.settings
        objective = OBJECTIVES["critic" if plan.phase == "critic_update" else self.recipe.trained_role]
        updates: list[Update] = []
        self._agree(plan)
        role.announce(plan, passes=2)
        with role.present(training=True):
            for number, mini_batch in enumerate(plan.mini_batches):
                weights = token_weights(batch, mini_batch, settings.aggregation, self.recipe.max_own_tokens)
                update = role.update(batch, mini_batch, objective(settings, batch, weights))
                compare(mini_batch, role.place.data_rank, update.executed)
                self.guard.update(role, number, mini_batch, update)
                updates.append(update)
                if plan.phase == "actor_update" and stops_early(settings.early_stop, update, role.place):
                    role.skip_updates(len(plan.mini_batches) - len(updates))
                    break
            self.guard.weights(role, plan.phase)
        executed = [update.executed for update in updates]
        ran, metrics = prove(plan, role.place, batch, self.costs[role_of(plan.phase)], executed)
        with span("metrics"):
            metrics |= update_metrics(role.role, plan, updates, role.place)
        if role.router_replay is not None:
            metrics |= role.router_replay.take_metrics()
        if plan.phase == "actor_update" and settings.early_stop is not None:
            metrics["actor/early_stopped_updates"] = len(plan.mini_batches) - len(updates)
        return ran, metrics

    def _refresh_reference(self, number: int) -> Metrics:
        """Copy the actor's weights to the reference after every `reference.refresh_every`-th step; the metric is the step of
        the reference's weights, 0 for the initial ones."""
        every = self.recipe.refresh_every
        if every is None:
            return {}
        if number % every == 0:
            with span("refresh"):
                self.parts.roles["reference"].take_weights(self.parts.roles["actor"])
        refreshed, warmed = number // every * every, self.recipe.sft_steps
        return {"reference/of_step": refreshed if refreshed > warmed else warmed * self.recipe.reference_is_warm}

    def _agree(self, plan: Plan) -> None:
        """Raise PlanMismatch on all ranks unless all are about to run this plan; otherwise they would hang."""
        start = PhaseStart(self.number, plan.phase, Summary.of(plan))
        if not same_everywhere(start.digest):
            refuse_unlike(gather_to_all(start))

    # Weight sync ------------------------------------------------------------------------------------------------------

    def sync(self, version: int) -> Metrics:
        """Send the actor's weights to all engines as `version`."""
        metrics = {} if self.parts.weights is None else self._publish(version, None)
        self.version = version
        return metrics | {"sync/version": version}

    def _sync_engines(self, updated: bool) -> Metrics:
        """Send the actor's weights if it was updated, or if the engines have slept and need the same version again."""
        if not updated and not self.parts.engines_sleep:
            return {"sync/version": self.version}
        with self._phase("weight_sync"):
            return self.sync(self.version + int(updated))

    def _broadcast_from_engines(self, result: Any) -> Any:
        """Return rank 0's result on every rank. The other ranks wait here and sync restarted engines meanwhile."""
        with span("wait_engines"):
            while isinstance(result := broadcast_from_first(result), Restarted):
                self._sync_restarted(result.engines)
                result = None
        return result

    def _sync_restarted_from_first(self, engines: Sequence[int]) -> None:
        """Sync engines that were restarted during a rollout. Rank 0 calls this; the others wait for the rollout."""
        broadcast_from_first(Restarted(tuple(engines)))
        self._sync_restarted(engines)

    def _sync_restarted(self, engines: Sequence[int]) -> None:
        """Send the current weights to restarted engines and add up the sync metrics. Collective."""
        metrics = self._publish(self.version, engines)
        before = {name: 0 for name in metrics} | self.restart_metrics
        summed = {name: value if name in NOT_SUMMED else before[name] + value for name, value in metrics.items()}
        self.restart_metrics |= summed | {"sync/count": before.get("sync/count", 0) + 1}

    def take_restart_metrics(self) -> Metrics:
        """Return `resync/...`, the metrics of syncs to restarted engines since the last call; the same on every rank."""
        metrics, self.restart_metrics = self.restart_metrics, {}
        return {f"re{name}": value for name, value in metrics.items()}

    def _publish(self, version: int, engines: Sequence[int] | None) -> Metrics:
        assert self.parts.weights is not None
        actor = self.parts.roles["actor"]
        canary = self.canary if self.canary is not None and self.canary.is_due(version, engines is not None) else None
        with actor.present():
            if canary is not None and engines is None:  # before engines wake, which then need the memory
                canary.score_actor(actor, version)
            shards = actor.shards()
            if self.parts.engines_sleep:  # they wake in the sync and need the memory
                platform.release_memory()
            if self.parts.rollouts is not None:
                with span("wait_engines"):  # one may start again
                    self.parts.rollouts.pause()
            metrics = self.parts.weights.publish(version, shards, self.parts.engines, engines)
        if canary is not None:
            pool = self.parts.engines
            score = None if pool is None else partial(pool.score, canary.sequences, engines)
            metrics |= canary.check(score, restarted=engines is not None)
        if self.parts.rollouts is not None:
            self.parts.rollouts.resume(version, engines)
        return metrics

    # Around the step --------------------------------------------------------------------------------------------------

    def evaluate(self, leaves: Callable[[], bool]) -> EvaluationResult | None:
        """Evaluate the engines on the held-out prompts, or the roles on held-out rows; returns the results on rank 0.

        Returns None everywhere if the run `leaves`, which all ranks ask before each round.
        """
        evaluation: Evaluation | None = None
        more, held_out = True, self.parts.held_out
        with self.clock.phase("evaluation"):
            if self.recipe.run.is_supervised:
                return held_out_loss(held_out, self._loss_of_batch, broadcast_from_first, leaves)
            while more:
                if leaves():
                    return None
                answer: Any = None
                if held_out is not None and self.parts.rollouts is not None:
                    evaluation = evaluation or held_out.begin()
                    answer = held_out.go_on(evaluation, self.parts.rollouts, self._sync_restarted_from_first)
                more = self._broadcast_from_engines(answer)
        return None if held_out is None or evaluation is None else held_out.result(evaluation)

    def _evaluate_after(self, number: int, writer: RunWriter, leaves: Callable[[], bool]) -> Metrics:
        """Evaluate after a step where the recipe says so, and a warm-up on rows; returns the metrics, on rank 0."""
        results = [self.evaluate(leaves)] if self.recipe.evaluates_after(number) else []
        supervised, metrics = self.supervised if number <= self.recipe.sft_steps else None, dict[str, Any]()
        if supervised is not None and supervised.recipe.evaluates_after(number):
            if self.parts.engines is not None:
                with self.clock.phase("evaluation"), span("wait_engines"):
                    self.parts.engines.rest()  # engines on the trainer's GPUs are awake after a sync
            results.append(supervised.evaluate(leaves))
            if number == self.recipe.sft_steps < self.recipe.run.steps:
                metrics = self._sync_engines(False)  # the first rollout follows
        return metrics | writer.evaluated(number, self.version, results)

    def _loss_of_batch(self, rollouts: RolloutBatch, valid: np.ndarray) -> tuple[Metrics, float]:
        """Return mean losses of held-out rows, and the number of tokens or pairs of each mean. Raises NotFinite."""
        batch = self._empty_batch(rollouts, np.zeros(len(valid), np.float32), valid)
        for phase in [phase for phase in FORWARD_PHASES if self.recipe.runs(phase)] or ["actor_logprob"]:
            rule = self.recipe.schedule(phase if self.recipe.runs(phase) else "actor_update")
            plan = self._plan(phase, batch, Schedule(phase, rule.sequences, rule.max_tokens))
            role, (result, field) = self.parts.roles[role_of(phase)], FORWARD_PHASES[phase]
            samples = distribute_samples(rollouts.payload, [plan], role.place)
            ran = self._forward(plan, replace(batch, samples=samples), result)
            mini_batch = replace(plan.mini_batches[0], phase=f"evaluation, {phase}")
            results, batch = FiniteGuard(None, self.rank).results(role, mini_batch, result, ran.results, batch)
            batch = batch.with_fields(**{field: results})
        return evaluation_loss(self._advantages(batch)[1], batch.fields["logprobs"], valid)

    def run(
        self, done: int, start_metrics: Metrics, run: RunDirectory, writer: RunWriter, preemption: Preemption, watch: Watch
    ) -> None:
        """Run all steps after step `done`. Raises Preempted if the run is preempted."""
        recipe, clock = self.recipe, self.clock
        if done == 0:
            self._evaluate_after(0, writer, preemption.agreed)
        writer.started(clock.take(), {f"start_{name}": value for name, value in start_metrics.items()})
        for number in range(done + 1, recipe.run.steps + 1):
            watch.begin(number, number == recipe.sft_steps + 1)  # after a warm-up the first rollouts
            with clock.phase("agree"):  # ranks wait here for a late one
                leaves = preemption.agreed()
            if leaves:
                raise self._leave(done, self.state(done) if 0 < done != preemption.saved else None, run, preemption)
            preemption.begin(number)
            before = self.state(done) if preemption.abandons else None
            try:
                with writer.profiler.step(number):
                    metrics = self.step(number)
            except Abandoned as abandoned:
                assert before is not None, "kept for a run that may abandon a step"
                raise self._leave(done, None if abandoned.moved else before, run, preemption) from None
            done = number
            # Before an evaluation, whose times do not count.
            engines = [] if self.parts.engines is None else self.parts.engines.take_times()
            if self.parts.rollouts is not None:
                self.parts.rollouts.follow(engines)
            metrics |= self._evaluate_after(number, writer, preemption.agreed)
            metrics |= self.take_restart_metrics()
            times = clock.take()
            with clock.phase("metrics"):  # counted in the next step's line
                stream = self.parts.rows if number <= recipe.sft_steps else self.parts.rollouts
                metrics |= {} if stream is None else stream.prompt_metrics()
                rows = [] if self.parts.samples is None else self.parts.samples.rows
                writer.step(number, times, engines, self.sizes, metrics, rows)
            every = recipe.run.checkpoint_every
            if number == recipe.run.steps or (every and number % every == 0):
                self._save(self.state(number), run, preemption)
        writer.close(clock.take())

    def _save(self, state: dict[str, Any], run: RunDirectory, preemption: Preemption) -> None:
        with self.clock.phase("checkpoint"):  # counted in the next step's line
            plain = {name: value for name, value in state.items() if name != "rollouts"}
            save_checkpoint(run.checkpoints, state["step"], self.parts.moving, plain, state["rollouts"])
        preemption.saved = state["step"]

    def _leave(self, done: int, state: dict[str, Any] | None, run: RunDirectory, preemption: Preemption) -> Preempted:
        """Save `state` unless it is saved already or None (the weights have moved on); returns how the run ends."""
        if state is not None and 0 < done != preemption.saved:
            self._save(state, run, preemption)
        return preemption.left(done, self.recipe.run.steps, str(run.checkpoints))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        if self.recipe.run.is_supervised and name in ("rollout", "reward"):
            name = "data"
        self.boundary(name)
        with self.clock.phase(name):
            yield

    def state(self, number: int) -> dict[str, Any]:
        """Return what a resume after step `number` needs besides the roles; the rollouts are on rank 0 only."""
        with self.clock.phase("checkpoint"), span("wait_engines"):
            rollouts = None if self.parts.rollouts is None else self.parts.rollouts.state()
            if self.parts.rows is not None and rollouts is not None:
                rollouts["rows"] = self.parts.rows.state()
        state = {"step": number, "version": self.version, "rollouts": rollouts, "random": torch.get_rng_state()}
        return state | {"kl_coefficient": self.kl.coefficient}

    def load(self, checkpoint: Path) -> int:
        """Load the roles and the state of a checkpoint; returns its step. Collective."""
        with self.clock.phase("load_checkpoint"):
            if 0 < self.recipe.sft_steps <= step_of(checkpoint):
                self.parts.roles["actor"].end_supervised()
            state = load_checkpoint(checkpoint, self.parts.moving)
            self.restore(state | {"rollouts": load_rollouts(checkpoint) if self.rank == 0 else None})
        return int(state["step"])

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self.version = state["version"]
        torch.set_rng_state(state["random"])
        if self.kl.coefficient is not None and state["kl_coefficient"] is not None:  # it may be adaptive since
            self.kl.coefficient = state["kl_coefficient"]
        if self.parts.rollouts is not None:
            self.parts.rollouts.restore(state["rollouts"])
        if self.parts.rows is not None:
            self.parts.rows.restore(state["rollouts"]["rows"])
