"""Episodes of agents at a real endpoint: tokens stay as they were sampled, and each end has its reward, mask and cause."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import openai
import pytest

from megarl.rollout import RolloutError
from megarl.rollout.agent import AgentRun
from megarl.rollout.engine import GroupRequest
from megarl.rollout.environment import Reply
from megarl.rollout.environment_workers import AgentClock
from megarl.rollout.episodes import AgentEpisodes, Environments, Episode
from megarl.rollout.groups import GroupResult
from tests.rollout.test_episodes import DRAW, END, environments_of, prompts, result, tokenizer

__all__ = ["tokenizer"]
Agent = Callable[[Any, AgentRun], Awaitable[Reply]]


class ScriptedWorkers:
    """In the place of the workers: runs the agent in this process, with a client."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self.ended, self.runs = agent, [], []  # type: ignore[var-annotated]

    async def run(self, number: int, question: AgentRun, clock: AgentClock) -> Reply:
        clock.begin()
        self.runs.append(question)
        async with openai.AsyncOpenAI(base_url=f"{question.url}/v1", api_key=question.token) as client:
            try:
                return await self._agent(client, question)
            except openai.APIStatusError as error:
                return Reply(failure=f"exited with status 1: {error}", cause="error")

    def end(self, number: int) -> None:
        self.ended.append(number)


def play(
    tokenizer: Any,
    agent: Agent,
    answer: Callable[[Episode, int], list[int]],
    size: int = 1,
    together: int = 1,
    **changes: Any,
) -> tuple[AgentEpisodes, Any]:
    """Play the episodes of a group; `answer` is what is sampled in a turn of an episode, once `together` requests wait."""
    barrier = asyncio.Barrier(together)
    limits = {"max_turns": 3, "max_episode_tokens": 30, "max_segments": 2}
    section = {"kind": "agent", "target": "tests.agents:run"} | limits | changes
    environments = environments_of(tokenizer, section, ScriptedWorkers(agent), ("data.max_prompt_tokens", 40))
    environments.gateway = Environments._open_gateway(environments, environments.section)
    played = AgentEpisodes(environments, prompts(tokenizer, 1)[0], size, None, DRAW)  # type: ignore[arg-type]

    async def generate(request: GroupRequest, episode: Episode) -> GroupResult:
        await barrier.wait()
        tokens = answer(episode, episode.turns)
        return result(request, tokens[: request.max_new_tokens], version=episode.turns)

    async def run() -> None:
        environments.gateway.serve()
        try:
            await played.play(generate)
        finally:
            await environments.gateway.close()

    asyncio.run(run())
    return played, environments


async def ask(client: Any, *texts: str, **options: Any) -> Any:
    """Send a chat in which both sides take turns; return the answer."""
    chat = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    answer = await client.chat.completions.create(model="policy", messages=chat, **options)
    return answer.choices[0].message.content


def words(*texts: str) -> Callable[[Episode, int], list[int]]:
    """The policy says these, one a turn."""
    return lambda episode, turn: [*map(int, texts[turn].split()), END]


async def two_turns(client: Any, run: AgentRun) -> Reply:
    first = await ask(client, "1+1=")
    await ask(client, "1+1=", first, "ok")
    return Reply(reward=0.5, done=True, metrics={"calls": 2.0})


def test_the_tokens_are_those_that_were_sampled(tokenizer: Any) -> None:
    played, environments = play(tokenizer, two_turns, words("20 21", "22"), size=2)
    facts, group = played.facts(), played.result()
    assert facts.rewards.tolist() == [0.5, 0.5] and facts.turns.tolist() == [2, 2] and facts.done.all()
    assert group.members.tolist() == [0, 1] and group.finish_reasons == ("stop", "stop") and len(group.prompt_lengths) == 1
    for member in range(2):
        completion = group.sample(member).completion
        assert completion.token_ids[completion.own].tolist() == [20, 21, END, 22, END]
        assert set(completion.versions[completion.own].tolist()) == {0, 1}
        assert (completion.logprobs[~completion.own] == 0).all() and (~completion.own).any()
    first, second = environments.workers.runs
    assert first.seed == second.seed and first.token != second.token and first.url != second.url
    assert sorted(environments.workers.ended) == [0, 1]
    assert facts.metrics()["agent/calls"] == 2.0 and facts.metrics()["rollout/segments_begun"] == 2


