"""`algorithm`: advantages, losses and KL. Formulas and sources: docs/algorithms.md and `megarl/algorithm/`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from megarl.recipe.section import Above, Below, BrokenRules, Positive, Section, Share, Target, Weight
from megarl.recipe.violation import GIVEN, MISSING, Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


Advantage = Literal[
    "gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "none",
    "supervised", "dpo", "bradley_terry",
]  # fmt: skip


# Advantages that compare the completions of a prompt with each other.
OF_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
# Advantages that differ between the tokens of a sequence.
OF_TOKENS = ("gae", "reinforce_plus_plus", "remax")


class ClipLossSection(Section):
    kind: Literal["clip"]
    """PPO's clipped surrogate."""
    low: Below = 0.2
    """The ratio is clipped below at 1 - low."""
    high: Above = 0.2
    """The ratio is clipped above at 1 + high."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """With a negative advantage A the loss of a token is at most -dual * A (dual clip); null for no such bound."""


class GspoLossSection(Section):
    kind: Literal["gspo"]
    """One ratio a sequence: the geometric mean of its tokens' ratios."""
    low: Below = 3e-4
    """The sequence's ratio is clipped below at 1 - low."""
    high: Above = 4e-4
    """The sequence's ratio is clipped above at 1 + high."""


class CispoLossSection(Section):
    kind: Literal["cispo"]
    """The policy gradient, each token weighted by its clipped ratio: no token loses its gradient."""
    low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The weight is clipped below at 1 - low; 1 does not clip."""
    high: Above = 0.3
    """The weight is clipped above at 1 + high."""


class GmpoLossSection(Section):
    kind: Literal["gmpo"]
    """The geometric mean of the tokens' clipped ratios."""
    low: Above = 0.4
    """The logarithm of a token's ratio is clipped below at -low."""
    high: Above = 0.4
    """The logarithm of a token's ratio is clipped above at high."""


class SapoLossSection(Section):
    kind: Literal["sapo"]
    """A smooth gate instead of a clip."""
    positive_temperature: Above = 1.0
    """Steepness of the gate for positive advantages."""
    negative_temperature: Above = 1.05
    """Steepness of the gate for other advantages."""


class PolicyGradientLossSection(Section):
    kind: Literal["policy_gradient"]
    """REINFORCE: no ratio, nothing clipped."""


class FunctionLossSection(Section):
    kind: Literal["function"]
    """Your function, decorated with `megarl.algorithm.policy_loss`."""
    target: Target
    """`module:function`, importable on every rank."""
    options: dict[str, Any] = {}
    """Its keyword arguments."""


PolicyLossSection = Annotated[
    ClipLossSection
    | GspoLossSection
    | CispoLossSection
    | GmpoLossSection
    | SapoLossSection
    | PolicyGradientLossSection
    | FunctionLossSection,
    Field(discriminator="kind"),
]


class AdaptiveKlSection(Section):
    target: Above
    """Target of the mean KL of a token, by `estimator`."""
    rate: Share = 0.1
    """A step multiplies the coefficient by 1 + rate * e, where e is the relative error, clipped to +-0.2."""


class KlSection(Section):
    place: Literal["loss", "reward"]
    """Add the KL term to the loss, or subtract it from the reward of each token."""
    coefficient: Weight
    """Factor of the KL term; with `adaptive` its first value."""
    estimator: Literal["k1", "k2", "k3", "absolute"]
    """Estimator of the KL divergence from the reference, by Schulman's names, or the absolute difference."""
    adaptive: AdaptiveKlSection | None = None
    """Adapt the coefficient to a target KL; null for a fixed coefficient."""

    def broken_rules(self) -> BrokenRules:
        if self.adaptive is not None and self.coefficient == 0:
            rule = "multiplies algorithm.kl.coefficient, which is 0 and stays 0"
            yield "adaptive", rule, "algorithm.kl.coefficient: 0.001"


