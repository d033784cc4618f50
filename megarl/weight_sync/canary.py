"""The canary of a weight sync: the actor and every engine score the same fixed tokens, and must agree.

Checksums prove that the bytes arrived. The canary proves that an engine computes with them: a worker that wrote a box to a
wrong place, lost a buffer, or has a defective device gives other log-probabilities than the actor. Two comparisons, each
under the same weights, show the drift of an engine and not the drift of the policy:

- *Engine and actor.* Their kernels round differently, so the mean absolute difference is never 0. It is compared with the
  usual one, the median of the last canaries. The median follows rounding that grows slowly with the policy's logits.
- *Engines among each other.* Engines of one kind run the same kernels, so they agree bit for bit, and any difference counts
  once a canary had none. Before it counts all engines score again: one that does not repeat itself rounds by chance.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from megarl.megatron.parallel import broadcast_from_first
from megarl.megatron.role import Role
from megarl.megatron.scores import score_sequences
from megarl.recipe import Recipe
from megarl.recipe.weight_sync_section import CanarySection
from megarl.telemetry.clock import span
from megarl.weight_sync.manifest import SyncError

logger = logging.getLogger(__name__)
SEED = 0  # of the canary's tokens
# Mean absolute differences between actor and engine, in nats, by the coarser precision of the two. Rounding always explains
# a difference up to the first value, and never one above the second. Measured on CPUs with 135M weights: 1e-5 in fp32, 0.08
# in bf16.
LEAST_AND_MOST = {"fp32": (3e-5, 0.01), "fp16": (0.01, 0.1), "bf16": (0.05, 0.5), "fp8": (0.1, 2.0)}
# Between them a difference is wrong if it exceeds the usual one by this many standard deviations, which are about
# 1 / sqrt(tokens) of it, and by half. Over 200 syncs in bf16 it was at most four.
DEVIATIONS = 8.0
SPREAD_FACTOR = 2.0  # likewise for the difference between engines, times the largest one so far
LOWEST = -1e9  # stands for a log-probability of NaN or -inf
REMEMBERED = 32  # canaries, whose differences are usual
CANARY_METRICS = tuple(f"sync/canary_{name}" for name in ("difference", "difference_max", "spread", "policy", "drift", "s"))


class Verdict(NamedTuple):
    """What a canary measured, and which engine drifted; None if none did."""

    metrics: dict[str, float]
    drift: str | None


def canary_sequences(vocab: int, count: int, tokens: int) -> list[np.ndarray]:
    """Return `count` sequences of random token ids, the same for the same arguments. They leave out an eighth of the
    vocabulary at either end, where special tokens are."""
    drawn = np.random.default_rng(SEED).integers(vocab // 8, vocab - vocab // 8, (count, tokens))
    return list(drawn.astype(np.int32))


class Canary:
    """Judges what engines compute, and remembers how far they usually are from the actor and from each other. The actor's
    scores are on every rank, the engines' on rank 0."""

    def __init__(self, section: CanarySection, precision: str, sequences: list[np.ndarray]) -> None:
        """`precision` is the coarser precision of trainer and engines, a key of LEAST_AND_MOST."""
        self.sequences, self.stops = sequences, section.action == "stop"
        self._every, self._precision = section.every, precision
        self._version = -1  # the last one that was scored
        self._actor: np.ndarray | None = None
        self._moved, self._actor_s = 0.0, 0.0
        self._from_actor: deque[float] = deque(maxlen=REMEMBERED)  # of the median engine
        self._spread: deque[float] = deque(maxlen=REMEMBERED)  # of the engine that is farthest from the others
        self._replicas: dict[str, np.ndarray] = {}  # scores of the current version by data-parallel rank of each engine

    @classmethod
    def of(cls, recipe: Recipe, vocab: int) -> Canary | None:
        """Return the canary of a recipe, or None if it has none."""
        section, trainer = recipe.weight_sync.canary, recipe.trainer
        if section is None:
            return None
        with_fp8 = trainer.fp8 is not None or recipe.rollout.quantization is not None
        precisions = (trainer.precision, recipe.rollout_precision, *(["fp8"] if with_fp8 else []))
        coarser = max(precisions, key=[*LEAST_AND_MOST].index)
        sequences = canary_sequences(vocab, section.sequences, section.length(recipe.max_sequence_tokens))
        return cls(section, coarser, sequences)

    def is_due(self, version: int, restarted: bool) -> bool:
        """Say whether to judge the engines that take a version; `restarted` engines take the version that others have."""
        return version == self._version if restarted else self._actor is None or version % self._every == 0

    def score_actor(self, actor: Role, version: int) -> None:
        """Have the actor, which holds `version`, score the sequences. Collective."""
        begun, before = time.perf_counter(), self._actor
        self._version, self._actor = version, score_sequences(actor, self.sequences)
        self._moved = 0.0 if before is None else _distance(self._actor, before)
        self._actor_s = time.perf_counter() - begun

    def check(self, score: Callable[[], Mapping[int, np.ndarray]] | None, restarted: bool) -> dict[str, float]:
        """`judge` the engines, which rank 0 asks (`score` is None elsewhere), and return the metrics on all ranks. Raises
        SyncError on all ranks for an engine that has drifted, unless `weight_sync.canary.action` is `warn`. Collective."""
        with span("wait_engines"):  # the other ranks wait for rank 0
            metrics, drift = broadcast_from_first(None if score is None else self.judge(score, restarted))
        if drift is not None and self.stops:
            raise SyncError(drift)
        if drift is not None and score is not None:
            logger.warning("%s", drift)
        return metrics

    def judge(self, score: Callable[[], Mapping[int, np.ndarray]], restarted: bool = False) -> Verdict:
        """Compare engines with the actor and among each other. `score` has them score now and returns [data-parallel ranks,
        sequences, tokens - 1] by engine number. If they `restarted`, the scores of the others are remembered."""
        begun, actor = time.perf_counter() - (0.0 if restarted else self._actor_s), self._actor
        assert actor is not None, "the actor scores first"
        scored = _by_replica(score())
        self._replicas = (self._replicas if restarted else {}) | scored
        if not scored:  # all engines died, and the next rollout starts them again
            return Verdict({}, None)
        distances = {name: _distance(scores, actor) for name, scores in scored.items()}
        farthest = max(distances, key=distances.__getitem__)
        least, most = LEAST_AND_MOST[self._precision]
        limit, rule = most, f"the most that rounding explains in {self._precision}"
        # At the first canary several engines still show what is usual.
        earlier = self._from_actor or (distances.values() if len(distances) > 2 else ())
        factor = 1.0 + max(0.5, DEVIATIONS / actor.size**0.5)
        if earlier and (usual := factor * statistics.median(earlier)) < most:
            limit, rule = max(least, usual), f"{factor:.3g} times what is usual in this run"
        drift = None
        if distances[farthest] > limit:
            drift = self._describe(farthest, scored[farthest], "the actor", actor, limit, rule)
        else:
            self._from_actor.append(statistics.median(distances.values()))
        metrics = {
            "sync/canary_difference": distances[farthest],
            "sync/canary_difference_max": max(float(np.abs(scores - actor).max()) for scores in scored.values()),
            "sync/canary_policy": self._moved,
        }
        if len(self._replicas) > 1:
            metrics["sync/canary_spread"], apart = self._compare_replicas(score)
            drift = drift or apart
        metrics |= {"sync/canary_drift": float(drift is not None), "sync/canary_s": time.perf_counter() - begun}
        return Verdict(metrics, drift)

    def _compare_replicas(self, score: Callable[[], Mapping[int, np.ndarray]]) -> tuple[float, str | None]:
        """Return the mean difference of the engine that is farthest from the median of all, and what is wrong with it."""
        middle = np.median([*self._replicas.values()], axis=0)
        apart = {name: _distance(scores, middle) for name, scores in self._replicas.items()}
        spread, limit = max(apart.values()), SPREAD_FACTOR * max(self._spread, default=np.inf)
        again = _by_replica(score()) if spread > limit else {}
        if not again or not all(np.array_equal(scores, self._replicas[name]) for name, scores in again.items()):
            self._spread.append(spread)
            return spread, None
        # Two engines are equally far from their middle, and so are two halves of all.
        farthest = [name for name, distance in apart.items() if distance > 0.999 * spread]
        rule = f"{SPREAD_FACTOR:g} times the most of the last canaries, and each engine repeats its numbers bit for bit"
        scores = self._replicas[farthest[0]]
        return spread, self._describe(" or ".join(farthest), scores, "the other engines", middle, limit, rule)

    def _describe(self, name: str, scores: np.ndarray, other: str, others: np.ndarray, limit: float, rule: str) -> str:
        sequence, token = np.unravel_index(np.abs(scores - others).argmax(), scores.shape)
        pair = f"{scores[sequence, token]:.6g} and {others[sequence, token]:.6g}"
        return (
            f"weight_sync.canary: {name} does not compute what the actor computes, after the sync of version "
            f"{self._version}: its log-probabilities differ from those of {other} by {_distance(scores, others):.3g} on "
            f"average, above {limit:.3g} ({rule}), and most at sequence {sequence}, token {token + 1}: {pair}; "
            "go on from the last checkpoint with --resume, on another host if it happens again, or set "
            "weight_sync.canary.action: warn"
        )


def _by_replica(engines: Mapping[int, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the float64 scores of each data-parallel rank by its name, with LOWEST in place of NaN and -inf."""
    return {
        f"rollout engine {engine}" + (f", data-parallel rank {rank}" if len(scores) > 1 else ""): np.nan_to_num(
            replica.astype(np.float64), nan=LOWEST, neginf=LOWEST
        )
        for engine, scores in sorted(engines.items())
        for rank, replica in enumerate(scores)
    }


def _distance(scores: np.ndarray, others: np.ndarray) -> float:
    return float(np.abs(scores - others).mean())
