"""Score texts by a service over HTTP: a batch at a time, within a deadline, with retries after errors that may pass.

A request is one JSON document, `{"samples": [{"prompt", "completion", "answer", "metadata"}, ...]}`. The answer is one JSON
document, `{"rewards": [number, ...]}`, with null for a sample that the service could not judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import os
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import tenacity

from megarl.data.sample import Prompt
from megarl.recipe.reward_section import HttpRewardSection, JudgeSection, part_names
from megarl.reward.verifiers import TextScore

# The reason of a completion's score: the service judged it at once or after a retry; or it is masked, because the service
# gave no answer after all retries, refused the request, answered with something else than a number, or missed the deadline.
REASONS = ("answered", "retried", "unreachable", "refused", "unusable", "late")
LARGEST = 3.4e38  # of float32, in which rewards are kept
LARGEST_ANSWER_BYTES = 1 << 26
MAX_QUOTED_BYTES = 300  # of an error's body, in the message
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0
MAX_REDIRECTS = 5


class Busy(Exception):
    """The service cannot answer now, but may answer later."""


class Refused(Exception):
    """The service refuses this request, and would refuse it again."""


class Unusable(Exception):
    """The answer has no readable rewards."""


class Service:
    """The service behind one part of the reward; `name` is the part's name in the metrics.

    Raises ValueError for a header whose environment variable is not set, and for a proxy that is not a URL.
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
        # Do not use a proxy for a loopback address: the address would mean the proxy's machine.
        self._client = httpx.AsyncClient(headers=headers, timeout=section.timeout_s, trust_env=not _is_loopback(section.url))

    async def score(self, texts: Sequence[str], prompts: Sequence[Prompt], timeout_s: float) -> list[TextScore]:
        """Score each text, in order, batch by batch. A text that is not scored after `timeout_s` is masked as late."""
        scores: list[TextScore] = []
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for first in range(0, len(texts), self._section.batch):
                    batch = slice(first, first + self._section.batch)
                    scores += await self._score_batch(texts[batch], prompts[batch], deadline)
        failure = f"timeout: {self._section.url} had not answered after {timeout_s:g} s"
        late = TextScore(None, failure, True, {self._name: "late"}, cause="service")
        return scores + [late] * (len(texts) - len(scores))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _score_batch(self, texts: Sequence[str], prompts: Sequence[Prompt], deadline: float) -> list[TextScore]:
        samples = [
            {"prompt": prompt.question, "completion": text, "answer": prompt.answer, "metadata": prompt.row}
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        content = json.dumps(as_json({"samples": samples}), allow_nan=False).encode()
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(1 + self._section.retries)
            | tenacity.stop_before_delay(max(0.0, deadline - time.monotonic())),
            wait=tenacity.wait_exponential_jitter(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S, jitter=FIRST_WAIT_S),
            retry=tenacity.retry_if_exception_type((httpx.TransportError, Busy)),
            reraise=True,
        )
        try:
            values = _rewards(await retrying(self._post, content), len(texts))
        except (httpx.HTTPError, Busy, Refused, Unusable) as error:
            reason = {Refused: "refused", Unusable: "unusable"}.get(type(error), "unreachable")
            return [self._masked(reason, error, prompts)] * len(texts)
        reason = "answered" if retrying.statistics["attempt_number"] == 1 else "retried"
        scores = []
        for value, prompt in zip(values, prompts, strict=True):
            # For Python a JSON true is an int. Rewards are kept in float32, and `not <=` also catches NaN.
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
                fault = Unusable(f"a reward is {str(value)[:80]!r}; a finite number is needed")
                scores.append(self._masked("unusable", fault, [prompt]))
            else:
                scores.append(TextScore({self._name: float(value)}, reasons={self._name: reason}))
        return scores

    def _masked(self, reason: str, error: Exception, prompts: Sequence[Prompt]) -> TextScore:
        """Return the masked score of all completions of a request, with the names of the request's rows."""
        rows = list(dict.fromkeys(prompt.where or f"prompt {prompt.index}" for prompt in prompts))
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        proxy = f" (through the proxy {self._proxy}; no_proxy={httpx.URL(self._section.url).host} goes past it)"
        failure = f"{reason}: {self._section.url}: {error or type(error).__name__}{proxy if self._proxy else ''}"
        failure += f"; the request held {', '.join(rows[:3])}{more}"
        return TextScore(None, failure, reasons={self._name: reason}, cause="service")

    async def _post(self, content: bytes) -> bytes:
        """Send a request, follow redirections, and return the body of the answer. Raises Busy, Refused and Unusable."""
        headers = {"Content-Type": "application/json"}
        request = self._client.build_request("POST", self._section.url, content=content, headers=headers)
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._client.send(request, stream=True)
            async with contextlib.aclosing(response):
                # Only these two statuses repeat the same request, with its body, at the other place.
                moved = response.status_code in (httpx.codes.TEMPORARY_REDIRECT, httpx.codes.PERMANENT_REDIRECT)
                if not moved or response.next_request is None:
                    return await _read(response)
                request = response.next_request
        raise Refused(f"more than {MAX_REDIRECTS} redirections, the last to {request.url}")


