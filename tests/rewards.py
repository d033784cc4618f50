"""Rewards for tiny models, as a user would write them."""

from megarl.data.sample import Prompt


def digits(text: str, prompt: Prompt) -> float:
    """The share of digits: a random policy gets some, and can learn to get more."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def boom(text: str, prompt: Prompt) -> float:
    """A reward with a bug."""
    raise KeyError("answer key")
