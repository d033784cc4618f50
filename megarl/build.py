"""Build the parts of a run from its recipe, on every trainer rank, and start the trainer."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from platform import node as host_name
from typing import Any

import ray
import torch
import torch.distributed as dist

from megarl.algorithm.estimate import check_advantage
from megarl.algorithm.policy import load_policy_loss
from megarl.cluster.cores import BIND, bind, node_load, rank_cores
from megarl.cluster.doctor import check_precision
from megarl.cluster.engine_nodes import Stage, check_local_device, set_stage
from megarl.cluster.preemption import ASKED, LeaveNow, Preemption
from megarl.cluster.ray_cluster import ClusterError, join_cluster
from megarl.cluster.watchdog_judge import Deadlines
from megarl.cluster.watched import nodes_without_ranks, watched
from megarl.data.routing import teachers_of
from megarl.data.supervised import answer_of
from megarl.megatron.model import has_own_attention, spec_name
from megarl.megatron.parallel import Place, broadcast_from_first, gather_to_all, start_control, start_parallel
from megarl.megatron.role import Role, RoleSettings, Training
from megarl.megatron.spans import timed_waits
from megarl.megatron.teaching import FromTeachers
from megarl.models import ModelShape
from megarl.models.model_files import model_directory
from megarl.models.stored_weights import check_weights
from megarl.planner.placement import PlacementError
from megarl.platform import current as platform
from megarl.recipe import Recipe, RecipeError, kind_of, load_recipe, role_of
from megarl.recipe.device_section import cpu_engine_args, with_gpus, without_gpus
from megarl.recipe.role_sections import trained_sections, without_transformer_engine
from megarl.recipe.sizes import with_engine_sizes
from megarl.recipe.violation import Violation
from megarl.recipe.weight_sync_section import BUCKET_BYTES
from megarl.reward.workers import RewardWorkers
from megarl.rollout import RolloutError
from megarl.rollout.environment_workers import check_environment
from megarl.rollout.evaluation import HeldOut, open_data
from megarl.rollout.loop_thread import collect_seldom
from megarl.rollout.pool import EnginePool, takes_turns
from megarl.rollout.replay import ReplayStream, check_dumps, dump_rollout
from megarl.rollout.stream import open_stream
from megarl.rollout.taken import DatasetStream
from megarl.telemetry import exit_status
from megarl.telemetry.clock import PhaseClock, recording
from megarl.telemetry.disk import describe_full, is_full, write_whole
from megarl.telemetry.exit_status import BAD_INPUT, COMPLETE, FAILED, REQUEUE, Preempted
from megarl.telemetry.progress import ProgressLine, watching_work
from megarl.telemetry.run_directory import TRANSPORT, Resume, RunDirectory, RunDirectoryError, latest_checkpoint, step_of
from megarl.telemetry.run_writer import Profiler, RunWriter, snapshot_on_out_of_memory
from megarl.telemetry.samples import SampleTable
from megarl.telemetry.sinks import Sinks, open_sinks
from megarl.telemetry.time_metrics import TimeMetrics
from megarl.trainer import RunParts, Trainer
from megarl.weight_sync.adapter import AdapterSync
from megarl.weight_sync.manifest import REPORT_WAITS, SyncError, SyncSettings
from megarl.weight_sync.publish import WeightSync

logger = logging.getLogger(__name__)
# The time for engines to load their model, while all other ranks wait for rank 0.
ENGINE_START_S = 900.0


def train(recipe: Recipe, resume: Resume) -> None:
    """Run the recipe on this rank. Raises ValueError for errors that a user can fix; others name rank and phase."""
    local_rank = int(os.environ["LOCAL_RANK"])
    check_local_device(os.environ)
    first_stage = set_stage(recipe, os.environ) if os.environ["RANK"] == "0" else None
    torch.set_num_threads(recipe.trainer.threads)
    platform.start_process_group(local_rank, recipe.trainer.collective_timeout_s)
    recipe = with_engine_sizes(recipe, platform.total_bytes)
    rank = int(os.environ["RANK"])
    waits_s = _longest_waits_s(recipe)
    control = start_control(sum(waits_s))
    layouts = recipe.layouts
    places = start_parallel(layouts.values(), recipe.run.seed, recipe.trainer.collective_timeout_s, local_rank)
    directory = RunDirectory.of(recipe)
    checkpoint = _open(directory, recipe, resume, rank)  # locked from here on
    hosts = gather_to_all(host_name())
    if rank == 0:
        exit_status.record_start(directory.path, hosts, 0 if checkpoint is None else step_of(checkpoint))
        if platform.num_devices is None and (slow := check_precision(recipe.trainer.precision)).fix:
            print(f"{slow.message}; {slow.fix}", file=sys.stderr)
    with ExitStack() as stack:
        if rank == 0:
            stack.callback(directory.unlock)
        progress = stack.enter_context(ProgressLine(recipe.run.steps, enabled=rank == 0))
        trace = recipe.run.trace
        nodes = nodes_without_ranks(int(os.environ.get("GROUP_WORLD_SIZE", "1"))) if rank == 0 else []
        deadlines = Deadlines.of(recipe, *waits_s)
        watch = stack.enter_context(watched(deadlines, directory.path, places[layouts["actor"]], nodes))
        synchronize = platform.synchronize if recipe.telemetry.device_sync == "always" else None
        clock = PhaseClock(rank, progress.phase, keep_phases=trace != "none", keep_spans=trace == "spans",
                           synchronize=synchronize, beat=watch.beat)  # fmt: skip
        stack.enter_context(recording(clock))
        stack.enter_context(watching_work(progress.work))
        stack.enter_context(timed_waits(clock))
        done = 0 if checkpoint is None else step_of(checkpoint)
        if recipe.telemetry.memory_snapshot:
            stack.enter_context(snapshot_on_out_of_memory(directory.path, rank, platform))
        sinks = stack.enter_context(open_sinks(recipe, directory.path, done) if rank == 0 else Sinks(()))
        profiler = Profiler(recipe.telemetry.profile, directory.path, rank, clock, platform)
        with watch.deadlines(clock.place_of), clock.phase("start"):
            role_places = {role: places[layout] for role, layout in layouts.items()}
            stage: Stage = broadcast_from_first(first_stage)
            if rank == 0 and stage.transport is not None and recipe.sent_adapter is None:
                write_whole(directory.path / TRANSPORT, stage.transport.text)
            with ASKED.nothing_begun():
                parts = build_parts(recipe, role_places, control, directory, stage, stack)
            _bind(recipe, stage, rank)
            ASKED.watch_again()
        preemption = Preemption(recipe.run.preemption == "abandon", recipe.run.grace_s, gather_to_all)
        trainer = Trainer(recipe, rank, parts, clock, preemption.boundary)
        shapes = {name: role.shape for name, role in parts.roles.items()}
        engine_devices = sum(len(place.devices) for place in stage.engines)
        measures = TimeMetrics(recipe, shapes, engine_devices, platform.peak_tflops)
        with watch.deadlines(clock.place_of):
            if checkpoint is not None:
                done = preemption.saved = trainer.load(checkpoint)
                progress.resumed(done)
            with clock.phase("weight_sync"):
                start_metrics = trainer.sync(trainer.version)
            resumed = None if checkpoint is None else done
            writer = RunWriter(recipe, directory, rank, resumed, gather_to_all, progress, profiler, sinks, measures)
            trainer.run(done, start_metrics, directory, writer, preemption, watch)
    if rank == 0:
        exit_status.record_end(directory.path, COMPLETE, f"all {recipe.run.steps} steps")


def _bind(recipe: Recipe, stage: Stage, rank: int) -> None:
    """Bind this rank to its cores, after Ray has started: Ray would inherit the binding from rank 0."""
    ranks_per_node = _bound_ranks()
    if ranks_per_node is not None and stage.engines:
        load = node_load(recipe, stage.engines, rank // ranks_per_node, ranks_per_node)
        cores = rank_cores(sorted(os.sched_getaffinity(0)), load, rank % ranks_per_node)
        if cores:
            bind(cores)


def _bound_ranks() -> int | None:
    """Return the number of ranks of a node if processes are bound to cores, else None."""
    on_cpus = platform.num_devices is None
    return int(os.environ["LOCAL_WORLD_SIZE"]) if on_cpus and BIND in os.environ else None


def _open(directory: RunDirectory, recipe: Recipe, resume: Resume, rank: int) -> Path | None:
    """Lock the run directory and return the checkpoint to resume from. Raises RunDirectoryError. Both on every rank."""
    checkpoint: Path | None = None
    refusal: RunDirectoryError | None = None
    if rank == 0:
        try:
            directory.check(recipe, resume)
            directory.lock()
            checkpoint = directory.check(recipe, resume)  # again: another run may have ended before the lock
            if (kept := directory.prepare(recipe, checkpoint)) is not None:
                print(f"{directory.path}: no checkpoint to go on from; earlier metrics are in {kept.name}", file=sys.stderr)
        except RunDirectoryError as error:
            refusal = error
    checkpoint, refusal = broadcast_from_first((checkpoint, refusal))
    if refusal is not None:
        raise refusal
    return checkpoint


def check_models(recipe: Recipe) -> None:
    """Check, before any process group is made, that every tensor that a role reads exists and has its shape, and that this
    machine supports the recipe. Raises RecipeError."""
    paths = {"model.path": recipe.model.path}
    paths |= {f"{role}.path": recipe.path(role) for role in recipe.roles if recipe.path(role) != recipe.model.path}
    violations: list[Violation] = []
    shapes: dict[str, ModelShape] = {}
    for key, path in paths.items():
        try:
            directory = model_directory(path)
            shape, scores = ModelShape.from_directory(directory), key == "reward_model.path"
            shapes[key] = shape
            has_new_head = key == "critic.path" or (key == "model.path" and recipe.trained_role == "reward_model")
            check_weights(directory, shape, critic=scores or has_new_head, score=scores)
        except (ValueError, OSError) as error:
            violations.append(Violation(key, path, f"cannot be loaded: {error}"))
    for phase in (phase for phase in recipe.engine_phases if recipe.runs(phase)):
        role, section = role_of(phase), recipe.phase_section(phase)
        shape_of_role = shapes.get(f"{role}.path", shapes.get("model.path"))
        if section is None or not section.share_prompts or shape_of_role is None:
            continue
        if not has_own_attention(shape_of_role, recipe.trainer.precision):
            rule = f"the {role} uses Transformer Engine's attention here, which supports no shared prompts"
            violations.append(Violation(f"phases.{kind_of(phase)}.share_prompts", True, rule, "false"))
    if spec_name(recipe.trainer.precision) == "local":
        for role, trained in trained_sections(recipe):
            if trained.memory.recompute == "selective":
                violations += without_transformer_engine(recipe, role)
        if recipe.trainer.fp8 is not None:
            rule = "FP8 needs Transformer Engine, which megarl uses only on GPUs of compute capability 9.0 and newer"
            violations.append(Violation("trainer.fp8", recipe.trainer.fp8, rule, "remove trainer.fp8"))
    if platform.kind == "cpu":
        violations += without_gpus(recipe)
        if (actor := shapes.get("model.path")) is not None:
            violations += cpu_engine_args(recipe, actor)
    else:
        violations += with_gpus(recipe)
    if violations:
        raise RecipeError(violations)


def check_functions(recipe: Recipe) -> None:
    """Load the user's functions once, before any process group is made. Raises RecipeError."""
    check_advantage(recipe.algorithm)
    if recipe.environment is not None:
        check_environment(recipe.environment)
    load_policy_loss(recipe.algorithm.policy_loss)


