"""A reward that cannot be had is masked and counted, alone, and never a 0; the rest is scored in order."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from email.message import Message
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError

import httpx
import numpy as np
import pytest
import ray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.data.sample import Completion, Prompt, Sample
from megarl.recipe.phases_section import RewardPhaseSection
from megarl.recipe.reward_section import FunctionRewardSection, PatternRewardSection, SchemaRewardSection, VerifierSection
from megarl.reward import fork_server, verifier_process
from megarl.reward.outages import is_outage
from megarl.reward.verifier_process import VerifierProcess
from megarl.reward.workers import RewardResult, RewardWorkers, Scorer
from megarl.rollout import TokensLost
from megarl.rollout.taken import DataPayload
from tests.sink_cases import wait_for

OWN_REWARDS = """
import os, time

def judge(text, prompt):
    if text == "loop":
        while True:
            pass
    if text == "raise" or prompt.answer == "broken":
        raise KeyError("what")
    if text.startswith("start"):
        for _ in range(2):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(999)
                os._exit(0)
        if text == "start and die":
            os._exit(3)
    if text == "down":
        raise ConnectionRefusedError("no judge")
    if text.endswith("once more") and not os.path.exists(__file__ + text):
        open(__file__ + text, "w").close()
        raise (RuntimeError if text.startswith("error") else TimeoutError)("no judge")
    if text == "error, and hang once more":
        time.sleep(999)
    if text == "fill":
        held = bytearray(300 << 20)
        held[::4096] = bytes(len(held[::4096]))
        time.sleep(999)
    if text == "fill shared":
        import mmap
        held = [mmap.mmap(-1, 100 << 20) for _ in range(3)]
        for at in range(0, 100 << 20, 4096):
            for one in held:
                one[at] = 1
        time.sleep(999)
    if text == "fork":
        for _ in range(30):
            if os.fork() == 0:
                time.sleep(999)
        time.sleep(999)
    if text == "die" or (text == "die once" and not os.path.exists(__file__ + ".died")):
        open(__file__ + ".died", "w").close()
        os._exit(3)
    return float(text == prompt.answer)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a byte tokenizer whose token 0 is the end token."""
    path = tmp_path_factory.mktemp("model")
    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(path)


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(OWN_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return [FunctionRewardSection(kind="function", target="own_rewards:judge", weight=2.0)]


def prompts(*answers):
    return [Prompt(i, np.zeros(1, dtype=np.int32), "?", answer, {}) for i, answer in enumerate(answers)]


def payload(model, texts):
    """What a rollout hands over of completions, with an end token behind each text."""
    from megarl.data.tokenizer import load_tokenizer

    tokenizer, samples = load_tokenizer(model), []
    for number, text in enumerate(texts):
        ids = np.array(tokenizer(text)["input_ids"] + [0], np.int32)
        completion = Completion(ids, np.zeros(len(ids), np.float32), "stop", np.zeros(len(ids), np.int64))
        samples.append(Sample(number // 2, np.zeros(1, np.int32), completion))
    return DataPayload(tuple(samples))


def score_batch(model, specs, texts, prompts, **section):
    """Score completions of groups of two, in this process but for its verifiers."""
    phase = RewardPhaseSection(**{"timeout_s": 60.0} | section)
    with closing(RewardWorkers(specs, model, (0,), phase, local=True)) as workers:
        return workers.score_together([(payload(model, texts), range(len(texts)), 2)], prompts)[0]


def score_tasks(verifiers, *tasks):
    """Score tasks, each given as texts, prompts and seconds, in one event loop."""

    async def play():
        try:
            await verifiers.load()
            return [await verifiers.score_task(texts, prompts, timeout_s) for texts, prompts, timeout_s in tasks]
        finally:
            verifiers.close()

    return asyncio.run(play())


def test_a_verifier_that_raises_dies_or_is_lost_with_its_server_fails_alone(own_rewards):
    verifiers = VerifierProcess(own_rewards)

    async def play():
        try:
            await verifiers.load()
            texts = ["a", "raise", "b", "die once", "die", "a"]
            scores = await verifiers.score_task(texts, prompts("a", "a", "a", "die once", "a", "a"), 60)
            killed = verifiers._server.process
            os.kill(killed, signal.SIGKILL)
            os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)  # its child is killed with it
            scores += await verifiers.score_task(["a"], prompts("a"), 60)
            assert verifiers._server.process != killed
            return scores
        finally:
            verifiers.close()

    scores = asyncio.run(play())
    assert [score.parts for score in scores] == [{"judge": value} for value in (1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0)]
    assert [score.cause for score in scores] == ["", "error", "", "", "crash", "", ""], "the text is no cause of `die once`"
    assert "KeyError: 'what'" in scores[1].failure
    assert "exit status 3 on prompt 3" in scores[3].failure and "exit status 3 on prompt 4" in scores[4].failure
    assert "gone" in scores[6].failure and not any(score.timed_out for score in scores)


def test_an_outage_of_a_service_that_a_function_asks_is_no_0(own_rewards, monkeypatch):
    ask, sent_texts = VerifierProcess._ask, []

    async def in_no_time(self, text, prompt, timeout_s, answers):
        sent_texts.append(text)
        return await ask(self, text, prompt, 0.0 if sent_texts.count(text) > 1 and "hang" in text else timeout_s, answers)

    monkeypatch.setattr(VerifierProcess, "_ask", in_no_time)
    texts = ["error once more", "timeout once more", "down", "error, and hang once more", "raise"]
    (scores,) = score_tasks(VerifierProcess(own_rewards), (texts, prompts(*texts), 60))
    assert [score.parts and score.parts["judge"] for score in scores] == [1.0, 1.0, None, None, 0.0]
    assert [score.cause for score in scores] == ["", "", "verifier", "verifier", "error"]
    assert "no judge" in scores[0].failure and "ConnectionRefusedError: no judge" in scores[2].failure
    assert "not done in time" in scores[3].failure


def of_library(name: str, bases: tuple[type, ...] = (Exception,), **fields: Any) -> Exception:
    """What a library raises that need not be here."""
    module, _, kind = name.rpartition(".")
    return type(kind, bases, {"__module__": module} | fields)("failed")


UNREACHED = {
    "refused": ConnectionRefusedError(), "late": TimeoutError(), "no route": OSError(errno.EHOSTUNREACH, "no route"),
    "no name": socket.gaierror(-2, "no such name"), "urllib": URLError(ConnectionResetError()),
    "urllib 503": HTTPError("http://judge", 503, "busy", Message(), None), "httpx": httpx.ReadError("reset"),
    "requests": of_library("requests.exceptions.ConnectTimeout", (type(of_library("requests.exceptions.Timeout")),)),
    "requests 500": of_library("requests.exceptions.HTTPError", response=SimpleNamespace(status_code=500)),
    "openai 429": of_library("openai.RateLimitError", status_code=429),
}  # fmt: skip
OF_THE_TEXT = {
    "file": FileNotFoundError(errno.ENOENT, "none", "x"), "file of a URL": URLError(FileNotFoundError(2, "none", "x")),
    "no URL": URLError("unknown url type: x"), "urllib 404": HTTPError("http://judge", 404, "none", Message(), None),
    "a program's pipe": BrokenPipeError(), "a program was late": subprocess.TimeoutExpired("python", 1.0),
    "key": KeyError("x"), "no service's status": of_library("own.Failed", code=500),
}  # fmt: skip


@pytest.mark.parametrize("name", [*UNREACHED, *OF_THE_TEXT])
def test_an_error_of_a_transport_is_told_from_one_that_a_text_can_cause(name):
    error = (UNREACHED | OF_THE_TEXT)[name]
    assert is_outage(error) == (name in UNREACHED)
    for wrap in (False, True):
        try:
            try:
                raise error
            except Exception as caught:
                raise ValueError("not judged") from (caught if wrap else None)
        except ValueError as wrapped:
            assert is_outage(wrapped) == (wrap and name in UNREACHED)


@pytest.fixture
def paced(monkeypatch):
    """A clock that moves by what a text is given without an answer and by `load_s` for each start, and by nothing else."""
    ask, load, clock = (
        fork_server.ForkServerClient.ask,
        VerifierProcess.load,
        SimpleNamespace(now_s=0.0, load_s=0.0, loads=0),
    )

    async def paced_ask(self, key, question, timeout_s, starts=False):
        is_timed = timeout_s not in (verifier_process.START_TIMEOUT_S, verifier_process.EMPTY_TIMEOUT_S)
        reply = await ask(self, key, question, 0.2 if is_timed and question[0] == "loop" else 60.0, starts)
        if getattr(reply, "cause", "") == "wall_time":
            clock.now_s += timeout_s
        return reply

    async def paced_load(self):
        clock.now_s += clock.load_s
        clock.loads += 1
        await load(self)

    monkeypatch.setattr(fork_server.ForkServerClient, "ask", paced_ask)
    monkeypatch.setattr(VerifierProcess, "load", paced_load)
    monkeypatch.setattr(verifier_process, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_a_task_of_nothing_but_looping_verifiers_ends_at_its_deadline(own_rewards, paced):
    (scores,) = score_tasks(VerifierProcess(own_rewards), (["loop"] * 9 + ["a"], prompts(*"aaaaaaaaaa"), 12))
    assert all(score.timed_out for score in scores)
    # An equal part is 1.2 s: three texts had 6, 3 and 1.5 s, the fourth 0.75 s. After it no text is begun.
    assert [score.cause for score in scores] == ["wall_time"] * 3 + ["waiting"] * 7
    assert [score.parts for score in scores] == [{"judge": 0.0}] * 3 + [None] * 7, "what was not judged is no 0"
    assert "had no answer within" in scores[0].failure and "waited behind" in scores[-1].failure
    assert "left 0.75 s, less than its part of 1.2 s" in scores[3].failure
    assert paced.loads == 4 and paced.now_s == 12 - 12 / 16


def test_a_limit_ends_a_verifier_with_all_that_it_has_started_and_names_itself(own_rewards, monkeypatch):
    monkeypatch.setattr(verifier_process, "MAX_PROCESSES", 16)
    # More than 16 forked processes take together: which limit they pass is not to depend on when they are looked at.
    verifiers = VerifierProcess(own_rewards, memory_bytes=200 << 20)
    server = verifiers._server.process
    below: list[int] = []

    async def play():
        try:
            await verifiers.load()
            texts = ["fill", "fill shared", "fork", "start", "a"]
            scores = await verifiers.score_task(texts, prompts(*"aaaaa"), 4000)
            # The verifier, the two that it has started and the two that these have left: a score does not wait for them.
            wait_for(lambda: len(fork_server.below(server)) == 5)
            below.extend(fork_server.below(server))
            scores += await verifiers.score_task(["start and die"], prompts("a"), 2000)
            assert not any(os.path.exists(f"/proc/{pid}") for pid in below), "something has outlived its verifier"
            below[:] = fork_server.below(server)
            return scores
        finally:
            verifiers.close()

    scores = asyncio.run(play())
    assert [score.cause for score in scores] == ["memory", "memory", "processes", "", "", "crash"]
    assert [score.parts and score.parts["judge"] for score in scores] == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert "200 MiB of memory (phases.reward.memory_mib)" in scores[0].failure
    assert not any(os.path.exists(f"/proc/{pid}") for pid in [server, *below])


@pytest.mark.parametrize(("processes", "zombies", "expected"), [(2, 9, ""), (1, 0, "processes"), (2, 3, "processes")])
def test_only_running_processes_count_unless_very_many_have_ended(monkeypatch, processes, zombies, expected):
    """A program that waits for none of those that it starts is no crowd, until it takes the machine's process ids."""
    monkeypatch.setattr(fork_server, "MAX_ZOMBIES", 9 if expected == "" else 2)
    starts = f"""
import os, subprocess, sys
if os.fork() == 0:
    os.close(1)
    sys.stdin.read(1)
    os._exit(0)
ended = [subprocess.Popen(["true"]) for _ in range({zombies})]
for one in ended:
    os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
print("ready", flush=True)
sys.stdin.read(1)
"""
    child = subprocess.Popen([sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    limits = fork_server.ChildLimits(1 << 40, processes)
    assert fork_server.passed_limit(child.pid, limits, os.getpid()) == expected
    child.communicate()


def test_nothing_outlives_the_process_that_asked_the_verifiers(own_rewards):
    asks = f"""
import asyncio, sys, time
sys.path[:] = {sys.path!r}
from megarl.recipe.reward_section import FunctionRewardSection
from megarl.data.sample import Prompt
from megarl.reward.verifier_process import VerifierProcess
async def play():
    verifiers = VerifierProcess([FunctionRewardSection(kind="function", target="own_rewards:judge")])
    await verifiers.score_task(["start"], [Prompt(0, None, "?", "a", {{}})], 600)
    print(verifiers._server.process, flush=True)
    time.sleep(999)
asyncio.run(play())
"""
    asking = subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    server = int(asking.stdout.readline())
    processes = [server, *fork_server.below(server)]
    assert len(processes) > 3
    asking.kill()
    asking.communicate()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in processes))


