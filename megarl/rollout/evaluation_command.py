"""`megarl eval`: rollout engines alone answer a recipe's held-out prompts, with a model's weights or those of a run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from megarl.data.prompts import PromptStream
from megarl.data.tokenizer import prompt_tokenizer, stop_token_ids
from megarl.models import ModelShape
from megarl.models.model_files import model_directory
from megarl.planner.placement import EnginePlace
from megarl.platform import current as platform
from megarl.recipe import Recipe
from megarl.recipe.sizes import with_engine_sizes
from megarl.reward.service import services_of
from megarl.reward.verifiers import check_answer, load_terms
from megarl.reward.workers import RewardWorkers
from megarl.rollout.evaluation import Evaluation, HeldOut, Judged, held_out_data
from megarl.rollout.pool import open_pool
from megarl.telemetry.run_directory import RunDirectory, latest_checkpoint


def evaluate(recipe: Recipe, model: str | None, run: Path | None) -> Evaluation:
    """Answers under the weights of `model`, a Hugging Face directory or hub name, else of the last checkpoint of `run`, else
    of `model.path`. Raises ValueError for what the caller can mend, RolloutError where engines fail."""
    if recipe.evaluation is None:
        raise ValueError(
            "evaluation: the recipe has no such section; add one, as "
            "`evaluation: {prompts: {kind: jsonl, path: held_out.jsonl, prompt_field: question, answer_field: answer}}`"
        )
    recipe = with_engine_sizes(recipe, platform.total_bytes)
    with ExitStack() as stack:
        if run is not None and model is None:
            directory = _exported(run, stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-eval-")))
        else:
            directory = model_directory(model or recipe.model.path)
        started = (RunDirectory.of(recipe) if run is None else RunDirectory(run)).first_start
        tokenizer = prompt_tokenizer(str(directory), recipe.data.template_options, started)
        services_of(recipe.verifiers)  # raises if one cannot be asked
        judge, known = partial(check_answer, load_terms(recipe.verifiers)), ModelShape.from_directory(directory).vocab
        stream = partial(PromptStream, seed=recipe.run.seed, tokenizer=tokenizer, num_tokens=known, judge=judge)
        held_out = HeldOut(recipe, stream(held_out_data(recipe), key="evaluation.prompts"), stream(recipe.data))
        stops = stop_token_ids(str(directory), tokenizer, known)
        places = engine_places(recipe, platform.num_devices)
        rollouts = open_pool(recipe, str(directory), stops, recipe.run.seed, places=places)
        stack.callback(rollouts.shutdown)
        rollouts.start()
        rewards = RewardWorkers(recipe.verifiers, str(directory), stops, recipe.phases.reward, local=False)
        stack.callback(rewards.close)
        judged = Judged()
        while held_out.go_on(judged, rollouts, rewards, 0):
            print(f"{judged.num_prompts} of {len(held_out.prompts)} prompts", file=sys.stderr, flush=True)
        return held_out.result(judged)


def engine_places(recipe: Recipe, num_devices: int | None) -> tuple[EnginePlace, ...]:
    """As many of the recipe's engines as fit this machine's devices, on which no trainer rank is; where there are only
    cores, all of them. Raises ValueError where none fits."""
    workers = recipe.rollout.layout.workers
    devices = recipe.rollout.engines * workers if num_devices is None else num_devices
    fitting = min(recipe.rollout.engines, devices // workers)
    if not fitting:
        raise ValueError(
            f"an engine takes {workers} devices (rollout.tensor x pipeline x data), and this machine has {devices}; "
            f"override them, as rollout.tensor={devices}"
        )
    return tuple(EnginePlace(0, tuple(range(number * workers, (number + 1) * workers))) for number in range(fitting))


def report(recipe: Recipe, found: Evaluation, as_json: bool) -> str:
    """What the command prints."""
    assert recipe.evaluation is not None
    figures = found.metrics(recipe.evaluation)
    if as_json:
        finite = {key: value if math.isfinite(value) else None for key, value in figures.items()}
        return json.dumps(finite, indent=2)
    masked, left_out = figures["evaluation/num_masked"], figures["evaluation/num_left_out"]
    unused = figures["evaluation/num_dropped"] + figures["evaluation/num_bad_rows"]
    lines = [
        found.summary(recipe.evaluation),
        f"completions of {figures['evaluation/completion_length_mean']:.1f} tokens, "
        f"{figures['evaluation/truncated_share']:.1%} of them cut at rollout.max_new_tokens",
    ]
    lines += [f"{masked:.0f} completions could not be scored and count for nothing"] if masked else []
    lines += [f"{left_out:.0f} prompts left out, which are among the training prompts"] if left_out else []
    lines += [f"{unused:.0f} prompts left out, longer than data.max_prompt_tokens or bad rows"] if unused else []
    return "\n".join(lines)


def _exported(run: Path, out: str) -> Path:
    """The run's last checkpoint as a Hugging Face directory. Raises ValueError where there is none."""
    if latest_checkpoint(run / "checkpoints") is None:
        raise ValueError(
            f"{run / 'checkpoints'} holds no complete checkpoint; give --model DIR, or a recipe for its model.path"
        )
    # A process of its own: the engine's side starts a process group, and vLLM wants none.
    target = Path(out) / "model"
    command = [sys.executable, "-W", "ignore", "-m", "megarl.megatron.export", str(run), str(target)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise ValueError(f"{run}: its last checkpoint could not be exported; why is said above")
    return target