def build_roles(recipe: Recipe, places: Mapping[str, Place]) -> dict[str, Role]:
    """Build the recipe's roles by name. The reference is the actor itself if it is the base model without adapters."""
    settings = RoleSettings(
        precision=recipe.trainer.precision,
        temperature=recipe.rollout.temperature,
        seed=recipe.run.seed,
        fp8=recipe.trainer.fp8,
        initial_loss_scale=recipe.trainer.initial_loss_scale,
        compile=recipe.trainer.compile,
        megatron=recipe.trainer.megatron,
        max_sequence_tokens=max(part.max_sequence_tokens for part in (recipe, recipe.supervised) if part is not None),
    )

    def build(role: str, path: str, place: Place, **more: Any) -> Role:
        directory = model_directory(path)
        return Role(role, ModelShape.from_directory(directory), directory, place, settings, **more)

    actor, critic, place = recipe.actor, recipe.critic, places["actor"]
    steps, supervised = recipe.rollout_steps - recipe.critic_warmup_steps, recipe.supervised
    warmup = None if supervised is None else Training(supervised.actor.optimizer, recipe.sft_steps)
    training = Training(actor.optimizer, steps, recipe.updates_per_batch, actor.lora, actor.freeze, warmup)
    more: dict[str, Any] = {"memory": actor.memory, "router_replay": actor.router_replay}
    built = build(recipe.trained_role, recipe.model.path, place, training=training, **more)
    roles = {"actor": built}
    if "reference" in places and recipe.reference_is_base:
        roles["reference"] = built
    elif "reference" in places:
        memory = recipe.reference.memory if recipe.reference is not None else None
        path, place, follows = recipe.path("reference"), places["reference"], recipe.reference_follows
        roles["reference"] = build("reference", path, place, memory=memory, follows=follows)
    teachers = {f"teachers.{name}": teacher for name, teacher in recipe.teachers.items() if name not in recipe.served}
    for role, teacher in teachers.items():
        roles[role] = build(role, teacher.path, places[role], memory=teacher.memory)
    if (distillation := recipe.algorithm.distillation) is not None and distillation.over != "sampled":
        directories = {role: model_directory(teacher.path) for role, teacher in teachers.items()}
        built.distillation = FromTeachers(distillation, roles, directories)
    if critic is not None:
        schedule = recipe.schedule("critic_update")
        assert schedule.mini_batch is not None
        updates = recipe.num_rollouts // schedule.mini_batch * schedule.epochs
        training = Training(critic.optimizer, recipe.rollout_steps, updates, frozen=critic.freeze)
        roles["critic"] = build("critic", recipe.path("critic"), places["critic"], training=training, memory=critic.memory)
    if recipe.reward_model is not None:
        roles["reward_model"] = build("reward_model", recipe.path("reward_model"), places["reward_model"])
    return roles


