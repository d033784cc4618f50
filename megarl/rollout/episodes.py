"""The episodes of a rollout, seen from rank 0: what engines sampled, what environments answered, and what comes next.

Every episode goes on as soon as its engine or its environment has answered; none waits for another.

A turn's prompt is exactly the tokens so far: prompt, sampled, observed. Nothing that was sampled is tokenized again. A turn
that was truncated is answered like any other; the observation then begins with the template's end of the turn.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megarl.data.sample import Completion, Prompt
from megarl.data.tokenizer import Observations, prompt_tokenizer
from megarl.recipe import Recipe
from megarl.recipe.environment_section import AgentSection, AnyEnvironment, CommandSection, EnvironmentSection
from megarl.rollout import RolloutError
from megarl.rollout.agent import AgentRun
from megarl.rollout.engine import GroupRequest, request_seed, vllm_seed
from megarl.rollout.environment import SHORT_ERROR, Reply, load_environment
from megarl.rollout.environment_workers import AgentClock, EnvironmentWorkers, Reset, Step
from megarl.rollout.groups import EpisodeFacts, GroupResult
from megarl.rollout.session import Segment, Session, SessionLimits
from megarl.telemetry.run_directory import RunDirectory

if TYPE_CHECKING:
    from megarl.rollout.gateway import Gateway, OpenSession, SamplingRequest

ENVIRONMENT_MEMBER = 2**32 - 1  # in place of a member, in the seed of a group's environments


@dataclass
class Episode:
    """One sample in progress: its session has the turns so far, and `observed` is what its next prompt adds to them (the
    first one: all of it). `ended` is the finish reason."""

    member: int
    observed: np.ndarray
    number: int  # among all episodes of the run
    session: Session
    malformed: int = 0
    reward: float = 0.0
    rewards: list[float] = field(default_factory=list)  # of its turns, if there are any
    metrics: dict[str, float] = field(default_factory=dict)  # of its agent
    failure: str = ""
    cause: str = ""  # of the failure, if the policy's turn can be the cause
    ended: str = ""

    @property
    def turns(self) -> int:
        return self.session.num_turns

    @property
    def segment(self) -> Segment:
        """All tokens of the episode."""
        (segment,) = self.session.segments
        return segment


Generate = Callable[[GroupRequest, Episode], Awaitable[GroupResult]]


class Environments:
    """What the rollouts of a run need for episodes: the environment workers, tokenizer and observations."""

    def __init__(self, recipe: Recipe, model_path: str, num_tokens: int, stop_token_ids: Sequence[int], seed: int) -> None:
        """Raises RolloutError for an environment that does not load, ValueError for a chat template that cannot continue a
        conversation, or not with the environment's tools."""
        assert recipe.environment is not None
        self.section: AnyEnvironment = recipe.environment
        self.recipe, self.seed, self.stops = recipe, seed, frozenset(int(token) for token in stop_token_ids)
        first_start = RunDirectory.of(recipe).first_start
        self.tokenizer = prompt_tokenizer(model_path, recipe.data.template_options, first_start)
        self.observations = Observations(self.tokenizer, recipe.data, num_tokens)
        self.limits = SessionLimits.of(recipe)
        self.gateway: Gateway | None = None
        if self.section.kind == "class":
            check_tool_role(self.section, self.observations)
        else:
            self.gateway = self._open_gateway(self.section)
        self.workers = EnvironmentWorkers(self.section, recipe.rollout.timeout_s)
        self.numbers = itertools.count()

    def _open_gateway(self, section: AgentSection | CommandSection) -> Gateway:
        """Make the endpoint, which the stream's loop is to serve. Raises ValueError for parsers that vLLM does not have."""
        from megarl.rollout.gateway import Gateway, GatewayLimits  # takes long, and only agents need it
        from megarl.rollout.gateway_messages import AnswerReader

        recipe = self.recipe
        limits = GatewayLimits(self.limits, recipe.rollout.max_new_tokens, section.max_turns)
        reader = AnswerReader(self.tokenizer, self.stops, section.tool_parser, section.reasoning_parser)
        return Gateway(self.observations.chat, reader, limits, recipe.rollout.temperature, host=section.host)