def services_of(specs: Sequence[JudgeSection]) -> list[Service]:
    """Return the services among the parts of a reward, without a request. Raises ValueError like `Service`."""
    pairs = zip(part_names(specs), specs, strict=True)
    return [Service(name, spec) for name, spec in pairs if isinstance(spec, HttpRewardSection)]


def as_json(value: Any) -> Any:
    """Return the value in a form that every JSON parser reads: null for NaN and infinities, lists for arrays, and texts for
    types that JSON lacks, such as bytes, dates, Decimals and integers of more than 64 bits."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return int(value)
    if isinstance(value, Mapping):
        return {as_text(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in value]
    return as_text(value)


def as_text(value: Any) -> str:
    """Return the value's text, in characters that UTF-8 can encode."""
    text = value.decode(errors="replace") if isinstance(value, bytes | bytearray) else str(value)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


async def _read(response: httpx.Response) -> bytes:
    """Read the body of an answer. Raises Busy, Refused and Unusable."""
    body, most = b"", LARGEST_ANSWER_BYTES if response.is_success else MAX_QUOTED_BYTES
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > most:
            break
    if response.is_success:
        if len(body) > most:
            raise Unusable(f"an answer of more than {LARGEST_ANSWER_BYTES} bytes")
        return body
    quote = " ".join(body[:MAX_QUOTED_BYTES].decode(errors="replace").split())
    message = f"status {response.status_code}" + (f": {quote}" if quote else "")
    if response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error:
        raise Busy(message)
    if response.has_redirect_location:
        place = response.headers["location"]
        raise Refused(f"status {response.status_code}: it has moved to {place}; give that as the part's url")
    raise Refused(message)


def _is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _proxy(url: str) -> str | None:
    """Return the proxy that the environment names for a URL, without the password; None without a proxy.
    Raises ValueError for a proxy of any scheme that is not a URL, because the client reads the proxies of all schemes."""
    parsed, proxies = httpx.URL(url), urllib.request.getproxies()
    if _is_loopback(url) or "*" in proxies.get("no", "").split(","):
        return None
    read: dict[str, httpx.Proxy] = {}
    for key in ("http", "https", "all"):
        if value := proxies.get(key):
            try:
                read[key] = httpx.Proxy(value if "://" in value else f"http://{value}")
            except (httpx.InvalidURL, ValueError) as error:
                name = next(name for name in (f"{key}_proxy", f"{key.upper()}_PROXY") if os.environ.get(name))
                value = value.rpartition("@")[2]  # leave out a password
                raise ValueError(
                    f"the environment variable {name} is {value!r}, which is no URL of a proxy; write it as "
                    "http://HOST:PORT, or unset it, wherever reward workers run and before Ray starts there"
                ) from error
    proxy = read.get(parsed.scheme) or read.get("all")
    if proxy is None or urllib.request.proxy_bypass(parsed.host):
        return None
    return f"{proxy.url.scheme}://{proxy.url.host}" + (f":{proxy.url.port}" if proxy.url.port else "")


def _rewards(body: bytes, number: int) -> list[Any]:
    """Return the unchecked rewards in an answer. Raises Unusable if the answer does not have `number` rewards."""
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
