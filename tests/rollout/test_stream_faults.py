"""Faults of each part of the rollout stream at each moment: the run goes on, or ends in time with a name.

`kill`: the process is gone. `stop`: it takes no calls. `stall`: it takes calls and gives no answer. The parts are scripted;
the router, the reward workers and the environment workers around them are real. A kill at the moment of a save is in
tests/schedule/test_admission.py.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megarl.data.sample import Prompt
from megarl.reward import workers as reward_workers
from megarl.reward.verifiers import TextScore
from megarl.reward.workers import RewardWorkers, Task, TaskResult
from megarl.rollout import EngineSilent, RolloutError, StreamStalled, environment_workers
from megarl.rollout.engine import GroupRequest
from megarl.rollout.environment_workers import Reply, Reset, Step
from megarl.rollout.loop_thread import LoopThread
from megarl.rollout.stream import Sampling
from tests.scripted_stream import (
    PER_STEP,
    SIZE,
    ScriptedEngine,
    ScriptedPool,
    ScriptedScorer,
    Trainer,
    prompt,
    scripted_environments,
    scripted_rewards,
    stream_recipe,
    trainer,
)

pytestmark = [pytest.mark.stream, pytest.mark.timeout(60)]

TIMEOUT_S = 0.3  # of the parts
END_S = 20.0  # more than all deadlines together, for a busy machine


@contextmanager
def ends_with(kind: type[Exception], words: str) -> Iterator[None]:
    begun = time.monotonic()
    with pytest.raises(kind, match=words):
        yield
    assert time.monotonic() - begun < END_S


def prompt_engines() -> ScriptedPool:
    return ScriptedPool.of(2, delay=lambda request: 0.0)


def hold(engine: ScriptedEngine) -> None:
    engine.delay = lambda request: None


TOKENS_LOST = ray.exceptions.ObjectLostError("ab", None, "")
WORKER_LOST = ray.exceptions.RayActorError(error_msg="the worker restarts")


async def _hang(*_: Any) -> Any:
    await asyncio.Event().wait()


def _raises(error: Exception) -> Callable[..., Any]:
    """Return a call that fails."""

    async def fail(*_: Any) -> Any:
        raise error

    return fail


# Engines ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("moment", ["admission", "sampling", "scoring", "take", "pause", "resume", "evaluation"])
def test_a_killed_engine_costs_no_group_and_serves_again(moment: str, staleness: int) -> None:
    pool = prompt_engines()
    engine = pool.engines[0]

    def score(prompt: Prompt, member: int, tokens: Any) -> TextScore:
        if moment == "scoring" and prompt.index == PER_STEP and not engine.restarts and not engine.is_dead:
            engine.die()
        return TextScore({"last_number": float(member)})

    taken: list[int] = []
    rewards = scripted_rewards(stream_recipe(), ScriptedScorer(score), SIZE)
    with trainer(pool, rewards, max_staleness=staleness) as run:
        for step in range(5):
            strikes = step == 1
            if strikes and moment == "admission":
                run.in_loop(engine.die)
            if strikes and moment in ("sampling", "evaluation"):
                hold(engine)
            while not engine.arrivals.empty():
                engine.arrivals.get()
            if strikes and moment == "evaluation":
                with ThreadPoolExecutor(1) as thread:
                    sampling = thread.submit(run.stream.sample, [prompt(100), prompt(101)], Sampling(1, 0), run.resync)
                    engine.arrivals.get(timeout=END_S)
                    run.in_loop(engine.die)
                    engine.delay = lambda request: 0.0
                    assert sampling.result(END_S)[0].groups.tolist() == [100, 101]
            run.begin()
            if strikes and moment == "sampling":
                engine.arrivals.get(timeout=END_S)
                run.in_loop(engine.die)
                engine.delay = lambda request: 0.0
            if strikes and moment == "take":
                run.stream.wait_sampled(run.resync)
                run.in_loop(engine.die)
            taken += run.take().rollouts.groups[::SIZE].tolist()
            if strikes and moment == "pause":
                run.stream.pause()
                run.in_loop(engine.die)
            run.sync()
            if strikes and moment == "resume":
                run.in_loop(engine.die)
        assert len(set(taken)) == len(taken) == 5 * PER_STEP and max(taken) < (5 + staleness) * PER_STEP
        assert run.resynced == [] and engine.restarts == 1
        assert engine.version == 5 and not engine.is_dead


@pytest.mark.parametrize("fault", ["stop", "stall"])
@pytest.mark.parametrize("moment", ["admission", "sampling", "pause", "evaluation"])
def test_a_silent_engine_ends_the_run_by_its_name(fault: str, moment: str) -> None:
    pool = prompt_engines()
    engine = pool.engines[0]
    words = rf"rollout engine 0: .* step {7 if moment == 'evaluation' else 1} .*rollout.timeout_s = {TIMEOUT_S}"
    with trainer(pool, max_staleness=1, timeout_s=TIMEOUT_S) as run, ends_with(EngineSilent, words):
        engine.holds_submissions = fault == "stop"
        hold(engine)
        if moment == "evaluation":
            run.stream.sample([prompt(100), prompt(101)], Sampling(1, 7), run.resync)
        run.begin()
        if moment == "sampling":
            run.stream.wait_sampled(run.resync)
        if moment == "pause":
            run.sync()
        run.take()
        run.sync()
        run.begin()
        run.take()


# Reward workers --------------------------------------------------------------------------------------------------------

Act = Callable[[int], Any]


@pytest.fixture
def rewards(monkeypatch: pytest.MonkeyPatch) -> Callable[[Act], RewardWorkers]:
    """Reward workers with one scripted actor. `act` gets the number of the task, and may raise or wait; then the actor
    fetches the tokens."""

    def make(act: Act, sequences: int = SIZE, timeout_s: float = TIMEOUT_S) -> RewardWorkers:
        recipe, numbers = stream_recipe(), itertools.count()

        async def score_task(task: Task) -> TaskResult:
            process = await act(next(numbers))
            for payload, _ in task.pieces:
                await payload.tokens
            num_texts = sum(len(samples) for _, samples in task.pieces)
            return TaskResult([TextScore({"last_number": 1.0})] * num_texts, 0.0, process)

        actor = SimpleNamespace(score_task=SimpleNamespace(remote=score_task))
        monkeypatch.setattr(reward_workers, "_start_actors", lambda arguments, count: ([actor], [1]))
        monkeypatch.setattr(reward_workers, "TASK_GRACE_S", 0.0)
        monkeypatch.setattr(ray, "kill", lambda actor: None)
        section = recipe.phases.reward.model_copy(update={"timeout_s": timeout_s, "sequences": sequences})
        return RewardWorkers(recipe.reward, "nowhere", (), section, local=False)

    return make


async def _score(number: int) -> int:
    return 1


@pytest.mark.parametrize("moment", ["scoring", "take", "evaluation"])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (_hang, TimeoutError, "phase reward: a task of 2 sequences on worker 0"),
        (_raises(WORKER_LOST), RolloutError, "phase reward: a task of 2 sequences on worker 0 has no worker any more"),
        (_raises(TOKENS_LOST), RolloutError, "phase reward: .* lost with the node of their engine"),
    ],
    ids=["stall", "kill", "tokens"],
)
def test_a_reward_worker_that_is_lost_ends_the_run(
    rewards: Any, act: Act, kind: type[Exception], words: str, staleness: int, moment: str
) -> None:
    with trainer(prompt_engines(), rewards(act), max_staleness=staleness) as run, ends_with(kind, words):
        if moment == "evaluation":
            run.stream.sample([prompt(100)], Sampling(2, 0), run.resync)
        run.begin()
        if moment == "take":
            run.stream.wait_sampled(run.resync)
            run.stream.take()
        run.take()


def test_a_reward_worker_that_ray_started_again_costs_nothing(rewards: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def act(number: int) -> int:
        return 1 if number < 2 else 2

    with trainer(prompt_engines(), rewards(act)) as run:
        for _ in range(3):
            run.begin()
            assert run.take().rewards.valid.all()
            run.sync()
    assert "reward worker 0 was lost" in caplog.text


@pytest.mark.parametrize("moment", ["scoring", "take", "evaluation"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_group_whose_tokens_were_lost_with_their_node_before_its_reward_is_sampled_again(
    rewards: Any, staleness: int, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    lost, sequences = [101 if moment == "evaluation" else 1], 3  # groups; a task has a part of one

    def loses(request: GroupRequest) -> bool:
        if request.group not in lost:
            return False
        lost.remove(request.group)
        return True

    pool = ScriptedPool.of(1, delay=lambda request: 0.0, loses=loses)
    with trainer(pool, rewards(_score, sequences, END_S), max_staleness=staleness, max_restarts=1) as run:
        recipe = stream_recipe(max_staleness=staleness)
        recipe.phases.reward.__dict__["sequences"] = sequences
        if moment == "evaluation":
            prompts = [prompt(number) for number in range(100, 104)]
            batch, scored = run.stream.sample(prompts, Sampling(SIZE, 0), run.resync)
            assert batch.groups[::SIZE].tolist() == [100, 101, 102, 103] and scored is not None and scored.valid.all()
        taken = []
        for step in range(3):
            run.begin()
            if step == 0 and moment == "take":
                run.stream.wait_sampled(run.resync)
            taken.append(run.take())
            taken[-1].check(recipe)
            run.sync()
    trained = [group for batch in taken for group in batch.rollouts.groups[::SIZE].tolist()]
    assert len(set(trained)) == len(trained) and all(batch.rewards.valid.all() for batch in taken)
    sampled = [request.group for call in pool.engines[0].calls for request in call]
    again = len(sampled) - len(set(sampled))
    assert again in (1, 2), "the lost group, and one that shared a task with it"
    assert caplog.text.count("is sampled again") == again and not lost
    counted = sum(batch.metrics.get("rollout/num_sampled_again", 0) for batch in taken)
    assert counted == (0 if moment == "evaluation" else again)


def test_groups_whose_tokens_and_only_engine_were_lost_with_their_node_let_the_trainer_send_weights(rewards: Any) -> None:
    may_score = asyncio.Event()

    async def score_when_told(number: int) -> int:
        await may_score.wait()
        return 1

    pool = ScriptedPool.of(1, delay=lambda request: 0.0)
    engine = pool.engines[0]
    engine.loses = lambda request: not engine.restarts

    def end_node() -> None:
        engine.die()
        may_score.set()

    with trainer(pool, rewards(score_when_told, PER_STEP * SIZE, END_S)) as run:
        run.begin()
        run.stream.wait_sampled(run.resync)
        taking = asyncio.run_coroutine_threadsafe(run.stream._take(), run.stream._loop)
        run.in_loop(end_node)
        assert taking.result(END_S) is None
        assert run.take().rewards.valid.all()
    assert run.resynced == [[0]]


def test_tokens_that_an_early_phase_has_used_are_not_sampled_again(rewards: Any) -> None:
    may_score = asyncio.Event()

    async def lose_when_told(number: int) -> int:
        await may_score.wait()
        raise TOKENS_LOST

    with (
        trainer(prompt_engines(), rewards(lose_when_told, timeout_s=END_S)) as run,
        ends_with(RolloutError, "lost with the node of their engine"),
    ):
        run.begin()
        assert len(run.stream.next_part(PER_STEP, run.resync)) == PER_STEP * SIZE
        run.in_loop(may_score.set)
        run.take()


def test_a_group_whose_tokens_are_lost_when_a_checkpoint_is_written_is_saved_as_one_to_sample() -> None:
    with trainer(ScriptedPool.of(1, delay=lambda request: 0.0), max_staleness=1) as run:
        run.begin()
        run.take()
        run.sync()
        while any(group.facts is None for group in list(run.stream._groups.values())):
            run.in_loop(lambda: None)
        run.stream._groups[PER_STEP].tokens = _raises(TOKENS_LOST)()
        saved = {values["index"]: values["parts"][0]["result"] for values in run.stream.state()["groups"]}
    assert saved.keys() == {PER_STEP, PER_STEP + 1} and saved[PER_STEP] is None and saved[PER_STEP + 1] is not None


# Environments ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: value)


async def _answer(question: Any) -> Reply:
    return Reply() if isinstance(question, Reset) else Reply([{"role": "user", "content": "go on"}], reward=1.0)


def _fails(moment: str, fault: Callable[[], Any], times: int = 1000) -> Callable[[Any], Any]:
    left = itertools.count()

    async def answer(question: Any) -> Reply:
        if isinstance(question, Reset) == (moment == "reset") and next(left) < times:
            await fault()
        return await _answer(question)

    return answer


@pytest.mark.parametrize("moment", ["reset", "step"])
def test_a_killed_environment_worker_costs_its_episodes_alone(moment: str, without_ray: None) -> None:
    games = scripted_environments(_fails(moment, _raises(WORKER_LOST), times=1), TIMEOUT_S)
    with trainer(prompt_engines(), environments=games) as run:
        for step in range(2):
            run.begin()
            taken = run.take()
            assert taken.rewards.valid.sum() == PER_STEP * SIZE - (step == 0)
            if step == 0:
                assert "the worker of its process is gone" in next(iter(taken.rewards.failures.values()))
            run.sync()


@pytest.mark.parametrize("times", [1, 2])
def test_a_turn_whose_tokens_were_lost_before_the_environment_saw_them_is_sampled_again(
    times: int, without_ray: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Every turn is lost once: it counts against `rollout.max_restarts` alone."""
    seen: Counter[tuple[Any, ...]] = Counter()

    def loses(request: GroupRequest) -> bool:
        key = request.group, request.seeds, len(request.prompt_ids)
        seen[key] += 1
        return seen[key] <= times

    pool = ScriptedPool.of(1, delay=lambda request: 0.0, loses=loses)
    games = scripted_environments(_answer, TIMEOUT_S)
    with trainer(pool, environments=games, max_restarts=1) as run:
        run.begin()
        if times > 1:
            with ends_with(RolloutError, "a turn was lost with the node of its engine"):
                run.take()
            return
        taken = run.take()
    turns = 2 * PER_STEP * SIZE
    assert taken.rewards.valid.all() and taken.metrics["rollout/num_sampled_again"] == turns
    assert taken.rollouts.episodes.turns.tolist() == [2] * PER_STEP * SIZE
    assert sum(map(len, pool.engines[0].calls)) == 2 * turns
    assert caplog.text.count("a turn of the group of prompt") == turns


