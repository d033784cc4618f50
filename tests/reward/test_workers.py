"""A reward that cannot be had is masked and counted, alone, and never a 0; the rest is scored in order."""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.data.sample import Completion, Prompt, Sample
from megarl.recipe.phases_section import RewardPhaseSection
from megarl.recipe.reward_section import FunctionRewardSection, PatternRewardSection, SchemaRewardSection, VerifierSection
from megarl.reward import process, process_tree
from megarl.reward.process import VerifierProcess
from megarl.reward.workers import RewardWorkers, Scorer
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
    if text.endswith("once more") and not os.path.exists(__file__ + text[0]):
        open(__file__ + text[0], "w").close()
        raise (RuntimeError if text[0] == "e" else TimeoutError)("no judge")
    if text == "error, and hang once more":
        time.sleep(999)
    if text == "fill":
        held = bytearray(600 << 20)
        held[::4096] = bytes(len(held[::4096]))
        time.sleep(999)
    if text == "fill shared":
        import mmap
        held = [mmap.mmap(-1, 200 << 20) for _ in range(3)]
        for at in range(0, 200 << 20, 4096):
            for one in held:
                one[at] = 1
        time.sleep(999)
    if text == "fork":
        for _ in range(300):
            if os.fork() == 0:
                time.sleep(999)
        time.sleep(999)
    if text == "die" or (text == "die once" and not os.path.exists(__file__ + ".died")):
        open(__file__ + ".died", "w").close()
        os._exit(3)
    return float(text == prompt.answer)

def pid(text, prompt):
    return os.getpid()
