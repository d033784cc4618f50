"""The run of one trainer rank: builds the parts, takes the steps, saves and resumes; `megarl/train.py` starts it."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from platform import node as host_name
from typing import Any

import ray
import torch

# Every rank would print them, and none is the user's to mend but those about the options of a TransformerConfig.
warnings.filterwarnings("ignore", module=r"megatron\.core")
if os.environ.get("RANK", "0") == "0":
    warnings.filterwarnings("default", module=r"megatron\.core\.transformer\.transformer_config")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
logging.getLogger("megatron.core").setLevel(logging.ERROR)
logging.getLogger("megatron.core.transformer.transformer_config").setLevel(logging.WARNING)

from megarl.algorithm.estimate import check_advantage  # noqa: E402
from megarl.algorithm.policy import load_policy_loss  # noqa: E402
from megarl.cluster.cores import BIND, bind, node_load, rank_cores  # noqa: E402
from megarl.cluster.doctor_machine import check_precision  # noqa: E402
from megarl.cluster.engine_nodes import Stage, check_local_device, set_stage  # noqa: E402
from megarl.cluster.peers import watch_peers  # noqa: E402
from megarl.cluster.preemption import ASKED, Abandoned, LeaveNow, Preemption  # noqa: E402
from megarl.cluster.ray_cluster import ClusterError, join_cluster  # noqa: E402
from megarl.cluster.watchdog_limits import Limits  # noqa: E402
from megarl.cluster.watched import Watch, watched  # noqa: E402
from megarl.cluster.watchers import nodes_beside, watched_nodes  # noqa: E402
from megarl.data.prompts import PromptStream  # noqa: E402
from megarl.data.tokenizer import prompt_tokenizer, stop_token_ids  # noqa: E402
from megarl.ledger import Ledger  # noqa: E402
from megarl.megatron.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from megarl.megatron.collectives import timed_waits  # noqa: E402
from megarl.megatron.exchange import broadcast_from_first, gather_to_all, start_control  # noqa: E402
from megarl.megatron.model import has_own_attention, spec_name  # noqa: E402
from megarl.megatron.parallel import Place, start_parallel  # noqa: E402
from megarl.megatron.role import Engine  # noqa: E402
from megarl.megatron.settings import DTYPES  # noqa: E402
from megarl.models import ModelShape  # noqa: E402
from megarl.models.model_files import model_directory  # noqa: E402
from megarl.models.stored_weights import check_weights  # noqa: E402
from megarl.planner.placement import PlacementError  # noqa: E402
from megarl.platform import current as platform  # noqa: E402
from megarl.recipe import ROLE_OF, Recipe, RecipeError, cpu_rules, load_recipe  # noqa: E402
from megarl.recipe.engine_sizes import with_engine_sizes  # noqa: E402
from megarl.recipe.feature_rules import trained_sections  # noqa: E402
from megarl.recipe.megatron_rules import without_transformer_engine  # noqa: E402
from megarl.recipe.sections import BUCKET_BYTES  # noqa: E402
from megarl.recipe.violation import Violation  # noqa: E402
from megarl.reward.service import services_of  # noqa: E402
from megarl.reward.verifiers import check_answer, load_terms  # noqa: E402
from megarl.reward.workers import RewardWorkers  # noqa: E402
from megarl.rollout.batch import dump_rollout  # noqa: E402
from megarl.rollout.environment import load_environment  # noqa: E402
from megarl.rollout.evaluation import HeldOut, held_out_data  # noqa: E402
from megarl.rollout.failure import RolloutError  # noqa: E402
from megarl.rollout.pool import open_pool, takes_turns  # noqa: E402
from megarl.telemetry import PhaseClock, ProgressLine, starts, work  # noqa: E402
from megarl.telemetry.clock import recording  # noqa: E402
from megarl.telemetry.device_sync import DeviceSync  # noqa: E402
from megarl.telemetry.devices import Devices  # noqa: E402
from megarl.telemetry.disk import DiskFull, describe_full, is_full, no_room, size_bytes  # noqa: E402
from megarl.telemetry.exit_status import BAD_INPUT, COMPLETE, FAILED, REQUEUE, Preempted  # noqa: E402
from megarl.telemetry.records import Records, recorded  # noqa: E402
from megarl.telemetry.refusals import refusals  # noqa: E402
from megarl.telemetry.run_directory import (  # noqa: E402
    Resume,
    RunDirectory,
    RunDirectoryError,
    latest_checkpoint,
    step_of,
)
from megarl.telemetry.samples import SampleTable  # noqa: E402
from megarl.telemetry.step_figures import StepFigures  # noqa: E402
from megarl.trainer import Parts, Pipeline  # noqa: E402
from megarl.weight_sync.manifest import SyncError  # noqa: E402
from megarl.weight_sync.publish import SyncSettings, WeightSync  # noqa: E402
from megarl.weight_sync.transport import REPORT_WAITS, TRANSPORTS  # noqa: E402

logger = logging.getLogger(__name__)
# Engines load their model while all other ranks wait for rank 0.
ENGINE_START_S = 900.0


def train(recipe: Recipe, resume: Resume) -> None:
    """Run the recipe on this rank. Raises ValueError for what a user can mend; any other error names rank and phase."""
    local_rank = int(os.environ["LOCAL_RANK"])
    check_local_device(os.environ)
    found = set_stage(recipe, os.environ) if os.environ["RANK"] == "0" else None
    torch.set_num_threads(recipe.trainer.threads)
    platform.start_process_group(local_rank, recipe.trainer.collective_timeout_s)
    recipe = with_engine_sizes(recipe, platform.total_bytes)
    rank = int(os.environ["RANK"])
    control = start_control(_longest_engine_wait_s(recipe) + _longest_reward_wait_s(recipe))
    layouts = recipe.layouts
    places = start_parallel(layouts.values(), recipe.run.seed, recipe.trainer.collective_timeout_s, local_rank)
    directory = RunDirectory.of(recipe)
    checkpoint = _open(directory, recipe, resume, rank)  # locked from here on
    hosts = gather_to_all(host_name())
    if rank == 0:
        starts.record_start(directory.path, hosts, 0 if checkpoint is None else step_of(checkpoint))
        if platform.num_devices is None and (slow := check_precision(recipe.trainer.precision)).fix:
            print(f"{slow.found}; {slow.fix}", file=sys.stderr)
    with ExitStack() as stack:
        if rank == 0:
            stack.callback(directory.unlock)
        progress = stack.enter_context(ProgressLine(recipe.run.steps, enabled=rank == 0))
        trace = recipe.run.trace
        settled = DeviceSync(recipe.telemetry, platform.synchronize)
        waits_s = _longest_engine_wait_s(recipe), _longest_reward_wait_s(recipe)
        beside = nodes_beside(int(os.environ.get("GROUP_WORLD_SIZE", "1"))) if rank == 0 else []
        watch = stack.enter_context(
            watched(Limits.of(recipe), *waits_s, directory.path, places[layouts["actor"]], bool(beside))
        )
        clock = PhaseClock(rank, progress.phase, keep_phases=trace != "none", keep_spans=trace == "spans", on_end=settled,
                           beat=watch.beat)  # fmt: skip
        stack.enter_context(recording(clock))
        stack.enter_context(work.watching(progress.work))
        stack.enter_context(timed_waits(clock))
        done = 0 if checkpoint is None else step_of(checkpoint)
        records = stack.enter_context(recorded(recipe, directory.path, rank, done, clock, platform))
        stack.enter_context(watch_peers(recipe.trainer.collective_timeout_s, lambda: clock.current))
        with watch.deadlines(clock.place_of), clock.phase("start"):
            role_places = {role: places[layout] for role, layout in layouts.items()}
            stage: Stage = broadcast_from_first(found)
            stack.enter_context(watched_nodes(watch.elsewhere, beside))
            with ASKED.nothing_begun():
                parts = build_parts(recipe, role_places, control, directory, stage, stack)
            _bind(recipe, stage, rank)
            ASKED.watch_again()
        preemption = Preemption(recipe.run.preemption == "abandon", recipe.run.grace_s, gather_to_all)
        pipeline = Pipeline(recipe, rank, parts, clock, preemption.boundary)
        shapes = {role: engine.shape for role, engine in parts.engines.items()}
        each = int(os.environ["LOCAL_WORLD_SIZE"])
        devices = Devices.of(recipe.trainer.ranks, each, stage.engines, shared=platform.num_devices is None)
        measures = StepFigures(recipe, shapes, devices, platform.peak_tflops)
        with watch.deadlines(clock.place_of):
            run_steps(pipeline, recipe, directory, checkpoint, progress, preemption, settled, measures, records, watch)
    if rank == 0:
        starts.record_end(directory.path, starts.COMPLETE, f"all {recipe.run.steps} steps")


def _bind(recipe: Recipe, stage: Stage, rank: int) -> None:
    """Keep this rank to its cores. Not before Ray runs, which would have them, too, where rank 0 has started it."""
    each = _bound_ranks()
    if each is not None and stage.engines:
        load = node_load(recipe, stage.engines, rank // each, each)
        cores = rank_cores(sorted(os.sched_getaffinity(0)), load, rank % each)
        if cores:
            bind(cores)


def _bound_ranks() -> int | None:
    """Ranks of a node, where processes are bound to cores; None where they are not."""
    on_cpus = platform.num_devices is None
    return int(os.environ["LOCAL_WORLD_SIZE"]) if on_cpus and BIND in os.environ else None


def _open(directory: RunDirectory, recipe: Recipe, resume: Resume, rank: int) -> Path | None:
    """The checkpoint to resume from, on every rank. Raises RunDirectoryError, on every rank too."""
    found: Path | None = None
    refusal: RunDirectoryError | None = None
    if rank == 0:
        try:
            directory.check(recipe, resume)
            directory.lock()
            found = directory.check(recipe, resume)  # another run may have ended in between
            if (kept := directory.prepare(recipe, found)) is not None:
                print(f"{directory.path}: no checkpoint to go on from; earlier metrics are in {kept.name}", file=sys.stderr)
        except RunDirectoryError as error:
            refusal = error
    found, refusal = broadcast_from_first((found, refusal))
    if refusal is not None:
        raise refusal
    return found


def check_models(recipe: Recipe) -> None:
    """Every tensor that a role will read is there and has its shape: said before any process group is made, from the files'
    headers. So is what the recipe asks for and this machine has not. Raises RecipeError."""
    paths = {"model.path": recipe.model.path}
    paths |= {f"{role}.path": recipe.path(role) for role in recipe.roles if recipe.path(role) != recipe.model.path}
    found: list[Violation] = []
    shapes: dict[str, ModelShape] = {}
    for key, path in paths.items():
        try:
            directory = model_directory(path)
            shape, scores = ModelShape.from_directory(directory), key == "reward_model.path"
            shapes[key] = shape
            check_weights(directory, shape, critic=scores or key == "critic.path", score=scores)
        except (ValueError, OSError) as error:
            found.append(Violation(key, path, f"cannot be loaded: {error}"))
    found += refusals(recipe, platform.kind)
    for phase, role in ROLE_OF.items():
        section, own = recipe.phase_section(phase), shapes.get(f"{role}.path", shapes.get("model.path"))
        if (
            section is not None
            and section.share_prompts
            and own is not None
            and not has_own_attention(own, recipe.trainer.precision)
        ):
            rule = f"the {role}'s layers are Transformer Engine's here, whose attention knows no shared prompt"
            found.append(Violation(f"phases.{phase}.share_prompts", True, rule, "false"))
    if spec_name(recipe.trainer.precision) == "local":
        for role, trained in trained_sections(recipe):
            if trained.memory.recompute == "selective":
                found += without_transformer_engine(recipe, role)
        if recipe.trainer.fp8 is not None:
            rule = "megarl uses Transformer Engine on GPUs of compute capability 9.0 and newer alone, and FP8 is its own"
            found.append(Violation("trainer.fp8", recipe.trainer.fp8, rule, "remove trainer.fp8"))
    if platform.kind == "cpu":
        found += cpu_rules.without_gpus(recipe)
        if (actor := shapes.get("model.path")) is not None:
            found += cpu_rules.engine_args(recipe, actor)
    if found:
        raise RecipeError(found)


def check_functions(recipe: Recipe) -> None:
    """Functions of the user's own are there: said before any process group is made. Raises RecipeError."""
    check_advantage(recipe.algorithm)
    if recipe.environment is not None:
        load_environment(recipe.environment.target, recipe.environment.options)
    load_policy_loss(recipe.algorithm.policy_loss)


