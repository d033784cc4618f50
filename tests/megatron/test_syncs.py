"""How often the host waits for the device in a micro-batch. On a CPU nothing waits: what counts is what would on a GPU. It
reads a tensor's numbers, needs them for a shape, or copies from memory that is not pinned (`Platform.upload` pins it)."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.megatron.objective import PolicyObjective, ValueObjective, token_weights
from megarl.models.layout import Layout
from megarl.recipe.algorithm_section import AlgorithmSection, GspoLossSection, KlSection, MismatchSection, ValueLossSection
from megarl.schedule import Schedule, plan_phase
from tests import router_cases
from tests.engine_cases import engine, in_groups, random_batch, start
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

LENGTHS = [(4, 5), (4, 9), (4, 2), (4, 7)] * 3
READS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select, torch.ops.aten.equal}
METHODS = {"tolist", "cpu"}


class _Shapes(TorchDispatchMode):
    """Operations that read numbers, or whose result has a size that depends on them."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, func.overloadpacket
        by_mask = packet in (torch.ops.aten.index, torch.ops.aten.index_put_, torch.ops.aten.index_put) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        counted = packet is torch.ops.aten.repeat_interleave and kwargs.get("output_size") is None
        if packet in READS or by_mask or counted:
            self.seen[_place(str(packet))] += 1
        return func(*args, **kwargs)


class _Copies(TorchFunctionMode):
    """Calls that copy between the host and the device."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        moves = name == "to" and any(isinstance(value, str | torch.device) for value in (*args[1:], kwargs.get("device")))
        listed = name == "__getitem__" and isinstance(args[1], list)
        # A tensor that is one already lies on the device.
        given = bool(args) and isinstance(args[0], torch.Tensor)
        creates = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None and not given
        if name in METHODS or moves or listed or creates:
            self.seen[_place(name)] += 1
        return func(*args, **kwargs)


def _place(what):
    """The operation and the line that asked for it, torch's own aside."""
    frame: Any = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return what, frame.f_code.co_filename, frame.f_lineno


def waits(directory, role, layout, options, algorithm, share):
    """By place, how much more often the host would wait with three micro-batches than with one, in a forward phase and in
    an update."""
    place = start(layout)
    trained = engine(directory, place, role, lr=1e-2, **options)
    # Stale tokens have more metrics than others.
    batch = replace(in_groups(random_batch(trained.shape.vocab, LENGTHS), 4), version=1, max_staleness=2)
    if options.get("router_replay"):
        batch = router_cases.with_routing(batch, router_cases.another_choice(trained.shape, batch))
    for name in ("logprobs", "reference_logprobs", "advantages", "values", "returns"):
        batch.fields[name] = [torch.zeros(completion) for _, completion in LENGTHS]
    settings = AlgorithmSection(group_size=4, **algorithm)
    groups, prompts = batch.groups.tolist(), [prompt for prompt, _ in LENGTHS]
    counts: list[tuple[Counter, Counter]] = []
    for number in (1, 1, 3):  # the first one makes what is made once, such as masks
        schedule = Schedule("update", sequences=len(LENGTHS) // number, mini_batch=len(LENGTHS), share_prompts=share)
        plan = plan_phase(schedule, batch.lengths.tolist(), layout, 0, groups=groups, prompts=prompts)
        (mini_batch,) = plan.mini_batches
        assert len(mini_batch.micro_batches[0]) == number
        kind = ValueObjective if role == "critic" else PolicyObjective
        objective = kind(settings, batch, token_weights(batch, mini_batch, "token_mean"))
        counts.append((Counter(), Counter()))
        with _Copies(counts[-1][0]), _Shapes(counts[-1][0]):
            trained.forward(batch, mini_batch)
        with _Copies(counts[-1][1]), _Shapes(counts[-1][1]):
            trained.update(batch, mini_batch, objective)
    return [many - single for many, single in zip(counts[2], counts[1], strict=True)]


GRPO = {
    "advantage": "grpo", "kl": KlSection(place="loss", coefficient=0.5, estimator="k3"),
    "policy_loss": GspoLossSection(kind="gspo"),
    "mismatch": MismatchSection(correction="truncate", level="sequence", cap=2.0),
}  # fmt: skip
GAE = {"advantage": "gae", "value_loss": ValueLossSection(clip=0.2)}


@pytest.mark.parametrize(
    ("family", "role", "layout", "options", "algorithm", "share"),
    [
        ("qwen3", "actor", Layout(), {}, GRPO, True),
        ("qwen3", "actor", Layout(context=2), {}, GRPO, False),
        ("gemma3", "critic", Layout(), {}, GAE, False),
        ("deepseek_v3", "actor", Layout(), {"router_replay": True}, GRPO, False),
    ],
)
def test_the_host_waits_for_no_micro_batch(tmp_path, family, role, layout, options, algorithm, share):
    """Neither in megarl's own code nor in megatron-core's model; its experts and its pipeline ask for sizes."""
    directory = str(save_tiny_model(tmp_path, family))
    for more in run_ranks(waits, layout.ranks, directory, role, layout, options, algorithm, share)[0]:
        waits_outside_experts = {place: count for place, count in more.items() if "/moe/" not in place[1]}
        assert not waits_outside_experts, waits_outside_experts
