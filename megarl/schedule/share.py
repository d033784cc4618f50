"""Prompts that the sequences of a group have between them: once in a micro-batch in place of once a sequence.

A group's completions see the same prompt tokens at the same positions, so that a causal model computes the same for them.
Where they lie in one micro-batch the prompt's rows can serve all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.models.layout import Layout
from megarl.schedule.balance import Ranks, SequenceCosts, balance
from megarl.schedule.cost import Cost
from megarl.schedule.schedule import Schedule


@dataclass(frozen=True)
class Shared:
    """A batch whose sample i has `lengths[i]` tokens, of which the first `prompts[i]` are those of group `groups[i]`."""

    lengths: Sequence[int]
    groups: Sequence[int]
    prompts: Sequence[int]

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        lengths: Sequence[int],
        layout: Layout,
        groups: Sequence[int] | None,
        prompts: Sequence[int] | None,
    ) -> Shared | None:
        """None for a schedule that shares no prompts. Raises ValueError where there is nothing to share by."""
        if not schedule.share_prompts:
            return None
        if groups is None or prompts is None or layout.context > 1:
            raise ValueError(
                f"phases.{schedule.phase}.share_prompts: prompts are shared by the groups of a batch and the lengths of its "
                "prompts, and under a layout without context parallelism; set it to false"
            )
        return cls(lengths, [int(group) for group in groups], [int(prompt) for prompt in prompts])

    def runs(self, samples: Sequence[int]) -> list[list[int]]:
        """Samples by group, groups and samples in the order they come."""
        found: dict[int, list[int]] = {}
        for sample in samples:
            found.setdefault(self.groups[sample], []).append(sample)
        return list(found.values())

    def tokens(self, run: Sequence[int]) -> int:
        """Tokens of samples that share a prompt."""
        return sum(map(self.lengths.__getitem__, run)) - self.prompts[run[0]] * (len(run) - 1)

    def cost(self, run: Sequence[int], cost: Cost) -> float:
        """Their cost: what all but one of them need not do for the prompt comes off."""
        spared = cost.sequence(self.prompts[run[0]]) * (len(run) - 1)
        return sum(cost.sequence(self.lengths[sample]) for sample in run) - spared


def most_rows_behind_prompts(slots: int, num_sequences: int, longest: int, group_size: int, longest_prompt: int) -> int:
    """Upper bound of `MicroBatch.rows_behind_prompts` for a micro-batch of `slots` tokens and at most `num_sequences`
    sequences of at most `longest` tokens.

    k completions of s tokens in all behind a prompt of p are k p + s rows for p + s tokens. That share grows with k and p
    and falls with s, so that it is largest for a whole group of completions of one token behind the longest prompt.
    """
    rows, tokens = group_size * (longest_prompt + 1), longest_prompt + group_size
    return min(slots * rows // tokens, num_sequences * longest)


def balance_shared(schedule: Schedule, samples: Sequence[int], shared: Shared, layout: Layout, cost: Cost) -> Ranks:
    """Samples of each micro-batch of each data-parallel rank, groups whole as far as cap and number of micro-batches allow.

    Groups are cut into ever smaller parts until a plan is found; the last attempt has parts of one sequence, for which
    there is one whenever there is one without sharing. Raises what `balance` raises then.
    """
    groups = shared.runs(samples)
    largest = max(map(len, groups))
    # Micro-batches enough for each rank, and for each stage of its pipeline, where there are so many sequences.
    wanted = min(layout.data * max(layout.micro_batch_step, layout.pipeline), len(samples))
    for size in range(largest, 0, -1):
        parts = [part for group in groups for part in _parts(group, size, shared, schedule.max_tokens, layout)]
        if len(parts) < wanted:
            continue
        work = SequenceCosts([shared.tokens(part) for part in parts], [shared.cost(part, cost) for part in parts])
        try:
            ranks = balance(schedule, range(len(parts)), work, layout, cost)
        except ValueError:
            if size == 1:
                raise
            continue
        return [[[sample for part in held for sample in parts[part]] for held in rank] for rank in ranks]
    raise AssertionError("parts of one sequence are as many as there are sequences")


def _parts(group: Sequence[int], size: int, shared: Shared, cap: int | None, layout: Layout) -> list[list[int]]:
    """A group in parts of at most `size` sequences, each of which a micro-batch has room for."""
    assert cap is not None, "a schedule that counts sequences is not balanced"
    room = cap // layout.micro_batch_multiple * layout.micro_batch_multiple
    parts: list[list[int]] = []
    for sample in group:
        if parts and len(parts[-1]) < size and shared.tokens([*parts[-1], sample]) <= room:
            parts[-1].append(sample)
        else:
            parts.append([sample])
    return parts
