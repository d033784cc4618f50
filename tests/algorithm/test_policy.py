"""Every loss against its formula written out sequence by sequence, and its gradient against differences; importance weights,
KL estimators and aggregates against theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from megarl.algorithm import PolicyTokens, policy_loss
from megarl.algorithm.control import adapted
from megarl.algorithm.loss import kl, loss_weights, value_loss
from megarl.algorithm.policy import Loss, cispo, gspo, load_policy_loss, mismatch_weights, policy_gradient
from megarl.recipe import RecipeError
from megarl.recipe.algorithm_section import MismatchSection, PolicyLossSection
from megarl.recipe.load import kinds, sections_of

# Empty, of one token, and longer; ratios near 1, and beyond every bound.
LENGTHS = (3, 1, 0, 5, 2)
ADVANTAGES = (1.5, -2.0, 1.0, -0.5, 0.0)
RATIOS = [1.0, 1.5, 0.4, 0.9, 1.0, 1.00035, 3.5, 0.2, 1.25, 1.1, 0.9999]
# Extreme ones: new less old log-probability, within +-20 and beyond, for advantages of either sign.
WILD = [15.0, -30.0, 0.1, 30.0, -15.0, 0.0, 15.0, -30.0, 30.0, -12.0, 25.0]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "clip": [{"low": 0.2, "high": 0.28}, {"low": 0.2, "high": 0.2, "dual": 1.8}],
    "gspo": [{"low": 0.0003, "high": 0.0004}, {"low": 0.5, "high": 0.5}],
    "cispo": [{"low": 1.0, "high": 0.3}, {"low": 0.3, "high": 0.2}],
    "gmpo": [{"low": 0.4, "high": 0.4}],
    "sapo": [
        {"positive_temperature": 1.0, "negative_temperature": 1.05},
        {"positive_temperature": 3.0, "negative_temperature": 9.0},
    ],
    "policy_gradient": [{}],
}  # fmt: skip
CASES = [(kind, options) for kind, each in OPTIONS.items() for options in each]


def tokens(logprobs: torch.Tensor | None = None) -> PolicyTokens:
    old = torch.linspace(-3.0, -0.2, len(RATIOS), dtype=torch.float64)
    spread = [advantage for advantage, length in zip(ADVANTAGES, LENGTHS, strict=True) for _ in range(length)]
    new = old + torch.tensor(RATIOS, dtype=torch.float64).log() if logprobs is None else logprobs
    return PolicyTokens(new, old, torch.tensor(spread, dtype=torch.float64), LENGTHS)


def wild_tokens(logprobs: torch.Tensor | None = None) -> PolicyTokens:
    far = torch.tensor(WILD, dtype=torch.float64)
    old = -0.5 - far.clamp(min=0.0)  # log-probabilities, both of them
    return tokens(old + far if logprobs is None else logprobs)._replace(old_logprobs=old)


def loss_of(kind: str, options: dict[str, Any]) -> Callable[[PolicyTokens], Loss]:
    return load_policy_loss(TypeAdapter(PolicyLossSection).validate_python({"kind": kind, **options}))


def of_paper(kind: str, options: dict[str, float], given: PolicyTokens) -> list[float]:
    """The value of each token's loss, from the formula of the sequence it is in, in plain Python."""
    losses = []
    start = 0
    for advantage, length in zip(ADVANTAGES, LENGTHS, strict=True):
        new, old = (part[start : start + length].tolist() for part in (given.logprobs, given.old_logprobs))
        start += length
        ratios = [math.exp(min(max(a - b, -20.0), 20.0)) for a, b in zip(new, old, strict=True)]
        low, high = options.get("low", 0.0), options.get("high", 0.0)
        if kind == "clip":
            for ratio in ratios:
                surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
                if "dual" in options and advantage < 0:
                    surrogate = max(surrogate, options["dual"] * advantage)
                losses.append(-surrogate)
        elif kind == "gspo":
            whole = math.prod(ratios) ** (1 / length) if length else 1.0
            losses += [-min(whole * advantage, min(max(whole, 1 - low), 1 + high) * advantage)] * length
        elif kind == "cispo":
            pairs = zip(ratios, new, strict=True)
            losses += [-min(max(ratio, 1 - low), 1 + high) * advantage * logprob for ratio, logprob in pairs]
        elif kind == "gmpo":
            sign = 1 if advantage > 0 else -1
            bounded = [sign * min(sign * r, sign * min(max(r, math.exp(-low)), math.exp(high))) for r in ratios]
            losses += [-advantage * math.prod(bounded) ** (1 / length)] * length if length else []
        elif kind == "sapo":
            steep = options["positive_temperature"] if advantage > 0 else options["negative_temperature"]
            losses += [-advantage * 4 / steep / (1 + math.exp(-steep * (ratio - 1))) for ratio in ratios]
        else:
            losses += [-advantage * logprob for logprob in new]
    return losses


