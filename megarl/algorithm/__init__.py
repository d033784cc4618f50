"""Advantages, losses and KL estimators: pure functions of tensors, each with its formula's source."""

from megarl.algorithm.advantage import gae, grpo_advantages, token_rewards, whiten
from megarl.algorithm.kl import kl
from megarl.algorithm.loss import loss_weights, policy_loss, value_loss

__all__ = [
    "gae",
    "grpo_advantages",
    "kl",
    "loss_weights",
    "policy_loss",
    "token_rewards",
    "value_loss",
    "whiten",
]
