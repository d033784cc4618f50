"""Advantages, losses and KL estimators: pure functions of tensors, each with its formula's source."""

from megarl.algorithm.estimate import advantage
from megarl.algorithm.policy import PolicyTokens, policy_loss

__all__ = ["PolicyTokens", "advantage", "policy_loss"]
