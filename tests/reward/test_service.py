"""A reward over HTTP: batches, retries and a deadline; a value that is not a number is masked with a reason."""

import asyncio
import json
import threading
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
from megarl.recipe.reward_section import HttpRewardSection, VerifierSection
from megarl.reward import service
from megarl.reward.service import Service, services_of
from tests.ports import unused_port
from tests.recipe_cases import edited, make_folder, write
from tests.reward.test_workers import model, score_batch  # noqa: F401
from tests.sink_cases import wait_for


class Judge:
    """A service that answers each request with the next scripted reply, and then with the length of each completion. A reply
    is a status, a status with a location, a body, or an Event to wait for."""

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
                request = json.loads(judge.bodies[-1])
                judge.requests.append(request["samples"])
                judge.headers.append(self.headers)
                reply = judge.replies.pop(0) if judge.replies else None
                if isinstance(reply, threading.Event):
                    reply.wait(60)
                if reply == "hang up":
                    return
                body = reply if isinstance(reply, str) else None
                if body is None:
                    body = json.dumps({"rewards": [len(sample["completion"]) for sample in request["samples"]]})
                with suppress(ConnectionError):  # the client has abandoned the request
                    status, place = reply if isinstance(reply, tuple) else (reply, None)
                    self.send_response(status if isinstance(status, int) else 200)
                    if place is not None:
                        self.send_header("Location", place)
                    content = judge.words if isinstance(status, int) and judge.words else body.encode()
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

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
    """Score texts with a service, and close the service."""

    async def play():
        try:
            return await service.score(texts, rows, timeout_s)
        finally:
            await service.close()

    return asyncio.run(play())


def scores_of(judge, texts, deadline_s=60.0, **settings):
    return score(
        Service("http", HttpRewardSection(kind="http", url=judge.url, **settings)), texts, prompts(len(texts)), deadline_s
    )


def test_every_parser_can_read_the_request_for_any_row(judge):
    bad: dict[Any, Any] = {
        "nan": float("nan"), "inf": [-np.inf], "day": date(2024, 1, 2),
        "money": Decimal("1.50"), "bytes": b"\xffa", "array": np.array([[1.5, np.nan]], np.float32), 7: {np.int64(3)},
    }  # fmt: skip
    judged = Service("http", HttpRewardSection(kind="http", url=judge.url))
    rows = [Prompt(i, np.zeros(1, dtype=np.int32), "q", "a", row) for i, row in enumerate((bad, {"level": 1}))]
    assert outcomes(score(judged, ["a", "bb"], rows)) == [(1.0, "answered"), (2.0, "answered")]
    assert b"NaN" not in judge.bodies[0] and b"Infinity" not in judge.bodies[0]
    assert judge.requests[0][0]["metadata"] == {
        "nan": None, "inf": [None], "day": "2024-01-02",
        "money": "1.50", "bytes": "\ufffda", "array": [[1.5, None]], "7": [3],
    }  # fmt: skip


def test_a_masked_score_names_the_services_answer_and_the_rows(judge):
    judge.words = b'{"error":  "no such\nlevel"}' + b"x" * 10**6
    judge.replies = [422, 503]
    rows = [Prompt(i, np.zeros(1, dtype=np.int32), "q", "a", {}, where=f"rows.jsonl line {i}") for i in range(5)]
    judged = Service("http", HttpRewardSection(kind="http", url=judge.url, batch=4, retries=0))
    refused, *_, busy = score(judged, ["a"] * 5, rows)
    assert 'status 422: {"error": "no such level"}x' in refused.failure and len(refused.failure) < 600
    assert refused.failure.endswith("the request held rows.jsonl line 0, rows.jsonl line 1, rows.jsonl line 2 and 1 more")
    assert "status 503: " in busy.failure and busy.failure.endswith("the request held rows.jsonl line 4")
    assert refused.cause == busy.cause == "service"


def outcomes(scores):
    return [(None if score.parts is None else score.parts["http"], score.reasons["http"]) for score in scores]


