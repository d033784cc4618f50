"""The conversation of one rollout with the engines, with every token as it was sampled. Pure: no I/O, no engine.

A session turns each request into a prompt: the tokens of an earlier turn that it continues, and tokens of only the text that
is new. Nothing that was sampled is tokenized again. A request that continues no earlier turn begins another segment: its
history was rewritten, compacted, or belongs to a sub-agent, or the chat template shows earlier turns in another way. A
request that continues a turn in the middle of a segment (a retry, a branch) begins another segment with the same tokens, of
which the copied ones are not trained again. So each sampled token is trained in exactly one segment.

Histories are compared by their messages, as the client got them from us, and never by their tokens.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from megarl.data.sample import Completion
from megarl.data.tokenizer import ChatRenderer, Message
from megarl.recipe import Recipe


class ContextTooLong(ValueError):
    """The next prompt leaves no room for a token."""


class TooManySegments(ValueError):
    """The rollout has as many segments as it may have."""


@dataclass(frozen=True)
class SessionLimits:
    """Limits of each segment in tokens, and of segments a session. The last `max_branches` turns can be continued; older
    ones are forgotten."""

    max_prompt_tokens: int
    max_completion_tokens: int
    max_segments: int = 64
    max_branches: int = 64

    @classmethod
    def of(cls, recipe: Recipe) -> SessionLimits:
        """Return the limits of a recipe's rollouts."""
        return cls(recipe.data.max_prompt_tokens, recipe.max_completion_tokens, recipe.max_segments)


@dataclass(eq=False)
class Segment:
    """One token sequence to train on: what follows the prompt is `completion`. `messages` and `text` are the last request's,
    and the turn after it."""

    prompt_ids: np.ndarray
    completion: Completion = field(default_factory=Completion.empty)
    messages: list[Message] = field(default_factory=list)
    text: str = ""  # of the last prompt, as the template rendered it; of prompt and turn for text that is no chat

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.completion)

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt_ids, self.completion.token_ids])

    def append(self, sampled: Completion) -> None:
        """Append a turn that an engine sampled. Its routing is that of the whole sequence."""
        self.completion += sampled

    def observe(self, ids: np.ndarray) -> None:
        """Append tokens that the policy did not sample, with the version of the turn before."""
        self.completion += _unsampled(ids, np.full(len(ids), self.completion.versions[-1]))

    def copy(self, num_tokens: int) -> Segment:
        """Return a segment that begins with the same tokens, of which none is trained: they are in this segment."""
        same = self.completion
        return Segment(self.prompt_ids, _unsampled(same.token_ids[:num_tokens], same.versions[:num_tokens]))


def _unsampled(ids: np.ndarray, versions: np.ndarray) -> Completion:
    return Completion(ids, np.zeros(len(ids), np.float32), "", versions, own=np.zeros(len(ids), bool))


@dataclass(frozen=True, eq=False)
class State:
    """A segment up to the end of one of its turns: so many tokens after the prompt, messages, and characters of the text of
    the turn's prompt."""

    segment: Segment
    num_tokens: int
    num_messages: int = 0
    num_characters: int = 0


@dataclass(frozen=True, eq=False)
class TurnPrompt:
    """A prompt for an engine. It changes the session only once `Session.record` gets what was sampled. So a turn may be
    given up, and may be recorded several times (`n` completions)."""

    prompt_ids: np.ndarray
    max_new_tokens: int
    state: State | None = None  # that it continues
    observed: np.ndarray | None = None  # the new tokens, after those of `state`
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    history: bytes = b""  # names tools and messages
    reason: str = "forked"  # why a segment begins, if one does


