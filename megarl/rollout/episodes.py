"""Episodes of a rollout, seen from rank 0: what each one's engine has sampled, what its environment answered, and what comes
next.

All living episodes of an engine take their turns together: an engine repeats its work bit for bit only where the same
requests are queued at the same time, and a resumed run goes on bit for bit. So an engine's next turn begins when the
environments of all its episodes have answered; they are asked while others of its completions are still being sampled, and
engines do not wait for each other.

A turn's prompt is exactly the tokens so far: prompt, sampled, observed. Nothing that was sampled is tokenized again. A turn
that was cut at its limit is answered like any other; the observation then brings the template's end of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.data.observations import Observations
from megarl.data.sample import Prompt
from megarl.data.tokenizer import prompt_tokenizer
from megarl.recipe import Recipe
from megarl.recipe.environment_section import EnvironmentSection
from megarl.rollout.batch import EpisodeFacts, GroupResult
from megarl.rollout.engine import GroupRequest, request_seed
from megarl.rollout.environment import SHORT_ERROR, load_environment
from megarl.rollout.environment_workers import EnvironmentWorkers, Reply, Reset, Step
from megarl.rollout.failure import RolloutError
from megarl.telemetry.run_directory import RunDirectory

# In the place of a member: the seed of a group's environments.
OF_ENVIRONMENT = 2**32 - 1


@dataclass
class Episode:
    """One sample on its way. `ids`, `own` and `logprobs` are behind the prompt, a piece a turn and a piece an observation;
    `ended` is its finish reason."""

    prompt: Prompt
    group: int
    member: int
    engine: int
    temperature: float | None
    prompt_ids: np.ndarray
    begun: bool = False  # its environment was reset
    ids: list[np.ndarray] = field(default_factory=list)
    own: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    turns: int = 0
    malformed: int = 0
    reward: float = 0.0
    failure: str = ""
    cause: str = ""  # of the failure, where the policy's turn can be it
    ended: str = ""
    first_version: int = 0
    last_version: int = 0
    routing: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens behind the prompt."""
        return sum(map(len, self.ids))

    def sampled(self, result: GroupResult) -> None:
        """A turn of the policy, exactly as it came."""
        if not self.turns:
            self.first_version = int(result.first_versions[0])
        self.last_version = int(result.last_versions[0])
        self.turns += 1
        self.ids.append(result.token_ids)
        self.own.append(np.ones(len(result.token_ids), dtype=bool))
        self.logprobs.append(result.logprobs)
        self.routing = result.routing  # of the whole sequence so far, the prompt of this turn

    def observed(self, ids: np.ndarray) -> None:
        """What its environment said to that."""
        self.ids.append(ids)
        self.own.append(np.zeros(len(ids), dtype=bool))
        self.logprobs.append(np.zeros(len(ids), dtype=np.float32))


class Environments:
    """What the rollouts of a run need for episodes: the workers, and text to tokens and back."""

    def __init__(self, recipe: Recipe, model_path: str, num_tokens: int, stop_token_ids: Sequence[int], seed: int) -> None:
        """Raises RolloutError for an environment that does not load, ValueError for a chat template that cannot go on, or
        not with its tools."""
        assert recipe.environment is not None
        self.section: EnvironmentSection = recipe.environment
        self.recipe, self.seed, self.stops = recipe, seed, frozenset(int(token) for token in stop_token_ids)
        started = RunDirectory.of(recipe).first_start
        self.tokenizer = prompt_tokenizer(model_path, recipe.data.template_options, started)
        self.observations = Observations(self.tokenizer, recipe.data, num_tokens)
        check_tool_role(self.section, self.observations)
        # A reset or a step of each episode and of each greedy one, and the end of those before.
        self.workers = EnvironmentWorkers(self.section, max_calls=4 * recipe.num_sequences + 16)
        self.rounds = itertools.count()

    def close(self) -> None:
        """End all environments."""
        self.workers.close()