def test_a_reward_sees_what_was_sampled_but_for_the_token_that_ends_it(tmp_path, model, own_rewards):
    from megarl.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    tokenizer.save_pretrained(tmp_path / "tags")
    (tmp_path / "tags" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    text = "so <answer>7</answer>"
    schema = SchemaRewardSection(kind="json_schema", json_schema={"type": "integer"})
    pattern = PatternRewardSection(kind="pattern", pattern="<answer>7</answer>$")
    parts: list[Any] = [VerifierSection(kind="exact"), pattern, schema]
    texts = [text, "7", "7<|end|>"]
    result = score_batch(str(tmp_path / "tags"), [*parts, *own_rewards], texts, prompts(text, "7<|end|>"))
    assert result.parts["exact"].tolist() == [1, 0, 1], "only the last token is left out, and only where it is an end"
    assert result.parts["pattern"].tolist() == [1, 0, 0] and result.parts["json_schema"].tolist() == [0, 1, 0]
    assert result.parts["judge"].tolist() == [1, 0, 1]


def test_the_tokens_that_end_a_completion_are_those_that_the_engines_stop_at(model):
    """Which is by the template's options too, of which a model's files know nothing."""
    from megarl.data.tokenizer import load_tokenizer

    ids = load_tokenizer(model)("7;")["input_ids"]
    assert Scorer([], model, (ids[1],), sys.path, 1 << 30).decode(ids) == "7"
    assert Scorer([], model, (0,), sys.path, 1 << 30).decode(ids) == "7;"


def test_a_function_that_needs_more_memory_to_load_says_which_key(tmp_path, monkeypatch):
    (tmp_path / "large_reward.py").write_text("import time\nx = bytes(1 << 28)\nx = bytearray(x)\ntime.sleep(99)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"loading the verifiers took more than 160 MiB of memory \(phases.reward.memory_mib\)"
    ):
        score_tasks(
            VerifierProcess([FunctionRewardSection(kind="function", target="large_reward:f")], memory_bytes=160 << 20)
        )


def check_batch(workers, model):
    """Nine samples of groups of two in tasks of three; one looping, one dying."""
    texts = ["a", "b", "b", "die", "c", "raise", "loop", "d", "a"]
    (result,) = workers.score_together([(payload(model, texts), range(9), 2)], prompts("a", "b", "c", "d", "broken"))
    assert result.task_sequences == (3, 3, 3)
    assert result.valid.tolist() == [True] * 8 + [False]
    # Samples 0 and 1 answer prompt 0, 2 and 3 prompt 1, and so on; the weight is 2.
    np.testing.assert_array_equal(result.rewards, [2, 0, 2, 0, 2, 0, 0, 2, np.nan])
    np.testing.assert_array_equal(result.parts["judge"], [1, 0, 1, 0, 1, 0, 0, 1, np.nan])
    assert sorted(result.failures) == [8] and "an empty completion failed too" in result.failures[8]
    metrics = result.metrics()
    assert metrics["reward/mean"] == 1.0 and metrics["reward/judge"] == 0.5
    assert metrics["reward/num_masked"] == 1 and metrics["reward/num_timeouts"] == 1
    causes = {key.removeprefix("reward/num_"): count for key, count in metrics.items() if count and "num_" in key}
    assert causes == {"workers": 1, "masked": 1, "timeouts": 1, "masked_verifier": 1,
                      "zero_crash": 1, "zero_error": 1, "zero_wall_time": 1}  # fmt: skip


def test_masked_rewards_are_counted_and_never_zero(model, own_rewards, paced):
    section = RewardPhaseSection(sequences=3, timeout_s=8.0)
    with closing(RewardWorkers(own_rewards, model, (0,), section, local=True)) as workers:
        check_batch(workers, model)


class LostPayload:
    """A payload whose node is gone."""

    def fetch(self, sample_ids):
        raise ray.exceptions.ObjectLostError("ab", None, "")


def test_lost_tokens_fail_the_groups_of_one_task_and_none_of_the_next(model):
    """Three groups of four in tasks of six: the second group, which is lost, has a part in both tasks."""
    section = RewardPhaseSection(sequences=6, timeout_s=60.0)
    workers = RewardWorkers([VerifierSection(kind="exact")], model, (0,), section, local=True)

    async def score_all():
        payloads = [payload(model, ["1"] * 4), LostPayload(), payload(model, ["1"] * 4)]
        scored = [
            workers.score_group(tokens, range(4), prompt) for tokens, prompt in zip(payloads, prompts(*"111"), strict=True)
        ]
        workers.send_all()
        return await asyncio.gather(*scored, return_exceptions=True)

    try:
        first, lost, last = workers._runner.run(score_all())
    finally:
        workers.close()
    assert isinstance(first, TokensLost) and isinstance(lost, TokensLost)
    assert [score.parts for score in last] == [{"exact": 1.0}] * 4
    assert len(workers._training.waiting) == 0


@pytest.mark.nightly  # in CI the runs score through Ray
def test_the_same_batch_through_ray(model, own_rewards):
    # Without an address Ray would join whatever cluster was started last on this machine.
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        section = RewardPhaseSection(sequences=3, timeout_s=8.0)
        workers = RewardWorkers(own_rewards, model, (0,), section, local=False)
        check_batch(workers, model)
        workers.close()
    finally:
        ray.shutdown()


def test_each_masked_completion_is_counted_once_whoever_masks_it_and_whether_it_is_selected():
    rewards = np.array([1, np.inf, 0, np.nan, np.nan, 0], np.float32)
    scored = RewardResult(rewards, ~np.isnan(rewards), {}, {3: "late", 4: "late"}, 2, (6,))
    taken = scored.select(range(4))  # as dynamic sampling passes over a group
    guarded = replace(taken, valid=np.isfinite(taken.rewards))
    assert guarded.metrics()["reward/num_masked"] == 3, "inf and NaN, and a NaN that was left out"
    assert guarded.select([0, 2, 3]).metrics()["reward/num_masked"] == 3
    assert guarded.select([0, 2]).select([1]).metrics()["reward/num_masked"] == 3