"""


class Payload:
    """What a rollout hands over: samples by id."""

    def __init__(self, texts, tokenizer):
        self.token_ids = [np.asarray(tokenizer(text)["input_ids"] + [0], dtype=np.int32) for text in texts]

    def fetch(self, sample_ids):
        def sample(i):
            ids = self.token_ids[i]
            completion = Completion(ids, np.zeros(len(ids), dtype=np.float32), "stop", 0, 0)
            return Sample(i // 2, np.zeros(1, dtype=np.int32), completion)

        return {i: sample(i) for i in sample_ids}


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
    from megarl.data.tokenizer import load_tokenizer

    return Payload(texts, load_tokenizer(model))


def test_a_raising_and_a_dying_verifier_fail_alone(own_rewards):
    process = VerifierProcess(own_rewards)
    try:
        texts = ["a", "raise", "b", "die once", "die", "a"]
        verdicts = process.score_task(texts, prompts("a", "a", "a", "die once", "a", "a"), timeout_s=60)
    finally:
        process.close()
    assert [v.said for v in verdicts] == [{"judge": one} for one in (1.0, 0.0, 0.0, 1.0, 0.0, 1.0)]
    assert [v.cause for v in verdicts] == ["", "error", "", "", "crash", ""], "what died once was not ended by the text"
    assert "KeyError: 'what'" in verdicts[1].failure
    assert "exit status 3 on prompt 3" in verdicts[3].failure and "exit status 3 on prompt 4" in verdicts[4].failure
    assert not any(v.timed_out for v in verdicts)


def test_an_outage_of_a_service_that_a_function_asks_is_no_0(own_rewards, monkeypatch):
    ask, asked = VerifierProcess._ask, []

    def in_no_time(self, text, prompt, timeout_s, answers):
        asked.append(text)
        return ask(self, text, prompt, 0.0 if asked.count(text) > 1 and "hang" in text else timeout_s, answers)

    monkeypatch.setattr(VerifierProcess, "_ask", in_no_time)
    verifiers = VerifierProcess(own_rewards)
    texts = ["error once more", "timeout once more", "down", "error, and hang once more", "raise"]
    try:
        verdicts = []
        for text in texts:
            for mark in Path(sys.path[0]).glob("own_rewards.py?"):
                mark.unlink()
            verdicts += verifiers.score_task([text], prompts(text), timeout_s=60)
    finally:
        verifiers.close()
    assert [v.said and v.said["judge"] for v in verdicts] == [1.0, 1.0, None, None, 0.0]
    assert [v.cause for v in verdicts] == ["", "", "verifier", "verifier", "error"]
    assert "no judge" in verdicts[0].failure and "ConnectionRefusedError: no judge" in verdicts[2].failure
    assert "not done in time" in verdicts[3].failure


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
    assert process.is_unreached(error) == (name in UNREACHED)
    for wrap in (False, True):
        try:
            try:
                raise error
            except Exception as caught:
                raise ValueError("not judged") from (caught if wrap else None)
        except ValueError as wrapped:
            assert process.is_unreached(wrapped) == (wrap and name in UNREACHED)


def test_a_looping_verifier_is_stopped_and_all_others_are_scored(own_rewards):
    process = VerifierProcess(own_rewards)
    try:
        verdicts = process.score_task(["a", "loop", "a", "loop", *"bbbb"], prompts(*"aaaaaaaa"), timeout_s=12)
        later = process.score_task(["a"], prompts("a"), timeout_s=60)
    finally:
        process.close()
    assert [v.timed_out for v in verdicts] == [False, True] * 2 + [False] * 4
    assert [v.said and v.said["judge"] for v in verdicts] == [1.0, 0.0, 1.0, 0.0] + [0.0] * 4
    assert [v.cause for v in verdicts] == ["", "wall_time"] * 2 + [""] * 4
    assert later[0].said == {"judge": 1.0}


def test_a_task_of_nothing_but_looping_verifiers_ends_at_its_deadline(own_rewards, monkeypatch):
    """On a clock that moves by what is waited for a verdict, and by nothing else."""
    start, pipe, starts, now_s = VerifierProcess._start, process._pipe, [], [0.0]

    def counted(self):
        starts.append(1)
        start(self)

    def paced():
        ours, theirs = pipe()

        def poll(timeout_s):
            if timeout_s in (process.START_TIMEOUT_S, process.EMPTY_TIMEOUT_S):
                return ours.poll(timeout_s)
            now_s[0] += timeout_s
            return ours.poll(0.1)

        mine = SimpleNamespace(poll=poll, send=ours.send, recv=ours.recv, close=ours.close)
        return mine, theirs

    monkeypatch.setattr(process, "_pipe", paced)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    verifiers = VerifierProcess(own_rewards)
    monkeypatch.setattr(VerifierProcess, "_start", counted)
    try:
        verdicts = verifiers.score_task(["loop"] * 9 + ["a"], prompts(*"aaaaaaaaaa"), timeout_s=12)
    finally:
        verifiers.close()
    assert all(v.timed_out for v in verdicts)
    # An equal part is 1.2 s: three texts had 6, 3 and 1.5 s, the fourth 0.75 s.
    assert [v.cause for v in verdicts] == ["wall_time"] * 3 + ["waiting"] * 7
    assert [v.said for v in verdicts] == [{"judge": 0.0}] * 3 + [None] * 7, "what was not judged is no 0"
    assert "still being scored" in verdicts[0].failure and "waited behind" in verdicts[-1].failure
    assert "left 0.75 s, less than its part of 1.2 s" in verdicts[3].failure
    # Halves of what is left, until less than a 24th is: then none is begun.
    assert len(starts) == 5 and now_s == [12 - 12 / 32]


def test_what_a_restart_takes_is_not_taken_from_the_texts_behind_it(own_rewards, monkeypatch):
    verifiers, start, real, ahead_s = VerifierProcess(own_rewards), VerifierProcess._start, time.monotonic, [0.0]

    def start_slowly(self):
        ahead_s[0] += 50.0
        start(self)

    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: real() + ahead_s[0]))
    monkeypatch.setattr(VerifierProcess, "_start", start_slowly)
    try:
        verdicts = verifiers.score_task(["die", "a"], prompts("a", "a"), timeout_s=60)
    finally:
        verifiers.close()
    assert verdicts[0].cause == "crash" and verdicts[1].said == {"judge": 1.0}, verdicts


def test_a_limit_ends_a_verifier_with_all_that_it_has_started_and_names_itself(own_rewards):
    # More than 256 forked processes take together: which limit they pass is not to depend on when they are looked at.
    verifiers = VerifierProcess(own_rewards, memory_bytes=400 << 20)
    try:
        keeper = verifiers._child.pid
        verdicts = verifiers.score_task(["fill", "fill shared", "fork", "start", "a"], prompts(*"aaaaa"), timeout_s=4000)
        child = verifiers._child
        # The verifier, the two that it has started and the two that these have left: a verdict does not wait for them.
        wait_for(lambda: len(process_tree.below(child.pid)) == 5)
        below = process_tree.below(child.pid)
        (crashed,) = verifiers.score_task(["start and die"], prompts("a"), timeout_s=2000)
        assert not any(os.path.exists(f"/proc/{one}") for one in [keeper, *below]), "something has outlived its verifier"
        below = process_tree.below(verifiers._child.pid)
    finally:
        verifiers.close()
    assert [one.cause for one in [*verdicts, crashed]] == ["memory", "memory", "processes", "", "", "crash"]
    assert [one.said and one.said["judge"] for one in [*verdicts, crashed]] == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert "400 MiB (phases.reward.memory_mib)" in verdicts[0].failure
    assert not any(os.path.exists(f"/proc/{one}") for one in below)


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
    section = RewardPhaseSection(timeout_s=60.0)
    workers = RewardWorkers([*parts, *own_rewards], str(tmp_path / "tags"), (0,), section, local=True)
    try:
        texts = Payload([text, "7", "7<|end|>"], tokenizer)
        result = workers.score(texts, prompts(text, "7<|end|>"), 3, group_size=2)
    finally:
        workers.close()
    assert result.parts["exact"].tolist() == [1, 0, 1], "only the last token is left out, and only where it is an end"
    assert result.parts["pattern"].tolist() == [1, 0, 0] and result.parts["json_schema"].tolist() == [0, 1, 0]
    assert result.parts["judge"].tolist() == [1, 0, 1]


def test_the_tokens_that_end_a_completion_are_those_that_the_engines_stop_at(model):
    """Which is by the template's options too, of which a model's files know nothing."""
    from megarl.data.tokenizer import load_tokenizer

    ids = load_tokenizer(model)("7;")["input_ids"]
    assert Scorer([], model, (ids[1],), sys.path, 1 << 30)._text(ids) == "7"
    assert Scorer([], model, (0,), sys.path, 1 << 30)._text(ids) == "7;"


def test_a_function_that_needs_more_memory_to_load_says_which_key(tmp_path, monkeypatch):
    (tmp_path / "large_reward.py").write_text("import time\nx = bytes(1 << 28)\nx = bytearray(x)\ntime.sleep(99)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"loading the verifiers took more than memory, 160 MiB \(phases.reward.memory_mib\)"
    ):
        VerifierProcess([FunctionRewardSection(kind="function", target="large_reward:f")], memory_bytes=160 << 20)


def test_functions_run_outside_this_process(own_rewards):
    process = VerifierProcess([FunctionRewardSection(kind="function", target="own_rewards:pid")])
    try:
        (verdict,) = process.score_task(["a"], prompts("a"), timeout_s=60)
    finally:
        process.close()
    assert verdict.said is not None and verdict.said["pid"] != os.getpid()


def check_batch(workers, model):
    """Seven samples of groups of two in tasks of three; one looping, one dying, tasks of their own."""
    texts = ["a", "b", "b", "die", "c", "raise", "loop", "d", "a"]
    result = workers.score(payload(model, texts), prompts("a", "b", "c", "d", "broken"), 9, group_size=2)
    assert result.task_sequences == (3, 3, 3)
    assert result.valid.tolist() == [True] * 8 + [False]
    # Samples 0 and 1 answer prompt 0, 2 and 3 prompt 1, and so on; the weight is 2.
    np.testing.assert_array_equal(result.rewards, [2, 0, 2, 0, 2, 0, 0, 2, np.nan])
    np.testing.assert_array_equal(result.parts["judge"], [1, 0, 1, 0, 1, 0, 0, 1, np.nan])
    assert sorted(result.failures) == [8] and "so it did on an empty completion" in result.failures[8]
    metrics = result.metrics()
    assert metrics["reward/mean"] == 1.0 and metrics["reward/judge"] == 0.5
    assert metrics["reward/num_masked"] == 1 and metrics["reward/num_timeouts"] == 1
    causes = {key.removeprefix("reward/num_"): count for key, count in metrics.items() if count and "num_" in key}
    assert causes == {"workers": 1, "masked": 1, "timeouts": 1, "masked_verifier": 1,
                      "zero_crash": 1, "zero_error": 1, "zero_wall_time": 1}  # fmt: skip


def test_masked_rewards_are_counted_and_never_zero(model, own_rewards):
    section = RewardPhaseSection(sequences=3, timeout_s=8.0)
    workers = RewardWorkers(own_rewards, model, (0,), section, local=True)
    try:
        check_batch(workers, model)
    finally:
        workers.close()


def test_an_unfit_answer_ends_the_phase_before_anything_is_scored(model):
    specs = [VerifierSection(kind="last_number")]
    workers = RewardWorkers(specs, model, (0,), RewardPhaseSection(sequences=2, timeout_s=60.0), local=True)
    try:
        with pytest.raises(ValueError, match="the answer of prompt 1 .* is 'x'"):
            workers.score(payload(model, ["1"] * 4), prompts("1", "x"), 4, group_size=2)
    finally:
        workers.close()


@pytest.mark.slow
def test_the_same_batch_through_ray(model, own_rewards):
    ray = pytest.importorskip("ray")
    # The actor cannot import this module, so the payload's class travels by value.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # Without an address Ray would join whatever cluster was started last on this machine.
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        section = RewardPhaseSection(sequences=3, timeout_s=8.0)
        workers = RewardWorkers(own_rewards, model, (0,), section, local=False)
        check_batch(workers, model)
        workers.close()
    finally:
        ray.shutdown()
