"""The losses of an update against their formulas written out, and their independence of the cut."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.data.sample import Completion, Sample
from megarl.megatron.batch import Batch, pack
from megarl.megatron.objective import PolicyObjective, ValueObjective, token_weights
from megarl.models.layout import Layout
from megarl.recipe.algorithm_section import AlgorithmSection, EarlyStopSection, KlSection, MismatchSection, ValueLossSection
from megarl.schedule import MicroBatch, MiniBatch

LENGTHS = [(2, 3), (4, 1), (1, 5)]
TOKENS = sum(completion for _, completion in LENGTHS)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    samples = {}
    for index, (prompt, completion) in enumerate(LENGTHS):
        tokens = np.arange(prompt + completion, dtype=np.int32)
        logprobs = np.full(completion, -1.5, np.float32)
        sampled = Completion(tokens[prompt:], logprobs, "stop", np.zeros(completion, np.int64))
        samples[index] = Sample(index, tokens[:prompt], sampled)

    def field(scale):
        return [torch.randn(completion, generator=generator) * scale for _, completion in LENGTHS]

    names = {"logprobs": 0.3, "reference_logprobs": 0.3, "advantages": 1.0, "values": 1.0, "returns": 1.0}
    return Batch(
        prompt_lengths=np.array([prompt for prompt, _ in LENGTHS]),
        completion_lengths=np.array([completion for _, completion in LENGTHS]),
        groups=np.arange(3),
        rewards=np.zeros(3, np.float32),
        valid=np.array([True, False, True]),  # the second one's reward could not be computed
        samples=samples,
        fields={name: field(scale) for name, scale in names.items()},
    )


def _run(objective, batch, outputs, cut):
    """Summed loss of the micro-batches that `cut` makes; outputs are [tokens] in sample order."""
    return sum(loss for loss, _ in _each(objective, batch, outputs, cut))


def _each(objective, batch, outputs, cut):
    starts = np.cumsum([0, *(completion for _, completion in LENGTHS)])
    for samples in cut:
        rows = torch.cat([torch.arange(starts[sample], starts[sample + 1]) for sample in samples])
        tokens = sum(sum(LENGTHS[sample]) for sample in samples)
        micro = pack(batch, MicroBatch(samples, tokens, tokens), torch.device("cpu"), Layout())
        yield objective(micro, {name: values[rows] for name, values in outputs.items()})


CUTS = [[(0, 1, 2)], [(2,), (0, 1)]]
COUNTED = torch.tensor([1.0] * 3 + [0.0] + [1.0] * 5)  # 1 where the sequence is valid
WHOLE = MiniBatch(0, (0, 1, 2), ())


@pytest.mark.parametrize("cut", CUTS)
def test_policy_loss_with_entropy_and_kl_in_the_loss(batch, cut):
    settings = AlgorithmSection(
        advantage="grpo", group_size=2, entropy_coefficient=0.1, kl=KlSection(place="loss", coefficient=0.5, estimator="k3")
    )
    logprobs = torch.linspace(-0.4, 0.4, TOKENS, requires_grad=True)
    entropy = torch.linspace(0.1, 2.0, TOKENS)
    objective = PolicyObjective(settings, batch, token_weights(batch, WHOLE, "token_mean"))
    loss = _run(objective, batch, {"logprobs": logprobs, "entropy": entropy}, cut)
    old, reference, advantages = (torch.cat(batch.fields[name]) for name in ("logprobs", "reference_logprobs", "advantages"))
    ratio = torch.exp(logprobs - old)
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    divergence = torch.exp(reference - logprobs) - 1 - (reference - logprobs)
    expected = ((surrogate - 0.1 * entropy + 0.5 * divergence) * COUNTED).sum() / COUNTED.sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    (wanted,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("cut", CUTS)
def test_without_an_actor_logprob_phase_the_ratio_is_one(batch, cut):
    del batch.fields["logprobs"]
    logprobs = torch.linspace(-0.4, 0.4, TOKENS, requires_grad=True)
    settings = AlgorithmSection(advantage="grpo", group_size=2)
    objective = PolicyObjective(settings, batch, token_weights(batch, WHOLE, "sequence_mean"))
    loss = _run(objective, batch, {"logprobs": logprobs, "entropy": torch.zeros(TOKENS)}, cut)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    # The gradient of REINFORCE: minus advantage, averaged over each of the two valid sequences, then over both.
    shares = torch.cat([torch.full((completion,), 1 / completion / 2) for _, completion in LENGTHS])
    torch.testing.assert_close(gradient, -torch.cat(batch.fields["advantages"]) * shares * COUNTED)


@pytest.mark.parametrize("cut", CUTS)
def test_value_loss_is_the_clipped_half_square(batch, cut):
    settings = AlgorithmSection(advantage="gae", group_size=1, value_loss=ValueLossSection(clip=0.2))
    values = torch.linspace(-1, 1, TOKENS)
    loss = _run(ValueObjective(settings, batch, token_weights(batch, WHOLE, "token_mean")), batch, {"values": values}, cut)
    old, returns = torch.cat(batch.fields["values"]), torch.cat(batch.fields["returns"])
    held = old + (values - old).clamp(-0.2, 0.2)
    errors = 0.5 * torch.maximum((values - returns) ** 2, (held - returns) ** 2)
    assert loss.item() == pytest.approx(((errors * COUNTED).sum() / COUNTED.sum()).item(), rel=1e-5)


def decoupled(new, old, behavior, advantages, lengths, mismatch):
    """The decoupled clipped objective of one batch, token by token, in fp64: [tokens]."""
    losses = []
    parts = zip(*(values.split(lengths) for values in (new, old, behavior, advantages)), strict=True)
    for current, proximal, sampled, advantage in parts:
        logs = proximal - sampled
        if mismatch.level != "token":
            logs = torch.full_like(logs, logs.mean() if mismatch.level == "geometric" else logs.sum())
        for t, weight in enumerate(logs.exp().tolist()):
            outside = not mismatch.floor <= weight <= mismatch.cap
            bounded = 0.0 if mismatch.correction == "mask" and outside else min(max(weight, mismatch.floor), mismatch.cap)
            ratio = torch.exp(current[t] - proximal[t])
            surrogate = torch.minimum(ratio * advantage[t], ratio.clamp(0.8, 1.2) * advantage[t])
            losses.append(-bounded * surrogate)
    return torch.stack(losses)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("correction", "floor"), [("truncate", 0.0), ("mask", 0.4), ("clip", 0.4), ("clip", 0.0)])
def test_under_staleness_the_gradient_is_that_of_the_decoupled_objective(batch, cut, level, correction, floor):
    """The ratio is new over proximal, and the weight proximal over behavior."""
    mismatch = MismatchSection(correction=correction, level=level, cap=1.3, floor=floor)
    settings = AlgorithmSection(advantage="grpo", group_size=2, mismatch=mismatch)
    generator = torch.Generator().manual_seed(5)
    rollout = torch.cat(batch.fields["logprobs"]) + 0.6 * torch.randn(TOKENS, generator=generator)
    batch = sampled_by(batch, rollout, [[3, 3, 4], [4], [2, 2, 3, 4, 4]], version=4, max_staleness=2)
    logprobs = (torch.cat(batch.fields["logprobs"]) + 0.4 * torch.randn(TOKENS, generator=generator)).requires_grad_()
    objective = PolicyObjective(settings, batch, token_weights(batch, WHOLE, "token_mean"))
    loss = _run(objective, batch, {"logprobs": logprobs, "entropy": torch.zeros(TOKENS)}, cut)
    proximal, advantages = (torch.cat(batch.fields[name]).double() for name in ("logprobs", "advantages"))
    lengths = [completion for _, completion in LENGTHS]
    losses = decoupled(logprobs.double(), proximal, rollout.double(), advantages, lengths, mismatch)
    expected = (losses * COUNTED).sum() / COUNTED.sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    (wanted,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)
    assert gradient.any()


def sampled_by(batch, rollout, versions, **more):
    """The batch with the engine's log-probabilities [tokens], the weight version of each token, and further fields."""
    parts = rollout.split([completion for _, completion in LENGTHS])
    for index, (logprobs, given) in enumerate(zip(parts, versions, strict=True)):
        sample = batch.samples[index]
        completion = replace(sample.completion, logprobs=logprobs.numpy(), versions=np.array(given))
        batch.samples[index] = replace(sample, completion=completion)
    return replace(batch, **more)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("cut", CUTS)
