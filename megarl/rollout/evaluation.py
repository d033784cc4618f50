"""The held-out prompts of a run, and what rank 0 finds out by them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megarl.algorithm.pass_at import Estimate, majority, mean_reward, pass_at
from megarl.data.prompts import PromptStream
from megarl.data.sample import Prompt
from megarl.recipe import Recipe
from megarl.recipe.data_section import DataSection
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.reward.workers import add_episodes
from megarl.rollout.pool import Sampling
from megarl.telemetry.clock import span

logger = logging.getLogger(__name__)
# Beyond the number of any step: the completions of an evaluation are those of no step, and the same draws in each evaluation
# of a run, so that the difference of two is less a matter of luck.
DRAW = 2**31


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Rewards and answers of each prompt's completions, in the order of the prompts."""

    prompts: Sequence[Prompt]
    rewards: Sequence[np.ndarray]  # of each prompt float [completions], NaN for one that could not be computed
    answers: Sequence[Sequence[str | None]] | None  # None where no part of the reward reads one
    lengths: np.ndarray  # int [all completions]
    truncated: np.ndarray  # bool [all completions]
    num_left_out: int
    num_dropped: int
    num_bad_rows: int

    def estimates(self, section: EvaluationSection) -> dict[str, Estimate]:
        """By name, the mean reward first."""
        known = [~np.isnan(one) for one in self.rewards]
        rewards = [one[valid] for one, valid in zip(self.rewards, known, strict=True)]
        found = {"mean": mean_reward(rewards)}
        for k in section.pass_at:
            found[f"pass_at_{k}"] = pass_at(rewards, k, section.pass_reward)
        if self.answers is not None and section.completions > 1:
            answers = [
                [answer for answer, valid in zip(given, mask, strict=True) if valid]
                for given, mask in zip(self.answers, known, strict=True)
            ]
            found[f"majority_at_{section.completions}"] = majority(rewards, answers, section.pass_reward)
        return found

    def metrics(self, section: EvaluationSection) -> dict[str, float]:
        """`evaluation/...`: each estimate with half of its confidence interval, and what it rests on."""
        figures: dict[str, float] = {}
        for name, estimate in self.estimates(section).items():
            figures |= {f"evaluation/{name}": estimate.value, f"evaluation/{name}_error": estimate.error}
        return figures | {
            "evaluation/num_prompts": len(self.prompts),
            "evaluation/num_left_out": self.num_left_out,
            "evaluation/num_dropped": self.num_dropped,
            "evaluation/num_bad_rows": self.num_bad_rows,
            "evaluation/num_masked": int(sum(np.isnan(one).sum() for one in self.rewards)),
            "evaluation/completion_length_mean": float(self.lengths.mean()),
            "evaluation/truncated_share": float(self.truncated.mean()),
        }

    def summary(self, section: EvaluationSection) -> str:
        """One line for a person."""
        shown = [
            f"{name.replace('_at_', '@')} {one.value:.3f}" + ("" if np.isnan(one.error) else f" ±{one.error:.3f}")
            for name, one in self.estimates(section).items()
        ]
        return f"{', '.join(shown)} on {len(self.prompts)} held-out prompts"

    def write(self, file: Path) -> None:
        """A line for each prompt; atomic."""
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(file.name + ".partial")
        with beside.open("w", encoding="utf-8") as lines:
            for number, prompt in enumerate(self.prompts):
                rewards = [None if np.isnan(reward) else float(reward) for reward in self.rewards[number]]
                line: dict[str, Any] = {"question": prompt.question, "answer": prompt.answer, "rewards": rewards}
                if self.answers is not None:
                    line["answers"] = list(self.answers[number])
                lines.write(json.dumps(line) + "\n")
        os.replace(beside, file)


@dataclass
class Judged:
    """What came of the first prompts, round by round."""

    num_prompts: int = 0
    rewards: list[np.ndarray] = field(default_factory=list)
    answers: list[list[str | None]] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)  # of each masked completion its prompt's number, and why


class HeldOut:
    """Prompts that a run is measured by; none is among those that it trains on. Raises ValueError where nothing is left."""

    def __init__(self, recipe: Recipe, asked: PromptStream, trained_on: PromptStream) -> None:
        """`asked` is a stream of `held_out_data`."""
        assert recipe.evaluation is not None
        self.section = recipe.evaluation
        seen = {_content(prompt) for prompt in trained_on.every()}
        every = list(asked.every())
        kept = [prompt for prompt in every if _content(prompt) not in seen]
        if not kept:
            raise ValueError(
                f"evaluation.prompts: all {len(every)} are among the training prompts, and nothing is held out; "
                "give others, or another seed to a generator"
            )
        self.num_left_out, self.num_dropped = len(every) - len(kept), asked.num_dropped
        self.num_bad_rows = asked.num_bad_rows
        self.prompts = kept[: self.section.max_prompts]
        # As many sequences at a time as a step has, for which the engines' memory and rollout.timeout_s are meant.
        self._at_a_time = max(1, recipe.num_sequences // self.section.completions)

    def go_on(
        self,
        judged: Judged,
        rollouts: Any,
        rewards: Any,
        step: int,
        resync: Callable[[Sequence[int]], None] | None = None,
    ) -> bool:
        """Have the engines answer the next prompts under the weights that they have, and score what they say: one round,
        whose deadlines are those of a step. Returns whether there are more. Raises what rollouts and rewards raise."""
        completions = self.section.completions
        prompts = self.prompts[judged.num_prompts : judged.num_prompts + self._at_a_time]
        with span("wait_engines"):
            batch = rollouts.generate(prompts, step, resync, Sampling(completions, DRAW, self.section.temperature))
        with span("wait_rewards"):
            scored = rewards.score(batch.payload, prompts, len(batch), completions, answers=completions > 1)
            scored = add_episodes(scored, batch.episodes)
        judged.failures += [(judged.num_prompts + one // completions, why) for one, why in scored.failures.items()]
        judged.num_prompts += len(prompts)
        judged.rewards += list(scored.rewards.reshape(len(prompts), completions))
        judged.lengths.append(batch.completion_lengths)
        judged.reasons += batch.finish_reasons
        if scored.answers is not None:
            judged.answers += [scored.answers[first : first + completions] for first in range(0, len(batch), completions)]
        rollouts.take_times()  # of no step
        return judged.num_prompts < len(self.prompts)

    def result(self, judged: Judged) -> Evaluation:
        """What all rounds say together; a warning names the first completion that could not be scored, and why."""
        assert judged.num_prompts == len(self.prompts), "there are more"
        for number, why in judged.failures[:1]:
            logger.warning(
                "evaluation: %d completions masked; one of held-out prompt %d: %s", len(judged.failures), number, why
            )
        truncated = np.array([reason == "length" for reason in judged.reasons])
        lengths = np.concatenate(judged.lengths)
        counts = self.num_left_out, self.num_dropped, self.num_bad_rows
        return Evaluation(self.prompts, judged.rewards, judged.answers or None, lengths, truncated, *counts)


def held_out_data(recipe: Recipe) -> DataSection:
    """`data`, with the held-out prompts in place of the others."""
    assert recipe.evaluation is not None
    return recipe.data.model_copy(update={"prompts": recipe.evaluation.prompts, "curriculum": None})


def _content(prompt: Prompt) -> bytes:
    """What tells prompts apart, in little memory: training sets are large."""
    return hashlib.blake2b(np.asarray(prompt.token_ids, dtype=np.int32).tobytes(), digest_size=16).digest()
