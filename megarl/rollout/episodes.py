"""The episodes of a rollout, seen from rank 0: what engines sampled, what environments answered, and what comes next.

All living episodes of an engine take their turns together: an engine repeats its work bit for bit only if the same requests
are queued at the same time, and a resumed run must continue bit for bit. So an engine's next turn begins when the
environments of all its episodes have answered. An environment is called as soon as its completion is there, while the engine
still samples others, and engines do not wait for each other.

A turn's prompt is exactly the tokens so far: prompt, sampled, observed. Nothing that was sampled is tokenized again. A turn
that was truncated is answered like any other; the observation then begins with the template's end of the turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
from megarl.telemetry.run_directory import RunDirectory

ENVIRONMENT_MEMBER = 2**32 - 1  # in place of a member, in the seed of a group's environments


@dataclass
class Episode:
    """One sample in progress. `ids`, `own`, `logprobs` and `versions` follow the prompt, with one piece per turn and per
    observation; `ended` is the finish reason."""

    prompt: Prompt
    group: int
    member: int
    engine: int
    temperature: float | None
    prompt_ids: np.ndarray
    begun: bool = False  # whether its environment was reset
    ids: list[np.ndarray] = field(default_factory=list)
    own: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    turns: int = 0
    malformed: int = 0
    reward: float = 0.0
    failure: str = ""
    cause: str = ""  # of the failure, if the policy's turn can be the cause
    ended: str = ""
    routing: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt."""
        return sum(map(len, self.ids))

    def append(self, ids: np.ndarray, logprobs: np.ndarray | None, versions: np.ndarray | None = None) -> None:
        """Append a turn of the policy, or an observation, which has no `logprobs`, and the version of the turn before."""
        self.ids.append(ids)
        self.versions.append(np.full(len(ids), self.versions[-1][-1]) if versions is None else versions)
        self.own.append(np.full(len(ids), logprobs is not None))
        self.logprobs.append(np.zeros(len(ids), dtype=np.float32) if logprobs is None else logprobs)


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
        self.workers = EnvironmentWorkers(self.section, max_calls=4 * recipe.num_sequences + 16)
        self.rounds = itertools.count()

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
    """The episodes of one rollout: groups of prompts, each with its number of members and their temperature."""

    def __init__(
        self, environments: Environments, groups: Sequence[tuple[Prompt, int, float | None]], draw: int, engines: int
    ) -> None:
        """`draw` as in `Sampling`; engine g % `engines` samples group g."""
        self._environments, self._draw = environments, draw
        self._round = next(environments.rounds)
        self.episodes = [
            Episode(prompt, position, member, position % engines, temperature, np.asarray(prompt.token_ids, dtype=np.int32))
            for position, (prompt, size, temperature) in enumerate(groups)
            for member in range(size)
        ]
        self._members: list[list[Episode]] = [[] for _ in groups]
        for episode in self.episodes:
            self._members[episode.group].append(episode)
        self._calls: dict[Any, int] = {}  # reference of a call to an environment -> its episode
        self._num_waiting = [0] * engines  # environments that have not answered, by engine
        self._num_ended = 0  # at the last call of `take_num_ended`

    def begin(self) -> list[Any]:
        """Reset all environments; return the references to wait for."""
        for number, episode in enumerate(self.episodes):
            seed = request_seed(self._environments.seed, self._draw, episode.prompt.index, ENVIRONMENT_MEMBER)
            self._call(number, Reset(episode.prompt.row, seed))
        return list(self._calls)

    def waits(self, engine: int) -> bool:
        """Say whether an environment of an engine's episodes has not answered yet."""
        return self._num_waiting[engine] > 0

    def requests(self, engine: int) -> dict[int, GroupRequest]:
        """Return the requests of an engine's next turn by episode; empty if all its episodes have ended."""
        requests = {}
        for number, episode in enumerate(self.episodes):
            if episode.engine != engine or episode.ended:
                continue
            if not episode.begun and not episode.turns:
                # Its environment failed in reset. The sample counts for nothing, and still has the prompt of its group.
                begun = [member.prompt_ids for member in self._members[episode.group] if member.begun]
                episode.prompt_ids = begun[0] if begun else episode.prompt_ids
            index = episode.prompt.index
            seed = request_seed(self._environments.seed, self._draw, index, episode.member, episode.turns)
            left = self._environments.recipe.max_completion_tokens - episode.num_tokens
            max_new_tokens = min(self._environments.recipe.rollout.max_new_tokens, left)
            ids = np.concatenate([episode.prompt_ids, *episode.ids])
            requests[number] = GroupRequest(number, index, ids, (seed,), episode.temperature, max_new_tokens)
        return requests

    def sampled(self, number: int, result: GroupResult) -> list[Any]:
        """Append a turn to an episode, exactly as it was sampled; return the references to wait for before its next turn."""
        episode = self.episodes[number]
        episode.turns += 1
        episode.append(result.token_ids, result.logprobs, result.versions)
        episode.routing = result.routing  # of the whole sequence so far, as the turn's prompt includes it
        if not episode.begun:  # its environment failed in reset: the sample has one turn, which does not count
            episode.ended = "failed"
            return []
        ids = result.token_ids.tolist()
        text = self._environments.tokenizer.decode(ids[:-1] if ids[-1] in self._environments.stops else ids)
        return [self._call(number, Step(text))]

    def answered(self, reference: Any) -> int:
        """Take the answer of an environment; return the engine of its episode. Raises RolloutError for a failure under
        `environment.on_error: stop`."""
        number = self._calls.pop(reference)
        episode, reply = self.episodes[number], self._environments.workers.reply(reference)
        self._num_waiting[episode.engine] -= 1
        if reply.failure:
            self._fail(episode, reply.failure, reply.cause)
        elif not episode.begun:
            self._reset(episode, reply)
        else:
            self._step(episode, reply)
        return episode.engine

    def take_num_ended(self) -> int:
        """Return how many episodes have ended since the last call."""
        earlier, self._num_ended = self._num_ended, sum(bool(episode.ended) for episode in self.episodes)
        return self._num_ended - earlier

    def close(self) -> None:
        """End the environments of all episodes."""
        self._environments.workers.end((number, (self._round, number)) for number in range(len(self.episodes)))

    def results(self) -> dict[int, GroupResult]:
        """Return the groups by position."""
        results = {}
        for position, members in enumerate(self._members):
            routing = [episode.routing for episode in members if episode.routing is not None]
            results[position] = GroupResult(
                group=members[0].prompt.index,
                prompt_ids=members[0].prompt_ids,
                token_ids=np.concatenate([piece for episode in members for piece in episode.ids]),
                logprobs=np.concatenate([piece for episode in members for piece in episode.logprobs]),
                lengths=np.array([episode.num_tokens for episode in members], dtype=np.int32),
                finish_reasons=tuple(episode.ended for episode in members),
                versions=np.concatenate([piece for episode in members for piece in episode.versions]),
                routing=np.concatenate(routing) if routing else None,
                own=np.concatenate([piece for episode in members for piece in episode.own]),
            )
        return results

    def facts(self, positions: range) -> EpisodeFacts:
        """Return how the episodes of some groups ended."""
        episodes = [episode for position in positions for episode in self._members[position]]
        rewards = []
        for episode in episodes:
            if not episode.failure:
                rewards.append(episode.reward)
            else:  # a failed episode loses what it gained, and keeps what it lost
                rewards.append(min(0.0, episode.reward) if episode.cause else np.nan)
        return EpisodeFacts(
            rewards=np.array(rewards, dtype=np.float32),
            turns=np.array([episode.turns for episode in episodes]),
            malformed=np.array([episode.malformed for episode in episodes]),
            done=np.array([episode.ended == "stop" for episode in episodes]),
            failures=np.array([episode.failure for episode in episodes], dtype=np.str_),
            causes=np.array([episode.cause for episode in episodes], dtype=np.str_),
        )

    def _call(self, number: int, question: Reset | Step) -> Any:
        reference = self._environments.workers.ask(number, (self._round, number), question)
        self._calls[reference] = number
        self._num_waiting[self.episodes[number].engine] += 1
        return reference

    def _reset(self, episode: Episode, reply: Reply) -> None:
        """Begin an episode with the prompt of its environment, or of the data."""
        ids = episode.prompt_ids
        if reply.messages is not None:
            try:
                ids = self._environments.observations.prompt(reply.messages)
            except ValueError as error:
                self._fail(episode, f"what reset returned cannot be used: {error}")
                return
        others = [member for member in self._members[episode.group] if member.begun]
        if others and not np.array_equal(others[0].prompt_ids, ids):
            self._fail(episode, "reset returned another prompt than for others of its group, with the same row and seed")
            return
        episode.prompt_ids, episode.begun = ids, True

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
        last, limit = int(episode.ids[-1][-1]), section.max_observation_tokens
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
        elif episode.num_tokens + len(ids) >= self._environments.recipe.max_completion_tokens:
            episode.ended = "length"
        else:
            episode.append(ids, None)

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