class DistillationSection(Section):
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon"] = "reverse_kl"
    """Of the policy p and the teacher q: `reverse_kl` KL(p || q), `forward_kl` KL(q || p), or `jensen_shannon`, that of both
    from their mixture."""
    over: Literal["sampled", "top_k", "vocabulary"] = "sampled"
    """At each position: `sampled` estimates the reverse KL from the sampled token; `top_k` compares the teacher's `top_k`
    likeliest tokens, and the rest as one; `vocabulary` compares all tokens."""
    place: Literal["advantage", "loss"]
    """Subtract the divergence from the advantage of each token, or add it to the loss; with `over: sampled` that is half the
    squared difference of the log-probabilities, whose expected gradient is that of the divergence."""
    coefficient: Above = 1.0
    """Factor of the divergence."""
    top_k: Positive | None = None
    """With `over: top_k`, how many of the teacher's tokens are compared."""
    mixture: Below = 0.5
    """With `jensen_shannon`, the teacher's share of the mixture."""
    data_share: Share = 0.0
    """The share of prompts, drawn by `run.seed`, whose completions are not sampled: each is the row's own answer
    (`data.prompts.answer_field`). With `over: top_k` or `vocabulary` only."""

    route: Annotated[str, Field(min_length=1)] | None = None
    """With several teachers, the field of a data row that names the teacher of its completions; null draws a teacher for
    each prompt, by `teachers.NAME.weight`."""

    def broken_rules(self) -> BrokenRules:
        if self.data_share and self.over == "sampled":
            rule = "the policy has not sampled the data's tokens, which estimate nothing"
            yield "data_share", rule, "0, or over: top_k"
        if self.over == "sampled" and self.divergence != "reverse_kl":
            yield "", "the policy's own tokens estimate the reverse KL alone", "divergence: reverse_kl, or over: top_k"
        if self.over != "sampled" and self.place == "advantage":
            yield "", "a divergence over several tokens is no advantage of one", "place: loss, or over: sampled"
        if (self.top_k is None) == (self.over == "top_k"):
            needs = self.top_k is None
            yield "", "needs top_k" if needs else "nothing reads top_k here", "top_k: 64" if needs else "remove top_k"
        if self.mixture != 0.5 and self.divergence != "jensen_shannon":
            yield "", "nothing reads mixture here", "remove mixture"


class GroupSection(Section):
    deviation: bool = True
    """Divide by the deviation of the group's rewards."""
    leave_one_out: bool = False
    """Compare with the mean of the other completions of the group, not of all."""


class GaeSection(Section):
    discount: Share = 1.0
    """Discount of later rewards (gamma)."""
    smoothing: Share = 0.95
    """Bias-variance trade-off (lambda)."""
    whiten: bool = True
    """Whiten advantages over all completion tokens of the step."""


class ValueLossSection(Section):
    clip: Above = 0.2
    """New values are clipped to this distance from the old ones."""


class OverlongSection(Section):
    mask: bool = False
    """Leave completions that reached rollout.max_new_tokens out of the update."""
    buffer: Annotated[int, Field(ge=0)] = 0
    """The penalty grows to its full size over this many tokens below rollout.max_new_tokens; 0 for no penalty."""
    penalty: Above = 1.0
    """Penalty of a completion of rollout.max_new_tokens."""

    def broken_rules(self) -> BrokenRules:
        if not self.buffer and not self.mask:
            yield "", "neither masks nor penalises anything", "mask: true, or a buffer above 0"


class DynamicSamplingSection(Section):
    max_rounds: Annotated[int, Field(ge=2)] = 10
    """Most rounds of `phases.rollout.prompts` prompts in which a step collects that many groups whose rewards differ; then
    groups of equal rewards fill the batch."""


class EarlyStopSection(Section):
    target_kl: Above
    """Skip a step's remaining mini-batches once the mean KL of a token from the policy before the step exceeds this."""
    estimator: Literal["k1", "k3"] = "k3"
    """Estimator of that KL, by Schulman's names."""