def test_figures_are_of_the_tokens_that_count(batch, cut, estimator):
    """A masked sequence is in no figure and does not steer: what `algorithm.kl.adaptive` and `early_stop` follow is of the
    others alone. Schulman's estimators with the tokens of the old policy: d = log(new) - log(old), k1 = -d,
    k3 = exp(d) - 1 - d."""
    settings = AlgorithmSection(
        advantage="grpo", group_size=2, kl=KlSection(place="loss", coefficient=0.5, estimator="absolute"),
        early_stop=EarlyStopSection(target_kl=0.1, estimator=estimator),
    )  # fmt: skip
    objective = PolicyObjective(settings, batch, token_weights(batch, WHOLE, "token_mean"))
    logprobs, entropy = torch.linspace(-0.4, 0.9, TOKENS), torch.linspace(0.1, 2.0, TOKENS)

    def metrics() -> dict[str, float]:
        each = [sums for _, sums in _each(objective, batch, {"logprobs": logprobs, "entropy": entropy}, cut)]
        columns = {name: [sums[name].item() for sums in each] for name in each[0]}
        return {name: max(column) if name.endswith("_max") else sum(column) for name, column in columns.items()}

    before = metrics()
    old, reference = (torch.cat(batch.fields[name]) for name in ("logprobs", "reference_logprobs"))
    d = logprobs - old
    k3 = d.exp() - 1 - d
    for name, values in (
        ("tokens", torch.ones(TOKENS)), ("entropy_sum", entropy), ("kl_sum", (reference - logprobs).abs()),
        ("drift_sum", k3), ("moved_kl_sum", {"k1": -d, "k3": k3}[estimator]), ("ratio_drift_sum", d.expm1().abs()),
        ("mismatch_sum", (old + 1.5).abs()),
    ):  # fmt: skip
        assert before[name] == pytest.approx((values * COUNTED).sum().item(), rel=1e-5), name
    for name, values in (("ratio_drift_max", d.expm1().abs()), ("mismatch_max", (old + 1.5).abs())):
        assert before[name] == pytest.approx((values * COUNTED).max().item(), rel=1e-5), name
    (masked,) = torch.nonzero(COUNTED == 0).flatten().tolist()
    logprobs[masked], entropy[masked] = -9.0, 7.0
    assert metrics() == pytest.approx(before, rel=1e-6), "whatever its numbers are"