def test_a_rewritten_history_is_another_segment_of_the_same_rollout(tokenizer: Any) -> None:
    async def compacts(client: Any, run: AgentRun) -> Reply:
        first = await ask(client, "1+1=")
        await ask(client, "1+1=", first, "ok")
        await ask(client, "2+2=")
        return Reply(reward=1.0, rewards=(0.25, 0.0, 0.75), done=True)

    played, _ = play(tokenizer, compacts, words("20", "21", "22"), size=2)
    group, facts = played.result(), played.facts()
    assert group.members.tolist() == [0, 0, 1, 1] and group.prefixes.tolist() == [0, 1, 0, 1]
    assert [group.sample(n).completion.own.sum() for n in range(4)] == [4, 2, 4, 2]
    assert json.loads(facts.notes[0]) == {"rewards": [0.25, 0.0, 0.75], "metrics": {}, "segments": {"begun": 2}}


def asks(*texts: str, reply: Reply | None = None) -> Agent:
    """An agent that begins conversations one after the other, and replies, also if it is refused a turn; without a reply it
    fails with the refusal."""

    async def agent(client: Any, run: AgentRun) -> Reply:
        try:
            for text in texts:
                await ask(client, text)
        except openai.RateLimitError:
            if reply is None:
                raise
        assert reply is not None, "refused before"
        return reply

    return agent


async def asks_at_once(client: Any, run: AgentRun) -> Reply:
    await asyncio.gather(*(ask(client, f"{number}+1=") for number in range(3)))
    return GOOD


NAN, WITHOUT_END = float("nan"), ["1+1="] * 9
GOOD, FAILED = Reply(reward=1.0, done=True), Reply(failure="exited with status 1", cause="error")
LOST = Reply(failure="the worker of its process is gone")
ENDS = {
    "it fails at once": (asks(reply=FAILED), NAN, "failed", "", "exited with status 1"),
    "it fails later": (asks("1+1=", reply=FAILED), 0.0, "failed", "error", "behind turn 1: exited with status 1"),
    "it loses its service": (asks("1+1=", reply=Reply(failure="no service")), NAN, "failed", "", "no service"),
    "it asks without an end": (asks(*WITHOUT_END), 0.0, "length", "", ""),
    "it begins too many": (asks("0+1=", "1+1=", "2+1="), 0.0, "length", "", ""),
    "it is too long": (asks("1+1=", "1+1=" * 30), 0.0, "length", "", ""),
    "it is content with its turns": (asks(*WITHOUT_END, reply=GOOD), 1.0, "length", "", ""),
    "it loses its worker after a refusal": (asks(*WITHOUT_END, reply=LOST), NAN, "failed", "", LOST.failure),
    "it asks nothing": (asks(reply=GOOD), NAN, "failed", "", "returned without a request that the policy answered"),
    "it miscounts": (
        asks("1+1=", reply=Reply(reward=1.0, rewards=(0.5, 0.5), done=True)), 0.0, "failed", "error",
        "it returned 2 rewards for 1 answers of the policy",
    ),
    "it asks at once": (asks_at_once, 0.0, "length", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_what_the_policy_can_cause_is_scored_and_all_else_is_masked(tokenizer: Any, name: str) -> None:
    agent, reward, ended, cause, failure = ENDS[name]
    together = 2 if agent is asks_at_once else 1
    played, _ = play(tokenizer, agent, lambda episode, turn: [20, END], together=together, max_segments=2)
    facts, (episode,) = played.facts(), played.episodes
    np.testing.assert_equal(facts.rewards, np.array([reward], np.float32))
    assert (episode.ended, episode.cause) == (ended, cause) and failure in episode.failure
    assert bool(episode.failure) == bool(failure)
    group = played.result()
    assert 1 <= len(group.lengths) <= 2 and all(group.lengths > 0), (
        "a rollout always has tokens, and never too many segments"
    )


def test_an_engine_s_error_is_the_run_s_and_not_the_agent_s(tokenizer: Any) -> None:
    def answer(episode: Episode, turn: int) -> list[int]:
        raise RolloutError("no engine is left")

    with pytest.raises(RolloutError, match="no engine is left"):
        play(tokenizer, two_turns, answer)


def test_a_slow_agent_holds_up_nobody(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits until the second has ended, and its processes were killed."""
    ended: list[int] = []
    killed: list[int] = []
    monkeypatch.setattr(ScriptedWorkers, "end", lambda self, number: killed.append(number))

    async def waits(client: Any, run: AgentRun) -> Reply:
        number = len(ended)
        ended.append(number)
        await ask(client, "1+1=")
        while number == 0 and killed != [1]:
            await asyncio.sleep(0)
        ended.append(number)
        return Reply(reward=1.0, done=True)

    played, _ = play(tokenizer, waits, lambda episode, turn: [20, END], size=2)
    assert played.facts().done.all()