def test_every_loss_has_cases() -> None:
    assert {kinds(section)[0] for section in sections_of(PolicyLossSection)} == {*OPTIONS, "function"}


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_value_is_that_of_the_paper(kind: str, options: dict[str, float]) -> None:
    losses, clipped = loss_of(kind, options)(tokens())
    assert losses.tolist() == pytest.approx(of_paper(kind, options, tokens()), abs=1e-9)
    assert clipped.dtype == torch.bool and clipped.shape == losses.shape
    losses, _ = loss_of(kind, options)(wild_tokens())
    assert losses.tolist() == pytest.approx(of_paper(kind, options, wild_tokens()), rel=1e-9, abs=1e-9)


# Of these the gradient is that of the value; gspo's and cispo's have a factor without one, and tests of their own.
@pytest.mark.parametrize(("kind", "options"), [case for case in CASES if case[0] not in ("gspo", "cispo")])
@pytest.mark.parametrize("given", [tokens, wild_tokens])
def test_the_gradient_is_the_difference_quotient(
    kind: str, options: dict[str, float], given: Callable[..., PolicyTokens]
) -> None:
    loss = loss_of(kind, options)
    start = given().logprobs.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda at: loss(given(at))[0], (start,), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS["gspo"])
def test_the_gradient_of_gspo_is_that_of_the_sequence_form(options: dict[str, float]) -> None:
    """Mean over the tokens of each sequence, against the clipped surrogate of its geometric mean."""
    start = tokens().logprobs.detach().requires_grad_()
    given = tokens(start)
    losses, _ = gspo(given, **options)
    pieces = zip(losses.split(LENGTHS), (start - given.old_logprobs).split(LENGTHS), ADVANTAGES, strict=True)
    total, expected = torch.zeros(()), torch.zeros(())
    for piece, logs, advantage in pieces:
        if len(piece):
            total = total + piece.mean()
            ratio = logs.mean().exp()
            bounded = ratio.clamp(1 - options["low"], 1 + options["high"])
            expected = expected - torch.minimum(ratio * advantage, bounded * advantage)
    (gradient,), (wanted,) = torch.autograd.grad(total, start), torch.autograd.grad(expected, start)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("given", [tokens, wild_tokens])
