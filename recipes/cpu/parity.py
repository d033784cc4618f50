"""The reward of the recipes beside it."""

from megarl.data.sample import Prompt


def parity(text: str, prompt: Prompt) -> float:
    """The share of digits that are odd where the answer is odd, and even where it is even: at chance about one in twenty."""
    odd = int(prompt.answer) % 2
    return sum(character.isdigit() and int(character) % 2 == odd for character in text) / max(1, len(text))
