"""Episodes against scripted engines and environments: tokens stay exactly as they were sampled, what follows them is the
observation's own, and limits, failures and seeds are as the recipe has them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.data.sample import Prompt
from megarl.data.tokenizer import Observations, load_tokenizer
from megarl.reward.workers import RewardResult, add_episodes
from megarl.rollout import RolloutError
from megarl.rollout.engine import GroupRequest, request_seed
from megarl.rollout.environment import SHORT_ERROR
from megarl.rollout.environment_workers import Reply, Reset, Step
from megarl.rollout.episodes import Episode, Episodes, check_tool_role
from megarl.rollout.groups import EpisodeFacts, GroupResult
from megarl.rollout.session import SessionLimits
from tests.rollout_cases import recipe as pool_recipe
from tests.tiny_models import save_tiny_tokenizer

VOCAB, END, SEED, DRAW = 98, 1, 7, 3
FIRST = {"role": "user", "content": "ok"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    tiny_tokenizer = load_tokenizer(str(folder))
    tiny_tokenizer.add_tokens(["12"])
    return tiny_tokenizer


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class Scripted:
    """In the place of the workers: answers by `answer(sample, question)`, after `delay()` rounds of the loop."""

    def __init__(self, answer: Callable[[int, Reset | Step], Reply], delay: Callable[[], int] = lambda: 0) -> None:
        self._answer, self._delay, self.ended = answer, delay, []  # type: ignore[var-annotated]
        self.heard: list[tuple[int, Reset | Step]] = []

    async def ask(self, number: int, question: Reset | Step) -> Reply:
        await rounds(self._delay())
        self.heard.append((number, question))
        return self._answer(number, question)

    def end(self, episode: int) -> None:
        self.ended.append(episode)


async def rounds(number: int) -> None:
    """Let other work of the loop go first."""
    for _ in range(number):
        await asyncio.sleep(0)


def environments(tokenizer: Any, answer: Callable[[int, Reset | Step], Reply], **changes: Any) -> Any:
    section = {"target": "tests.environments:Counting", "max_turns": 3, "max_observation_tokens": 6} | changes
    return environments_of(tokenizer, section, Scripted(answer))


def environments_of(tokenizer: Any, section: dict[str, Any], workers: Any, *edits: tuple[str, Any]) -> Any:
    """What `Environments` is, without Ray. `max_new_tokens` is 4."""
    recipe = pool_recipe(Path("model"), ("environment", section), *edits, max_new_tokens=4)
    return SimpleNamespace(
        section=recipe.environment, recipe=recipe, seed=SEED, stops=frozenset([END]), tokenizer=tokenizer,
        observations=Observations(tokenizer, recipe.data, VOCAB), workers=workers, numbers=itertools.count(),
        limits=SessionLimits.of(recipe),
    )  # fmt: skip


def prompts(tokenizer: Any, count: int = 2) -> list[Prompt]:
    texts = [f"{number}+{number}=" for number in range(count)]
    return [
        Prompt(10 + number, np.array(ids(tokenizer, text), np.int32), text, "", {"row": number}, where=f"rows line {number}")
        for number, text in enumerate(texts)
    ]


def result(request: GroupRequest, tokens: Sequence[int], version: int = 0) -> GroupResult:
    """What an engine gives for a request of one; the log-probabilities tell turns and tokens apart."""
    logprobs = np.array([-0.01 * token - len(request.prompt_ids) for token in tokens], np.float32)
    reason, versions = "stop" if tokens[-1] == END else "length", np.full(len(tokens), version)
    return GroupResult(
        request.group, request.prompt_ids, np.array(tokens, np.int32), logprobs, np.array([len(tokens)]), (reason,), versions
    )


def play(
    given: Any,
    groups: Sequence[tuple[Prompt, int, float | None]],
    policy: Callable[[int, int], list[int]],
    delay: Callable[[], int] = lambda: 0,
) -> list[Episodes]:
    """Play all groups at the same time, as the stream does; `policy(sample, turn)` is what is sampled. Keeps the requests of
    each turn in `given.requests`, by sample."""
    played = [Episodes(given, prompt, size, temperature, DRAW) for prompt, size, temperature in groups]
    given.requests = []

    async def generate(request: GroupRequest, episode: Episode) -> GroupResult:
        await rounds(delay())
        if len(given.requests) == episode.turns:
            given.requests.append({})
        given.requests[episode.turns][episode.number] = request
        return result(request, policy(episode.number, episode.turns), version=episode.turns)

    async def play_all() -> None:
        await asyncio.gather(*(episodes.play(generate) for episodes in played))

    try:
        asyncio.run(play_all())
    finally:
        numbers = [episode.number for episodes in played for episode in episodes.episodes]
        assert sorted(given.workers.ended) == numbers == list(range(len(numbers))), "each environment is ended once"
    return played


def policy_of(sample: int, turn: int) -> list[int]:
    return [5 + sample % 7, 6 + turn, END]


def test_who_answers_first_changes_nothing(tokenizer: Any) -> None:
    groups: list[Any] = [(prompt, 4, None) for prompt in prompts(tokenizer, 4)]
    generator = random.Random(5)
    orders, requests, results = [], [], []
    for delay in (lambda: 0, lambda: generator.randrange(9)):
        given = environments(tokenizer, says("ok", "go"))
        given.workers = Scripted(says("ok", "go"), delay)
        played = play(given, groups, policy_of, delay)
        orders.append([number for number, _ in given.workers.heard])
        requests.append([{n: (turn[n].seeds, turn[n].prompt_ids.tolist()) for n in sorted(turn)} for turn in given.requests])
        results.append([episodes.result() for episodes in played])
    assert orders[0] != orders[1] and orders[1] != sorted(orders[1]), "answers come in another order"
    assert requests[0] == requests[1] and len(requests[0]) == 3
    for first, other in zip(*results, strict=True):
        assert first.token_ids.tolist() == other.token_ids.tolist() and first.finish_reasons == other.finish_reasons
        assert first.logprobs.tolist() == other.logprobs.tolist() and first.own.tolist() == other.own.tolist()
        assert first.versions.tolist() == other.versions.tolist()


def test_an_episode_goes_on_while_others_wait(tokenizer: Any) -> None:
    """The first episode is played to its end before any other's first turn is answered."""
    given = environments(tokenizer, says("ok", "go"))
    episodes = Episodes(given, prompts(tokenizer)[0], 3, None, DRAW)
    order = []

    async def play_first() -> None:
        first_is_over = asyncio.Event()

        async def generate(request: GroupRequest, episode: Episode) -> GroupResult:
            if episode.number > 0:
                await first_is_over.wait()
            order.append((episode.number, episode.turns))
            if (episode.number, episode.turns) == (0, 2):
                first_is_over.set()
            return result(request, [5, END])

        await asyncio.wait_for(episodes.play(generate), 60)

    asyncio.run(play_first())
    assert order[:3] == [(0, 0), (0, 1), (0, 2)] and len(order) == 9


