"""Rewards from a service over HTTP: whole batches at a time, sent again where that can help, and never waited for too long.

A request is one JSON document, `{"samples": [{"prompt", "completion", "answer", "metadata"}, ...]}`, and so is its answer,
`{"rewards": [number, ...]}`, with null for what the service could not judge.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import os
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import tenacity

from megarl.data.sample import Prompt
from megarl.recipe.reward_section import HttpRewardSection, JudgeSection, part_names
from megarl.reward.process import Verdict

# What became of a completion: judged at once or after another request; or masked, because the service gave no answer after
# all retries, did not take the request, gave an answer that is no number, or was not done at the deadline.
REASONS = ("answered", "retried", "unreachable", "refused", "unusable", "late")
LARGEST = 3.4e38  # of float32, in which rewards are kept
LARGEST_ANSWER_BYTES = 1 << 26
MOST_WORDS_BYTES = 300  # of what a service says about a request that it does not take
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0
MOST_REDIRECTS = 5


class Busy(Exception):
    """The service cannot answer now, and may do so later."""


class Refused(Exception):
    """The service will not take this request, however often it is sent."""


class Unusable(Exception):
    """An answer that nothing can be read from."""


class Service:
    """The service behind one part of the reward, which is called `name` in the metrics.

    Raises ValueError for a header whose environment variable is not set, and for a proxy that is no URL.
    """

    def __init__(self, name: str, section: HttpRewardSection) -> None:
        self._name, self._section = name, section
        headers = {}
        for header, variable in section.headers_from_environment.items():
            if variable not in os.environ:
                raise ValueError(
                    f"reward {name}: headers_from_environment.{header} is {variable!r}, and there is no such environment "
                    "variable; set it wherever reward workers run, before Ray starts there"
                )
            headers[header] = os.environ[variable]
        self._proxy = _proxy(section.url)
        # A proxy's own loopback is another machine's.
        self._client = httpx.Client(headers=headers, timeout=section.timeout_s, trust_env=not _is_loopback(section.url))

    def ask(self, texts: Sequence[str], prompts: Sequence[Prompt], timeout_s: float) -> Answers:
        """Begin to ask; the answers are waited for until `timeout_s` from now."""
        return Answers(self, texts, prompts, timeout_s)

    def close(self) -> None:
        """Give up the connections."""
        self._client.close()

    def judge(self, texts: Sequence[str], prompts: Sequence[Prompt], deadline: float) -> Iterator[Verdict]:
        """A verdict for each text, in order, batch by batch. No request begins after the deadline; one may pass it."""
        for first in range(0, len(texts), self._section.batch):
            batch = slice(first, first + self._section.batch)
            if time.monotonic() >= deadline:
                return
            yield from self._judge_batch(texts[batch], prompts[batch], deadline)

    def late(self, timeout_s: float) -> Verdict:
        """The verdict on what was not judged in time."""
        reason = {self._name: "late"}
        said = f"timeout: {self._section.url} had not answered after {timeout_s:g} s"
        return Verdict(None, said, True, reason, cause="service")

    def _judge_batch(self, texts: Sequence[str], prompts: Sequence[Prompt], deadline: float) -> list[Verdict]:
        samples = [
            {"prompt": prompt.question, "completion": text, "answer": prompt.answer, "metadata": prompt.row}
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        content = json.dumps(as_json({"samples": samples}), allow_nan=False).encode()
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(1 + self._section.retries)
            | tenacity.stop_before_delay(max(0.0, deadline - time.monotonic())),
            wait=tenacity.wait_exponential_jitter(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S, jitter=FIRST_WAIT_S),
            retry=tenacity.retry_if_exception_type((httpx.TransportError, Busy)),
            reraise=True,
        )
        try:
            values = _rewards(retrying(self._post, content), len(texts))
        except (httpx.HTTPError, Busy) as error:
            return [self._masked("unreachable", error, prompts)] * len(texts)
        except Refused as error:
            return [self._masked("refused", error, prompts)] * len(texts)
        except Unusable as error:
            return [self._masked("unusable", error, prompts)] * len(texts)
        reason = "answered" if retrying.statistics["attempt_number"] == 1 else "retried"
        return [self._verdict(value, reason, prompt) for value, prompt in zip(values, prompts, strict=True)]

    def _verdict(self, value: Any, reason: str, prompt: Prompt) -> Verdict:
        # A JSON true is an int to Python; rewards are kept in float32, and NaN is not below anything.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            error = Unusable(f"a reward is {str(value)[:80]!r}; a finite number is needed")
            return self._masked("unusable", error, [prompt])
        return Verdict({self._name: float(value)}, reasons={self._name: reason})

    def _masked(self, reason: str, error: Exception, prompts: Sequence[Prompt]) -> Verdict:
        """The verdict on all completions of a request; names the rows that were in it."""
        rows = list(dict.fromkeys(prompt.where or f"prompt {prompt.index}" for prompt in prompts))
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        way = f" (through the proxy {self._proxy}; no_proxy={httpx.URL(self._section.url).host} goes past it)"
        text = f"{reason}: {self._section.url}: {error or type(error).__name__}{way if self._proxy else ''}"
        text += f"; sent were {', '.join(rows[:3])}{more}"
        return Verdict(None, text, reasons={self._name: reason}, cause="service")

    def _post(self, content: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = self._client.build_request("POST", self._section.url, content=content, headers=headers)
        for _ in range(MOST_REDIRECTS + 1):
            response = self._client.send(request, stream=True)
            # These two alone have the same request sent to the other place, body and all.
            moved = response.status_code in (httpx.codes.TEMPORARY_REDIRECT, httpx.codes.PERMANENT_REDIRECT)
            if not moved or response.next_request is None:
                return _read(response)
            response.close()
            request = response.next_request
        raise Refused(f"more than {MOST_REDIRECTS} redirections, the last to {request.url}")


class Answers:
    """What a service will have said. It is asked in a thread of its own: no library ends a request at a deadline of all of
    it, so that one that is late is left alone."""

    def __init__(self, service: Service, texts: Sequence[str], prompts: Sequence[Prompt], timeout_s: float) -> None:
        self._service, self._timeout_s, self._num_texts = service, timeout_s, len(texts)
        self.deadline = time.monotonic() + timeout_s
        self._verdicts: list[Verdict] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._ask, args=(texts, prompts), daemon=True)
        self._thread.start()

    def wait(self) -> list[Verdict]:
        """One verdict for each text, at the deadline at the latest. Raises what only a bug can raise."""
        self._thread.join(max(0.0, self.deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        verdicts = list(self._verdicts)
        return verdicts + [self._service.late(self._timeout_s)] * (self._num_texts - len(verdicts))

    def _ask(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> None:
        try:
            for verdict in self._service.judge(texts, prompts, self.deadline):
                self._verdicts.append(verdict)
        except BaseException as error:  # a thread would end without a word: `wait` raises it
            self._error = error


def services_of(specs: Sequence[JudgeSection]) -> list[Service]:
    """The services among the parts of a reward. Raises ValueError where one cannot be asked."""
    pairs = zip(part_names(specs), specs, strict=True)
    return [Service(name, spec) for name, spec in pairs if isinstance(spec, HttpRewardSection)]


def check_services(specs: Sequence[JudgeSection]) -> None:
    """Raises ValueError where a service cannot be asked; none is asked yet."""
    for service in services_of(specs):
        service.close()


def both(one: Verdict, other: Verdict) -> Verdict:
    """What two say of the same text: numbers only where both have them."""
    reasons = one.reasons | other.reasons
    if one.said is None or other.said is None:
        failed = one if one.said is None else other
        return Verdict(None, failed.failure, one.timed_out or other.timed_out, reasons, cause=failed.cause)
    answer, first = other.answer if one.answer is None else one.answer, one if one.cause else other
    if not first.cause:
        return Verdict(one.said | other.said, reasons=reasons, answer=answer)
    return Verdict(one.said | other.said, first.failure, first.timed_out, reasons, answer, first.cause)


def _words(response: httpx.Response) -> str:
    """The beginning of an answer's text, for a message; "" for none."""
    body = b""
    for piece in response.iter_bytes():
        body += piece
        if len(body) > MOST_WORDS_BYTES:
            break
    text = " ".join(body[:MOST_WORDS_BYTES].decode(errors="replace").split())
    return f": {text}" if text else ""


