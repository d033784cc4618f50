"""Rules on advantages, losses and their corrections; `rules.py` runs them with its own."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.recipe.algorithm_sections import OF_GROUPS, OF_TOKENS
from megarl.recipe.recipe import Recipe
from megarl.recipe.violation import GIVEN, MISSING, Violation

Violations = Iterator[Violation]


def advantage(recipe: Recipe) -> Violations:
    """GAE needs a critic and its settings, which others do not read; a group has two members or more."""
    algorithm = recipe.algorithm
    if algorithm.advantage in OF_GROUPS and algorithm.group_size < 2:
        rule = f"{algorithm.advantage} compares at least two completions of a prompt"
        yield Violation("algorithm.group_size", algorithm.group_size, rule, "2")
    if algorithm.group is not None and algorithm.advantage != "grpo":
        rule = f"says how grpo compares, and algorithm.advantage is {algorithm.advantage}"
        yield Violation("algorithm.group", GIVEN, rule, "remove algorithm.group")
    if recipe.critic is not None and algorithm.advantage != "gae":
        yield _gae_only("critic", "a critic")
    if recipe.critic is None and algorithm.advantage == "gae":
        yield _with_gae("critic", "critic: {optimizer: {lr: 1.0e-5}}")


def gae_section(recipe: Recipe) -> Violations:
    if recipe.algorithm.gae is not None and recipe.algorithm.advantage != "gae":
        yield _gae_only("algorithm.gae", "gae settings")
    if recipe.algorithm.gae is None and recipe.algorithm.advantage == "gae":
        yield _with_gae("algorithm.gae", "gae: {discount: 1.0, smoothing: 0.95}")


def value_loss(recipe: Recipe) -> Violations:
    if recipe.algorithm.value_loss is not None and recipe.algorithm.advantage != "gae":
        yield _gae_only("algorithm.value_loss", "a value loss")
    if recipe.algorithm.value_loss is None and recipe.algorithm.advantage == "gae":
        yield _with_gae("algorithm.value_loss", "value_loss: {clip: 0.2}")


def _gae_only(key: str, what: str) -> Violation:
    return Violation(
        key,
        GIVEN,
        f"{what} needs algorithm.advantage: gae (PPO)",
        f"remove {key}, or algorithm.advantage: gae",
    )


def _with_gae(key: str, example: str) -> Violation:
    return Violation(key, MISSING, "required with algorithm.advantage: gae (PPO)", example)


def policy_loss(recipe: Recipe) -> Violations:
    """A geometric mean has one advantage and one weight a sequence: its tokens' losses are copies of one value."""
    algorithm = recipe.algorithm
    if algorithm.policy_loss.kind != "gmpo":
        return
    if algorithm.mismatch is not None and algorithm.mismatch.level == "token":
        rule = "weighs each token's loss, and of algorithm.policy_loss.kind = gmpo each is the whole sequence's"
        yield Violation("algorithm.mismatch.level", "token", rule, "sequence")
    if algorithm.advantage in OF_TOKENS:
        rule = f"has one advantage a sequence, and algorithm.advantage = {algorithm.advantage} gives each token its own"
        yield Violation("algorithm.policy_loss.kind", "gmpo", rule, "gspo, which takes those")


def adaptive_kl(recipe: Recipe) -> Violations:
    """A coefficient of 0 stays 0, whatever it is multiplied by."""
    kl = recipe.algorithm.kl
    if kl is not None and kl.adaptive is not None and kl.coefficient == 0:
        rule = "algorithm.kl.adaptive multiplies it, and 0 stays 0"
        yield Violation("algorithm.kl.coefficient", kl.coefficient, rule, "0.001")


def overlong(recipe: Recipe) -> Violations:
    """The penalty grows over a part of the completion."""
    section, longest = recipe.algorithm.overlong, recipe.max_own_tokens
    if section is None:
        return
    if section.buffer > longest:
        key = "rollout.max_new_tokens" if recipe.environment is None else "what the turns of an episode may have"
        rule = f"must not exceed {key} = {longest}"
        yield Violation("algorithm.overlong.buffer", section.buffer, rule, str(longest))
    turns = recipe.environment
    if section.buffer and turns is not None and turns.max_episode_tokens is not None:
        rule = (
            f"penalises the last tokens before {longest} of the policy's own, which an episode may never have where "
            f"environment.max_episode_tokens = {turns.max_episode_tokens} counts observations, too"
        )
        yield Violation("algorithm.overlong.buffer", section.buffer, rule, "0, or environment.max_episode_tokens: null")
    if not section.buffer and not section.mask:
        rule = "neither masks nor penalises anything"
        yield Violation("algorithm.overlong", GIVEN, rule, f"mask: true, or buffer: {max(1, longest // 4)}")


