"""Control across steps: the adaptive KL coefficient, the early stop, and the check of the first ratio."""

from __future__ import annotations

import logging

from megarl.recipe.algorithm_section import AlgorithmSection, EarlyStopSection

logger = logging.getLogger(__name__)


def adapted(coefficient: float, measured: float, target: float, rate: float) -> float:
    """Return the KL coefficient of the next step: coefficient * (1 + rate * e), e = measured / target - 1 within +-0.2.

    `measured` and `target` are mean KLs of a token. Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2, with `rate`
    in place of their 0.1.
    """
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + rate * error)


class KLControl:
    """Holds the algorithm section of the current step: the recipe's, with the adaptive KL coefficient."""

    def __init__(self, section: AlgorithmSection) -> None:
        self.settings = section
        self._adapts = section.kl is not None and section.kl.adaptive is not None

    @property
    def coefficient(self) -> float | None:
        """The coefficient to save in a checkpoint; None if it is fixed."""
        return self.settings.kl.coefficient if self._adapts and self.settings.kl is not None else None

    @coefficient.setter
    def coefficient(self, value: float) -> None:
        assert self.settings.kl is not None
        kl = self.settings.kl.model_copy(update={"coefficient": value})
        self.settings = self.settings.model_copy(update={"kl": kl})

    def adapt(self, measured: float | None) -> dict[str, float]:
        """Set the coefficient of the next step from the mean KL of a token; returns the metrics of this step.

        `measured` is None if every update was refused or all tokens were masked.
        """
        section = self.settings.kl
        if section is None or section.adaptive is None or measured is None:
            return {}
        self.coefficient = adapted(section.coefficient, measured, section.adaptive.target, section.adaptive.rate)
        return {"actor/kl_coefficient": section.coefficient}


class RatioDrift:
    """Checks that the ratio is 1 before the first update.

    The policy has not moved by then: any other ratio comes from `actor_logprob` and `actor_update` packing differently.
    """

    def __init__(self, bound: float, warns: bool) -> None:
        """Set `warns` on one rank only: all ranks measure the same drift."""
        self._bound, self._warns = bound, warns

    def check(self, drift: float | None) -> dict[str, float]:
        """Compare the largest drift of the first update (None if not measured) with the bound, and warn once."""
        if drift is None:
            return {}
        if drift > self._bound and self._warns:
            logger.warning(
                "before the first update a policy ratio is %.3g away from 1, more than algorithm.max_ratio_drift = %.3g: "
                "actor_logprob and actor_update pack the batch differently and their kernels round differently; make their "
                "micro-batches more alike in size, or use a finer trainer.precision (said once; see actor/ratio_drift_max)",
                drift,
                self._bound,
            )
            self._warns = False
        return {"actor/ratio_drift_exceeded": int(drift > self._bound)}


def moved_too_far(section: EarlyStopSection | None, kl_sum: float, tokens: float) -> bool:
    """Say whether `algorithm.early_stop` ends the updates of this step.

    `kl_sum` is the KL from the policy before the first update, summed over `tokens` of all ranks.
    """
    return section is not None and kl_sum / max(tokens, 1.0) > section.target_kl