def build_parts(
    recipe: Recipe,
    places: Mapping[str, Place],
    control: dist.ProcessGroup,
    run: RunDirectory,
    stage: Stage,
    stack: ExitStack,
) -> RunParts:
    """Build the roles on every rank; prompts, rollouts and rewards on rank 0. Collective.

    `stack` closes what was made, also if the start fails.
    """
    roles, place = build_roles(recipe, places), places["actor"]
    sleeps = takes_turns(recipe) and recipe.has_engines
    if sleeps:  # before the collective calls below, after which rank 0 starts the engines
        platform.release_memory()
    weights = None
    if recipe.has_engines:
        weights = build_weight_sync(recipe, place, control if place.layout.ranks > 1 else None, stage)
        stack.callback(weights.close)
    parts = RunParts(roles, weights, refreshes=recipe.reference_follows, engines_sleep=sleeps)
    if place.rank == 0:
        build_first_rank(parts, recipe, run, stage, stack)
        collect_seldom()
    address = broadcast_from_first(None if parts.engines is None else parts.engines.address)
    if any(other.is_leader for other in places.values()) and place.rank != 0 and address is not None:
        join_cluster(address)
    return parts


def build_weight_sync(
    recipe: Recipe, place: Place, group: dist.ProcessGroup | None, stage: Stage
) -> WeightSync | AdapterSync:
    """Build the trainer's end of the weight sync. Collective."""
    section = recipe.weight_sync
    shape = ModelShape.from_directory(model_directory(recipe.model.path))
    if recipe.sent_adapter is not None:
        return AdapterSync(recipe, shape, place.layout, place.rank, group)
    assert stage.transport is not None, "weights are synced"
    kind = "gpu" if platform.kind == "cuda" else "cpu_two_legs" if stage.servers else "cpu"
    settings = SyncSettings(
        precision=recipe.rollout_precision,
        rollout=recipe.rollout.layout,
        num_engines=recipe.rollout.engines,
        bucket_bytes=section.bucket_bytes or BUCKET_BYTES[kind],
        timeout_s=section.timeout_s,
        mode=section.mode,
        transport=stage.transport.name,
        is_final=stage.transport.is_final,
        on_device=platform.kind == "cuda" and section.wire == "full",  # differences are computed on hosts
        servers=stage.servers,
        host=os.environ["MASTER_ADDR"],
        wire=section.wire,
        quantization=recipe.rollout.quantization,
        merges=recipe.actor.lora is not None,
    )
    if place.rank == 0:
        print(f"weight sync: {stage.transport.text}", file=sys.stderr)
    if section.mode == "checkpoint" and place.rank == 0:
        logger.warning("weight_sync.mode = checkpoint: every worker of an engine receives the whole model at each sync")
    return WeightSync(shape, place.layout, settings, place.rank, group)


