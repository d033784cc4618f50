"""Sessions against scripted policies: what is trained are the tokens that were sampled, each once, and a prompt has the
tokens of the turn that it continues."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.tokenizer import ChatRenderer
from megarl.rollout.gateway_messages import tool_call
from megarl.rollout.session import ContextTooLong, Session, SessionLimits, TooManySegments, TurnPrompt
from tests.chat_templates import ADD, DROPPING, KEEPING, TEMPLATES, squashed
from tests.session_cases import LIMITS, Policy, check_trained, renderer

pytestmark = pytest.mark.agent
WORDS = st.text("abcdefg 012.é\n", min_size=1, max_size=12)


def sent_back(reply: dict[str, Any], drops_thoughts: bool) -> dict[str, Any]:
    """What a client makes of a reply: JSON, other ids of calls, white space, and thoughts as it likes."""
    shown = json.loads(json.dumps(reply)) | {"content": reply["content"].strip()}
    for number, call in enumerate(shown.get("tool_calls", ())):
        call["id"] = f"call-{number}"
    if drops_thoughts:
        shown.pop("reasoning_content", None)
    return shown


def is_continued(turn: TurnPrompt, before: np.ndarray) -> bool:
    return len(turn.prompt_ids) > len(before) and np.array_equal(turn.prompt_ids[: len(before)], before)


turns = st.lists(st.tuples(WORDS, WORDS, st.booleans(), st.integers(0, 3)), min_size=8, max_size=8)


@pytest.mark.parametrize("tools", [None, [ADD]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", KEEPING)
@given(turns=turns)
@settings(max_examples=12, deadline=None)
def test_eight_turns_are_one_segment_of_sampled_tokens(name: str, tools: Any, turns: Any) -> None:
    chat = renderer(name)
    session, policy = Session(chat, LIMITS), Policy(chat)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}]
    before = np.empty(0, np.int32)
    for answer, question, is_cut, num_calls in turns:
        turn = session.next_turn(messages, tools)
        assert is_continued(turn, before), "the prompt has the tokens of all turns before"
        shown, wanted = chat.tokenizer.decode(turn.prompt_ids), chat.render(messages, tools)
        if not chat.turn_end.startswith("<|turn_end|>"):  # the policy ends its turns as engines let it, and nobody else
            shown, wanted = (text.replace("<|turn_end|>", "") for text in (shown, wanted))
        assert squashed(shown) == squashed(wanted)
        calls = [
            tool_call("add", {"a": number})
            for number in range(num_calls if tools and "tool_calls" in TEMPLATES[name] else 0)
        ]
        text = answer + "".join(
            f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': n}})}</tool_call>" for n in range(len(calls))
        )
        sampled = policy.write(text, is_cut)
        reply = {"role": "assistant", "content": answer} | ({"tool_calls": calls} if calls else {})
        session.record(turn, sampled, reply)
        before = np.concatenate([turn.prompt_ids, sampled.token_ids])
        messages = [*messages, sent_back(reply, True)]
        messages += [{"role": "tool", "content": question, "tool_call_id": "1"} for _ in calls] or [
            {"role": "user", "content": question}
        ]
    check_trained(session.segments, policy.sampled)
    (segment,) = session.segments
    assert segment.tokens.tolist() == before.tolist() and session.counts == {"begun": 1}


@pytest.mark.parametrize("tools", [None, [ADD]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", DROPPING)
@given(turns=turns)
@settings(max_examples=12, deadline=None)
def test_a_template_that_changes_earlier_turns_begins_segments(name: str, tools: Any, turns: Any) -> None:
    """The prompt is then what the engine would get anywhere else: the template's text, of which nothing is trained."""
    chat = renderer(name)
    session, policy = Session(chat, LIMITS), Policy(chat)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}]
    for number, (answer, question, is_cut, _) in enumerate(turns):
        turn = session.next_turn(messages, tools)
        assert turn.prompt_ids.tolist() == chat.ids(chat.render(messages, tools)).tolist()
        text = answer if name == "opens thoughts itself" else f"<think>{answer}</think>{answer}"
        session.record(turn, policy.write(text, is_cut), {"role": "assistant", "content": text})
        assert session.counts["template"] == number == len(session.segments) - 1
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": question}]
    check_trained(session.segments, policy.sampled)