def test_a_request_has_all_fields_and_batches_have_the_given_size(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    scores = scores_of(judge, ["a", "bb", "ccc"], batch=2, headers_from_environment={"X-Key": "JUDGE_KEY"})
    assert outcomes(scores) == [(1.0, "answered"), (2.0, "answered"), (3.0, "answered")]
    assert [len(request) for request in judge.requests] == [2, 1]
    assert judge.requests[0][1] == {"prompt": "q1", "completion": "bb", "answer": "a1", "metadata": {"level": 1}}
    assert [headers["X-Key"] for headers in judge.headers] == ["secret", "secret"]


@pytest.mark.parametrize("failure", [500, 503, 429, "hang up"])
def test_an_error_that_may_pass_is_retried(judge, failure):
    judge.replies = [failure, failure]
    assert outcomes(scores_of(judge, ["a"], retries=2)) == [(1.0, "retried")]
    judge.replies = [failure] * 3
    assert outcomes(scores_of(judge, ["a", "b"], retries=2, batch=1)) == [(None, "unreachable"), (1.0, "answered")]
    assert len(judge.requests) == 7


@pytest.mark.parametrize(("silent", "retries", "outcome"), [(1, 100, (1.0, "retried")), (3, 2, (None, "unreachable"))])
def test_a_request_without_an_answer_is_abandoned_and_sent_again(judge, monkeypatch, silent, retries, outcome):
    # The client has no limit, so only the limit of the section ends the wait for the gate.
    monkeypatch.setattr(service.httpx, "AsyncClient", partial(httpx.AsyncClient, timeout=None))
    gate = threading.Event()
    judge.replies = [gate] * silent
    try:
        assert outcomes(scores_of(judge, ["a"], deadline_s=300.0, timeout_s=0.2, retries=retries)) == [outcome]
        wait_for(lambda: not judge.replies)  # the service may read an abandoned request only now
    finally:
        gate.set()


@pytest.mark.parametrize("reply", [400, 401, 404, 301, (307, "/score/")])
def test_a_refusal_is_final_and_names_the_place_to_which_the_service_has_moved(judge, reply):
    status, place = reply if isinstance(reply, tuple) else (reply, None)
    judge.replies = [reply]
    (masked,) = scores_of(judge, ["a"])
    assert masked.reasons == {"http": "refused"} and f"status {status}" in masked.failure and judge.url in masked.failure
    assert ("moved to /score/; give that as the part's url" in masked.failure) == (place is not None)
    assert len(judge.requests) == 1


@pytest.mark.parametrize("body", ["", "[1, 2]", "{}", '{"rewards": 1}', '{"rewards": [1]}', '{"rewards": [1, 2, 3]}', "1e"])
def test_a_malformed_answer_masks_its_batch(judge, body):
    judge.replies = [body]
    assert outcomes(scores_of(judge, ["a", "b", "c"], batch=2)) == [(None, "unusable")] * 2 + [(1.0, "answered")]


def test_a_value_that_is_not_a_finite_number_masks_its_sample(judge):
    values = ["NaN", "Infinity", "1e999", "null", "true", '"1"', "[1]", "1" + "0" * 400, "-0.5", "3"]
    judge.replies = ['{"rewards": [' + ", ".join(values) + "]}"]
    result = outcomes(scores_of(judge, ["a"] * len(values)))
    assert result == [(None, "unusable")] * 8 + [(-0.5, "answered"), (3.0, "answered")]


def test_the_deadline_ends_a_wait_and_keeps_earlier_scores(judge):
    gate = threading.Event()
    judge.replies = ['{"rewards": [7]}', gate]
    try:
        scores = scores_of(judge, ["a", "b", "c"], deadline_s=2.0, batch=1)
    finally:
        gate.set()
    assert outcomes(scores) == [(7.0, "answered"), (None, "late"), (None, "late")]
    assert [score.timed_out for score in scores] == [False, True, True] and "after 2 s" in scores[1].failure
    assert len(judge.requests) == 2, "no request begins after the deadline"


def test_retries_stop_before_the_deadline(judge, monkeypatch):
    monkeypatch.setattr(service, "FIRST_WAIT_S", 1000.0)
    monkeypatch.setattr(service, "LONGEST_WAIT_S", 1000.0)
    judge.replies = [500] * 50
    assert outcomes(scores_of(judge, ["a"], deadline_s=60.0, retries=50)) == [(None, "unreachable")]
    assert len(judge.requests) == 1


def test_a_sample_counts_if_every_part_has_judged_it(judge, model):  # noqa: F811
    judge.replies = ['{"rewards": [0.5, null]}', '{"rewards": [2, 3]}']
    specs = [VerifierSection(kind="exact"), HttpRewardSection(kind="http", url=judge.url, batch=2, weight=2.0)]
    result = score_batch(model, specs, ["a0", "a0", "a1", "x"], prompts(2), sequences=4)
    np.testing.assert_array_equal(result.rewards, [2.0, np.nan, 5.0, 6.0])
    metrics = result.metrics()
    assert metrics["reward/num_masked"] == 1 and metrics["reward/num_timeouts"] == 0
    assert metrics["reward/http_num_answered"] == 3 and metrics["reward/http_num_unusable"] == 1
    assert metrics["reward/exact"] == pytest.approx(2 / 3) and metrics["reward/http"] == pytest.approx(5.5 / 3)


def test_without_another_part_no_verifier_runs(judge, model):  # noqa: F811
    part = HttpRewardSection(kind="http", url=judge.url)
    assert score_batch(model, [part], ["a", "bb"], prompts(1)).rewards.tolist() == [1, 2]


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
    keys = {violation.key for violation in refused.value.violations}
    assert keys == {"reward.0.url", "reward.0.headers_from_environment"}
