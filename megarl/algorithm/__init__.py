"""Advantages, losses and KL estimators: pure functions of tensors, each with its formula's source."""

from megarl.algorithm.advantage import gae, group_advantages, token_rewards, whiten
from megarl.algorithm.estimate import advantage
from megarl.algorithm.loss import kl, loss_weights, value_loss
from megarl.algorithm.policy import PolicyTokens, policy_loss

__all__ = [
    "PolicyTokens",
    "advantage",
    "gae",
    "group_advantages",
    "kl",
    "loss_weights",
    "policy_loss",
    "token_rewards",
    "value_loss",
    "whiten",
]