def test_thoughts_stay_until_the_next_question() -> None:
    """Such a template keeps them while tools answer: these turns are one segment, and the next question begins another."""
    chat = renderer("thoughts of earlier questions")
    session, policy = Session(chat, LIMITS), Policy(chat)
    call, text = tool_call("add", {"a": 1}), '<think>hm</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What?"}]
    for _ in range(3):
        turn = session.next_turn(messages, [ADD])
        reply = {"role": "assistant", "content": "<think>hm</think>", "tool_calls": [call]}
        session.record(turn, policy.write(text), reply)
        messages = [*messages, sent_back(reply, False), {"role": "tool", "content": "2", "tool_call_id": "1"}]
    assert session.counts == {"begun": 1}
    messages += [{"role": "user", "content": "And then?"}]
    session.record(session.next_turn(messages, [ADD]), policy.write("so"), {"role": "assistant", "content": "so"})
    assert session.counts == {"begun": 1, "template": 1}
    check_trained(session.segments, policy.sampled)


def test_thoughts_that_a_template_drops_begin_a_segment_though_no_client_sends_them_back() -> None:
    chat = renderer("plain")
    session, policy = Session(chat, LIMITS), Policy(chat)
    messages, reply = [{"role": "user", "content": "2 + 2?"}], {"role": "assistant", "content": "4"}
    thoughtful = reply | {"reasoning_content": "two and two"}
    session.record(session.next_turn(messages), policy.write("<think>two and two</think>4"), thoughtful)
    session.record(session.next_turn([*messages, reply, *messages]), policy.write("4"), reply)
    assert session.counts == {"begun": 1, "template": 1}
    check_trained(session.segments, policy.sampled)


class Client:
    """Keeps every turn that it got, and continues any of them, edits histories, or begins anew."""

    def __init__(self, chat: ChatRenderer, name: str, generator: random.Random) -> None:
        self.session, self.policy, self.name, self.random = Session(chat, LIMITS), Policy(chat), name, generator
        self.known: list[tuple[list[dict[str, Any]], np.ndarray]] = []  # histories, and their tokens
        self.open: list[tuple[TurnPrompt, np.ndarray | None]] = []  # requests that no engine has answered
        self.number = 0

    def ask(self) -> None:
        """Send a request: one of its turns continued, with all its tokens, or a history that the session does not have."""
        self.number += 1
        message = {"role": "user", "content": f"{self.name} asks {self.number}"}
        kind = self.random.choice(("newest", "newest", "any", "edited", "new")) if self.known else "new"
        if kind == "new":
            self.open.append((self.session.next_turn([message]), None))
            return
        messages, tokens = self.known[-1] if kind == "newest" else self.random.choice(self.known)
        if kind == "edited":
            place = self.random.randrange(len(messages))
            messages = [
                m | {"content": f"{self.name} edits {self.number}"} if n == place else m for n, m in enumerate(messages)
            ]
        self.open.append((self.session.next_turn([*messages, message]), None if kind == "edited" else tokens))

    def answer(self) -> None:
        """Complete one of the requests, or give it up."""
        turn, tokens = self.open.pop(self.random.randrange(len(self.open)))
        if tokens is not None:
            assert is_continued(turn, tokens), "the prompt has the tokens that were sampled"
        if self.random.random() < 0.1:
            return
        text = f"{self.name} says ab {self.number}"
        sampled, reply = self.policy.write(text, self.random.random() < 0.3), {"role": "assistant", "content": text}
        self.session.record(turn, sampled, reply)
        self.number += 1
        self.known.append(([*turn.messages, sent_back(reply, True)], np.concatenate([turn.prompt_ids, sampled.token_ids])))

    def step(self) -> None:
        if not self.open or (len(self.open) < 4 and self.random.random() < 0.5):
            self.ask()
        else:
            self.answer()


