"""The compiled head gives what the plain one gives."""

from __future__ import annotations

import numpy as np
import torch

from tests.logprobs_cases import Case, run_head
from tests.ranks import run_ranks

CASES = [Case(13, 1000, 1024, temperature=1.3, block_bytes=4 * 64 * 5, block_rows=7, compile=on) for on in (True, False)]


def run_counted(cases: list[Case]) -> tuple[list[dict[str, np.ndarray]], int]:
    """What `run_head` returns, and how many graphs torch has compiled for it."""
    found = run_head(cases)
    return found, int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_the_compiled_head_gives_what_the_plain_one_gives() -> None:
    """torch.compile's own compiler, which `make setup` sees to, over blocks of several sizes."""
    (((compiled, plain), graphs),) = run_ranks(run_counted, 1, CASES)
    assert graphs, "nothing was compiled"
    for name, value in plain.items():
        np.testing.assert_allclose(compiled[name], value, atol=2e-5, err_msg=name)
