"""The episodes of agents, seen from rank 0: each has a session of the endpoint, and a process that asks it.

An episode ends as its agent does. What the policy can cause is scored, and what it cannot is masked:

- The agent returns a reward: that is the episode's, also if a request was refused because turns, tokens or segments ran out.
- It fails before the policy has answered once, does not reach a service, or loses its worker: masked.
- It fails otherwise after such a refusal: truncated, with the reward 0.
- It fails otherwise: the reward is 0, and the cause is counted.

An error of an engine ends the run, as it does without agents.
"""

from __future__ import annotations

import asyncio

import numpy as np

from megarl.data.sample import Completion
from megarl.rollout.agent import AgentRun
from megarl.rollout.environment import Reply
from megarl.rollout.environment_workers import AgentClock
from megarl.rollout.episodes import Episode, Generate, GroupEpisodes
from megarl.rollout.gateway import OpenSession, SamplingRequest


class AgentEpisodes(GroupEpisodes):
    """Episodes in which agents ask the policy."""

    async def play_one(self, episode: Episode, generate: Generate) -> None:
        """Run an agent to its end."""
        environments = self.environments
        assert environments.section.kind != "class" and environments.gateway is not None
        clock = AgentClock(environments.section)
        errors: list[Exception] = []

        async def sample(prompt_ids: np.ndarray, request: SamplingRequest) -> Completion:
            with clock.stopped():
                try:
                    return await self.sample(episode, prompt_ids, request.number, request.max_new_tokens, generate)
                except Exception as error:  # whatever an engine raises ends the run, below
                    errors.append(error)
                    running.cancel()  # its agent may go on for long
                    raise

        opened = environments.gateway.open(sample)
        episode.session = opened.session
        try:
            run = AgentRun(self.prompt.row, opened.url, opened.token, self.seed)
            running = asyncio.ensure_future(environments.workers.run(episode.number, run, clock))
            reply = await running
        except asyncio.CancelledError:
            running.cancel()
            if not errors:
                raise
        finally:
            environments.gateway.end(opened)
        if errors:
            raise errors[0]
        self._end(episode, reply, opened)

    def _end(self, episode: Episode, reply: Reply, opened: OpenSession) -> None:
        """Note what became of an episode."""
        most = self.environments.limits.max_segments
        opened.is_exhausted |= len(episode.session.segments) > most
        del episode.session.segments[most:]  # of requests that were under way together
        episode.ended = "length" if opened.is_exhausted else "stop"
        failure, cause = reply.failure, reply.cause
        if not failure and not episode.turns:
            failure = "it returned without a request that the policy answered"
        elif not failure and reply.rewards and len(reply.rewards) != episode.turns:
            failure, cause = f"it returned {len(reply.rewards)} rewards for {episode.turns} answers of the policy", "error"
        if not failure:
            episode.reward, episode.rewards, episode.metrics = reply.reward, list(reply.rewards), reply.metrics
        else:
            if opened.fault:
                failure, cause = f"{failure}; the endpoint: {opened.fault}", ""
            cause = cause if episode.turns else ""
            if not (cause and opened.is_exhausted):
                self.fail(episode, failure, cause)
