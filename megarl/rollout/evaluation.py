"""Evaluation on held-out prompts: during a run, and as `megarl eval`, where rollout engines run alone; and the loss of a
supervised run on held-out rows."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megarl.algorithm.pass_at import Estimate, majority, mean_reward, pass_at
from megarl.data.prompts import PromptStream, not_trained_on
from megarl.data.sample import Prompt
from megarl.data.tokenizer import prompt_tokenizer, stop_token_ids
from megarl.models import ModelShape
from megarl.models.model_files import model_directory
from megarl.planner.placement import EnginePlace
from megarl.platform import current as platform
from megarl.recipe import Recipe
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.recipe.sizes import with_engine_sizes
from megarl.reward.service import services_of
from megarl.reward.verifiers import check_answer, load_terms
from megarl.reward.workers import RewardWorkers
from megarl.rollout.groups import RolloutBatch
from megarl.rollout.pool import EnginePool
from megarl.rollout.stream import RolloutStream, Sampling, open_stream
from megarl.rollout.taken import KnownBatches, Resync, batch_of_rows
from megarl.telemetry.clock import span
from megarl.telemetry.run_directory import RunDirectory, latest_checkpoint
from megarl.telemetry.run_writer import EvaluationResult

logger = logging.getLogger(__name__)
# Beyond the number of any step. All evaluations of a run have the same draws, which makes their differences less noisy.
DRAW = 2**31


@dataclass(eq=False)
class Evaluation:
    """Rewards and answers of each prompt's completions, in the order of the prompts; `HeldOut.go_on` adds them."""

    prompts: Sequence[Prompt]
    counts: dict[str, float]  # `HeldOut.counts`
    rewards: list[np.ndarray] = field(default_factory=list)  # of each prompt float [completions], NaN if masked
    answers: list[list[str | None]] = field(default_factory=list)  # empty if no part of the reward reads answers
    lengths: list[int] = field(default_factory=list)  # of all completions
    truncated: list[bool] = field(default_factory=list)  # of all completions
    failures: list[tuple[int, str]] = field(default_factory=list)  # prompt number and reason of each masked completion

    def estimates(self, section: EvaluationSection) -> dict[str, Estimate]:
        """Return the estimates by name, the mean reward first."""
        known = [~np.isnan(values) for values in self.rewards]
        rewards = [values[valid] for values, valid in zip(self.rewards, known, strict=True)]
        estimates = {"mean": mean_reward(rewards)}
        for k in section.pass_at:
            estimates[f"pass_at_{k}"] = pass_at(rewards, k, section.pass_reward)
        if self.answers and section.completions > 1:
            answers = [
                [answer for answer, valid in zip(given, mask, strict=True) if valid]
                for given, mask in zip(self.answers, known, strict=True)
            ]
            estimates[f"majority_at_{section.completions}"] = majority(rewards, answers, section.pass_reward)
        return estimates

    def metrics(self, section: EvaluationSection) -> dict[str, float]:
        """Return the metrics `evaluation/...`: each estimate with half of its confidence interval, and counts."""
        metrics: dict[str, float] = {}
        for name, estimate in self.estimates(section).items():
            metrics |= {f"evaluation/{name}": estimate.value, f"evaluation/{name}_error": estimate.error}
        return metrics | self.counts | {
            "evaluation/num_masked": int(sum(np.isnan(values).sum() for values in self.rewards)),
            "evaluation/completion_length_mean": float(np.mean(self.lengths)),
            "evaluation/truncated_share": float(np.mean(self.truncated)),
        }  # fmt: skip

    def summary(self, section: EvaluationSection) -> str:
        """Return one line for a person."""
        shown = [
            f"{name.replace('_at_', '@')} {mean.value:.3f}" + ("" if np.isnan(mean.error) else f" ±{mean.error:.3f}")
            for name, mean in self.estimates(section).items()
        ]
        return f"{', '.join(shown)} on {len(self.prompts)} held-out prompts"

    def table(self) -> str:
        """Return a JSON line for each prompt."""
        lines = []
        for number, prompt in enumerate(self.prompts):
            rewards = [None if np.isnan(reward) else float(reward) for reward in self.rewards[number]]
            line: dict[str, Any] = {"question": prompt.question, "answer": prompt.answer, "rewards": rewards}
            lines.append(json.dumps(line | ({"answers": self.answers[number]} if self.answers else {})) + "\n")
        return "".join(lines)