def says(*texts: str, reward: float = 0.0) -> Callable[[int, Reset | Step], Reply]:
    """Answers the n-th turn of every episode with the n-th text, and ends behind the last."""
    turns: dict[int, int] = {}

    def answer(number: int, question: Reset | Step) -> Reply:
        if isinstance(question, Reset):
            return Reply()
        turns[number] = turns.get(number, 0) + 1
        if turns[number] > len(texts):
            return Reply(reward=reward, done=True)
        return Reply([{"role": "user", "content": texts[turns[number] - 1]}], reward)

    return answer


def test_tokens_are_those_that_were_sampled_and_observations_their_own(tokenizer: Any) -> None:
    # The policy writes 12 as two tokens, for which the tokenizer has one.
    digit_1, digit_2 = ids(tokenizer, "1")[0], ids(tokenizer, "2")[0]
    sampled = {0: [5, digit_1, digit_2, END], 1: [digit_1, digit_2, END], 2: [digit_1, digit_2]}
    assert ids(tokenizer, tokenizer.decode(sampled[0])) != sampled[0], "the policy's tokens do not come back from their text"
    given = environments(tokenizer, says("ok", "go", reward=0.5))
    groups = [(prompt, 2, None) for prompt in prompts(tokenizer)]
    episodes = play(given, groups, lambda sample, turn: sampled[turn])
    # The template ends a turn with END: a turn that did so has it already, and one that was cut gets it.
    between = [ids(tokenizer, "ok="), ids(tokenizer, "go=")]
    whole = [*sampled[0], *between[0], *sampled[1], *between[1], *sampled[2]]
    marks = [1] * 4 + [0] * 3 + [1] * 3 + [0] * 3 + [1] * 2
    for (prompt, _, _), group in zip(groups, episodes, strict=True):
        played = group.result()
        assert played.group == prompt.index and played.finish_reasons == ("stop", "stop")
        assert played.lengths.tolist() == [len(whole)] * 2
        for member in range(2):
            completion = played.sample(member).completion
            assert completion.token_ids.tolist() == whole and completion.own.astype(int).tolist() == marks
            assert completion.final_ids.tolist() == sampled[2]
            starts = [len(prompt.token_ids), len(prompt.token_ids) + 7, len(prompt.token_ids) + 13]
            logprobs = [
                -0.01 * token - start for start, turn in zip(starts, sampled, strict=True) for token in sampled[turn]
            ]
            np.testing.assert_allclose(completion.logprobs[completion.own], logprobs, rtol=1e-6)
            assert not completion.logprobs[~completion.own].any()
            assert completion.versions.tolist() == [0] * 7 + [1] * 6 + [2] * 2, "an observation has that of the turn before"
    for turn, requests in enumerate(given.requests):
        history = [[], whole[:7], whole[:13]][turn]
        for number, request in requests.items():
            assert request.prompt_ids.tolist() == [*groups[number // 2][0].token_ids, *history]
            assert request.seeds == (request_seed(SEED, DRAW, 10 + number // 2, number % 2, turn),)
    seeds = {request.seeds for requests in given.requests for request in requests.values()}
    assert len(seeds) == 12, "each turn of each episode draws by itself"
    facts = EpisodeFacts.joined([group.facts() for group in episodes])
    assert facts.rewards.tolist() == [1.5] * 4 and facts.turns.tolist() == [3] * 4 and facts.done.all()
    steps = [question.text for _, question in given.workers.heard if isinstance(question, Step)]
    assert steps[0] == tokenizer.decode([5, digit_1, digit_2]), (
        "the environment hears the turn without the token that ended it"
    )


def test_an_episode_is_truncated_where_turns_or_tokens_are_over(tokenizer: Any) -> None:
    prompt = [(prompts(tokenizer)[0], 1, None)]
    given = environments(tokenizer, says("a", "b", "c", "d"))
    played = play(given, prompt, lambda sample, turn: [5, END])[0].result()
    assert played.finish_reasons == ("length",) and len(given.requests) == 3, "turns"
    assert played.token_ids.tolist()[-2:] == [5, END], "nothing is observed that no turn follows"
    # 4 tokens of the first turn, 2 observed, and room for 3 more; then none.
    given = environments(tokenizer, says("a", "b", "c"), max_episode_tokens=9)
    played = play(given, prompt, lambda sample, turn: [[5, 6, 7, END], [8, 9, 10]][turn])[0].result()
    assert [request[0].max_new_tokens for request in given.requests] == [4, 3]
    assert played.lengths.tolist() == [9] and played.finish_reasons == ("length",)


def test_greedy_episodes_begin_as_those_of_their_group_and_end_with_them(tokenizer: Any) -> None:
    first, second = prompts(tokenizer)
    given = environments(tokenizer, says("ok"))
    groups: list[tuple[Prompt, int, float | None]] = [(first, 2, None), (second, 2, None), (first, 1, 0.0), (second, 1, 0.0)]
    episodes = play(given, groups, lambda sample, turn: [5 + sample, END])
    assert [given.requests[0][number].temperature for number in range(6)] == [None] * 4 + [0.0] * 2
    resets = {number: question for number, question in given.workers.heard if isinstance(question, Reset)}
    seeds = [resets[number].seed for number in range(6)]
    assert seeds[0] == seeds[1] == seeds[4] != seeds[2] == seeds[3] == seeds[5], "a prompt's environments begin alike"
    assert [group.facts().turns.tolist() for group in episodes] == [[2, 2], [2, 2], [2], [2]]
    assert [group.result().group for group in episodes] == [10, 11, 10, 11]


def test_a_prompt_that_reset_gives_takes_the_place_of_the_row_s(tokenizer: Any) -> None:
    def answer(number: int, question: Reset | Step) -> Reply:
        if isinstance(question, Reset):
            return Reply(failure="no board") if number == 0 else Reply([{"role": "user", "content": "what"}])
        return Reply(reward=1.0, done=True)

    given = environments(tokenizer, answer)
    (episodes,) = play(given, [(prompts(tokenizer)[0], 3, None)], lambda sample, turn: [5, END])
    played = episodes.result()
    row_ids, given_by_reset = prompts(tokenizer)[0].token_ids.tolist(), ids(tokenizer, "what=")
    assert [played.sample(member).prompt_ids.tolist() for member in range(3)] == [row_ids, given_by_reset, given_by_reset]
    assert played.finish_reasons == ("failed", "stop", "stop"), "it samples one turn, which does not count"
    assert np.isnan(episodes.facts().rewards).tolist() == [True, False, False]


BAD = {
    "board fell": (Reply(failure="step raised OSError: fell", cause="error"), "step raised OSError: fell", "error"),
    "too late": (Reply(failure="step gave no answer", cause="wall_time"), "step gave no answer", "wall_time"),
    "too long": (
        Reply([{"role": "user", "content": "7654321"}]), "has 8 tokens with its template, more than environment.", "error"
    ),
    "its worker died": (Reply(failure="its process is gone"), "its process is gone", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_failure_behind_a_turn_is_scored_another_one_masked_and_either_may_end_the_run(tokenizer: Any, case: str) -> None:
    reply, message, cause = BAD[case]

    def answer(number: int, question: Reset | Step) -> Reply:
        if isinstance(question, Reset):
            return Reply()
        return reply if number == 1 else Reply(reward=1.0, done=True)

    groups: list[Any] = [(prompts(tokenizer)[0], 2, None)]
    (episodes,) = play(environments(tokenizer, answer), groups, lambda sample, turn: [5, END])
    facts = episodes.facts()
    name = "rows line 0: environment tests.environments:Counting, member 1 of prompt 10, behind turn 1: "
    assert facts.failures.tolist()[0] == "" and facts.failures.tolist()[1].startswith(name)
    assert message in facts.failures.tolist()[1] and facts.causes.tolist() == ["", cause]
    np.testing.assert_array_equal(facts.rewards, [1.0, 0.0 if cause else np.nan])
    scored = RewardResult(np.zeros(2, np.float32), np.ones(2, bool), {}, {}, 0, (2,))
    metrics = add_episodes(scored, facts).metrics()
    assert metrics["reward/num_masked"] == metrics["reward/num_masked_environment"] == (not cause)
    assert not cause or metrics[f"reward/num_zero_{cause}"] == 1
    assert episodes.result().finish_reasons == ("stop", "failed")
    with pytest.raises(RolloutError, match=f"rows line 0: .*{message}.*environment.on_error: mask"):
        play(environments(tokenizer, answer, on_error="stop"), groups, lambda sample, turn: [5, END])


@pytest.mark.parametrize("first", [None, "game 0"])
@pytest.mark.parametrize("second", [None, "game 1"])
def test_resets_that_differ_within_a_group_are_a_failure(tokenizer: Any, first: str | None, second: str | None) -> None:
    def answer(number: int, question: Reset | Step) -> Reply:
        if isinstance(question, Reset):
            given = [first, second][number]
            return Reply(None if given is None else [{"role": "user", "content": given}])
        return Reply(done=True)

    (episodes,) = play(environments(tokenizer, answer), [(prompts(tokenizer)[0], 2, None)], lambda sample, turn: [5, END])
    failures = episodes.facts().failures.tolist()
    assert failures[0] == ""
    if first is second is None:
        assert failures[1] == ""
    else:
        assert "reset returned another prompt than for others of its group" in failures[1]


def test_a_tool_s_role_is_tried_before_the_first_step(tokenizer: Any) -> None:
    def section(size: int) -> Any:
        changes = {"target": "tests.environments:Faulty", "max_observation_tokens": size}
        return environments(tokenizer, says(), **changes).section

    shows = environments(tokenizer, says()).observations
    size = len(shows.behind(-1, [{"role": "tool", "content": SHORT_ERROR}]))
    check_tool_role(section(size), shows)
    with pytest.raises(ValueError, match=f"max_observation_tokens = {size - 1}: .* has {size} tokens"):
        check_tool_role(section(size - 1), shows)
    refuses, hides = (SimpleNamespace(behind=function) for function in (_refuse_role, lambda last, messages: np.array([5])))
    with pytest.raises(ValueError, match="Faulty, tool_role = 'tool': roles must alternate; give the class another"):
        check_tool_role(section(size), refuses)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tool_role = 'tool': the model's chat template leaves messages of that role out"):
        check_tool_role(section(size), hides)  # type: ignore[arg-type]


def _refuse_role(last: int, messages: Any) -> Any:
    raise ValueError("roles must alternate")


def test_what_environments_gave_is_added_to_the_rewards_and_a_failure_masks_both() -> None:
    rewards, nan = np.array([0.5, 0.25, np.nan, 1.0], np.float32), np.nan
    scored = RewardResult(rewards, ~np.isnan(rewards), {"exact": rewards}, {2: "timeout"}, 1, (4,))
    given, failures = np.array([1.0, nan, 2.0, -1.0], np.float32), np.array(["", "it broke", "", ""])
    notes = np.full(4, '{"rewards": [], "metrics": {}, "segments": {"begun": 1}}')
    facts = EpisodeFacts(given, np.arange(4) + 1, np.zeros(4, int), ~np.isnan(given), failures, np.full(4, ""), notes)
    combined = add_episodes(scored, facts)
    np.testing.assert_array_equal(combined.rewards, [1.5, nan, nan, 0.0])
    np.testing.assert_array_equal(combined.parts["exact"], [0.5, nan, nan, 1.0])
    np.testing.assert_array_equal(combined.parts["environment"], [1.0, nan, nan, -1.0])
    assert combined.valid.tolist() == [True, False, False, True] and combined.failures == {1: "it broke", 2: "timeout"}
    assert combined.metrics()["reward/num_masked"] == 2 and combined.metrics()["reward/environment"] == 0.0
    assert add_episodes(scored, None) is scored
