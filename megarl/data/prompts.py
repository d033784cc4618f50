"""An endless stream of prompts that resumes exactly where a run stopped."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.data.sample import Example, Prompt
from megarl.data.sources import BadRows, Row, load_rows, naming
from megarl.data.supervised import examples_of
from megarl.data.tokenizer import render_chat, render_questions
from megarl.recipe.data_section import CurriculumSection, DataSection

logger = logging.getLogger(__name__)


class PromptStream:
    """An endless stream of prompts: epochs over the rows of each source, each epoch in a new order.

    The next prompts depend only on the recipe's section, the seed and `state()`. `num_tokens` is the size of the model's
    vocabulary; `judge` raises ValueError for a prompt whose answer no reward can use. `key` is the source's recipe key.
    `answer` gives a prompt its row's answer as an example. Raises ValueError for unusable data, and if no row is left.
    """

    def __init__(
        self,
        data: DataSection,
        seed: int,
        tokenizer: Any,
        num_tokens: int | None = None,
        judge: Callable[[Prompt], None] = lambda _: None,
        key: str = "data.prompts",
        answer: Callable[[Row], Example] | None = None,
    ) -> None:
        self.data, self.tokenizer, self.num_tokens, self.judge, self.answer = data, tokenizer, num_tokens, judge, answer
        if data.prompts.kind == "mixture":
            self._weights = data.prompts.weights
            # The last number makes these orders differ from the order of a single source, whose seed is (seed, epoch).
            sources = [
                (source, [seed, number, 1], f"{key}.parts.{number}") for number, source in enumerate(data.prompts.parts)
            ]
        else:
            self._weights = (1.0,)
            sources = [(data.prompts, [seed], key)]
        self._parts: list[_Part] = []
        for source, seeds, place in sources:
            bad = BadRows(data.on_bad_row)
            rows = load_rows(source, seed, data, place, bad)
            self._parts.append(_Part(self, rows, seeds, bad, place))
        self.position = 0

    @property
    def num_rows(self) -> int:
        """Number of prompts in one epoch of every source."""
        return sum(len(part.rows) for part in self._parts)

    @property
    def num_dropped(self) -> int:
        """Number of rows left out because their prompt is longer than `data.max_prompt_tokens`."""
        return sum(part.num_dropped for part in self._parts)

    @property
    def num_bad_rows(self) -> int:
        """Number of rows left out because they cannot be used."""
        return sum(part.num_bad_rows for part in self._parts)

    def every(self) -> Iterator[Prompt]:
        """Yield each row's prompt once, in the order of the data; the position stays."""
        rows = [(number, row) for number, part in enumerate(self._parts) for row in range(len(part.rows))]
        for index, (number, row) in enumerate(rows):
            yield self._parts[number].prompt(index, (number, row))

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts, each from the part that is furthest behind its share."""
        prompts = []
        for _ in range(num_prompts):
            shares = zip(self._weights, self._parts, strict=True)
            deficits = [weight * (self.position + 1) - part.taken for weight, part in shares]
            number = deficits.index(max(deficits))
            prompts.append(self._parts[number].prompt(self.position, (number, self._parts[number].next_row())))
            self.position += 1
        return prompts

    def prompt(self, index: int, origin: tuple[int, int]) -> Prompt:
        """Return a prompt that was taken, by its `index` and `origin`."""
        return self._parts[origin[0]].prompt(index, origin)

    def learn(self, prompts: Sequence[Prompt], rewards: np.ndarray, valid: np.ndarray) -> None:
        """Give the curriculum the rewards of prompts: `rewards` float and `valid` bool [samples], in groups of one size."""
        group = len(rewards) // len(prompts)
        for number, prompt in enumerate(prompts):
            members = slice(number * group, (number + 1) * group)
            part, row = prompt.origin
            if (curriculum := self._parts[part].curriculum) is not None:
                curriculum.learn(row, rewards[members][valid[members]])

    def metrics(self) -> dict[str, float]:
        """Return the metrics `data/...`."""
        known: dict[str, float] = {"num_rows": self.num_rows, "num_dropped": self.num_dropped}
        known["num_bad_rows"] = self.num_bad_rows
        if len(self._parts) > 1:
            known |= {f"part_{number}_epochs": part.walked / len(part.rows) for number, part in enumerate(self._parts)}
        else:
            known["epochs"] = self._parts[0].walked / self.num_rows
        curricula = [part.curriculum for part in self._parts if part.curriculum is not None]
        if curricula:
            known["num_passed_over"] = sum(part.walked - part.taken for part in self._parts)
            known["num_with_pass_rate"] = sum(len(curriculum.rates) for curriculum in curricula)
            known["num_in_bounds"] = sum(curriculum.num_in_bounds for curriculum in curricula)
        return {f"data/{name}": value for name, value in known.items()}

    def state(self) -> dict[str, Any]:
        """Return the exact position, as plain values."""
        return {"position": self.position, "parts": [part.state() for part in self._parts]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the position that `state` returned. Raises ValueError if the rows have changed since then."""
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.restore(saved)
        self.position = state["position"]


