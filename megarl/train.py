"""One trainer rank: `torchrun ... -m megarl.train RECIPE [key=value ...] [--resume]`; `megarl train` starts them all."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Every rank would print them, and none is the user's to mend.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
logging.getLogger("megatron.core").setLevel(logging.ERROR)

from megarl.data.model_files import model_directory  # noqa: E402
from megarl.data.prompts import PromptStream  # noqa: E402
from megarl.data.tokenizer import load_tokenizer, stop_token_ids  # noqa: E402
from megarl.engine.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint  # noqa: E402
from megarl.engine.engine import Engine  # noqa: E402
from megarl.engine.exchange import broadcast_from_first, start_control  # noqa: E402
from megarl.engine.model import DTYPES  # noqa: E402
from megarl.engine.parallel import Place, start_parallel  # noqa: E402
from megarl.pipeline import Parts, Pipeline  # noqa: E402
from megarl.platform import current as platform  # noqa: E402
from megarl.recipe import Recipe, RecipeError, load_recipe, recipe_yaml  # noqa: E402
from megarl.reshard.boxes import ModelShape  # noqa: E402
from megarl.reward.workers import RewardWorkers  # noqa: E402
from megarl.rollout.batch import dump_rollout  # noqa: E402
from megarl.rollout.cluster import join_cluster  # noqa: E402
from megarl.rollout.failure import RolloutError  # noqa: E402
from megarl.rollout.pool import open_pool  # noqa: E402
from megarl.sync.manifest import SyncError  # noqa: E402
from megarl.sync.publish import WeightSync  # noqa: E402
from megarl.telemetry import MetricsWriter, PhaseClock, ProgressLine  # noqa: E402

# `auto` takes the fastest transport that works here: engines and trainer share a machine, so shared memory.
TRANSPORTS = {"auto": WeightSync, "shared_memory": WeightSync}
# Engines load their model while all other ranks wait for rank 0.
ENGINE_START_S = 900.0


def train(recipe: Recipe, resume: bool) -> None:
    """Run the recipe on this rank. Raises ValueError for what a user can mend; any other error names rank and phase."""
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.set_num_threads(recipe.trainer.threads)
    platform.start_process_group(local_rank, recipe.trainer.collective_timeout_s)
    rank = int(os.environ["RANK"])
    control = start_control(_longest_wait_s(recipe))
    place = start_parallel(recipe.layout, recipe.run.seed, recipe.trainer.collective_timeout_s, local_rank)
    run_dir = Path(recipe.run.dir) / recipe.run.name
    checkpoint = prepare_run_directory(recipe, run_dir, resume) if rank == 0 else None
    checkpoint = broadcast_from_first(checkpoint)
    with ProgressLine(recipe.run.steps, enabled=rank == 0) as progress:
        clock = PhaseClock(rank, on_phase=progress.phase)
        with clock.phase("start"):
            directory = model_directory(recipe.model.path)
            parts = build_parts(recipe, directory, place, control, run_dir)
        try:
            pipeline = Pipeline(recipe, place, parts, clock)
            run_steps(pipeline, recipe, run_dir, checkpoint, progress)
        finally:
            for part in (parts.rewards, parts.weights):
                if part is not None:
                    part.close()
            if parts.rollouts is not None:
                parts.rollouts.shutdown()


def prepare_run_directory(recipe: Recipe, run_dir: Path, resume: bool) -> Path | None:
    """Make the run directory with the resolved recipe; the checkpoint to resume from, if any. Rank 0 only.

    Raises ValueError where a run would write over another one, or has nothing to resume from.
    """
    checkpoint = latest_checkpoint(run_dir / "checkpoints") if resume else None
    metrics = run_dir / "metrics.jsonl"
    if resume and checkpoint is None:
        raise ValueError(f"--resume: {run_dir / 'checkpoints'} holds no complete checkpoint; start without --resume")
    if not resume and metrics.is_file() and metrics.stat().st_size:
        raise ValueError(f"run.name = {recipe.run.name!r}: {run_dir} holds a run already; continue it with --resume, "
                         "take another run.name, or remove the directory")  # fmt: skip
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.yaml").write_text(recipe_yaml(recipe))
    return checkpoint


def build_parts(recipe: Recipe, directory: Path, place: Place, control: Any, run_dir: Path) -> Parts:
    """Engines on every rank; prompts, rollouts and rewards on rank 0. Collective."""
    shape = ModelShape.from_directory(directory)
    engine = partial(
        Engine,
        place=place,
        precision=recipe.trainer.precision,
        temperature=recipe.rollout.temperature,
        compile_entropy=recipe.trainer.compile_entropy,
        seed=recipe.run.seed,
        steps=recipe.run.steps,
    )
    actor = engine("actor", shape, directory, optimizer=recipe.actor.optimizer, updates_per_step=recipe.updates_per_batch)
    reference = engine("reference", shape, directory) if "reference_logprob" in recipe.running_phases else None
    critic = None
    if recipe.critic is not None:
        values = model_directory(recipe.critic_path)
        cut = recipe.schedule("critic_update")
        assert cut.mini_batch is not None
        critic = engine("critic", ModelShape.from_directory(values), values, optimizer=recipe.critic.optimizer,
                        updates_per_step=recipe.num_sequences // cut.mini_batch * cut.epochs)  # fmt: skip
    replayed = recipe.rollout.replay is not None
    weights = None
    if not replayed:
        dtype = DTYPES[recipe.rollout_precision]
        group = control if place.layout.ranks > 1 else None
        weights = TRANSPORTS[recipe.weight_sync.transport](
            shape, place.layout, recipe.rollout.tensor, dtype, recipe.run.name, place.rank, group
        )
    prompts = rollouts = rewards = dump = None
    if place.rank == 0:
        tokenizer = load_tokenizer(str(directory))
        prompts = PromptStream(recipe.data, recipe.run.seed, tokenizer)
        rollouts = open_pool(recipe, str(directory), stop_token_ids(str(directory), tokenizer), recipe.run.seed)
        rollouts.start()
        rewards = RewardWorkers(recipe.reward, str(directory), recipe.phases.reward, local=replayed)
        if recipe.run.dump_rollouts:
            dump = partial(dump_rollout, run_dir / "rollouts")
    address = broadcast_from_first(None if rollouts is None else rollouts.address)
    if place.is_leader and place.rank != 0 and address is not None:
        join_cluster(address)
    return Parts(actor, reference, critic, prompts, rollouts, rewards, weights, dump)


def run_steps(pipeline: Pipeline, recipe: Recipe, run_dir: Path, checkpoint: Path | None, progress: ProgressLine) -> None:
    """From the first step, or from behind the checkpoint, to the last one."""
    place, clock, trained = pipeline.place, pipeline.clock, pipeline.parts.trained
    done = 0
    if checkpoint is not None:
        with clock.phase("load_checkpoint"):
            state = load_checkpoint(checkpoint, trained)
            pipeline.restore(state)
            done = state["step"]
    with clock.phase("weight_sync"):
        pipeline.sync(pipeline.version)
    metrics = MetricsWriter(run_dir / "metrics.jsonl") if place.rank == 0 else None
    if metrics is not None:
        metrics.truncate_after(done)
    clock.take()  # the start of a run belongs to no step
    for number in range(done + 1, recipe.run.steps + 1):
        figures = pipeline.step(number)
        if recipe.run.checkpoint_every and number % recipe.run.checkpoint_every == 0:
            with clock.phase("checkpoint"):
                save_checkpoint(run_dir / "checkpoints", number, trained, pipeline.state(number))
        figures |= clock.take()
        if metrics is not None:
            metrics.write(number, figures)
        progress.step(number, figures)
    if metrics is not None:
        metrics.close()


def _longest_wait_s(recipe: Recipe) -> float:
    """How long a rank may have to wait for rank 0: engines that start, a rollout with every restart, and the rewards."""
    rollouts = (recipe.rollout.timeout_s + ENGINE_START_S) * (1 + recipe.rollout.max_restarts)
    tasks = -(-recipe.num_sequences // recipe.phases.reward.sequences)
    return ENGINE_START_S + rollouts + tasks * recipe.phases.reward.timeout_s


def main(arguments: list[str]) -> int:
    """Exit status 0 when the run is complete, 1 after an error, 2 for a recipe with violations."""
    resume = "--resume" in arguments
    path, *overrides = [argument for argument in arguments if argument != "--resume"]
    first = os.environ.get("RANK", "0") == "0"
    try:
        train(load_recipe(path, overrides), resume)
    except RecipeError as error:
        if first:
            print(error, file=sys.stderr)
        return 2
    except (ValueError, RolloutError, SyncError, TimeoutError) as error:
        # These say by themselves what happened, where, and what to do; a traceback would bury it.
        if first:
            print("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