def build_parts(
    recipe: Recipe, places: dict[str, Place], control: Any, run: RunDirectory, stage: Stage, stack: ExitStack
) -> Parts:
    """Engines on every rank; prompts, rollouts and rewards on rank 0. Collective.

    What must be closed is put on the stack as it is made, so that a failing start leaves nothing behind.
    """
    directory = model_directory(recipe.model.path)
    shape = ModelShape.from_directory(directory)
    engine = partial(
        Engine,
        precision=recipe.trainer.precision,
        fp8=recipe.trainer.fp8,
        megatron=recipe.trainer.megatron,
        initial_loss_scale=recipe.trainer.initial_loss_scale,
        temperature=recipe.rollout.temperature,
        compile_timeout_s=recipe.trainer.compile_timeout_s if recipe.trainer.compile else None,
        seed=recipe.run.seed,
        max_sequence_tokens=recipe.max_sequence_tokens,
    )
    place = places["actor"]
    actor = engine("actor", shape, directory, place, optimizer=recipe.actor.optimizer, lora=recipe.actor.lora,
                   steps=recipe.run.steps - recipe.critic_warmup_steps,
                   memory=recipe.actor.memory, frozen=recipe.actor.freeze, router_replay=recipe.actor.router_replay,
                   updates_per_step=recipe.updates_per_batch)  # fmt: skip
    reference: Engine | None = None
    if "reference" in places and recipe.reference_is_base:
        reference = actor
    elif "reference" in places:
        near = model_directory(recipe.path("reference"))
        memory = recipe.reference.memory if recipe.reference is not None else None
        reference = engine("reference", ModelShape.from_directory(near), near, places["reference"], memory=memory,
                           follows=recipe.refresh_every is not None)  # fmt: skip
    critic = None
    if recipe.critic is not None:
        values = model_directory(recipe.path("critic"))
        cut = recipe.schedule("critic_update")
        assert cut.mini_batch is not None
        critic = engine("critic", ModelShape.from_directory(values), values, places["critic"],
                        optimizer=recipe.critic.optimizer, steps=recipe.run.steps, memory=recipe.critic.memory,
                        frozen=recipe.critic.freeze,
                        updates_per_step=recipe.num_sequences // cut.mini_batch * cut.epochs)  # fmt: skip
    reward_model = None
    if recipe.reward_model is not None:
        judge = model_directory(recipe.path("reward_model"))
        reward_model = engine("reward_model", ModelShape.from_directory(judge), judge, places["reward_model"])
    replayed = recipe.rollout.replay is not None
    if takes_turns(recipe) and not replayed:  # before all ranks meet below, and rank 0 then starts the engines
        platform.release_memory()
    weights = None
    if not replayed:
        section, group = recipe.weight_sync, control if place.layout.ranks > 1 else None
        bucket_in = "gpu" if TRANSPORTS[stage.transport].on_device else "cpu"
        settings = SyncSettings(DTYPES[recipe.rollout_precision], recipe.rollout.layout, recipe.rollout.engines,
                                section.bucket_bytes or BUCKET_BYTES[bucket_in], section.timeout_s, section.mode,
                                stage.transport, os.environ["MASTER_ADDR"], section.wire, section.verify,
                                recipe.rollout.quantization, recipe.actor.lora is not None)  # fmt: skip
        if section.mode == "checkpoint" and place.rank == 0:
            logger.warning("weight_sync.mode = checkpoint: every worker of an engine receives the whole model at each sync")
        weights = WeightSync(shape, place.layout, settings, recipe.run.name, place.rank, group)
        stack.callback(weights.close)
    prompts = rollouts = rewards = dump = samples = held_out = None
    if place.rank == 0:
        tokenizer = prompt_tokenizer(str(directory), recipe.data.template_options, run.first_start)
        # Before the engines start: a reward that does not load, or cannot judge an answer, ends the run at once.
        services_of(recipe.verifiers)  # raises if one cannot be asked
        judged = partial(check_answer, load_terms(recipe.verifiers))
        stream = partial(PromptStream, seed=recipe.run.seed, tokenizer=tokenizer, num_tokens=shape.vocab, judge=judged)
        prompts = stream(recipe.data)
        if prompts.num_dropped:
            print(f"data: {prompts.num_dropped} rows left out, longer than data.max_prompt_tokens", file=sys.stderr)
        if recipe.evaluation is not None:
            held_out = HeldOut(recipe, stream(held_out_data(recipe), key="evaluation.prompts"), prompts)
        stops = stop_token_ids(str(directory), tokenizer, shape.vocab)
        rollouts = open_pool(recipe, str(directory), stops, recipe.run.seed,
                             os.environ.get("MEGARL_RAY_ADDRESS"), stage.engines, _bound_ranks())  # fmt: skip
        stack.callback(rollouts.shutdown)
        rollouts.start()
        rewards = RewardWorkers(recipe.verifiers, str(directory), stops, recipe.phases.reward, local=replayed)
        stack.callback(rewards.close)
        if recipe.run.dump_rollouts:
            dump = partial(dump_rollout, run.rollouts)
        if recipe.telemetry.samples_per_step:
            samples = SampleTable(run.path, recipe.telemetry.samples_per_step, tokenizer.decode)
    address = broadcast_from_first(None if rollouts is None else rollouts.address)
    if any(one.is_leader for one in places.values()) and place.rank != 0 and address is not None:
        join_cluster(address)
    return Parts(
        actor, reference, critic, reward_model, prompts, rollouts, rewards, weights, dump, samples, held_out,
        refreshes=recipe.refresh_every is not None, engines_sleep=takes_turns(recipe) and not replayed,
    )  # fmt: skip


def run_steps(
    pipeline: Pipeline,
    recipe: Recipe,
    run: RunDirectory,
    checkpoint: Path | None,
    progress: ProgressLine,
    preemption: Preemption,
    settled: DeviceSync,
    measures: StepFigures,
    records: Records,
    watch: Watch,
) -> None:
    """From the first step, or from behind the checkpoint, to the last. Raises Preempted where the run is told to leave."""
    clock, moving = pipeline.clock, pipeline.parts.moving
    done = 0
    if checkpoint is not None:
        with clock.phase("load_checkpoint"):
            state = load_checkpoint(checkpoint, moving)
            pipeline.restore(state)
            done = preemption.saved = state["step"]
        progress.resumed(done)
    with clock.phase("weight_sync"):
        pipeline.sync(pipeline.version)
    ledger = Ledger(recipe, run, pipeline, progress, records, measures, None if checkpoint is None else done)

    def save(state: dict[str, Any]) -> None:
        with clock.phase("checkpoint"):  # counted in the next step's line
            saved = latest_checkpoint(run.checkpoints)
            try:
                save_checkpoint(run.checkpoints, state["step"], moving, state)
            except BaseException as error:  # torch's own is no Exception
                if is_full(error) and not isinstance(error, DiskFull):
                    raise no_room(run.checkpoints, f"the checkpoint of step {state['step']}", size_bytes(saved)) from error
                raise
        preemption.saved = state["step"]

    def is_unsaved() -> bool:
        return done > 0 and preemption.saved != done

    def leave(state: dict[str, Any] | None) -> Preempted:
        """With that `state` of the done steps saved, unless they are or it is none any more."""
        if is_unsaved() and state is not None:
            save(state)
        return preemption.left(done, recipe.run.steps, str(run.checkpoints))

    if done == 0 and recipe.evaluates_after(0):
        ledger.evaluated(0, pipeline.evaluate(0, preemption.agreed))
    ledger.started(clock.take(), {f"start_{name}": value for name, value in pipeline.figures.items()})
    for number in range(done + 1, recipe.run.steps + 1):
        watch.begin(number)
        with clock.phase("agree"):  # a rank that comes late to a step is waited for here
            told = preemption.agreed()
        if told:
            raise leave(pipeline.state(done) if is_unsaved() else None)
        preemption.begin(number)
        settled.begin(number)
        before = pipeline.state(done) if preemption.abandons else None
        try:
            with ledger.profiled(number):
                figures = pipeline.step(number)
        except Abandoned as left:
            assert before is not None, "it was to be kept"
            raise leave(None if left.moved else before) from None
        done = number
        engines = pipeline.parts.rollouts.take_times() if pipeline.rank == 0 else []  # of the step, not of an evaluation
        if recipe.evaluates_after(number):
            figures |= ledger.evaluated(number, pipeline.evaluate(number, preemption.agreed))
        figures |= pipeline.take_resyncs()
        times = clock.take()
        with clock.phase("metrics"):  # counted in the next step's line
            ledger.step(number, times, engines, figures)
        every = recipe.run.checkpoint_every
        if number == recipe.run.steps or (every and number % every == 0):
            save(pipeline.state(number))
    ledger.close(clock.take())


def _longest_engine_wait_s(recipe: Recipe) -> float:
    """How long rank 0 may have to wait for engines, and others for it: while they start, for a rollout with every restart,
    and for what engines say of a sync."""
    syncs = max(REPORT_WAITS.values()) * recipe.weight_sync.timeout_s * recipe.rollout.engines
    rollouts = (recipe.rollout.timeout_s + ENGINE_START_S) * (1 + recipe.rollout.max_restarts)
    return ENGINE_START_S + rollouts + syncs


def _longest_reward_wait_s(recipe: Recipe) -> float:
    """The same for the rewards of a batch, whose tasks run one after another."""
    tasks = -(-recipe.num_sequences // recipe.phases.reward.sequences)
    return tasks * recipe.phases.reward.timeout_s


def main(arguments: list[str]) -> int:
    """COMPLETE, FAILED after an error, BAD_INPUT for a recipe with violations, or that does not fit the nodes."""
    options = {option.value: option for option in Resume if option is not Resume.NEVER}
    resume = [options[word] for word in arguments if word in options]
    words = [word for word in arguments if word not in options]
    if not words or len(resume) > 1 or "LOCAL_RANK" not in os.environ:
        usage = "torchrun --nproc-per-node RANKS -m megarl.train RECIPE [key=value ...] [--resume | --resume-if-saved]"
        print(f"usage: {usage}", file=sys.stderr)
        return BAD_INPUT
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        resume = [Resume.IF_SAVED]  # torchrun starts its ranks again with the words of the first start
    rank = os.environ["RANK"]
    ASKED.watch_again()
    recipe: Recipe | None = None
    try:
        recipe = load_recipe(words[0], words[1:], fetch=model_directory)
        check_models(recipe)
        check_functions(recipe)
        train(recipe, resume[0] if resume else Resume.NEVER)
    except (RecipeError, RunDirectoryError) as error:
        if rank == "0":  # all ranks read the same recipe, and are told of the same directory
            print(error, file=sys.stderr)
        return BAD_INPUT
    except (PlacementError, ClusterError) as error:
        print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except Preempted as left:
        if rank == "0" and recipe is not None:
            print(left, file=sys.stderr, flush=True)
            starts.record_end(RunDirectory.of(recipe).path, starts.REQUEUED, str(left))
        return left.status
    except LeaveNow:
        return _cut_short(recipe, rank, "left at once")
    except (ValueError, RolloutError, SyncError, TimeoutError) as error:
        # These say by themselves what happened, where, and what to do; a traceback would bury it.
        print("\n".join([f"error on rank {rank}: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr, flush=True)
        return FAILED if ASKED.name is None else _cut_short(recipe, rank, "failed while it was to leave")
    except OSError as error:
        if recipe is None or not is_full(error):
            raise
        return _disk_full(RunDirectory.of(recipe), int(rank), error)
    except (RuntimeError, ray.exceptions.RayError):
        if ASKED.name is None:
            raise
        # Peers that have left at once, or engines that were sent the same signal.
        traceback.print_exc()
        return _cut_short(recipe, rank, "failed while it was to leave")
    return COMPLETE


def _disk_full(run: RunDirectory, rank: int, error: OSError) -> int:
    """FAILED: say which disk has no room, and what stands."""
    saved = latest_checkpoint(run.checkpoints)
    stands = "no checkpoint was written so far" if saved is None else f"{saved.name} stands, go on from it with --resume"
    said = f"{describe_full(error, run.path)}; make room: {stands}"
    print(f"error on rank {rank}: {said}", file=sys.stderr, flush=True)
    starts.record_end(run.path, starts.FAILED, said, rank)
    return FAILED


def _cut_short(recipe: Recipe | None, rank: str, how: str) -> int:
    """A rank that was asked to leave and saved nothing: REQUEUE where no finished step is lost with it, or can be done again
    from a checkpoint."""
    can_go_on = recipe is None or RunDirectory.of(recipe).can_go_on
    stands = "what was saved before stands" if can_go_on else "no checkpoint was written so far"
    print(f"rank {rank} {how}, {ASKED.seconds():.0f} s after {ASKED.name}: {stands}", file=sys.stderr, flush=True)
    return REQUEUE if can_go_on else FAILED