class Curriculum:
    """Skips prompts of one source whose last pass rate was outside the bounds, such as prompts that always fail or always
    pass.

    A row outside the bounds is skipped in `revisit` epochs and taken in the next epoch, so that its rate can change.
    """

    def __init__(self, section: CurriculumSection) -> None:
        self._section = section
        self.rates: dict[int, float] = {}
        self._num_skips: dict[int, int] = {}  # skips since the row was last taken

    def skips(self, row: int) -> bool:
        """Return whether to skip the row this time; count the skip."""
        if row not in self.rates or self._in_bounds(self.rates[row]):
            return False
        times = self._num_skips.get(row, 0)
        self._num_skips[row] = (times + 1) % (self._section.revisit + 1)
        return times < self._section.revisit

    def learn(self, row: int, rewards: np.ndarray) -> None:
        """Record the rewards (float32) of a group of completions of the row; an empty group changes nothing."""
        if len(rewards):
            # In float32: 0.9 in float32 is below 0.9 in float64.
            self.rates[row] = float((rewards >= np.float32(self._section.pass_reward)).mean())

    @property
    def num_in_bounds(self) -> int:
        """Number of rows with a rate in the bounds."""
        return sum(map(self._in_bounds, self.rates.values()))

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain values."""
        return {"rates": dict(self.rates), "num_skips": dict(self._num_skips)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        self.rates, self._num_skips = dict(state["rates"]), dict(state["num_skips"])

    def _in_bounds(self, rate: float) -> bool:
        return self._section.low <= rate <= self._section.high


class _Part:
    """The usable rows of one source, in shuffled order. `walked` counts rows so far, `taken` those that became prompts."""

    def __init__(self, stream: PromptStream, rows: list[Row], seeds: list[int], bad: BadRows, key: str) -> None:
        data, tokenizer = stream.data, stream.tokenizer
        self.rows: list[Row] = []
        self._token_ids: list[np.ndarray] = []
        self._examples: list[tuple[Example, ...]] = []
        section = "warmup.sft.data" if key.startswith("warmup.sft.") else "data"
        limit_key, limit = f"{section}.max_prompt_tokens", data.max_prompt_tokens
        if data.max_tokens is not None:
            limit_key, limit = f"{section}.max_tokens", data.max_tokens
        self.num_dropped = self.walked = self.taken = 0
        self._key, self._seeds, self._shuffle = key, seeds, data.shuffle
        self._epoch = -1
        lengths = []
        for row, token_ids, examples in _rendered(data, rows, tokenizer, bad):
            lengths.append(max([len(example.token_ids) for example in examples] or [len(token_ids)]))
            if lengths[-1] > limit:
                if data.on_long_prompt == "stop":
                    raise ValueError(
                        f"{row.prompt_place}: the {'sequence' if examples else 'prompt'} ({row.question[:80]!r}) has "
                        f"{lengths[-1]} tokens and {limit_key} is {limit}; raise it, shorten the row, or leave such "
                        f"rows out: {section}.on_long_prompt: skip"
                    )
                self.num_dropped += 1
                continue
            try:
                _check_vocabulary(row, token_ids, stream.num_tokens)
                if stream.answer is not None:
                    examples = (stream.answer(row),)
                    _check_vocabulary(row, examples[0].token_ids.tolist(), stream.num_tokens)
                with naming(f"{row.where}: field {row.answer_field!r}"):
                    stream.judge(Prompt(len(self.rows), np.zeros(0, np.int32), row.question, row.answer, row.fields))
            except ValueError as error:
                bad.add(error)
                continue
            question = tokenizer.decode(token_ids) if data.prompt_format == "token_ids" else row.question
            self.rows.append(replace(row, question=question))
            self._token_ids.append(np.asarray(token_ids, dtype=np.int32))
            self._examples.append(examples)
        self.num_bad_rows = bad.count
        if not self.rows and not self.num_dropped:
            raise ValueError(f"{key} has no rows that can be used: {bad.count} are left out, the first: {bad.first}")
        if not self.rows:
            raise ValueError(
                f"{limit_key} is {limit}, but the shortest of the {len(lengths)} "
                f"rows of {key} has {min(lengths)} tokens; raise it to at least that"
            )
        if self.num_dropped:
            logger.warning(
                "%s: %d of %d rows left out, longer than %s = %d", key, self.num_dropped, len(rows), limit_key, limit
            )
        self._order = np.arange(len(self.rows))
        self._checksum = 0  # of all token ids, in order
        for ids in self._token_ids:
            self._checksum = zlib.crc32(ids.tobytes(), self._checksum)
        self.curriculum = None if data.curriculum is None else Curriculum(data.curriculum)

    def prompt(self, index: int, origin: tuple[int, int]) -> Prompt:
        """Return the prompt of the row at `origin`: the number of the part, and the number of the row in the part."""
        row = self.rows[origin[1]]
        ids, examples = self._token_ids[origin[1]], self._examples[origin[1]]
        return Prompt(index, ids, row.question, row.answer, row.fields, origin, row.where, examples)

    def next_row(self) -> int:
        """Return the next row that the curriculum does not skip."""
        while True:
            epoch, offset = divmod(self.walked, len(self.rows))
            if self._shuffle and epoch != self._epoch:
                self._order = np.random.default_rng([*self._seeds, epoch]).permutation(len(self.rows))
                self._epoch = epoch
            row = int(self._order[offset])
            self.walked += 1
            if self.curriculum is None or not self.curriculum.skips(row):
                self.taken += 1
                return row

    def state(self) -> dict[str, Any]:
        """Return the position, and a checksum of the rows."""
        state = {"walked": self.walked, "taken": self.taken, "rows": len(self.rows), "checksum": self._checksum}
        return state | {"curriculum": None if self.curriculum is None else self.curriculum.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the position that `state` returned. Raises ValueError if the rows have changed since then."""
        ours, theirs = (len(self.rows), self._checksum), (state["rows"], state["checksum"])
        if ours != theirs:
            raise ValueError(
                f"{self._key}: the {ours[0]} rows from {self.rows[0].where} on are not the {theirs[0]} that the checkpoint "
                "was made with, so its position is meaningless; restore the old data, or start another run"
            )
        self.walked, self.taken = state["walked"], state["taken"]
        if self.curriculum is not None:
            self.curriculum.restore(state["curriculum"])