class MismatchSection(Section):
    correction: Literal["truncate", "mask", "clip"]
    """Weight tokens by the trainer's probability before the step's first update over the engine's: `truncate` at most by
    `cap`, `clip` within `floor` and `cap`; `mask` leaves out tokens whose weight is below `floor` or above `cap`."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """One weight a token, or one a sequence: the product of its tokens' weights, or their geometric mean."""
    cap: Annotated[float, Field(ge=1)] = 2.0
    """The largest weight."""
    floor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The smallest weight; 0 for no such bound."""

    def broken_rules(self) -> BrokenRules:
        if self.floor and self.correction == "truncate":
            yield "floor", "algorithm.mismatch.correction = truncate has no lower bound", "0, or correction: clip or mask"


class DpoSection(Section):
    beta: Above = 0.1
    """How strongly the policy is held near the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The assumed share of pairs whose labels are exchanged (conservative DPO)."""


class AlgorithmSection(Section):
    advantage: Annotated[
        Annotated[Advantage, Tag("name")] | Annotated[Target, Tag("target")],
        Discriminator(lambda value: "target" if isinstance(value, str) and ":" in value else "name"),
    ]
    """How much better than expected a token was. `gae` needs a critic; `grpo`, `dr_grpo`, `rloo` and
    `reinforce_plus_plus_baseline` compare the completions of a prompt; `remax` compares each with one extra greedy
    completion a prompt; `none` learns from no reward, only from `distillation`; `module:function` is yours, decorated with
    `megarl.algorithm.advantage`. `supervised`, `dpo` and `bradley_terry` are those of `run.kind: sft`, `dpo` and
    `reward_model`."""
    group_size: Positive
    """Completions of one prompt."""
    group: GroupSection | None = None
    """How a group is compared; with `advantage: grpo` only."""
    policy_loss: PolicyLossSection = ClipLossSection(kind="clip")
    """How the policy ratio enters the loss."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"] = "token_mean"
    """The loss of a mini-batch: the mean over tokens; the mean over rollouts of their means, or of their sums; or the sum
    over tokens divided by rollouts times rollout.max_new_tokens (in episodes the most tokens of all turns). A rollout counts
    as one sequence, however many segments it has."""
    entropy_coefficient: Weight = 0.0
    """Factor of the entropy bonus."""
    kl: KlSection | None = None
    """The KL term against the reference; null for none, and no reference runs."""
    distillation: DistillationSection | None = None
    """Learn from `teachers` on the policy's own completions; null for none, and no teacher runs."""
    gae: GaeSection | None = None
    """Generalized advantage estimation; with `advantage: gae` only."""
    value_loss: ValueLossSection | None = None
    """The critic's loss; with `advantage: gae` only."""
    dpo: DpoSection | None = None
    """Direct preference optimization; with `advantage: dpo` only."""
    overlong: OverlongSection | None = None
    """Mask or penalise completions at the length limit; null does neither."""
    dynamic_sampling: DynamicSamplingSection | None = None
    """Replace prompts whose completions all have the same reward; null trains on all."""
    early_stop: EarlyStopSection | None = None
    """End the actor's updates of a step once the policy has moved far; null runs all updates."""
    mismatch: MismatchSection | None = None
    """Correct the difference between the engine's and the trainer's probabilities by importance sampling; null does not.
    Required with `rollout.max_staleness` above 0, where older weights than the trainer's sample."""
    max_ratio_drift: Above = 0.1
    """Before the first update of a step every policy ratio should be 1. Warn when one is further off than this:
    `actor_logprob` and `actor_update` have different micro-batches, whose kernels may round differently."""

    @property
    def has_rollout_terms(self) -> bool:
        """Whether the loss of a token depends on its whole rollout, whose segments then run in one micro-batch."""
        of_rollouts = self.mismatch is not None and self.mismatch.level != "token"
        return of_rollouts or self.policy_loss.kind in ("gspo", "gmpo", "function")

    @property
    def has_policy_loss(self) -> bool:
        """Whether the policy loss teaches anything: not where a divergence in the loss is all that is learned from."""
        return self.advantage != "none" or self.distillation is None or self.distillation.place == "advantage"