def as_json(value: Any) -> Any:
    """The value in terms that every JSON parser reads: null for NaN and infinities, arrays as lists, bytes and all else that
    JSON has not, as a date, a Decimal or an integer of more than 64 bits, as text."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return int(value)
    if isinstance(value, Mapping):
        return {as_text(key): as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(one) for one in value]
    return as_text(value)


def as_text(value: Any) -> str:
    """The value's text, of characters that UTF-8 has."""
    text = value.decode(errors="replace") if isinstance(value, bytes | bytearray) else str(value)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read(response: httpx.Response) -> bytes:
    """The body of an answer. Raises Busy, Refused and Unusable."""
    with contextlib.closing(response):
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error:
            raise Busy(f"status {response.status_code}{_words(response)}")
        if response.has_redirect_location:
            place = response.headers["location"]
            raise Refused(f"status {response.status_code}: it has moved to {place}; give that as the part's url")
        if not response.is_success:
            raise Refused(f"status {response.status_code}{_words(response)}")
        body = b""
        for piece in response.iter_bytes():
            body += piece
            if len(body) > LARGEST_ANSWER_BYTES:
                raise Unusable(f"an answer of more than {LARGEST_ANSWER_BYTES} bytes")
        return body


def _is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _proxy(url: str) -> str | None:
    """The proxy that the environment asks for on the way to a URL, without its password; None where there is none.
    Raises ValueError for one that is no URL, of any scheme, as the client reads all of them."""
    parsed, proxies = httpx.URL(url), urllib.request.getproxies()
    if _is_loopback(url) or "*" in proxies.get("no", "").split(","):
        return None
    read: dict[str, httpx.Proxy] = {}
    for key in ("http", "https", "all"):
        if value := proxies.get(key):
            try:
                read[key] = httpx.Proxy(value if "://" in value else f"http://{value}")
            except (httpx.InvalidURL, ValueError) as error:
                name = next(one for one in (f"{key}_proxy", f"{key.upper()}_PROXY") if os.environ.get(one))
                value = value.rpartition("@")[2]  # a password is before that
                raise ValueError(
                    f"the environment variable {name} is {value!r}, which is no URL of a proxy; write it as "
                    "http://HOST:PORT, or unset it, wherever reward workers run and before Ray starts there"
                ) from error
    proxy = read.get(parsed.scheme) or read.get("all")
    if proxy is None or urllib.request.proxy_bypass(parsed.host):
        return None
    return f"{proxy.url.scheme}://{proxy.url.host}" + (f":{proxy.url.port}" if proxy.url.port else "")


def _rewards(body: bytes, number: int) -> list[Any]:
    """As many as asked for; what each is shows later. Raises Unusable."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"the answer is no JSON: {error}") from error
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise Unusable('the answer is not {"rewards": [...]}')
    if len(rewards) != number:
        raise Unusable(f"{len(rewards)} rewards for {number} completions")
    return rewards
