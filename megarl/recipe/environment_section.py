"""`environment`: what answers the policy, turn by turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from megarl.recipe.section import Positive, Seconds, Section, Target
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class EnvironmentSection(Section):
    target: Target
    """The class as `module:Class`, yours or megarl's: `megarl.rollout.calculator:Calculator`,
    `megarl.rollout.guessing_game:GuessingGame`. docs/multi-turn.md describes its methods."""
    options: dict[str, Any] = {}
    """Options of the class, by name."""
    max_turns: Positive
    """Turns of the policy in one episode, each of up to `rollout.max_new_tokens` tokens; a longer episode is truncated."""
    max_observation_tokens: Positive
    """Longest observation between two turns, in tokens with the chat template's. A longer one is an error of the
    environment."""
    max_episode_tokens: Positive | None = None
    """Tokens of one episode after its prompt, observations included; an episode without room for a turn is truncated. null
    has room for all turns and observations at their longest."""
    max_segments: Positive = 1
    """Token sequences of one episode: one, and another each time its history is rewritten. Memory and micro-batches are
    planned for so many; an episode is truncated where it would need one more."""
    timeout_s: Seconds = 30.0
    """Deadline of each reset and of each step."""
    workers: Positive = 1
    """Processes in the Ray cluster that run environments; each starts one process an episode and serves 64 episodes at a
    time."""
    memory_mib: Positive = 4096
    """Most resident memory of an episode's process and its children, in MiB, without what importing `target` loads for all
    episodes."""
    on_error: Literal["mask", "stop"] = "mask"
    """What happens if an environment raises, dies, passes a limit or returns something illegal (`rollout/failed_share`).
    `mask`: after a turn of the policy, which can be the cause, the reward is 0; before the first turn, or if a worker dies,
    the sample is masked. `stop`: the run ends."""

    def most_tokens(self, turn: int) -> int:
        """Most tokens of all turns, of `turn` tokens each, and of the observations between them."""
        return self.max_turns * turn + (self.max_turns - 1) * self.max_observation_tokens


def environment_rules(recipe: Recipe) -> Violations:
    """Turns that do not fit an episode's tokens, or deadlines that do not fit a rollout's."""
    section, turn, limit = recipe.environment, recipe.rollout.max_new_tokens, recipe.rollout.timeout_s
    if section is None:
        return
    episode = section.max_episode_tokens
    if episode is not None and episode < turn:
        rule = f"has no room for one turn of rollout.max_new_tokens = {turn}"
        yield Violation("environment.max_episode_tokens", episode, rule, str(turn))
    if section.timeout_s >= limit:  # a worker's deadline must pass before rank 0's
        rule = f"must be below rollout.timeout_s = {limit:g}, after which its worker counts as silent"
        yield Violation("environment.timeout_s", section.timeout_s, rule, f"{limit / 2:g}")
