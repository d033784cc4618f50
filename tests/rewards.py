"""Rewards for tiny models, as a user would write them."""

from megarl.data.sample import Prompt


def digits(text: str, prompt: Prompt) -> float:
    """The share of digits: a random policy gets some, and can learn to get more."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def boom(text: str, prompt: Prompt) -> float:
    """A reward with a bug."""
    raise KeyError("answer key")


def too_large(text: str, prompt: Prompt) -> float:
    """More than fp32 holds, for the first prompt of a run."""
    return 1e39 if prompt.index == 0 else digits(text, prompt)


def rarely(text: str, prompt: Prompt) -> float:
    """1 for about one completion in four, by its first character: many groups are all wrong."""
    return float(sum(map(ord, text[:1])) % 4 == 0)
