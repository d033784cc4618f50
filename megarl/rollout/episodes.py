"""The episodes of a rollout, seen from rank 0: what engines sampled, what environments answered, and what comes next.

Every episode goes on as soon as its engine or its environment has answered; none waits for another.

A turn's prompt is exactly the tokens so far: prompt, sampled, observed. Nothing that was sampled is tokenized again. A turn
that was truncated is answered like any other; the observation then begins with the template's end of the turn.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.data.sample import Prompt
from megarl.data.tokenizer import Observations, prompt_tokenizer
from megarl.recipe import Recipe
from megarl.recipe.environment_section import EnvironmentSection
from megarl.rollout import RolloutError
from megarl.rollout.engine import GroupRequest, request_seed
from megarl.rollout.environment import SHORT_ERROR, load_environment
from megarl.rollout.environment_workers import EnvironmentWorkers, Reply, Reset, Step
from megarl.rollout.groups import EpisodeFacts, GroupResult
from megarl.rollout.session import Segment, Session, SessionLimits
from megarl.telemetry.run_directory import RunDirectory

ENVIRONMENT_MEMBER = 2**32 - 1  # in place of a member, in the seed of a group's environments


@dataclass
class Episode:
    """One sample in progress: its session has the turns so far, and `observed` is what its next prompt adds to them (the
    first one: all of it). `ended` is the finish reason."""

    prompt: Prompt
    member: int
    temperature: float | None
    observed: np.ndarray
    number: int  # among all episodes of the run
    session: Session
    begun: bool = False  # whether its environment was reset
    malformed: int = 0
    reward: float = 0.0
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
        self.section: EnvironmentSection = recipe.environment
        self.recipe, self.seed, self.stops = recipe, seed, frozenset(int(token) for token in stop_token_ids)
        first_start = RunDirectory.of(recipe).first_start
        self.tokenizer = prompt_tokenizer(model_path, recipe.data.template_options, first_start)
        self.observations = Observations(self.tokenizer, recipe.data, num_tokens)
        check_tool_role(self.section, self.observations)
        # A reset or a step of each episode, greedy episodes included, and the end of those of the last rollout.
        most = (1 + recipe.rollout.max_staleness) * 4 * recipe.num_sequences + 16
        self.workers = EnvironmentWorkers(self.section, most, recipe.rollout.timeout_s)
        self.numbers = itertools.count()

    def close(self) -> None:
        """End all environments."""
        self.workers.close()


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


class Episodes:
    """The episodes of one group: they begin with one prompt and row, and each goes on as fast as it can."""

    def __init__(self, environments: Environments, prompt: Prompt, size: int, temperature: float | None, draw: int) -> None:
        """`draw` as in `Sampling`."""
        self._environments, self._draw = environments, draw
        ids = np.asarray(prompt.token_ids, dtype=np.int32)
        limits = SessionLimits(environments.recipe.data.max_prompt_tokens, environments.recipe.max_completion_tokens)
        chat = environments.observations.chat
        self.episodes = [
            Episode(prompt, member, temperature, ids, next(environments.numbers), Session(chat, limits))
            for member in range(size)
        ]

    async def play(self, generate: Generate) -> None:
        """Play all episodes; `generate` samples a turn. Raises RolloutError for a failure under
        `environment.on_error: stop`."""
        workers = self._environments.workers
        prompt = self.episodes[0].prompt
        seed = request_seed(self._environments.seed, self._draw, prompt.index, ENVIRONMENT_MEMBER)
        try:
            replies = await asyncio.gather(*(workers.ask(e.number, Reset(prompt.row, seed)) for e in self.episodes))
            for episode, reply in zip(self.episodes, replies, strict=True):
                if reply.failure:
                    self._fail(episode, reply.failure, reply.cause)
                else:
                    self._reset(episode, reply)
            begun = [episode.observed for episode in self.episodes if episode.begun]
            for episode in self.episodes:
                if not episode.begun:  # its sample counts for nothing, and still has the prompt of its group
                    episode.observed = begun[0] if begun else episode.observed
            await asyncio.gather(*(self._play(episode, generate) for episode in self.episodes))
        finally:
            workers.end(episode.number for episode in self.episodes)

    def result(self) -> GroupResult:
        """Return all tokens of the group."""
        completions = [episode.segment.completion for episode in self.episodes]
        routing = [completion.routing for completion in completions if completion.routing is not None]
        return GroupResult(
            group=self.episodes[0].prompt.index,
            prompt_ids=self.episodes[0].segment.prompt_ids,
            token_ids=np.concatenate([completion.token_ids for completion in completions]),
            logprobs=np.concatenate([completion.logprobs for completion in completions]),
            lengths=np.array([len(completion.token_ids) for completion in completions], dtype=np.int32),
            finish_reasons=tuple(episode.ended for episode in self.episodes),
            versions=np.concatenate([completion.versions for completion in completions]),
            routing=np.concatenate(routing) if routing else None,
            own=np.concatenate([completion.own for completion in completions]),
        )

    def facts(self) -> EpisodeFacts:
        """Return how the episodes ended."""
        rewards = []
        for episode in self.episodes:
            if not episode.failure:
                rewards.append(episode.reward)
            else:  # a failed episode loses what it gained, and keeps what it lost
                rewards.append(min(0.0, episode.reward) if episode.cause else np.nan)
        return EpisodeFacts(
            rewards=np.array(rewards, dtype=np.float32),
            turns=np.array([episode.turns for episode in self.episodes]),
            malformed=np.array([episode.malformed for episode in self.episodes]),
            done=np.array([episode.ended == "stop" for episode in self.episodes]),
            failures=np.array([episode.failure for episode in self.episodes], dtype=np.str_),
            causes=np.array([episode.cause for episode in self.episodes], dtype=np.str_),
        )

    async def _play(self, episode: Episode, generate: Generate) -> None:
        """Sample turns and step the environment until the episode has ended."""
        environments = self._environments
        while not episode.ended:
            index = episode.prompt.index
            seed = request_seed(environments.seed, self._draw, index, episode.member, episode.turns)
            turn = episode.session.after(episode.observed)
            max_new_tokens = min(environments.recipe.rollout.max_new_tokens, turn.max_new_tokens)
            request = GroupRequest(0, index, turn.prompt_ids, (seed,), episode.temperature, max_new_tokens)
            sampled = (await generate(request, episode)).sample(0).completion
            episode.session.record(turn, sampled)
            if not episode.begun:  # its environment failed in reset: the sample has one turn, which does not count
                episode.ended = "failed"
                break
            ids = sampled.token_ids.tolist()
            text = environments.tokenizer.decode(ids[:-1] if ids[-1] in environments.stops else ids)
            reply = await environments.workers.ask(episode.number, Step(text))
            if reply.failure:
                self._fail(episode, reply.failure, reply.cause)
            else:
                self._step(episode, reply)

    def _reset(self, episode: Episode, reply: Reply) -> None:
        """Begin an episode with the prompt of its environment, or of the data."""
        ids = episode.observed
        if reply.messages is not None:
            try:
                ids = self._environments.observations.prompt(reply.messages)
            except ValueError as error:
                self._fail(episode, f"what reset returned cannot be used: {error}")
                return
        others = [member for member in self.episodes if member.begun]
        if others and not np.array_equal(others[0].observed, ids):
            self._fail(episode, "reset returned another prompt than for others of its group, with the same row and seed")
            return
        episode.observed, episode.begun = ids, True

    def _step(self, episode: Episode, reply: Reply) -> None:
        """Append the observation after a turn, or end the episode."""
        section, observations = self._environments.section, self._environments.observations
        episode.reward += reply.reward
        episode.malformed += reply.malformed
        if reply.done:
            episode.ended = "stop"
            return
        if episode.turns == section.max_turns:
            episode.ended = "length"
            return
        last, limit = int(episode.segment.ids[-1][-1]), section.max_observation_tokens
        messages = reply.messages or []
        try:
            ids = observations.behind(last, messages)
            if reply.malformed and len(ids) > limit:
                # The policy is at fault, so its sample counts. `check_tool_role` made sure that the short error fits.
                ids = observations.behind(last, [dict(message, content=SHORT_ERROR) for message in messages])
        except ValueError as error:
            self._fail(episode, f"Observation.content cannot be used: {error}", "error")
            return
        if len(ids) > limit:
            rule = f"environment.max_observation_tokens = {limit}"
            self._fail(episode, f"Observation.content has {len(ids)} tokens with its template, more than {rule}", "error")
        elif episode.segment.num_tokens + len(ids) >= self._environments.recipe.max_completion_tokens:
            episode.ended = "length"
        else:
            episode.observed = ids

    def _fail(self, episode: Episode, reason: str, cause: str = "") -> None:
        """Record the failure of an environment; it has a `cause` if it followed a turn of the policy."""
        section = self._environments.section
        where = f"{episode.prompt.where}: " if episode.prompt.where else ""
        turn = f", behind turn {episode.turns}" if episode.turns else ""
        name = f"member {episode.member} of prompt {episode.prompt.index}{turn}"
        episode.cause = cause
        episode.failure = f"{where}environment {section.target}, {name}: {reason}"
        if section.on_error == "stop":
            raise RolloutError(f"{episode.failure}; environment.on_error: mask goes on without it")
        if episode.turns:
            episode.ended = "failed"