def dynamic_sampling(recipe: Recipe) -> Violations:
    """What makes a group informative is known behind the reward phase, and only where groups are compared."""
    algorithm, key = recipe.algorithm, "algorithm.dynamic_sampling"
    if algorithm.dynamic_sampling is None:
        return
    if algorithm.advantage not in OF_GROUPS and ":" not in algorithm.advantage:
        rule = f"replaces groups of equal rewards, and algorithm.advantage = {algorithm.advantage} compares no groups"
        yield Violation(key, GIVEN, rule, f"one of {', '.join(OF_GROUPS)}, or remove {key}")
    elif algorithm.group_size < 2:
        rule = f"{key} looks for groups whose rewards differ"
        yield Violation("algorithm.group_size", algorithm.group_size, rule, "2")
    if recipe.reward_model is not None:
        rule = "judges groups behind each round of rewards, and the reward model scores once, when the batch is complete"
        yield Violation(key, GIVEN, rule, f"remove {key}, or reward_model and its part of reward")
    if recipe.rollout.replay is not None:
        rule = "takes further prompts, and rollout.replay has the completions of a fixed batch a step"
        yield Violation(key, GIVEN, rule, f"remove {key}, or rollout.replay")
    if recipe.run.dump_rollouts:
        rule = f"writes rollouts for rollout.replay, which cannot stand in for the rounds of {key}"
        yield Violation("run.dump_rollouts", True, rule, "false; telemetry.samples_per_step keeps completions to look at")


def remax(recipe: Recipe) -> Violations:
    """The greedy completions are scored in the reward phase, and no engine phase sees them."""
    if recipe.algorithm.advantage == "remax" and recipe.reward_model is not None:
        rule = "the reward model scores what is trained on, and the greedy completions of remax are not"
        yield Violation("algorithm.advantage", "remax", rule, "rloo, or remove reward_model and its part of reward")


def early_stop(recipe: Recipe) -> Violations:
    """A mini-batch's KL is that of the policy that it updates: it is 0 before the first update of a step."""
    updates = recipe.updates_per_batch
    if recipe.algorithm.early_stop is not None and updates < 3:
        rule = f"of {updates} update{'s' if updates > 1 else ''} a step none can be skipped: the KL is 0 up to the second"
        nearest = "a smaller phases.actor_update.mini_batch, more epochs, or remove algorithm.early_stop"
        yield Violation("algorithm.early_stop", GIVEN, rule, nearest)


def critic_warmup(recipe: Recipe) -> Violations:
    """Some steps are left for the actor, and for its learning rate's warm-up."""
    warmup, steps = recipe.critic_warmup_steps, recipe.run.steps
    if warmup >= steps:
        rule = f"the actor would never be updated: must be below run.steps = {steps}"
        yield Violation("critic.warmup_steps", warmup, rule, str(steps - 1))


def reference_refresh(recipe: Recipe) -> Violations:
    """Each rank copies its own shards, so that both roles hold the same ones."""
    every, key = recipe.refresh_every, "reference.refresh_every"
    if every is None:
        return
    remove = f"remove {key}"
    if recipe.actor.lora is not None:
        rule = "with actor.lora the model's weights stay as they are, and there is nothing to take"
        yield Violation(key, every, rule, f"{remove}, or actor.lora")
    if recipe.path("reference") != recipe.model.path:
        rule = f"takes the weights of model.path = {recipe.model.path}, and reference.path is another model"
        yield Violation(key, every, rule, f"{remove}, or reference.path")
    if recipe.layout_section("reference") != recipe.actor.layout:
        rule = "each rank copies its own shards, and reference.layout cuts the model otherwise than actor.layout"
        yield Violation(key, every, rule, f"{remove}, or reference.layout")
    if every > recipe.run.steps:
        yield Violation(key, every, f"never comes: run.steps = {recipe.run.steps}", str(recipe.run.steps))


def learning_rate(recipe: Recipe) -> Violations:
    """A constant learning rate ends where it begins."""
    for role, owner in (("actor", recipe.actor), ("critic", recipe.critic)):
        if owner is not None and owner.optimizer.min_lr_share and owner.optimizer.decay == "constant":
            rule = f"is where a decay ends, and {role}.optimizer.decay is constant"
            key = f"{role}.optimizer.min_lr_share"
            yield Violation(key, owner.optimizer.min_lr_share, rule, f"decay: cosine, or remove {key}")