def check_tool_role(section: EnvironmentSection, observations: Observations) -> None:
    """Raises ValueError where an error about a tool call cannot be rendered, is not seen, or is longer than an observation
    may be."""
    made = load_environment(section.target, section.options)
    if not made.tools:
        return
    role = f"{section.target}, tool_role = {made.tool_role!r}"
    try:
        # Behind a turn that was cut, where the observation is longest.
        ids, other = (observations.behind(-1, [{"role": made.tool_role, "content": one}]) for one in (SHORT_ERROR, "ok"))
    except ValueError as error:
        raise ValueError(f"environment.target: {role}: {error}; give the class another tool_role, as 'user'") from error
    if np.array_equal(ids, other):
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
        """`draw` as of `Sampling`; group g goes to engine g % `engines`."""
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
        self._asked: dict[Any, int] = {}  # what environments are asked, by episode
        self._waiting = [0] * engines  # environments that are asked, by engine
        self._told = 0

    def begin(self) -> list[Any]:
        """Ask all environments to begin; what to wait for."""
        for number, episode in enumerate(self.episodes):
            names = self._environments.seed, self._draw, episode.prompt.index
            self._ask(number, Reset(episode.prompt.row, request_seed(*names, OF_ENVIRONMENT)))
        return list(self._asked)

    def waits(self, engine: int) -> bool:
        """Whether an environment of an engine's episodes has not answered yet."""
        return self._waiting[engine] > 0

    def have_begun(self, engine: int) -> bool:
        """Whether some episode of an engine had a turn."""
        return any(episode.turns for episode in self.episodes if episode.engine == engine)

    def requests(self, engine: int) -> dict[int, GroupRequest]:
        """An engine's next turn: what is to be sampled of each living episode, by its number. Empty where none lives."""
        for episode in self.episodes:
            if episode.engine == engine and not episode.begun and not episode.turns:
                # It counts for nothing, and has the prompt of its group all the same.
                episode.prompt_ids = next(
                    (one.prompt_ids for one in self._members[episode.group] if one.begun), episode.prompt_ids
                )
        return {
            number: self._request(number, episode)
            for number, episode in enumerate(self.episodes)
            if episode.engine == engine and not episode.ended
        }

    def sampled(self, number: int, result: GroupResult) -> list[Any]:
        """A turn of an episode came; what to wait for before its next one."""
        episode = self.episodes[number]
        episode.sampled(result)
        if not episode.begun:  # its environment failed in reset: there has to be something that does not count
            episode.ended = "failed"
            return []
        ids = result.token_ids.tolist()
        text = self._environments.tokenizer.decode(ids[:-1] if ids[-1] in self._environments.stops else ids)
        return [self._ask(number, Step(text))]

    def hear(self, reference: Any) -> int:
        """An environment has answered; the engine of its episode. Raises RolloutError for a failure under
        `environment.on_error: stop`."""
        number = self._asked.pop(reference)
        episode, reply = self.episodes[number], self._environments.workers.reply(reference)
        self._waiting[episode.engine] -= 1
        if reply.failure:
            self._fail(number, reply.failure, reply.cause)
        elif not episode.begun:
            self._first(number, reply)
        else:
            self._next(number, reply)
        return episode.engine

    def take_ended(self) -> int:
        """How many episodes have ended since the last call."""
        ended = sum(bool(episode.ended) for episode in self.episodes)
        self._told, new = ended, ended - self._told
        return new

    def close(self) -> None:
        """End the environments of all episodes."""
        self._environments.workers.end((number, (self._round, number)) for number in range(len(self.episodes)))

    def results(self) -> dict[int, GroupResult]:
        """The groups, by their position."""
        found = {}
        for position, own in enumerate(self._members):
            routing = [episode.routing for episode in own if episode.routing is not None]
            found[position] = GroupResult(
                group=own[0].prompt.index,
                prompt_ids=own[0].prompt_ids,
                token_ids=np.concatenate([piece for episode in own for piece in episode.ids]),
                logprobs=np.concatenate([piece for episode in own for piece in episode.logprobs]),
                lengths=np.array([episode.num_tokens for episode in own], dtype=np.int32),
                finish_reasons=tuple(episode.ended for episode in own),
                first_versions=np.array([episode.first_version for episode in own], dtype=np.int64),
                last_versions=np.array([episode.last_version for episode in own], dtype=np.int64),
                routing=np.concatenate(routing) if routing else None,
                own=np.concatenate([piece for episode in own for piece in episode.own]),
            )
        return found

    def facts(self, positions: range) -> EpisodeFacts:
        """What became of the episodes of some groups."""
        chosen = [episode for position in positions for episode in self._members[position]]
        return EpisodeFacts(
            rewards=np.array([_reward(one) for one in chosen], dtype=np.float32),
            turns=np.array([one.turns for one in chosen]),
            malformed=np.array([one.malformed for one in chosen]),
            done=np.array([one.ended == "stop" for one in chosen]),
            failures=np.array([one.failure for one in chosen], dtype=np.str_),
            causes=np.array([one.cause for one in chosen], dtype=np.str_),
        )

    def _ask(self, number: int, question: Reset | Step) -> Any:
        reference = self._environments.workers.ask(number, (self._round, number), question)
        self._asked[reference] = number
        self._waiting[self.episodes[number].engine] += 1
        return reference

    def _request(self, number: int, episode: Episode) -> GroupRequest:
        names = self._environments.seed, self._draw, episode.prompt.index
        seed = request_seed(*names, episode.member, episode.turns)
        room = self._environments.recipe.max_completion_tokens - episode.num_tokens
        longest = min(self._environments.recipe.rollout.max_new_tokens, room)
        ids = np.concatenate([episode.prompt_ids, *episode.ids])
        return GroupRequest(number, episode.prompt.index, ids, (seed,), episode.temperature, longest)

    def _first(self, number: int, reply: Reply) -> None:
        episode = self.episodes[number]
        ids = episode.prompt_ids  # the row's own
        if reply.messages is not None:
            try:
                ids = self._environments.observations.prompt(reply.messages)
            except ValueError as error:
                self._fail(number, f"what reset returned cannot be used: {error}")
                return
        others = [one for one in self._members[episode.group] if one.begun]
        if others and not np.array_equal(others[0].prompt_ids, ids):
            self._fail(number, "reset returned another prompt than for others of its group, with the same row and seed")
            return
        episode.prompt_ids, episode.begun = ids, True

    def _next(self, number: int, reply: Reply) -> None:
        episode, section = self.episodes[number], self._environments.section
        episode.reward += reply.reward
        episode.malformed += reply.malformed
        if reply.done:
            episode.ended = "stop"
        elif episode.turns == section.max_turns:
            episode.ended = "length"
        else:
            last = int(episode.ids[-1][-1])
            try:
                ids = self._environments.observations.behind(last, reply.messages or [])
                if reply.malformed and len(ids) > section.max_observation_tokens:
                    # The policy's fault: its sample counts. `check_tool_role` has seen that this one fits.
                    messages = [dict(message, content=SHORT_ERROR) for message in reply.messages or []]
                    ids = self._environments.observations.behind(last, messages)
            except ValueError as error:
                self._fail(number, f"Observation.content cannot be used: {error}", "error")
                return
            if len(ids) > section.max_observation_tokens:
                limit = f"environment.max_observation_tokens = {section.max_observation_tokens}"
                self._fail(
                    number, f"Observation.content has {len(ids)} tokens with its template, more than {limit}", "error"
                )
            elif episode.num_tokens + len(ids) >= self._environments.recipe.max_completion_tokens:
                episode.ended = "length"
            else:
                episode.observed(ids)

    def _fail(self, number: int, why: str, cause: str = "") -> None:
        """An environment failed: with a `cause` behind a turn of the policy."""
        episode, section = self.episodes[number], self._environments.section
        where = f"{episode.prompt.where}: " if episode.prompt.where else ""
        turn = f", behind turn {episode.turns}" if episode.turns else ""
        who = f"member {episode.member} of prompt {episode.prompt.index}{turn}"
        episode.cause = cause
        episode.failure = f"{where}environment {section.target}, {who}: {why}"
        if section.on_error == "stop":
            raise RolloutError(f"{episode.failure}; environment.on_error: mask goes on without it")
        if episode.turns:
            episode.ended = "failed"


def _reward(episode: Episode) -> float:
    """What its environment gave; of one that failed nothing that it had gained is left, nor is what it had lost forgiven."""
    if not episode.failure:
        return episode.reward
    return min(0.0, episode.reward) if episode.cause else np.nan
