"""A reward over HTTP: asked in batches, again where it helps, within a deadline; what is no number is masked, by reason."""

import asyncio
import json
import threading
import time
from contextlib import suppress
from datetime import date
from decimal import Decimal
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np
import pytest

from megarl.data.sample import Prompt
from megarl.recipe import RecipeError, load_recipe
from megarl.recipe.phases_section import RewardPhaseSection
from megarl.recipe.reward_section import HttpRewardSection, JudgeSection, VerifierSection
from megarl.reward import service
from megarl.reward.service import Service, services_of
from megarl.reward.workers import RewardWorkers
from tests.ports import unused_port
from tests.recipe_cases import edited, make_folder, write
from tests.reward.test_workers import model, payload  # noqa: F401


class Judge:
    """A service that answers with the scripted replies, one a request, and then with the length of each completion. A reply
    is a status, a status with a place to go to, a body, or an Event to wait for."""

    def __init__(self):
        self.replies: list[Any] = []
        self.requests: list[Any] = []
        self.headers: list[Any] = []
        self.bodies: list[bytes] = []
        self.words = b""
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                judge.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                asked = json.loads(judge.bodies[-1])
                judge.requests.append(asked["samples"])
                judge.headers.append(self.headers)
                reply = judge.replies.pop(0) if judge.replies else None
                if isinstance(reply, threading.Event):
                    reply.wait(60)
                if reply == "hang up":
                    return
                body = reply if isinstance(reply, str) else None
                if body is None:
                    body = json.dumps({"rewards": [len(one["completion"]) for one in asked["samples"]]})
                with suppress(ConnectionError):  # of a client that gave the request up
                    status, place = reply if isinstance(reply, tuple) else (reply, None)
                    self.send_response(status if isinstance(status, int) else 200)
                    if place is not None:
                        self.send_header("Location", place)
                    said = judge.words if isinstance(status, int) and judge.words else body.encode()
                    self.send_header("Content-Length", str(len(said)))
                    self.end_headers()
                    self.wfile.write(said)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", unused_port()), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}/score"


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.setattr(service, "FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    judge = Judge()
    yield judge
    judge.server.shutdown()
    judge.server.server_close()
    judge.thread.join()


def prompts(number):
    return [Prompt(i, np.zeros(1, dtype=np.int32), f"q{i}", f"a{i}", {"level": i}) for i in range(number)]


def score(service, texts, rows, timeout_s=60.0):
    """One scoring by a service, which is closed behind it."""

    async def play():
        try:
            return await service.score(texts, rows, timeout_s)
        finally:
            await service.close()

    return asyncio.run(play())


def asked(judge, texts, deadline_s=60.0, **settings):
    return score(
        Service("http", HttpRewardSection(kind="http", url=judge.url, **settings)), texts, prompts(len(texts)), deadline_s
    )


def test_whatever_a_row_holds_the_request_is_json_that_every_parser_reads(judge):
    bad: dict[Any, Any] = {
        "nan": float("nan"), "inf": [-np.inf], "zero": -0.0, "large": 1 << 64, "day": date(2024, 1, 2), (1, 2): None,
        "money": Decimal("1.50"), "bytes": b"\xffa", "array": np.array([[1.5, np.nan]], np.float32), 7: {np.int64(3)},
        "half": "a\ud800b", "small": -(1 << 63),
    }  # fmt: skip
    one = Service("http", HttpRewardSection(kind="http", url=judge.url))
    rows = [Prompt(i, np.zeros(1, dtype=np.int32), "q", "a", row) for i, row in enumerate((bad, {"level": 1}))]
    assert told(score(one, ["a", "bb"], rows)) == [(1.0, "answered"), (2.0, "answered")]
    assert b"NaN" not in judge.bodies[0] and b"Infinity" not in judge.bodies[0]
    assert judge.requests[0][0]["metadata"] == {
        "nan": None, "inf": [None], "zero": 0.0, "large": str(1 << 64), "day": "2024-01-02", "(1, 2)": None,
        "money": "1.50", "bytes": "\ufffda", "array": [[1.5, None]], "7": [3],
        "half": "a\ufffdb", "small": -(1 << 63),
    }  # fmt: skip


def test_a_masked_answer_says_what_the_service_said_and_of_which_rows(judge):
    judge.words = b'{"error":  "no such\nlevel"}' + b"x" * 10**6
    judge.replies = [422, 503]
    rows = [Prompt(i, np.zeros(1, dtype=np.int32), "q", "a", {}, where=f"rows.jsonl line {i}") for i in range(5)]
    one = Service("http", HttpRewardSection(kind="http", url=judge.url, batch=4, retries=0))
    refused, *_, busy = score(one, ["a"] * 5, rows)
    assert 'status 422: {"error": "no such level"}x' in refused.failure and len(refused.failure) < 600
    assert refused.failure.endswith("the request held rows.jsonl line 0, rows.jsonl line 1, rows.jsonl line 2 and 1 more")
    assert "status 503: " in busy.failure and busy.failure.endswith("the request held rows.jsonl line 4")
    assert refused.cause == busy.cause == "service"


def told(scores):
    return [(None if one.parts is None else one.parts["http"], one.reasons["http"]) for one in scores]


def test_a_request_has_everything_and_batches_have_their_size(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    found = asked(judge, ["a", "bb", "ccc"], batch=2, headers_from_environment={"X-Key": "JUDGE_KEY"})
    assert told(found) == [(1.0, "answered"), (2.0, "answered"), (3.0, "answered")]
    assert [len(one) for one in judge.requests] == [2, 1]
    assert judge.requests[0][1] == {"prompt": "q1", "completion": "bb", "answer": "a1", "metadata": {"level": 1}}
    assert [one["X-Key"] for one in judge.headers] == ["secret", "secret"]


@pytest.mark.parametrize("failure", [500, 503, 429, "hang up"])
def test_what_may_pass_is_asked_again(judge, failure):
    judge.replies = [failure, failure]
    assert told(asked(judge, ["a"], retries=2)) == [(1.0, "retried")]
    judge.replies = [failure] * 3
    assert told(asked(judge, ["a", "b"], retries=2, batch=1)) == [(None, "unreachable"), (1.0, "answered")]
    assert len(judge.requests) == 7


@pytest.mark.parametrize(("silent", "retries", "said"), [(1, 100, (1.0, "retried")), (3, 2, (None, "unreachable"))])
def test_a_request_without_an_answer_is_given_up_and_sent_again(judge, monkeypatch, silent, retries, said):
    # Without the limit of its section a service would wait for the gate here.
    monkeypatch.setattr(service.httpx, "AsyncClient", partial(httpx.AsyncClient, timeout=None))
    gate = threading.Event()
    judge.replies = [gate] * silent
    try:
        assert told(asked(judge, ["a"], deadline_s=300.0, timeout_s=0.2, retries=retries)) == [said]
        deadline = time.monotonic() + 60
        while judge.replies:  # a request that was given up may be read only now
            assert time.monotonic() < deadline, "it was not sent again"
            time.sleep(0.01)
    finally:
        gate.set()


@pytest.mark.parametrize("status", [400, 401, 404, 301])
def test_a_refusal_is_final(judge, status):
    judge.replies = [status]
    (masked,) = asked(judge, ["a"])
    assert masked.reasons == {"http": "refused"} and f"status {status}" in masked.failure and judge.url in masked.failure
    assert len(judge.requests) == 1


@pytest.mark.parametrize("status", [307, 308])
def test_a_request_follows_its_service_to_another_place(judge, status):
    judge.replies = [(status, "/score/")] * 2
    assert told(asked(judge, ["a", "bb"])) == [(1.0, "answered"), (2.0, "answered")]
    assert [len(one) for one in judge.requests] == [2, 2, 2]
    judge.replies = [(status, "/score/")] * 10
    (masked,) = asked(judge, ["a"])
    assert masked.reasons == {"http": "refused"} and "more than 5 redirections" in masked.failure


def test_a_redirection_that_would_lose_the_request_says_where_to(judge):
    judge.replies = [(303, "/score/")]
    (masked,) = asked(judge, ["a"])
    assert "moved to /score/; give that as the part's url" in masked.failure


def test_a_proxy_is_passed_by_on_loopback_and_named_elsewhere(judge, monkeypatch):
    monkeypatch.delenv("NO_PROXY")
    proxy = f"http://user:secret@127.0.0.1:{unused_port()}"
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy)
    assert told(asked(judge, ["a"])) == [(1.0, "answered")]
    monkeypatch.setattr(Judge, "url", "http://judge.internal:80/score")
    (masked,) = asked(judge, ["a"], retries=0)
    assert masked.reasons == {"http": "unreachable"} and "secret" not in masked.failure
    assert f"through the proxy http://127.0.0.1:{proxy.rpartition(':')[2]}; no_proxy=judge.internal" in masked.failure


def test_nobody_listening_masks(judge):
    one = Service("http", HttpRewardSection(kind="http", url=f"http://127.0.0.1:{unused_port()}/", retries=1))
    assert told(score(one, ["a"], prompts(1))) == [(None, "unreachable")]


@pytest.mark.parametrize("body", ["", "[1, 2]", "{}", '{"rewards": 1}', '{"rewards": [1]}', '{"rewards": [1, 2, 3]}', "1e"])
def test_an_answer_of_another_form_masks_its_batch(judge, body):
    judge.replies = [body]
    assert told(asked(judge, ["a", "b", "c"], batch=2)) == [(None, "unusable")] * 2 + [(1.0, "answered")]


def test_a_value_that_is_no_finite_number_masks_its_sample(judge):
    values = ["NaN", "Infinity", "1e999", "null", "true", '"1"', "[1]", "1" + "0" * 400, "-0.5", "3"]
    judge.replies = ['{"rewards": [' + ", ".join(values) + "]}"]
    found = told(asked(judge, ["a"] * len(values)))
    assert found == [(None, "unusable")] * 8 + [(-0.5, "answered"), (3.0, "answered")]


def test_the_deadline_ends_a_wait_and_keeps_what_was_judged(judge):
    gate = threading.Event()
    judge.replies = ['{"rewards": [7]}', gate]
    try:
        found = asked(judge, ["a", "b", "c"], deadline_s=2.0, batch=1)
    finally:
        gate.set()
    assert told(found) == [(7.0, "answered"), (None, "late"), (None, "late")]
    assert [one.timed_out for one in found] == [False, True, True] and "after 2 s" in found[1].failure
    assert len(judge.requests) == 2, "no request begins after the deadline"


def test_retries_stop_before_the_deadline(judge, monkeypatch):
    monkeypatch.setattr(service, "FIRST_WAIT_S", 1000.0)
    monkeypatch.setattr(service, "LONGEST_WAIT_S", 1000.0)
    judge.replies = [500] * 50
    assert told(asked(judge, ["a"], deadline_s=60.0, retries=50)) == [(None, "unreachable")]
    assert len(judge.requests) == 1


def test_a_sample_counts_where_every_part_has_judged_it(judge, model):  # noqa: F811
    judge.replies = ['{"rewards": [0.5, null]}', '{"rewards": [2, 3]}']
    specs: list[JudgeSection] = [
        VerifierSection(kind="exact"),
        HttpRewardSection(kind="http", url=judge.url, batch=2, weight=2.0),
    ]
    workers = RewardWorkers(specs, model, (0,), RewardPhaseSection(sequences=4, timeout_s=60.0), local=True)
    try:
        result = workers.score(payload(model, ["a0", "a0", "a1", "x"]), prompts(2), range(4), group_size=2)
    finally:
        workers.close()
    np.testing.assert_array_equal(result.rewards, [2.0, np.nan, 5.0, 6.0])
    metrics = result.metrics()
    assert metrics["reward/num_masked"] == 1 and metrics["reward/num_timeouts"] == 0
    assert metrics["reward/http_num_answered"] == 3 and metrics["reward/http_num_unusable"] == 1
    assert metrics["reward/exact"] == pytest.approx(2 / 3) and metrics["reward/http"] == pytest.approx(5.5 / 3)


def test_without_another_part_no_verifier_runs(judge, model):  # noqa: F811
    part = HttpRewardSection(kind="http", url=judge.url)
    workers = RewardWorkers([part], model, (0,), RewardPhaseSection(timeout_s=60.0), local=True)
    try:
        assert workers.score(payload(model, ["a", "bb"]), prompts(1), range(2), group_size=2).rewards.tolist() == [1, 2]
    finally:
        workers.close()


def test_a_secret_is_named_and_never_written(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    part = HttpRewardSection(kind="http", url="http://x/", headers_from_environment={"X-Key": "JUDGE_KEY"})
    with pytest.raises(ValueError, match="headers_from_environment.X-Key is 'JUDGE_KEY', and there is no such"):
        services_of([part])
    monkeypatch.setenv("JUDGE_KEY", "1")
    services_of([part])
    make_folder(tmp_path, monkeypatch)
    wrong = {"kind": "http", "url": "http://user:word@host/", "headers_from_environment": {"Authorization": "Bearer abc"}}
    with pytest.raises(RecipeError) as refused:
        load_recipe(write(tmp_path, edited(("reward", [wrong]))))
    keys = {one.key for one in refused.value.violations}
    assert keys == {"reward.0.url", "reward.0.headers_from_environment"}