class HeldOut:
    """The prompts, or rows, of an evaluation, without those of the training data. Raises ValueError if none is left."""

    def __init__(
        self, recipe: Recipe, stream: Callable[..., PromptStream], *trained_on: PromptStream, key: str = "evaluation"
    ) -> None:
        """`stream` is that of `open_data`, and `key` the section's; metrics begin with it, in a warm-up with
        `warmup_evaluation`."""
        assert recipe.evaluation is not None
        self.recipe, self.section, self.area = recipe, recipe.evaluation, key.replace("warmup.sft.", "warmup_")
        data = recipe.data.model_copy(update={"prompts": self.section.prompts, "curriculum": None})
        held_out = stream(data, key=f"{key}.prompts")
        prompts = not_trained_on(held_out, *trained_on)
        self.prompts = prompts[: self.section.max_prompts]
        self.counts: dict[str, float] = {
            f"{self.area}/num_prompts": len(self.prompts),
            f"{self.area}/num_left_out": held_out.num_rows - len(prompts),
            f"{self.area}/num_dropped": held_out.num_dropped,
            f"{self.area}/num_bad_rows": held_out.num_bad_rows,
        }

    def begin(self) -> Evaluation:
        """Return an evaluation without answers."""
        return Evaluation(self.prompts, self.counts)

    def result(self, evaluation: Evaluation) -> EvaluationResult:
        """Return the metrics, the summary and the table of a finished evaluation."""
        return EvaluationResult(evaluation.metrics(self.section), evaluation.summary(self.section), evaluation.table())

    def go_on(self, judged: Evaluation, stream: RolloutStream | KnownBatches, resync: Resync | None = None) -> bool:
        """Let the engines answer the next prompts, and score the answers: one round, with a step's deadlines. Returns
        whether prompts are left; after the last round a warning names the first completion that could not be scored. Raises
        what rollouts and rewards raise."""
        completions, done = self.section.completions, len(judged.rewards)
        # As many sequences at a time as in a step, for which the engines' memory and rollout.timeout_s are set.
        prompts = self.prompts[done : done + max(1, self.recipe.num_rollouts // completions)]
        with span("wait_engines"):
            sampling = Sampling(completions, DRAW, self.section.temperature)
            batch, scored = stream.sample(prompts, sampling, resync, answers=completions > 1)
        assert scored is not None, "the stream of an evaluation has rewards"
        judged.failures += [(done + sample // completions, why) for sample, why in scored.failures.items()]
        judged.rewards += list(scored.rewards.reshape(len(prompts), completions))
        judged.lengths += np.bincount(batch.rollouts, batch.completion_lengths).astype(int).tolist()
        judged.truncated += batch.truncated.tolist()
        if scored.answers is not None:
            answers = scored.answers
            judged.answers += [answers[first : first + completions] for first in range(0, len(answers), completions)]
        if len(judged.rewards) < len(self.prompts):
            return True
        for number, why in judged.failures[:1]:
            logger.warning(
                "evaluation: %d completions masked; one of held-out prompt %d: %s", len(judged.failures), number, why
            )
        return False


def open_data(
    recipe: Recipe, directory: Path, started: datetime
) -> tuple[Any, Callable[..., PromptStream], tuple[int, ...]]:
    """Return the tokenizer, a function that makes streams of prompts from `data`, and the tokens that end a completion.

    Raises ValueError for a reward that does not load, and for an invalid service.
    """
    tokenizer = prompt_tokenizer(str(directory), recipe.data.template_options, started)
    services_of(recipe.verifiers)  # raises for an invalid service
    judge, num_tokens = partial(check_answer, load_terms(recipe.verifiers)), ModelShape.from_directory(directory).vocab
    stream = partial(PromptStream, seed=recipe.run.seed, tokenizer=tokenizer, num_tokens=num_tokens, judge=judge)
    return tokenizer, stream, stop_token_ids(str(directory), tokenizer, num_tokens)


# Returns the mean metrics of a batch's sequences that count, and over how many tokens or pairs.
LossOfBatch = Callable[[RolloutBatch, np.ndarray], tuple[dict[str, float], float]]


def held_out_loss(
    held_out: HeldOut | None, loss_of: LossOfBatch, broadcast: Callable[[Any], Any], leaves: Callable[[], bool]
) -> EvaluationResult | None:
    """Compute the loss of all held-out rows, which rank 0 has, batch by batch; returns it there. Returns None everywhere if
    the run `leaves`, which all ranks ask before each batch. `broadcast` returns rank 0's value on every rank. Raises what
    `loss_of` raises. Collective."""
    batches, sums, total = iter(()) if held_out is None else _batches(held_out), dict[str, float](), 0.0
    while (batch := broadcast(next(batches, None))) is not None:
        if leaves():
            return None
        means, weight = loss_of(*batch)
        sums = {name: sums.get(name, 0.0) + weight * value for name, value in means.items()}
        total += weight
    if held_out is None:
        return None
    means = {name: value / total for name, value in sums.items()}
    summary = f"{', '.join(f'{name} {mean:.4f}' for name, mean in means.items())} on {len(held_out.prompts)} held-out rows"
    return EvaluationResult({f"{held_out.area}/{name}": mean for name, mean in means.items()} | held_out.counts, summary)


def _batches(held_out: HeldOut) -> Iterator[tuple[RolloutBatch, np.ndarray]]:
    """Yield the rows in batches of a step's size with a mask of the sequences that count: the last batch is filled up with
    the first rows."""
    size, rows = held_out.recipe.phases.rollout.prompts, held_out.prompts
    for start in range(0, len(rows), size):
        batch = batch_of_rows([rows[number % len(rows)] for number in range(start, start + size)])
        yield batch, np.arange(len(batch)) < (len(rows) - start) * batch.executed.group_size


def evaluate(recipe: Recipe, model: str | None, run: Path | None) -> Evaluation:
    """Evaluate the weights of `model` (a Hugging Face directory or hub name), or of the last checkpoint of `run`, or of
    `model.path`. Raises ValueError for errors that a user can fix, RolloutError if engines fail."""
    if recipe.run.is_supervised:
        raise ValueError(
            f"run.kind = {recipe.run.kind}: such a run measures its loss while it trains, and has no rewards for answers; "
            "export it, and evaluate the recipe of a run of kind rl with --model DIR"
        )
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
        _, stream, stops = open_data(recipe, directory, started)
        held_out = HeldOut(recipe, stream, stream(recipe.data))
        places = engine_places(recipe, platform.num_devices)
        pool = EnginePool(recipe, str(directory), stops, recipe.run.seed, places=places)
        stack.callback(pool.shutdown)
        pool.start()
        rewards = RewardWorkers(recipe.verifiers, str(directory), stops, recipe.phases.reward, local=False)
        stack.callback(rewards.close)
        rollouts = open_stream(recipe, pool, str(directory), stops, None, rewards, stack)
        judged = held_out.begin()
        while held_out.go_on(judged, rollouts):
            print(f"{len(judged.rewards)} of {len(held_out.prompts)} prompts", file=sys.stderr, flush=True)
        return judged


def engine_places(recipe: Recipe, num_devices: int | None) -> tuple[EnginePlace, ...]:
    """Place as many of the recipe's engines as fit this machine's devices, or all of them on CPUs. Raises ValueError if none
    fits."""
    workers = recipe.rollout.layout.workers
    devices = recipe.rollout.engines * workers if num_devices is None else num_devices
    fitting = min(recipe.rollout.engines, devices // workers)
    if not fitting:
        raise ValueError(
            f"an engine takes {workers} devices (rollout.tensor x pipeline x data), and this machine has {devices}; "
            f"override them, as rollout.tensor={devices}"
        )
    return tuple(EnginePlace(0, tuple(range(number * workers, (number + 1) * workers))) for number in range(fitting))


def report(recipe: Recipe, evaluation: Evaluation, as_json: bool) -> str:
    """Return what the command prints."""
    assert recipe.evaluation is not None
    metrics = evaluation.metrics(recipe.evaluation)
    if as_json:
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        return json.dumps(finite, indent=2)
    masked, left_out = metrics["evaluation/num_masked"], metrics["evaluation/num_left_out"]
    unused = metrics["evaluation/num_dropped"] + metrics["evaluation/num_bad_rows"]
    lines = [
        evaluation.summary(recipe.evaluation),
        f"completions of {metrics['evaluation/completion_length_mean']:.1f} tokens, "
        f"{metrics['evaluation/truncated_share']:.1%} of them cut at rollout.max_new_tokens",
    ]
    lines += [f"{masked:.0f} completions could not be scored and count for nothing"] if masked else []
    lines += [f"{left_out:.0f} prompts left out, which are among the training prompts"] if left_out else []
    lines += [f"{unused:.0f} prompts left out, longer than data.max_prompt_tokens or bad rows"] if unused else []
    return "\n".join(lines)


def _exported(run: Path, out: str) -> Path:
    """Export the run's last checkpoint as a Hugging Face directory. Raises ValueError if there is none."""
    if latest_checkpoint(run / "checkpoints") is None:
        raise ValueError(
            f"{run / 'checkpoints'} holds no complete checkpoint; give --model DIR, or a recipe for its model.path"
        )
    # In another process, since an export starts a process group, which vLLM does not expect.
    target = Path(out) / "model"
    command = [sys.executable, "-W", "ignore", "-m", "megarl.megatron.export", str(run), str(target)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise ValueError(f"{run}: its last checkpoint could not be exported; the error is printed above")
    return target