@pytest.mark.parametrize("options", OPTIONS["cispo"])
def test_the_gradient_of_cispo_is_the_difference_quotient_with_its_weight_held(
    given: Callable[..., PolicyTokens], options: dict[str, float]
) -> None:
    """The old policy moves with the new one, so that ratios stay what they are."""
    start = given().logprobs.detach().requires_grad_()
    distance = start.detach() - given().old_logprobs

    def held(at: torch.Tensor) -> torch.Tensor:
        return cispo(given(at)._replace(old_logprobs=at.detach() - distance), **options)[0]

    assert torch.autograd.gradcheck(held, (start,), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_wild_token_gives_a_finite_loss_and_gradient(kind: str, options: dict[str, float]) -> None:
    for new, old in ((-0.1, -500.0), (-500.0, -0.1)):
        logprobs = torch.tensor([new, -1.0], requires_grad=True)
        loss, _ = loss_of(kind, options)(PolicyTokens(logprobs, torch.tensor([old, -1.0]), torch.tensor([-1.0, -1.0]), (2,)))
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()


@policy_loss
def halved(given: PolicyTokens, factor: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    return -factor * given.advantages * given.logprobs, torch.zeros(len(given.logprobs), dtype=torch.bool)


@policy_loss
def summed(given: PolicyTokens) -> tuple[torch.Tensor, torch.Tensor]:
    return given.logprobs.sum(), torch.zeros(1, dtype=torch.bool)


def undecorated(given: PolicyTokens) -> None: ...


def test_a_loss_of_the_user() -> None:
    loss = loss_of("function", {"target": f"{__name__}:halved", "options": {"factor": 0.25}})
    plain, _ = policy_gradient(tokens())
    torch.testing.assert_close(loss(tokens())[0], plain / 4)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("halved", {"half": 1}, "takes no half; nearest: given, factor"),
        ("undecorated", {}, "is not decorated; nearest: @megarl.algorithm.policy_loss above it"),
        ("nowhere", {}, "has no attribute 'nowhere'"),
    ],
)
def test_a_loss_that_does_not_load_is_refused_by_its_key(name: str, options: dict[str, float], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        loss_of("function", {"target": f"{__name__}:{name}", "options": options})
    assert str(caught.value).startswith("algorithm.policy_loss.target = ") and words in str(caught.value)


def test_a_loss_without_one_value_a_token_is_refused() -> None:
    loss = loss_of("function", {"target": f"{__name__}:summed"})
    with pytest.raises(ValueError, match=r"gave losses \(\) .* for \(11,\) tokens"):
        loss(tokens())


BOUNDS: dict[str, list[dict[str, float]]] = {
    "truncate": [{"cap": 1.0}, {"cap": 2.0}],
    "mask": [{"cap": 1.5}, {"cap": 1.2, "floor": 0.5}, {"cap": 2.0, "floor": 0.95}],
    "clip": [{"cap": 1.5}, {"cap": 1.2, "floor": 0.5}, {"cap": 2.0, "floor": 0.95}],
}
LEVELS = ("token", "sequence", "geometric")
SETTINGS = [
    MismatchSection(level=level, correction=name, **bounds)  # type: ignore[arg-type]
    for level in LEVELS for name, each in BOUNDS.items() for bounds in each
]  # fmt: skip


def by_hand(logs: list[float], lengths: tuple[int, ...], section: MismatchSection) -> tuple[list[float], list[bool]]:
    """The corrected weight of each token, and whether the correction changed it, in plain Python."""
    corrected, changed = [], []
    start = 0
    for length in lengths:
        part = logs[start : start + length]
        start += length
        if section.level == "sequence":
            part = [math.fsum(part)] * length
        if section.level == "geometric":
            part = [math.fsum(part) / max(length, 1)] * length
        for log in part:
            weight = math.exp(min(max(log, -20.0), 20.0))
            outside = weight > section.cap or weight < section.floor
            changed.append(outside)
            if section.correction == "mask":
                corrected.append(0.0 if outside else weight)
            else:
                corrected.append(max(min(weight, section.cap), section.floor))
    return corrected, changed


def fp64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("section", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "logs", [[math.log(ratio) for ratio in RATIOS], [25.0, -30.0, 1e-3, 0.2, -25.0, 9.0, -9.5, 0.0, 0.3, -0.4, 0.7]]
)
def test_weights_are_those_of_the_formula(section: MismatchSection, logs: list[float]) -> None:
    behavior = torch.linspace(-3.0, -0.2, len(logs), dtype=torch.float64)
    proximal = (behavior + fp64(logs)).requires_grad_()
    corrected, raw = mismatch_weights(proximal, behavior, LENGTHS, section)
    weights, changed = by_hand((proximal - behavior).tolist(), LENGTHS, section)
    torch.testing.assert_close(corrected, fp64(weights), rtol=1e-12, atol=1e-12)
    assert (corrected != raw).tolist() == changed
    assert not corrected.requires_grad and not raw.requires_grad


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"correction": "truncate", "floor": 0.5}, "truncate has no lower bound"),
        ({"correction": "clip", "floor": 1.0}, "less than 1"),
        ({"correction": "clip", "floor": -0.1}, "greater than or equal to 0"),
        ({"correction": "mask", "cap": 0.9}, "greater than or equal to 1"),
    ],
)
def test_bounds_that_would_change_a_weight_of_one_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        MismatchSection(**settings)


AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")
LONGEST = 9


def test_value_loss_by_hand():
    values = torch.tensor([2.0, 2.0, 1.1, 5e3, -5e3], dtype=torch.float64)
    old = torch.ones(5, dtype=torch.float64)
    returns = torch.tensor([3.0, 0.0, 1.0, 1.0, -5e3], dtype=torch.float64)
    loss, clipped = value_loss(values, old, returns, clip=0.5)
    # held values 1.5, 1.5, 1.1, 1.5, 0.5: errors (1 | 2.25), (4 | 2.25), (0.01 | 0.01), (4999^2 | 0.25), (0 | 5000.5^2)
    assert loss.tolist() == pytest.approx([1.125, 2.0, 0.005, 4999.0**2 / 2, 5000.5**2 / 2], rel=1e-9)
    assert clipped.tolist() == [True, False, False, False, True]


