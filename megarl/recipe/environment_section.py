"""`environment`: what answers the policy, turn by turn, or the agent that asks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from megarl.recipe.section import Positive, Seconds, Section, Target
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class EpisodeSection(Section):
    """What every kind of environment has."""

    max_turns: Positive
    """Turns of the policy in one episode, each of up to `rollout.max_new_tokens` tokens; a longer episode is truncated."""
    workers: Positive = 1
    """Processes in the Ray cluster that run episodes, each in a process of its own."""
    memory_mib: Positive = 4096
    """Most resident memory of an episode's process and its children, in MiB, without what importing `target` loads for all
    episodes; of an agent also the size of each file that it writes."""
    max_processes: Positive = 64
    """Most processes of an episode that run at a time."""
    on_error: Literal["mask", "stop"] = "mask"
    """What happens if an episode's code raises, dies, passes a limit or returns something illegal (`rollout/failed_share`).
    `mask`: after a turn of the policy, which can be the cause, the reward is 0; before the first turn, or if a worker dies,
    the rollout is masked. `stop`: the run ends."""


class EnvironmentSection(EpisodeSection):
    kind: Literal["class"] = "class"
    """Your class answers the policy."""
    target: Target
    """The class as `module:Class`. docs/agents.md describes its methods, and recipes/environments has two examples."""
    options: dict[str, Any] = {}
    """Options of the class, by name."""
    max_observation_tokens: Positive
    """Longest observation between two turns, in tokens with the chat template's. A longer one is an error of the
    environment."""
    max_episode_tokens: Positive | None = None
    """Tokens of one episode after its prompt, observations included; an episode without room for a turn is truncated. null
    has room for all turns and observations at their longest."""
    timeout_s: Seconds = 30.0
    """Deadline of each reset and of each step. A worker serves 64 episodes at a time; the others' deadlines begin later."""

    def most_tokens(self, turn: int) -> int:
        """Most tokens of all turns, of `turn` tokens each, and of the observations between them."""
        longest = self.max_turns * turn + (self.max_turns - 1) * self.max_observation_tokens
        return longest if self.max_episode_tokens is None else min(longest, self.max_episode_tokens)


class ClientSection(EpisodeSection):
    """What both kinds have whose code asks the policy through the endpoint."""

    max_episode_tokens: Positive
    """Tokens of one segment after its first messages, which `data.max_prompt_tokens` limits. A request without room for an
    answer is refused, and the episode is truncated."""
    max_segments: Positive = 4
    """Token sequences of one episode: one, and another each time its history is rewritten, branches, or is a sub-agent's.
    Memory and micro-batches are planned for so many; an episode is truncated where it would need one more."""
    timeout_s: Seconds = 600.0
    """Time of an episode, without the time in which the policy answers it."""
    idle_s: Seconds = 120.0
    """Longest time of an episode between two requests, before the first and after the last."""
    max_concurrent: Positive = 64
    """Episodes that a worker runs at a time; the others wait."""
    host: str = "127.0.0.1"
    """Address of the endpoint, on the node of rank 0. With a loopback address all workers run on that node; with an address
    of the node's network they run anywhere, and each request still needs the key of its session."""
    tool_parser: str | None = None
    """vLLM's parser that finds the tool calls of the policy for clients, as `hermes`; null leaves them in the text."""
    reasoning_parser: str | None = None
    """vLLM's parser that takes the reasoning out of the text for clients, as `qwen3`; null leaves it there."""

    @property
    def is_loopback(self) -> bool:
        """Whether only the node of rank 0 reaches the endpoint."""
        return self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"


class AgentSection(ClientSection):
    kind: Literal["agent"]
    """Your coroutine asks the policy with a client of `openai`."""
    target: Target
    """The coroutine as `module:function`: `async def run(row, client) -> float | Result`. docs/agents.md describes it."""
    options: dict[str, Any] = {}
    """Further arguments of the coroutine, by name."""


class CommandSection(ClientSection):
    kind: Literal["command"]
    """Your program asks the policy, with whatever client it has."""
    run: Annotated[str, Field(min_length=1)]
    """The command line, for `sh`. docs/agents.md lists the environment variables that it gets, and how it gives its
    reward."""


AnyEnvironment = Annotated[
    Annotated[EnvironmentSection, Tag("class")]
    | Annotated[AgentSection, Tag("agent")]
    | Annotated[CommandSection, Tag("command")],
    Discriminator(lambda value: value.get("kind", "class") if isinstance(value, dict) else getattr(value, "kind", None)),
]


def environment_rules(recipe: Recipe) -> Violations:
    """Turns that do not fit an episode's tokens, or deadlines that do not fit each other."""
    section, turn, limit = recipe.environment, recipe.rollout.max_new_tokens, recipe.rollout.timeout_s
    if section is None:
        return
    episode = section.max_episode_tokens
    if episode is not None and episode < turn:
        rule = f"has no room for one turn of rollout.max_new_tokens = {turn}"
        nearest = f"{turn}, or rollout.max_new_tokens: {episode}"
        yield Violation("environment.max_episode_tokens", episode, rule, nearest)
    if section.kind == "class":
        if section.timeout_s >= limit:  # a worker's deadline must pass before rank 0's
            rule = f"must be below rollout.timeout_s = {limit:g}, after which its worker counts as silent"
            yield Violation("environment.timeout_s", section.timeout_s, rule, f"{limit / 2:g}")
        return
    if not recipe.data.chat_template:
        rule = "the endpoint renders the messages of agents with the chat template of model.path"
        yield Violation("data.chat_template", False, rule, "true")
    if section.host in ("0.0.0.0", "::"):
        rule = "is no address that an agent can call"
        yield Violation("environment.host", section.host, rule, "the address of the node of rank 0")
    if section.idle_s > section.timeout_s:
        rule = f"must not exceed environment.timeout_s = {section.timeout_s:g}, after which the episode has ended"
        yield Violation("environment.idle_s", section.idle_s, rule, f"{section.timeout_s:g}")
