"""What vLLM answers, as arrays: weight versions of tokens, log-probabilities of a prompt, chosen experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.outputs import WeightVersionSpan


def token_versions(spans: Sequence[WeightVersionSpan]) -> np.ndarray:
    """Return the weight version of each token, int64 [tokens], from vLLM's spans of tokens."""
    return np.repeat(np.array([int(span.version) for span in spans], np.int64), [span.end - span.start for span in spans])


def prompt_scores(output: Any) -> np.ndarray:
    """Return the log-probabilities of a prompt's tokens but the first, float32, from a `RequestOutput` of vLLM."""
    tokens = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return np.array([entry[token].logprob for token, entry in tokens], np.float32)


def routing_rows(recorded: np.ndarray | None, num_tokens: int, layers: Sequence[int] | None) -> np.ndarray:
    """Return the experts [num_tokens - 1, layers, experts a token] of a sequence: its last token was never fed, or only
    because the engine ran ahead. `layers` selects rows of all layers, as vLLM records them. Raises ValueError if tokens are
    missing."""
    if recorded is None:
        raise ValueError("vLLM recorded no experts")
    if len(recorded) < num_tokens - 1:
        raise ValueError(f"{len(recorded)} of {num_tokens - 1} tokens have recorded experts")
    rows = recorded[: num_tokens - 1]
    return rows if layers is None else rows[:, list(layers)]