def test_kl_estimators_by_hand():
    # Equal, near and far: reference less policy is 0, -1, 1, -15, 15, -30, 30; k3 takes 20 for the last.
    logprobs = torch.tensor([-0.5, 0.0, -1.0, -0.1, -15.1, -0.1, -30.1], dtype=torch.float64)
    reference = torch.tensor([-0.5, -1.0, 0.0, -15.1, -0.1, -30.1, -0.1], dtype=torch.float64)
    estimates = {estimator: kl(logprobs, reference, estimator).tolist() for estimator in ("k1", "k2", "k3", "absolute")}
    assert estimates["k1"] == pytest.approx([0.0, 1.0, -1.0, 15.0, -15.0, 30.0, -30.0], abs=1e-9)
    assert estimates["k2"] == pytest.approx([0.0, 0.5, 0.5, 112.5, 112.5, 450.0, 450.0], abs=1e-9)
    far = [math.exp(-15) + 14, math.exp(15) - 16, math.exp(-30) + 29, math.exp(20) - 21]
    assert estimates["k3"] == pytest.approx([0.0, math.exp(-1), math.e - 2, *far], rel=1e-9)
    assert estimates["absolute"] == pytest.approx([0.0, 1.0, 1.0, 15.0, 15.0, 30.0, 30.0], abs=1e-9)
    with pytest.raises(ValueError, match="algorithm.kl.estimator is 'k4'"):
        kl(logprobs, reference, "k4")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "absolute"])
def test_the_gradient_of_a_kl_term_is_the_difference_quotient(estimator: str) -> None:
    """Of near and far tokens; the kink of `absolute` is left out."""
    reference = torch.tensor([-1.0, -2.0, -0.5, -9.0, -30.0], dtype=torch.float64)
    start = torch.tensor([-1.2, -1.0, -0.6, -0.1, -2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda at: kl(at, reference, estimator), (start,), eps=1e-7, atol=1e-6)


def test_the_gradient_of_the_value_loss_is_the_difference_quotient() -> None:
    """Within the clip, beyond it on either side, and where the clipped value is the worse one."""
    old, returns = torch.zeros(6, dtype=torch.float64), torch.tensor([1.0, 1.0, -1.0, -1.0, 0.1, 0.4], dtype=torch.float64)
    start = torch.tensor([0.1, 0.9, 0.7, -0.6, 0.3, -0.1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda at: value_loss(at, old, returns, 0.2)[0], (start,), eps=1e-7, atol=1e-6)
    clipped = value_loss(start, old, returns, 0.2)[1]
    assert clipped.any() and not clipped.all()


def test_the_kl_coefficient_follows_the_error_within_a_fifth():
    assert adapted(0.1, measured=0.011, target=0.01, rate=0.5) == pytest.approx(0.1 * 1.05)
    assert adapted(0.1, measured=5.0, target=0.01, rate=0.1) == pytest.approx(0.102)
    assert adapted(0.1, measured=-1.0, target=0.01, rate=0.1) == pytest.approx(0.098)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=16), st.sampled_from(AGGREGATIONS))
def test_an_aggregate_is_the_mean_that_its_name_says(sequences, aggregation):
    """Of valid sequences that have a token; 0 without any."""
    with pytest.raises(ValueError, match="algorithm.aggregation is 'mean'"):
        loss_weights(torch.tensor([1]), torch.tensor([True]), "mean")
    lengths, valid = map(list, zip(*sequences, strict=True))
    generator = torch.Generator().manual_seed(sum(lengths))
    losses = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    weights = loss_weights(torch.tensor(lengths), torch.tensor(valid), aggregation, LONGEST).tolist()
    aggregate = sum(weight * float(loss.sum()) for weight, loss in zip(weights, losses, strict=True))
    counted_losses = [loss for loss, ok in zip(losses, valid, strict=True) if ok and len(loss)]
    if not counted_losses:
        assert aggregate == 0.0
        return
    sums = torch.stack([loss.sum() for loss in counted_losses])
    expected = {
        "token_mean": torch.cat(counted_losses).mean(),
        "sequence_mean": torch.stack([loss.mean() for loss in counted_losses]).mean(),
        "sequence_sum": sums.mean(),
        "fixed_length": (sums / LONGEST).mean(),
    }[aggregation]
    assert aggregate == pytest.approx(float(expected), rel=1e-6, abs=1e-6)
