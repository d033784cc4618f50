"""Score texts by a service over HTTP: a batch at a time, within a deadline, with retries after errors that may pass.

A request is one JSON document, `{"samples": [{"prompt", "completion", "answer", "metadata"}, ...]}`. The answer is one JSON
document, `{"rewards": [number, ...]}`, with null for a sample that the service could not judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import tenacity
from pydantic import BaseModel, ValidationError

from megarl.data.sample import Prompt
from megarl.recipe.reward_section import HttpRewardSection, JudgeSection, part_names
from megarl.reward.verifiers import TextScore

# The reason of a completion's score: the service judged it at once or after a retry; or it is masked, because the service
# gave no answer after all retries, refused the request, answered with something else than a number, or missed the deadline.
REASONS = ("answered", "retried", "unreachable", "refused", "unusable", "late")
LARGEST = 3.4e38  # of float32, in which rewards are kept
MAX_QUOTED_CHARACTERS = 300  # of an error's body, in the message
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0


class Fault(Exception):
    """A request has no rewards. `reason` is one of REASONS; a service that is `unreachable` may answer later."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Answer(BaseModel):
    """The document that a service answers."""

    rewards: list[Any]


class Service:
    """The service behind one part of the reward; `name` is the part's name in the metrics.

    Raises ValueError for a header whose environment variable is not set.
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
        # A proxy would look for a loopback address on its own machine.
        is_here = httpx.URL(section.url).host in ("localhost", "127.0.0.1", "::1")
        self._client = httpx.AsyncClient(headers=headers, timeout=section.timeout_s, trust_env=not is_here)

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
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(1 + self._section.retries)
            | tenacity.stop_before_delay(max(0.0, deadline - time.monotonic())),
            wait=tenacity.wait_exponential_jitter(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S, jitter=FIRST_WAIT_S),
            retry=tenacity.retry_if_exception(_may_pass),
            reraise=True,
        )
        try:
            values: list[Any] = await retrying(self._post, as_json(samples), len(texts))
        except (httpx.HTTPError, Fault) as error:
            return [self._masked(error, prompts)] * len(texts)
        reason = "answered" if retrying.statistics["attempt_number"] == 1 else "retried"
        scores = []
        for value, prompt in zip(values, prompts, strict=True):
            # For Python a JSON true is an int. Rewards are kept in float32, and `not <=` also catches NaN.
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
                fault = Fault("unusable", f"a reward is {str(value)[:80]!r}; a finite number is needed")
                scores.append(self._masked(fault, [prompt]))
            else:
                scores.append(TextScore({self._name: float(value)}, reasons={self._name: reason}))
        return scores

    def _masked(self, error: httpx.HTTPError | Fault, prompts: Sequence[Prompt]) -> TextScore:
        """Return the masked score of all completions of a request, with the names of the request's rows."""
        reason = error.reason if isinstance(error, Fault) else "unreachable"
        rows = list(dict.fromkeys(prompt.where or f"prompt {prompt.index}" for prompt in prompts))
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        held = f"the request held {', '.join(rows[:3])}{more}"
        failure = f"{reason}: {self._section.url}: {error or type(error).__name__}; {held}"
        return TextScore(None, failure, reasons={self._name: reason}, cause="service")

    async def _post(self, content: bytes, number: int) -> list[Any]:
        """Send a request and return its `number` rewards, unchecked. Raises Fault, or httpx.HTTPError without an answer."""
        response = await self._client.post(self._section.url, content=content, headers={"Content-Type": "application/json"})
        if not response.is_success:
            quote = " ".join(response.text.split())[:MAX_QUOTED_CHARACTERS]
            message = f"status {response.status_code}" + (f": {quote}" if quote else "")
            if response.has_redirect_location:
                message += f"; it has moved to {response.headers['location']}; give that as the part's url"
            is_busy = response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error
            raise Fault("unreachable" if is_busy else "refused", message)
        try:
            rewards = Answer.model_validate_json(response.content).rewards
        except ValidationError as error:
            raise Fault("unusable", f'the answer is not {{"rewards": [...]}}: {error.errors()[0]["msg"]}') from error
        if len(rewards) != number:
            raise Fault("unusable", f"{len(rewards)} rewards for {number} completions")
        return rewards


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, httpx.TransportError) or (isinstance(error, Fault) and error.reason == "unreachable")


def services_of(specs: Sequence[JudgeSection]) -> list[Service]:
    """Return the services among the parts of a reward, without a request. Raises ValueError like `Service`."""
    pairs = zip(part_names(specs), specs, strict=True)
    return [Service(name, spec) for name, spec in pairs if isinstance(spec, HttpRewardSection)]


def as_json(samples: list[dict[str, Any]]) -> bytes:
    """Return a request's document: null for NaN and infinities, lists for arrays and sets, texts for what JSON lacks."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic | np.ndarray):
            value = value.tolist()
        if isinstance(value, dict):
            return {key if isinstance(key, str) else str(plain(key)): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [plain(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        return value if value is None or isinstance(value, bool | int | float | str) else str(value)

    return json.dumps(plain({"samples": samples})).encode()
