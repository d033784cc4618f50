"""The metrics of a step's rollouts."""

from __future__ import annotations

import numpy as np

from megarl.planner.lengths import QUANTILES
from megarl.rollout.groups import EpisodeFacts, RolloutBatch


def rollout_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Return lengths, truncation, observations of episodes, and the sizes that the engines ran."""
    lengths = rollouts.completion_lengths
    return {
        "rollout/completion_length_mean": float(lengths.mean()),
        "rollout/completion_length_max": int(lengths.max()),
        **{f"rollout/completion_length_p{q:02d}": float(np.percentile(lengths, q)) for q in QUANTILES},
        "rollout/prompt_length_mean": float(rollouts.prompt_lengths.mean()),
        "rollout/truncated_share": float(np.mean([reason == "length" for reason in rollouts.finish_reasons])),
        "rollout/version": int(rollouts.last_version.min()),
        "tokens/prompt": int(rollouts.prompt_lengths.sum()),
        "tokens/completion": int(lengths.sum()),
        "schedule/rollout/prompts": rollouts.executed.prompts,
        "schedule/rollout/max_concurrent": rollouts.executed.max_concurrent,
        **({} if rollouts.episodes is None else _episode_metrics(rollouts, rollouts.episodes)),
        **rollouts.metrics,
    }


def _episode_metrics(rollouts: RolloutBatch, episodes: EpisodeFacts) -> dict[str, float]:
    """Return how episodes ended, and how many of their tokens the policy did not sample."""
    observed = int(rollouts.completion_lengths.sum() - rollouts.own_lengths.sum())
    return {
        "rollout/own_length_mean": float(rollouts.own_lengths.mean()),
        "rollout/observation_tokens": observed,
        "rollout/observation_share": observed / int(rollouts.completion_lengths.sum()),
        **episodes.metrics(),
    }
