"""The stream of prompts that a run trains on, which can be continued exactly where another run stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megarl.data.sample import Prompt
from megarl.data.sources import Row, load_rows
from megarl.data.tokenizer import render_questions
from megarl.recipe.data_sections import DataSection


class PromptStream:
    """Prompts without end: epoch after epoch over the rows, each in an order of its own.

    A prompt is a function of (recipe section, seed, position) alone, so `seek` to a saved position continues
    a run exactly. Rows whose prompt is longer than `data.max_prompt_tokens` are left out; `num_dropped` says
    how many. Raises ValueError for data that cannot be used and where no row is left.
    """

    def __init__(self, data: DataSection, seed: int, tokenizer: Any) -> None:
        rows = load_rows(data.prompts, seed)
        questions = [row.question for row in rows]
        tokens = render_questions(tokenizer, questions, data.system_prompt, data.prompt_template, data.chat_template)
        kept = [i for i, ids in enumerate(tokens) if 0 < len(ids) <= data.max_prompt_tokens]
        if not kept:
            raise ValueError(
                f"data.max_prompt_tokens is {data.max_prompt_tokens}, but the shortest of the {len(rows)} "
                f"prompts has {min(map(len, tokens))} tokens; raise it to that at least"
            )
        self.num_dropped = len(rows) - len(kept)
        self.position = 0
        self._rows: list[Row] = [rows[i] for i in kept]
        self._tokens = [np.asarray(tokens[i], dtype=np.int32) for i in kept]
        self._seed = seed
        self._shuffle = data.shuffle
        self._epoch = -1
        self._order = np.arange(len(kept))

    @property
    def num_rows(self) -> int:
        """Prompts in one epoch."""
        return len(self._rows)

    def every(self) -> Iterator[Prompt]:
        """Each row's prompt once, in the order of the data; the position stays."""
        for i, row in enumerate(self._rows):
            yield Prompt(i, self._tokens[i], row.question, row.answer, row.fields)

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; the position moves on by as many."""
        taken = [self._at(self.position + offset) for offset in range(num_prompts)]
        self.position += num_prompts
        return taken

    def seek(self, position: int) -> None:
        """Continue at `position`, the count of prompts taken so far."""
        assert position >= 0, f"position {position}"
        self.position = position

    def _at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self._rows))
        if self._shuffle and epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
            self._epoch = epoch
        i = int(self._order[offset])
        row = self._rows[i]
        return Prompt(position, self._tokens[i], row.question, row.answer, row.fields)