def build_first_rank(parts: RunParts, recipe: Recipe, run: RunDirectory, stage: Stage, stack: ExitStack) -> None:
    """Start prompts, engines, reward workers and records, which only rank 0 has, and put them into `parts`."""
    directory = model_directory(recipe.model.path)
    # Before the engines start, so that a reward that does not load or cannot judge an answer ends the run at once.
    tokenizer, stream, stops = open_data(recipe, directory, run.first_start)
    answer = None
    if recipe.algorithm.distillation is not None and recipe.algorithm.distillation.data_share:
        longest = recipe.rollout.max_new_tokens
        answer = partial(answer_of, data=recipe.data, tokenizer=tokenizer, stop_token_ids=stops, max_new_tokens=longest)
    prompts = stream(recipe.data, answer=answer)
    trained_on = [prompts]
    if (supervised := recipe.supervised) is not None:
        rows_of = open_data(supervised, directory, run.first_start)[1]
        rows = rows_of(supervised.data, key="warmup.sft.data.prompts")
        parts.rows = DatasetStream(supervised, rows)
        trained_on.append(rows)
        if supervised.evaluation is not None:
            parts.held_out_rows = HeldOut(supervised, rows_of, rows, key="warmup.sft.evaluation")
    teachers_of(recipe, prompts.every())  # a row that names no teacher ends the run at once
    if recipe.evaluation is not None:
        parts.held_out = HeldOut(recipe, stream, *trained_on)
    if recipe.telemetry.samples_per_step:
        parts.samples = SampleTable(run.path, recipe.telemetry.samples_per_step, tokenizer.decode)
    if recipe.run.is_supervised:
        parts.rollouts = DatasetStream(recipe, prompts)
        return
    is_replayed = recipe.rollout.replay is not None
    if is_replayed:
        check_dumps(recipe)
    else:
        ray_address = os.environ.get("MEGARL_RAY_ADDRESS")
        bound_ranks = _bound_ranks()
        parts.engines = EnginePool(
            recipe, str(directory), stops, recipe.run.seed, ray_address, stage.engines, bound_ranks, stage.teachers
        )
        stack.callback(parts.engines.shutdown)
        parts.engines.start()
    rewards = RewardWorkers(recipe.verifiers, str(directory), stops, recipe.phases.reward, local=is_replayed)
    stack.callback(rewards.close)
    if is_replayed:
        parts.rollouts = ReplayStream(recipe, prompts, rewards)
    else:
        assert parts.engines is not None, "started above"
        parts.rollouts = open_stream(recipe, parts.engines, str(directory), stops, prompts, rewards, stack)
    if recipe.run.dump_rollouts:
        parts.dump = partial(dump_rollout, run.rollouts)