@pytest.mark.parametrize("moment", ["reset", "step"])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (_hang, EngineSilent, f"environments: .* rollout.timeout_s = {TIMEOUT_S}"),
        (_raises(ray.exceptions.ActorDiedError()), RolloutError, "a worker of environments is gone for good"),
    ],
    ids=["stall", "kill"],
)
def test_an_environment_worker_that_is_lost_ends_the_run(
    fault: Any, kind: type[Exception], words: str, staleness: int, moment: str, without_ray: None
) -> None:
    games = scripted_environments(_fails(moment, fault), TIMEOUT_S)
    with trainer(prompt_engines(), environments=games, max_staleness=staleness) as run, ends_with(kind, words):
        run.begin()
        run.take()


def test_the_deadline_of_an_environment_begins_when_it_is_asked_and_not_while_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five questions one after the other, each of which takes half the deadline."""

    async def answer(question: Any) -> Reply:
        await asyncio.sleep(TIMEOUT_S / 2)
        return Reply()

    monkeypatch.setattr(environment_workers, "AT_A_TIME", 1)
    workers = scripted_environments(answer, TIMEOUT_S).workers

    async def ask_all() -> list[Reply]:
        return await asyncio.gather(*(workers.ask(episode, Step("turn")) for episode in range(5)))

    assert asyncio.run(ask_all()) == [Reply()] * 5


# The loop --------------------------------------------------------------------------------------------------------------


def _exit() -> None:
    raise SystemExit("some code asked the process to exit")


def test_a_loop_whose_last_work_fails_ends() -> None:
    async def fail() -> None:
        raise RolloutError("it cannot be finished")

    thread = LoopThread("a loop", END_S)
    thread.close(fail())
    assert thread.loop.is_closed()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # what the loop had before it
@pytest.mark.parametrize("moment", ["sampling", "admission", "take", "pause", "resume", "evaluation", "metrics"])
def test_a_loop_that_has_ended_ends_the_run(moment: str) -> None:
    pool = prompt_engines()
    calls: dict[str, Callable[[Trainer], Any]] = {
        "sampling": Trainer.take,
        "admission": Trainer.begin,
        "take": lambda run: run.stream.take(),
        "pause": lambda run: run.stream.pause(),
        "resume": lambda run: run.stream.resume(1, None),
        "evaluation": lambda run: run.stream.sample([prompt(100)], Sampling(1, 0), run.resync),
        "metrics": lambda run: run.stream.prompt_metrics(),
    }
    with trainer(pool, max_staleness=1) as run, ThreadPoolExecutor(1) as thread:
        run.begin()
        run.take()
        for engine in pool.engines:
            hold(engine)
        run.sync()
        run.begin()
        waits = thread.submit(calls[moment], run) if moment == "sampling" else None
        run.stream._loop.call_soon_threadsafe(_exit)
        with ends_with(RolloutError, "the thread of the rollout stream has ended"):
            if waits is not None:
                waits.result(END_S)
            for _ in range(1000):  # the call may be served before the end
                calls[moment](run)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # what the loop had to do
@pytest.mark.parametrize("moment", ["sampling", "pause", "close"])
def test_a_loop_that_stands_still_ends_the_run_with_the_place_where_it_stands(moment: str) -> None:
    goes_on = threading.Event()

    def stands_in_the_loop() -> None:
        goes_on.wait(60)

    pool = prompt_engines()
    with trainer(pool, max_staleness=1, timeout_s=TIMEOUT_S) as run:
        hold(pool.engines[0])
        run.begin()
        run.stream._loop.call_soon_threadsafe(stands_in_the_loop)
        if moment != "close":
            with ends_with(StreamStalled, "the loop of the stream has stood still (.|\n)* in stands_in_the_loop"):
                run.take() if moment == "sampling" else run.stream.pause()
        run.stream.close()  # does not wait for the loop
        assert run.stream._thread._is_stalled
        goes_on.set()
        run.stream._loop.call_soon_threadsafe(run.stream._loop.stop)
        run.stream._thread._thread.join()