def algorithm_rules(recipe: Recipe) -> Violations:
    """Advantages, losses and corrections that do not work together, or lack what they read."""
    algorithm = recipe.algorithm
    yield from _advantage_rules(recipe)
    if algorithm.policy_loss.kind == "gmpo":
        # A geometric mean has one advantage and one weight a sequence; its tokens share one loss.
        if algorithm.mismatch is not None and algorithm.mismatch.level == "token":
            rule = "weights each token's loss, and with algorithm.policy_loss.kind = gmpo each is the whole sequence's"
            yield Violation("algorithm.mismatch.level", "token", rule, "sequence or geometric")
        taught = algorithm.distillation is not None and algorithm.distillation.place == "advantage"
        if taught or algorithm.advantage in OF_TOKENS:
            key, value = ("distillation.place", "advantage") if taught else ("advantage", algorithm.advantage)
            rule = f"has one advantage a sequence; algorithm.{key} = {value} gives each token its own"
            yield Violation("algorithm.policy_loss.kind", "gmpo", rule, "gspo, which takes those")
    yield from _distillation_rules(recipe)
    staleness = 0 if recipe.run.is_supervised else recipe.rollout.max_staleness
    if staleness and algorithm.mismatch is None and algorithm.has_policy_loss:
        rule = f"required with rollout.max_staleness = {staleness}: older weights than the trainer's sample the tokens"
        level = ", level: sequence" if algorithm.policy_loss.kind == "gmpo" else ""
        nearest = f"mismatch: {{correction: truncate{level}}}, or rollout.max_staleness: 0"
        yield Violation("algorithm.mismatch", MISSING, rule, nearest)
    if (section := algorithm.overlong) is not None:
        longest, episodes = recipe.max_own_tokens, recipe.environment
        if section.buffer > longest:
            key = "rollout.max_new_tokens" if episodes is None else "what the turns of an episode may have"
            rule = f"must not exceed {key} = {longest}"
            yield Violation("algorithm.overlong.buffer", section.buffer, rule, str(longest))
        if section.buffer and episodes is not None and episodes.max_episode_tokens is not None:
            rule = (
                f"penalises the last tokens before {longest} of the policy's own, which an episode may never have where "
                f"environment.max_episode_tokens = {episodes.max_episode_tokens} counts observations, too"
            )
            nearest = "0, or environment.max_episode_tokens: null" if episodes.kind == "class" else "0"
            yield Violation("algorithm.overlong.buffer", section.buffer, rule, nearest)
    updates = recipe.updates_per_batch
    if algorithm.early_stop is not None and updates < 3:
        # A mini-batch measures the KL of the policy that it updates: 0 at the first update of a step.
        rule = f"of {updates} update{'s' if updates > 1 else ''} a step none can be skipped: the KL is 0 up to the second"
        nearest = "a smaller phases.actor_update.mini_batch, more epochs, or remove algorithm.early_stop"
        yield Violation("algorithm.early_stop", GIVEN, rule, nearest)
    if algorithm.dynamic_sampling is not None:
        yield from _dynamic_sampling_rules(recipe)


def _advantage_rules(recipe: Recipe) -> Violations:
    """GAE needs a critic and its settings, which other advantages do not read; groups need two completions."""
    algorithm = recipe.algorithm
    if algorithm.advantage in OF_GROUPS and algorithm.group_size < 2:
        rule = f"{algorithm.advantage} compares at least two completions of a prompt"
        yield Violation("algorithm.group_size", algorithm.group_size, rule, "2")
    if algorithm.group is not None and algorithm.advantage != "grpo":
        rule = f"says how grpo compares, and algorithm.advantage is {algorithm.advantage}"
        yield Violation("algorithm.group", GIVEN, rule, "remove algorithm.group")
    if algorithm.advantage == "remax" and recipe.reward_model is not None:
        rule = "the reward model scores what is trained on, and the greedy completions of remax are not"
        yield Violation("algorithm.advantage", "remax", rule, "rloo, or remove reward_model and its part of reward")
    of_gae = {
        "critic": (recipe.critic, "critic: {optimizer: {lr: 1.0e-5}}"),
        "algorithm.gae": (algorithm.gae, "gae: {discount: 1.0, smoothing: 0.95}"),
        "algorithm.value_loss": (algorithm.value_loss, "value_loss: {clip: 0.2}"),
    }
    for key, (section, example) in of_gae.items():
        if section is not None and algorithm.advantage != "gae":
            yield Violation(key, GIVEN, "needs algorithm.advantage: gae (PPO)", f"remove {key}, or algorithm.advantage: gae")
        if section is None and algorithm.advantage == "gae":
            yield Violation(key, MISSING, "required with algorithm.advantage: gae (PPO)", example)