def _longest_waits_s(recipe: Recipe) -> tuple[float, float]:
    """Return how long ranks may wait for engines (while they start, for a rollout with every restart, and for a sync), and
    for the rewards of a batch, if its tasks run one after another."""
    scored = 0 if recipe.weight_sync.canary is None else 2  # once more where engines differ
    syncs = (REPORT_WAITS + scored) * recipe.weight_sync.timeout_s * recipe.rollout.engines
    # An engine has `timeout_s` for each group or turn, of which many may come one after the other.
    ahead, turns = 1 + recipe.rollout.max_staleness, 1 if recipe.environment is None else recipe.environment.max_turns
    at_a_time = recipe.rollout.engines * (recipe.phases.rollout.max_concurrent or recipe.num_rollouts)
    rounds = -(-ahead * recipe.num_rollouts // at_a_time) * turns
    rollouts = (rounds * recipe.rollout.timeout_s + ENGINE_START_S) * (1 + recipe.rollout.max_restarts)
    if (section := recipe.environment) is not None and section.kind != "class":  # agents have their own time, too
        rollouts += -(-ahead * recipe.num_rollouts // (section.workers * section.max_concurrent)) * section.timeout_s
    tasks = -(-ahead * recipe.num_rollouts // recipe.phases.reward.sequences)
    return ENGINE_START_S + rollouts + syncs, tasks * recipe.phases.reward.timeout_s


def main(arguments: list[str]) -> int:
    """Run a trainer rank and return its exit status."""
    options = {option.value: option for option in Resume if option is not Resume.NEVER}
    resume = [options[word] for word in arguments if word in options]
    words = [word for word in arguments if word not in options]
    if not words or len(resume) > 1 or "LOCAL_RANK" not in os.environ:
        usage = "torchrun --nproc-per-node RANKS -m megarl RECIPE [key=value ...] [--resume | --resume-if-saved]"
        print(f"usage: {usage}", file=sys.stderr)
        return BAD_INPUT
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        resume = [Resume.IF_SAVED]  # torchrun restarts ranks with the first arguments
    rank = os.environ["RANK"]
    ASKED.watch_again()
    recipe: Recipe | None = None
    try:
        recipe = load_recipe(words[0], words[1:], fetch=model_directory)
        check_models(recipe)
        check_functions(recipe)
        train(recipe, resume[0] if resume else Resume.NEVER)
    except (RecipeError, RunDirectoryError) as error:
        if rank == "0":  # all ranks have the same error
            print(error, file=sys.stderr)
        return BAD_INPUT
    except (PlacementError, ClusterError) as error:
        print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except Preempted as left:
        if rank == "0" and recipe is not None:
            print(left, file=sys.stderr, flush=True)
            exit_status.record_end(RunDirectory.of(recipe).path, REQUEUE, str(left))
        return left.status
    except LeaveNow:
        return _cut_short(recipe, rank, "left at once")
    except (ValueError, RolloutError, SyncError, TimeoutError) as error:
        # The message is complete; a traceback would bury it.
        print("\n".join([f"error on rank {rank}: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr, flush=True)
        return FAILED if ASKED.name is None else _cut_short(recipe, rank, "failed while it was to leave")
    except OSError as error:
        if recipe is None or not is_full(error):
            raise
        return _disk_full(RunDirectory.of(recipe), int(rank), error)
    except (RuntimeError, ray.exceptions.RayError):
        if ASKED.name is None:
            raise
        # Peers have left, or engines got the same signal.
        traceback.print_exc()
        return _cut_short(recipe, rank, "failed while it was to leave")
    return COMPLETE


def _disk_full(run: RunDirectory, rank: int, error: OSError) -> int:
    """Report a full disk and the checkpoint to resume from; returns FAILED."""
    saved = latest_checkpoint(run.checkpoints)
    rest = "no checkpoint was written so far" if saved is None else f"{saved.name} stands, go on from it with --resume"
    message = f"{describe_full(error, run.path)}; make room: {rest}"
    print(f"error on rank {rank}: {message}", file=sys.stderr, flush=True)
    exit_status.record_end(run.path, FAILED, message, rank)
    return FAILED


def _cut_short(recipe: Recipe | None, rank: str, how: str) -> int:
    """Report a preempted rank that saved nothing; returns REQUEUE if no finished step is lost or can be repeated."""
    can_go_on = recipe is None or RunDirectory.of(recipe).can_go_on
    stands = "what was saved before stands" if can_go_on else "no checkpoint was written so far"
    print(f"rank {rank} {how}, {ASKED.seconds():.0f} s after {ASKED.name}: {stands}", file=sys.stderr, flush=True)
    return REQUEUE if can_go_on else FAILED
