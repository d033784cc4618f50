"""Every policy loss against its paper's formula written out sequence by sequence, and its gradient against differences."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from megarl.algorithm import PolicyTokens, policy_loss
from megarl.algorithm.policy import Loss, cispo, gspo, load_policy_loss, policy_gradient
from megarl.recipe import RecipeError
from megarl.recipe.algorithm_section import PolicyLossSection
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
    (found,), (wanted,) = torch.autograd.grad(total, start), torch.autograd.grad(expected, start)
    torch.testing.assert_close(found, wanted)


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