def check_tool_role(section: EnvironmentSection, observations: Observations) -> None:
    """Raise ValueError if an error about a tool call cannot be rendered, is left out by the template, or is longer than an
    observation may be."""
    environment = load_environment(section.target, section.options)
    if not environment.tools:
        return
    role = f"{section.target}, tool_role = {environment.tool_role!r}"
    try:
        # After a truncated turn, where the observation is longest.
        ids, other_ids = (
            observations.behind(-1, [{"role": environment.tool_role, "content": text}]) for text in (SHORT_ERROR, "ok")
        )
    except ValueError as error:
        raise ValueError(f"environment.target: {role}: {error}; give the class another tool_role, as 'user'") from error
    if np.array_equal(ids, other_ids):
        raise ValueError(
            f"environment.target: {role}: the model's chat template leaves messages of that role out; give the class "
            "another tool_role, as 'user'"
        )
    if len(ids) > section.max_observation_tokens:
        raise ValueError(
            f"environment.max_observation_tokens = {section.max_observation_tokens}: an error about a tool call has "
            f"{len(ids)} tokens with its template; {len(ids)} at least are needed"
        )


class GroupEpisodes(ABC):
    """The episodes of one group: they begin with one prompt and row, and each goes on as fast as it can."""

    def __init__(self, environments: Environments, prompt: Prompt, size: int, temperature: float | None, draw: int) -> None:
        """`draw` as in `Sampling`."""
        self.environments, self.prompt, self.draw, self.temperature = environments, prompt, draw, temperature
        ids, chat, limits = np.asarray(prompt.token_ids, dtype=np.int32), environments.observations.chat, environments.limits
        self.episodes = [Episode(member, ids, next(environments.numbers), Session(chat, limits)) for member in range(size)]
        # All members have the same, so that their episodes begin alike.
        self.seed = vllm_seed(request_seed(environments.seed, draw, prompt.index, ENVIRONMENT_MEMBER))

    async def play(self, generate: Generate) -> None:
        """Play all episodes; `generate` samples a turn. Each one's processes are killed at its end, whatever that is. Raises
        RolloutError for a failure under `environment.on_error: stop`."""

        async def play_to_the_end(episode: Episode) -> None:
            try:
                await self.play_one(episode, generate)
            finally:
                self.environments.workers.end(episode.number)
            if not episode.turns:
                await self._fill(episode, generate)

        playing = [asyncio.ensure_future(play_to_the_end(episode)) for episode in self.episodes]
        try:
            await asyncio.gather(*playing)
        finally:
            for episode in playing:  # if one of them has failed
                episode.cancel()

    @abstractmethod
    async def play_one(self, episode: Episode, generate: Generate) -> None:
        """Play an episode to its end."""

    async def sample(self, episode: Episode, ids: np.ndarray, number: int, most: int, generate: Generate) -> Completion:
        """Let an engine complete a prompt with up to `most` tokens; `number` is that of the turn."""
        index = self.prompt.index
        seed = request_seed(self.environments.seed, self.draw, index, episode.member, number)
        most = min(self.environments.recipe.rollout.max_new_tokens, most)
        request = GroupRequest(0, index, ids, (seed,), self.temperature, most)
        return (await generate(request, episode)).sample(0).completion

    async def _fill(self, episode: Episode, generate: Generate) -> None:
        """Sample one turn that counts for nothing: every rollout has tokens, and this one's code failed before its first."""
        turn = episode.session.after(np.asarray(self.prompt.token_ids, dtype=np.int32))
        episode.session.record(turn, await self.sample(episode, turn.prompt_ids, 0, turn.max_new_tokens, generate))
        episode.ended = "failed"

    def result(self) -> GroupResult:
        """Return all tokens of the group."""
        rollouts = [episode.session.segments for episode in self.episodes]
        return GroupResult.of_segments(self.prompt.index, rollouts, [episode.ended for episode in self.episodes])

    def facts(self) -> EpisodeFacts:
        """Return how the episodes ended."""
        rewards, notes = [], []
        for episode in self.episodes:
            if not episode.failure:
                rewards.append(episode.reward)
            else:  # a failed episode loses what it gained, and keeps what it lost
                rewards.append(min(0.0, episode.reward) if episode.cause else np.nan)
            note = {"rewards": episode.rewards, "metrics": episode.metrics, "segments": episode.session.counts}
            notes.append(json.dumps(note))
        return EpisodeFacts(
            rewards=np.array(rewards, dtype=np.float32),
            turns=np.array([episode.turns for episode in self.episodes]),
            malformed=np.array([episode.malformed for episode in self.episodes]),
            done=np.array([episode.ended == "stop" for episode in self.episodes]),
            failures=np.array([episode.failure for episode in self.episodes], dtype=np.str_),
            causes=np.array([episode.cause for episode in self.episodes], dtype=np.str_),
            notes=np.array(notes, dtype=np.str_),
        )

    def fail(self, episode: Episode, reason: str, cause: str = "") -> None:
        """Record the failure of an environment; it has a `cause` if it followed a turn of the policy."""
        section = self.environments.section
        where = f"{self.prompt.where}: " if self.prompt.where else ""
        turn = f", behind turn {episode.turns}" if episode.turns else ""
        name = f"member {episode.member} of prompt {self.prompt.index}{turn}"
        episode.cause = cause
        episode.failure = (
            f"{where}environment {section.target if section.kind != 'command' else section.run}, {name}: {reason}"
        )
        if section.on_error == "stop":
            raise RolloutError(f"{episode.failure}; environment.on_error: mask goes on without it")
        if episode.turns:
            episode.ended = "failed"