def _distillation_rules(recipe: Recipe) -> Violations:
    """Runs without rewards have a teacher, and nothing that would only change rewards."""
    algorithm, key = recipe.algorithm, "algorithm.advantage"
    distillation, advantage = algorithm.distillation, algorithm.advantage
    if distillation is not None and distillation.data_share:
        refused = {
            f"the policy loss of algorithm.advantage = {advantage} is of what the policy sampled": advantage != "none",
            "algorithm.kl is estimated from what the policy sampled": algorithm.kl is not None,
            "algorithm.early_stop is estimated from what the policy sampled": algorithm.early_stop is not None,
            "data.curriculum reads pass rates off what the policy sampled": recipe.data.curriculum is not None,
            "the turns of an environment are no answer of the data": recipe.environment is not None,
            "a prompt of token ids has no answer of tokens (data.prompt_format)": recipe.data.prompt_format == "token_ids",
        }
        for rule in (rule for rule, holds in refused.items() if holds):
            yield Violation("algorithm.distillation.data_share", distillation.data_share, rule, "0")
    if advantage != "none":
        return
    if distillation is None:
        yield Violation(key, "none", "without algorithm.distillation nothing is learned", "grpo, or add distillation")
    unread = {
        "algorithm.mismatch": algorithm.mismatch is not None and not algorithm.has_policy_loss,
        "algorithm.policy_loss": algorithm.policy_loss != ClipLossSection(kind="clip") and not algorithm.has_policy_loss,
        "algorithm.kl.place": algorithm.kl is not None and algorithm.kl.place == "reward",
        "algorithm.overlong.buffer": algorithm.overlong is not None and algorithm.overlong.buffer > 0,
        "reward_model": recipe.reward_model is not None,
    }
    ways_out = {"algorithm.kl.place": "algorithm.kl.place: loss, or remove algorithm.kl"}
    if algorithm.overlong is not None and not algorithm.overlong.mask:  # without its buffer the section would do nothing
        ways_out["algorithm.overlong.buffer"] = "remove algorithm.overlong"
    for other, holds in unread.items():
        if holds:
            way_out = ways_out.get(other, f"remove {other}")
            yield Violation(key, "none", f"learns from no reward, and nothing reads {other}", way_out)


def _dynamic_sampling_rules(recipe: Recipe) -> Violations:
    """Dynamic sampling needs groups that are compared, and rewards in time."""
    algorithm, key = recipe.algorithm, "algorithm.dynamic_sampling"
    if algorithm.advantage not in OF_GROUPS and ":" not in algorithm.advantage:
        rule = f"replaces groups of equal rewards, and algorithm.advantage = {algorithm.advantage} compares no groups"
        yield Violation(key, GIVEN, rule, f"one of {', '.join(OF_GROUPS)}, or remove {key}")
    elif ":" in algorithm.advantage and algorithm.group_size < 2:
        rule = f"{key} looks for groups whose rewards differ"
        yield Violation("algorithm.group_size", algorithm.group_size, rule, "2")
    if recipe.reward_model is not None:
        rule = "judges groups after each round of rewards, and the reward model scores once, when the batch is complete"
        yield Violation(key, GIVEN, rule, f"remove {key}, or reward_model and its part of reward")
    if recipe.rollout.replay is not None:
        rule = "takes further prompts, and rollout.replay has the completions of a fixed batch a step"
        yield Violation(key, GIVEN, rule, f"remove {key}, or rollout.replay")
    if recipe.run.dump_rollouts:
        rule = f"writes rollouts for rollout.replay, which cannot stand in for the rounds of {key}"
        yield Violation("run.dump_rollouts", True, rule, "false; telemetry.samples_per_step keeps completions to look at")
