"""`environment`: what answers the policy, turn by turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from megarl.recipe.section import Positive, Seconds, Section, Target
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class EnvironmentSection(Section):
    target: Target
    """The class as `module:Class`, one of yours or of megarl: `megarl.rollout.calculator:Calculator`,
    `megarl.rollout.guessing_game:GuessingGame`. docs/multi-turn.md says what it has to have."""
    options: dict[str, Any] = {}
    """Options of the class, by name."""
    max_turns: Positive
    """Turns of the policy in one episode; an episode that is not done by then is truncated. Each turn has up to
    `rollout.max_new_tokens` tokens."""
    max_observation_tokens: Positive
    """Longest observation between two turns, in tokens and with what the chat template puts around it. A longer one is a
    fault of the environment, and never cut."""
    max_episode_tokens: Positive | None = None
    """Tokens of one episode behind its prompt, observations included; where no room is left for a turn it is truncated. Null
    has room for all turns and observations at their longest."""
    timeout_s: Seconds = 30.0
    """Deadline of each reset and of each step; what passes it is ended."""
    workers: Positive = 1
    """Processes in the Ray cluster that run environments; each episode has one of its own below them, and each worker asks
    64 of its episodes at a time."""
    memory_mib: Positive = 4096
    """Resident memory of an episode's process and all that it starts, in MiB, beside what importing `target` has loaded for
    all episodes; what passes it is ended."""
    on_error: Literal["mask", "stop"] = "mask"
    """What becomes of an episode whose environment raises, dies, passes a limit, or returns what it must not, which
    `rollout/failed_share` counts. `mask`: behind a turn of the policy, which can be the cause, its environment gives 0;
    before the first one, or where a worker dies, its sample counts for nothing. `stop`: the run ends in both cases."""

    def most_tokens(self, turn: int) -> int:
        """Tokens of all turns, of `turn` each, with the observations between them, at their longest."""
        return self.max_turns * turn + (self.max_turns - 1) * self.max_observation_tokens


def environment_rules(recipe: Recipe) -> Violations:
    """The turns of an episode fit its tokens, and their deadlines that of a rollout."""
    section, turn, limit = recipe.environment, recipe.rollout.max_new_tokens, recipe.rollout.timeout_s
    if section is None:
        return
    key, episode, most = "environment.max_episode_tokens", section.max_episode_tokens, section.most_tokens(turn)
    if episode is not None and episode < turn:
        yield Violation(key, episode, f"has no room for one turn of rollout.max_new_tokens = {turn}", str(turn))
    if episode is not None and episode > most:
        rule = f"is never reached: {section.max_turns} turns and the observations between them have {most} tokens at most"
        yield Violation(key, episode, rule, f"{most}, or null")
    calls = section.max_turns + 1
    if calls * section.timeout_s >= limit:
        rule = (
            f"a reset and environment.max_turns = {section.max_turns} steps may take {calls * section.timeout_s:g} s, which "
            f"must be below rollout.timeout_s = {limit:g}, the deadline of all turns of a step"
        )
        yield Violation("environment.timeout_s", section.timeout_s, rule, f"{limit / (calls + 1):g}")