@given(seed=st.integers(0, 2**32), name=st.sampled_from(list(KEEPING)))
@settings(max_examples=20, deadline=None)
def test_branches_retries_and_rewritten_histories_train_each_token_once(seed: int, name: str) -> None:
    client = Client(renderer(name), "A", random.Random(seed))
    for _ in range(40):
        client.step()
    check_trained(client.session.segments, client.policy.sampled)
    assert sum(client.session.counts.values()) == len(client.session.segments)


@pytest.mark.parametrize("steps", [4_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_sessions_that_interleave_never_mix(steps: int) -> None:
    """Every token of a session is of its own client: each one has a name, which all its texts begin with."""
    generator, chat = random.Random(7), renderer("plain")
    clients = [Client(chat, letter, generator) for letter in "ABCDEFGHIJKLMNOPQRST"]
    for number in range(steps):
        place = generator.randrange(len(clients))
        client = clients[place]
        client.step()
        if number % 50 == 49 or len(client.session.segments) > 30:  # this one ends, and another begins
            check_trained(client.session.segments, client.policy.sampled)
            text = "".join(chat.tokenizer.decode(segment.tokens) for segment in client.session.segments)
            assert not (set("ABCDEFGHIJKLMNOPQRST") - {client.name}) & set(text)
            clients[place] = Client(chat, client.name, generator)


def test_one_request_may_have_several_completions() -> None:
    chat = renderer("plain")
    session, policy = Session(chat, LIMITS), Policy(chat)
    first_messages = [{"role": "user", "content": "?"}]
    session.record(session.next_turn(first_messages), policy.write("a"), {"role": "assistant", "content": "a"})
    history = [*first_messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "!"}]
    turn = session.next_turn(history)
    for text in "bcd":
        session.record(turn, policy.write(text), {"role": "assistant", "content": text})
    assert len(session.segments) == 3 and session.counts == {"begun": 1, "forked": 2}
    check_trained(session.segments, policy.sampled)
    for number, text in enumerate("bcd"):
        other = session.next_turn([*history, {"role": "assistant", "content": text}, {"role": "user", "content": "."}])
        assert other.state is not None and other.state.segment is session.segments[number]


def test_limits_hold_for_each_segment() -> None:
    chat = renderer("plain")
    session, policy = Session(chat, SessionLimits(12, 12, max_segments=2, max_branches=1)), Policy(chat)
    first_messages = [{"role": "user", "content": "12345"}]
    with pytest.raises(ContextTooLong, match="the prompt has 13 tokens; 1 to 12"):
        session.next_turn([{"role": "user", "content": "1234567890"}])
    turn = session.next_turn(first_messages)
    assert turn.max_new_tokens == 12
    session.record(turn, policy.write("abcd"), {"role": "assistant", "content": "abcd"})
    history = [*first_messages, {"role": "assistant", "content": "abcd"}, {"role": "user", "content": "12"}]
    assert session.next_turn(history).max_new_tokens == 12 - 5 - 5
    with pytest.raises(ContextTooLong, match="has 12 tokens after its first prompt"):
        session.next_turn([*history[:-1], {"role": "user", "content": "1234"}])
    other = [{"role": "user", "content": "b"}]
    session.record(session.next_turn(other), policy.write("c"), {"role": "assistant", "content": "c"})
    for messages in (other, history):  # the second one's turn is forgotten
        with pytest.raises(TooManySegments):
            session.next_turn(messages)
    assert session.counts == {"begun": 2}
    with pytest.raises(ValueError, match="the last message must not be the assistant's"):
        session.next_turn(history[:2])
