"""Length distributions a batch can be forecast with."""

from __future__ import annotations

import random

DISTRIBUTIONS = ("uniform", "log-normal", "long-tail")

# Median and spread as shares of the longest length; completions of reasoning models look like the second and third.
_LOG_NORMAL_MEDIAN, _LOG_NORMAL_SIGMA = 1 / 6, 0.7
_LONG_TAIL_SHORTEST, _LONG_TAIL_EXPONENT = 1 / 32, 1.2


def draw(kind: str, count: int, longest: int, seed: int) -> list[int]:
    """`count` lengths in 1..longest, the same for the same arguments.

    `uniform`: every length alike. `log-normal`: median a sixth of `longest`, sigma 0.7. `long-tail`: a Pareto law with
    exponent 1.2 that starts at 1/32 of `longest`. A draw above `longest` becomes `longest`, as a completion that meets
    its limit is cut there. Raises ValueError for another `kind` and for sizes below 1.
    """
    if kind not in DISTRIBUTIONS:
        raise ValueError(f"length distribution {kind!r} is not one of {', '.join(DISTRIBUTIONS)}")
    if count < 1 or longest < 1:
        raise ValueError(f"{count} lengths up to {longest} tokens: both numbers must be at least 1")
    generator = random.Random(f"{kind}/{seed}")
    if kind == "uniform":
        return [generator.randint(1, longest) for _ in range(count)]
    if kind == "log-normal":
        shares = (_LOG_NORMAL_MEDIAN * generator.lognormvariate(0.0, _LOG_NORMAL_SIGMA) for _ in range(count))
    else:
        shares = (_LONG_TAIL_SHORTEST * generator.paretovariate(_LONG_TAIL_EXPONENT) for _ in range(count))
    return [max(1, min(longest, round(share * longest))) for share in shares]