class Episodes(GroupEpisodes):
    """Episodes in which environments answer the policy."""

    _first_prompt: np.ndarray | None = None

    async def play_one(self, episode: Episode, generate: Generate) -> None:
        """Sample turns and step the environment until the episode has ended."""
        environments = self.environments
        reply = await environments.workers.ask(episode.number, Reset(self.prompt.row, self.seed))
        if reply.failure:
            self.fail(episode, reply.failure, reply.cause)
        else:
            self._reset(episode, reply)
        while not episode.ended and not episode.failure:
            turn = episode.session.after(episode.observed)
            sampled = await self.sample(episode, turn.prompt_ids, episode.turns, turn.max_new_tokens, generate)
            episode.session.record(turn, sampled)
            ids = sampled.token_ids.tolist()
            text = environments.tokenizer.decode(ids[:-1] if ids[-1] in environments.stops else ids)
            reply = await environments.workers.ask(episode.number, Step(text, is_first=episode.turns == 1))
            if reply.failure:
                self.fail(episode, reply.failure, reply.cause)
            else:
                self._step(episode, reply)

    def _reset(self, episode: Episode, reply: Reply) -> None:
        """Begin an episode with the prompt of its environment, or of the data."""
        ids = episode.observed
        if reply.messages is not None:
            try:
                ids = self.environments.observations.prompt(reply.messages)
            except ValueError as error:
                self.fail(episode, f"what reset returned cannot be used: {error}")
                return
        if self._first_prompt is None:
            self._first_prompt = ids
        if not np.array_equal(self._first_prompt, ids):
            self.fail(episode, "reset returned another prompt than for others of its group, with the same row and seed")
            return
        episode.observed = ids

    def _step(self, episode: Episode, reply: Reply) -> None:
        """Append the observation after a turn, or end the episode."""
        section, observations = self.environments.section, self.environments.observations
        assert section.kind == "class"
        episode.reward += reply.reward
        episode.rewards.append(reply.reward)
        episode.malformed += reply.malformed
        if reply.done:
            episode.ended = "stop"
            return
        if episode.turns == section.max_turns:
            episode.ended = "length"
            return
        last, limit = int(episode.segment.completion.token_ids[-1]), section.max_observation_tokens
        messages = reply.messages or []
        try:
            ids = observations.behind(last, messages)
            if reply.malformed and len(ids) > limit:
                # The policy is at fault, so its sample counts. `check_tool_role` made sure that the short error fits.
                ids = observations.behind(last, [dict(message, content=SHORT_ERROR) for message in messages])
        except ValueError as error:
            self.fail(episode, f"Observation.content cannot be used: {error}", "error")
            return
        if len(ids) > limit:
            rule = f"environment.max_observation_tokens = {limit}"
            self.fail(episode, f"Observation.content has {len(ids)} tokens with its template, more than {rule}", "error")
        elif episode.segment.num_tokens + len(ids) >= self.environments.recipe.max_completion_tokens:
            episode.ended = "length"
        else:
            episode.observed = ids


class AgentEpisodes(GroupEpisodes):
    """Episodes in which agents ask the policy: each has a session of the endpoint, and a process that asks it.

    An episode ends as its agent does. What the policy can cause is scored, and what it cannot is masked:

    - The agent returns a reward: that is the episode's, also if a request was refused because turns, tokens or segments ran
      out.
    - It fails before the policy has answered once, does not reach a service, or loses its worker: masked.
    - It fails otherwise after such a refusal: truncated, with the reward 0.
    - It fails otherwise: the reward is 0, and the cause is counted.

    An error of an engine ends the run, as it does without agents.
    """

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