def _rendered(
    data: DataSection, rows: list[Row], tokenizer: Any, bad: BadRows
) -> Iterator[tuple[Row, Sequence[int], tuple[Example, ...]]]:
    """Yield each row with its token ids, those of a supervised run's examples end to end; rows that the chat template
    refuses are bad rows."""
    if data.prompt_format == "token_ids":
        yield from ((row, row.prompt, ()) for row in rows)
        return
    if data.prompt_format == "text" and data.max_tokens is None:
        questions = [row.question for row in rows]
        tokens = render_questions(tokenizer, questions, data.system_prompt, data.prompt_template, data.chat_template)
        yield from ((row, ids, ()) for row, ids in zip(rows, tokens, strict=True))
        return
    for row in rows:
        try:
            if data.max_tokens is not None:
                examples = examples_of(data, row, tokenizer)
                yield row, np.concatenate([example.token_ids for example in examples]), examples
            else:
                with naming(row.prompt_place):
                    yield row, render_chat(tokenizer, row.prompt, data.system_prompt), ()
        except ValueError as error:
            bad.add(error)


def _check_vocabulary(row: Row, token_ids: Sequence[int], num_tokens: int | None) -> None:
    """Raise ValueError for a token without an embedding, which would end the engine's process."""
    if not len(token_ids):
        raise ValueError(f"{row.prompt_place}: the prompt has no tokens")
    if num_tokens is None or (min(token_ids) >= 0 and max(token_ids) < num_tokens):
        return
    wrong = next(token for token in token_ids if not 0 <= token < num_tokens)
    raise ValueError(
        f"{row.prompt_place}: the prompt has token {wrong}, and the model (model.path) knows tokens 0 to {num_tokens - 1}; "
        "it was made with another tokenizer, or the model's tokenizer has tokens that its weights lack"
    )


def not_trained_on(held_out: PromptStream, *trained_on: PromptStream) -> list[Prompt]:
    """Return the held-out prompts, or rows, that are not among those of the training data. Raises ValueError if none is
    left."""
    seen = {_content(ids) for stream in trained_on for prompt in stream.every() for ids in _prompts_of(prompt)}
    left = [prompt for prompt in held_out.every() if _content(prompt.token_ids) not in seen]
    if not left:
        raise ValueError(
            f"evaluation.prompts: all {held_out.num_rows} are among the training prompts, and nothing is held out; "
            "give others, or another seed to a generator"
        )
    return left


def _prompts_of(prompt: Prompt) -> list[Sequence[int] | np.ndarray]:
    """Return the tokens of a row, and of a supervised one also those before the first trained token."""
    return [prompt.token_ids, *(example.token_ids[: int(example.trained.argmax())] for example in prompt.examples)]


def _content(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Return a digest of tokens, which is small: training sets are large."""
    return hashlib.blake2b(np.asarray(token_ids, dtype=np.int32).tobytes(), digest_size=16).digest()
