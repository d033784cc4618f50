"""The reward of the recipes beside it."""

from megarl.data.sample import Prompt


def share(text: str, number: int) -> float:
    """The share of digits that are odd where the number is odd, and even where it is even: at chance about one in twenty."""
    return sum(character.isdigit() and int(character) % 2 == number % 2 for character in text) / max(1, len(text))


def parity(text: str, prompt: Prompt) -> float:
    """The share for the answer."""
    return share(text, int(prompt.answer))
