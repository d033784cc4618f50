"""A reward that waits, so that a test can do something to a run in the middle of a step."""

import os
import time
from pathlib import Path

from megarl.data.sample import Prompt
from tests.rewards import digits

GATE = "MEGARL_TEST_GATE"
OPENS_S = 120.0


def digits_behind_a_gate(text: str, prompt: Prompt) -> float:
    """`tests.rewards.digits`, once the file that the environment names has gone, if it names one; a file beside it says that
    this waits."""
    if GATE not in os.environ:
        return digits(text, prompt)
    gate = Path(os.environ[GATE])
    deadline = time.monotonic() + OPENS_S
    while gate.exists() and time.monotonic() < deadline:
        gate.with_suffix(".reached").touch()
        time.sleep(0.05)
    return digits(text, prompt)


def digits_after_one_sleep(text: str, prompt: Prompt) -> float:
    """`tests.rewards.digits`; whoever finds the file that the environment names removes it, and never comes back."""
    gate = Path(os.environ[GATE])
    if gate.exists():
        gate.unlink()
        time.sleep(1e6)
    return digits(text, prompt)
