"""What does the divergence from a teacher over the whole vocabulary cost, beside the log-probabilities of the same tokens?

    python benchmarks/distillation.py [--json PATH] [--check]

Targets (with --check, exit 1 when missed), for a vocabulary of 151,936 on one rank:
- memory: what forward and backward of the divergence of 8,192 tokens hold at their peak, without inputs and their gradients,
  is below 1 % of both sides' logits in fp32;
- time: forward and backward of the divergence take at most 1.5 times what the log-probability phase of the same tokens takes
  with Qwen3-1.7B: its head, and its layers by their operations at the rate of a matrix product of their size. Of a larger
  model the head is a smaller part.
Measured are live bytes of torch's CPU allocator, and the best of two runs. Some minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the measurement of memory is the tests'

from megarl.megatron.divergence import Divergence  # noqa: E402
from megarl.megatron.logprobs import LogProbabilities  # noqa: E402
from megarl.models.layout import Layout  # noqa: E402
from tests.engine_cases import start  # noqa: E402
from tests.memory_cases import peak_of  # noqa: E402
from tests.ports import unused_port  # noqa: E402

KINDS = ("reverse_kl", "forward_kl", "jensen_shannon")
MEMORY, TIME = 0.01, 1.5
VOCAB, MEMORY_TOKENS, MEMORY_HIDDEN = 151_936, 8192, 64
# Qwen3-1.7B: hidden size, and weights of all layers.
TOKENS, HIDDEN, LAYER_WEIGHTS = 256, 2048, 1.41e9


def seconds(run: Callable[[], Any]) -> float:
    """The best of two runs."""
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)


def inputs(tokens: int, hidden: int) -> list[Any]:
    """Rows and head of the policy, with megatron-core's gradient buffer alone, and of the teacher."""
    rows, teacher_rows = torch.randn(2, tokens, hidden).unbind()
    weight, teacher_weight = (torch.randn(2, VOCAB, hidden) * hidden**-0.5).unbind()
    buffer: Any = weight
    buffer.main_grad, buffer.zero_out_wgrad = torch.zeros(VOCAB, hidden), True
    return [rows.requires_grad_(), weight.requires_grad_(), teacher_rows, teacher_weight]


def measure() -> dict[str, Any]:
    """Seconds of the head, of the phase and of each divergence, and what each divergence holds."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(unused_port())
    head = LogProbabilities(VOCAB, 1.0, start(Layout()).tensor_group)

    def compare(kind: str, tensors: list[Any]) -> Callable[[], None]:
        def run() -> None:
            Divergence(kind, 0.5, head)(*tensors).sum().backward()
            tensors[0].grad = tensors[1].grad = None

        return run

    tensors, targets = inputs(TOKENS, HIDDEN), torch.zeros(TOKENS, dtype=torch.int64)
    with torch.no_grad():
        head_s = seconds(lambda: head(tensors[0], tensors[1], targets, entropy=False))
        layer = torch.randn(HIDDEN, 6 * HIDDEN)  # as wide as gate and up together
        rate = layer.numel() / seconds(lambda: tensors[0] @ layer)
    phase_s = head_s + LAYER_WEIGHTS / rate
    results: dict[str, Any] = {"head_s": head_s, "phase_s": phase_s, "logits_bytes": 2 * 4 * MEMORY_TOKENS * VOCAB}
    for kind in KINDS:
        spent = seconds(compare(kind, tensors))
        results[kind] = {"seconds": spent, "of_phase": spent / phase_s, "of_head": spent / head_s}
    tensors = inputs(MEMORY_TOKENS, MEMORY_HIDDEN)
    for kind in KINDS:
        of_caller = 4 * MEMORY_HIDDEN * MEMORY_TOKENS  # the gradient of the rows
        results[kind]["extra_bytes"] = peak_of(compare(kind, tensors)) - of_caller
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    results = measure()
    table = Table(title="divergence from a teacher over the vocabulary, forward and backward")
    for column in ("divergence", "seconds", "of the phase", "of the head", "extra MiB", "of both logits"):
        table.add_column(column, justify="right")
    shares = {kind: results[kind]["extra_bytes"] / results["logits_bytes"] for kind in KINDS}
    for kind in KINDS:
        result = results[kind]
        cells = (
            f"{result['seconds']:.1f}",
            f"{result['of_phase']:.2f}",
            f"{result['of_head']:.1f}",
            f"{result['extra_bytes'] / 2**20:.0f}",
        )
        table.add_row(kind, *cells, f"{shares[kind]:.2%}")
    Console(width=120).print(table)
    if arguments.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        content = {"commit": commit, "device": device, "config": {"vocab": VOCAB, "targets": [MEMORY, TIME]}, **results}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    share, slowest = max(shares.values()), max(results[kind]["of_phase"] for kind in KINDS)
    print(
        f"distillation: {share:.2%} of both logits (target {MEMORY:.0%}), {slowest:.2f} times the log-probability phase "
        f"(target {TIME})"
    )
    return 1 if arguments.check and (share > MEMORY or slowest > TIME) else 0


if __name__ == "__main__":
    sys.exit(main())