class Session:
    """All segments of one rollout. `counts` says why segments began: `begun` (no earlier turn in its history), `forked` (an
    earlier turn was continued again), `rewritten` (a history with turns that this session does not have), `template` (the
    chat template drops or changes an earlier turn)."""

    def __init__(self, chat: ChatRenderer, limits: SessionLimits) -> None:
        self._chat, self._limits = chat, limits
        self.segments: list[Segment] = []
        self.counts: Counter[str] = Counter()
        self.num_turns = 0
        self._states: OrderedDict[bytes, State] = OrderedDict()  # by history, the newest last

    def next_turn(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> TurnPrompt:
        """Return the prompt for the answer to a chat. A message has `role` and `content`, and may have `tool_calls` as chat
        templates read them (arguments: a mapping), `tool_call_id`, `name` and `reasoning_content`.

        Raises ValueError for messages that the template refuses or that end with an answer, ContextTooLong, and
        TooManySegments."""
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError(
                "the last message must not be the assistant's: the policy writes the next one from its beginning"
            )
        histories = [_digest(b"", tools)]
        for message in messages:
            histories.append(_digest(histories[-1], _compared(message)))
        lengths = range(len(messages) - 1, 0, -1)
        state = next((self._states[histories[n]] for n in lengths if histories[n] in self._states), None)
        shown = list(messages)
        if state is not None:  # with the reasoning that clients do not send back
            shown[: state.num_messages] = state.segment.messages[: state.num_messages]
        text = self._chat.render(shown, tools)
        new_text = None if state is None else self._new_text(state, shown, tools, text)
        if state is not None and new_text is None:
            reason, state = "template", None
        elif any(message["role"] == "assistant" for message in messages):
            reason = "rewritten"
        else:
            reason = "begun"
        if state is None:
            turn = self._begin(self._chat.ids(text), reason)
        else:
            assert new_text is not None
            turn = self._continue(state, self._chat.ids_after(_last(state), new_text))
        return replace(turn, messages=shown, text=text, history=histories[-1])

    def next_text(self, text: str) -> TurnPrompt:
        """Return the prompt for a completion of text that is no chat. Text that follows a prompt and its completion, as the
        client got it, continues that turn. Raises as `next_turn`."""
        segments = [s for s in self.segments if not s.messages and s.text and text.startswith(s.text)]
        if segments:
            segment = max(segments, key=lambda one: len(one.text))
            ids = self._chat.ids(text[len(segment.text) :])
            turn = self._continue(State(segment, segment.num_tokens), ids)
        else:
            turn = self._begin(self._chat.known(self._chat.tokenizer(text)["input_ids"]), "begun")
        return replace(turn, text=text)

    def next_tokens(self, ids: Sequence[int] | np.ndarray) -> TurnPrompt:
        """Return the prompt for a completion of tokens, which continue the longest segment that they begin with and that is
        no chat. Raises as `next_turn`."""
        prompt = self._chat.known(ids)
        best: tuple[Segment, int] | None = None
        for segment in self.segments:
            length = len(segment.prompt_ids) + segment.num_tokens
            is_longer = not segment.messages and length <= len(prompt) and (best is None or length > best[1])
            if is_longer and np.array_equal(segment.tokens, prompt[:length]):
                best = segment, length
        if best is None:
            return self._begin(prompt, "begun")
        return self._continue(State(best[0], best[0].num_tokens), prompt[best[1] :])

    def after(self, ids: np.ndarray) -> TurnPrompt:
        """Return the prompt for the next turn of a rollout with one segment: its tokens so far, and these. Raises as
        `next_turn`."""
        if not self.segments:
            return self._begin(ids, "begun")
        (segment,) = self.segments
        return self._continue(State(segment, segment.num_tokens), ids)

    def record(self, turn: TurnPrompt, sampled: Completion, reply: Message | str = "") -> Segment:
        """Append what an engine sampled for a turn, and return the segment that has it. `reply` is what the client gets: the
        assistant's message with its reasoning, or the text that was no chat."""
        segment = self._place(turn)
        segment.append(sampled)
        segment.text = turn.text
        self.num_turns += 1
        if isinstance(reply, str):
            segment.text += reply if turn.text else ""
            return segment
        segment.messages = [*turn.messages, reply]
        history = _digest(turn.history, _compared(reply))
        self._states[history] = State(segment, segment.num_tokens, len(segment.messages), len(turn.text))
        self._states.move_to_end(history)
        if len(self._states) > self._limits.max_branches:
            self._states.popitem(last=False)
        return segment

    def _place(self, turn: TurnPrompt) -> Segment:
        """Return the segment that a sampled turn belongs to, with the turn's prompt."""
        if turn.state is None:
            segment = Segment(turn.prompt_ids)
        elif turn.state.num_tokens == turn.state.segment.num_tokens:
            segment = turn.state.segment
        else:
            segment = turn.state.segment.copy(turn.state.num_tokens)
        if turn.observed is not None:
            segment.observe(turn.observed)
        if turn.state is None or segment is not turn.state.segment:
            self.segments.append(segment)
            self.counts[turn.reason] += 1
        return segment

    def _begin(self, prompt_ids: np.ndarray, reason: str) -> TurnPrompt:
        self.check_segments(1)
        limit = self._limits.max_prompt_tokens
        if not 0 < len(prompt_ids) <= limit:
            raise ContextTooLong(f"the prompt has {len(prompt_ids)} tokens; 1 to {limit} are allowed")
        return TurnPrompt(prompt_ids, self._limits.max_completion_tokens, reason=reason)

    def _continue(self, state: State, observed: np.ndarray) -> TurnPrompt:
        segment = state.segment
        if state.num_tokens < segment.num_tokens:
            self.check_segments(1)
        so_far, limit = state.num_tokens + len(observed), self._limits.max_completion_tokens
        if so_far >= limit:
            raise ContextTooLong(
                f"the conversation has {so_far} tokens after its first prompt, and fewer than {limit} are allowed"
            )
        known = segment.completion.token_ids[: state.num_tokens]
        return TurnPrompt(np.concatenate([segment.prompt_ids, known, observed]), limit - so_far, state, observed)

    def check_segments(self, num_new: int) -> None:
        """Raise TooManySegments if there is no room for new segments."""
        if num_new and len(self.segments) + num_new > self._limits.max_segments:
            raise TooManySegments(f"the rollout has {len(self.segments)} segments already, and no more are allowed")

    def _new_text(self, state: State, messages: list[Message], tools: list[dict[str, Any]] | None, text: str) -> str | None:
        """Return what follows the turn of `state` in a prompt's `text`, or None if the template shows the history in another
        way than the engine saw it."""
        turn_end, seen = self._chat.turn_end, state.segment.text[: state.num_characters]
        history = self._chat.render(messages[: state.num_messages], tools, generate=False)
        if not (history.startswith(seen) and history.endswith(turn_end) and text.startswith(history)):
            return None
        shown = history[len(seen) : len(history) - len(turn_end)]
        return turn_end + text[len(history) :] if _shows(shown, messages[state.num_messages - 1]) else None


def _last(state: State) -> int:
    """Return the last token of a state, which an engine sampled."""
    return int(state.segment.completion.token_ids[state.num_tokens - 1])


def _shows(text: str, reply: Message) -> bool:
    """Whether a template's text of a turn has all that the policy wrote, up to white space and the form of tool calls."""
    names = [call["function"]["name"] for call in reply.get("tool_calls") or ()]
    text, position = "".join(text.split()), 0
    for part in (reply.get("reasoning_content") or "", reply["content"], *names):
        part = "".join(part.split())
        position = text.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


def _compared(message: Message) -> list[Any]:
    """Return what makes a message another one. Clients do not send reasoning back, name calls as they like, and strip an
    answer's white space."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    content = message["content"]
    return [message["role"], content.strip() if message["role"] == "assistant" else content, calls]


def _digest(history: bytes, value: Any) -> bytes:
    """Return the name of a history that goes on with a value."""
    return blake2b(history + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
