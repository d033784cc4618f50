"""An advantage and a policy loss as a user writes them."""

import torch

from megarl.algorithm import PolicyTokens, advantage, policy_loss


@advantage
def centred(rewards: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Against the mean of the whole batch."""
    return rewards - rewards[valid].mean()


@policy_loss
def bounded(tokens: PolicyTokens, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy gradient, for tokens whose probability has moved by less than a factor of exp(bound)."""
    beyond = (tokens.logprobs - tokens.old_logprobs).detach().abs() > bound
    return torch.where(beyond, 0.0, -tokens.advantages * tokens.logprobs), beyond
