"""A gateway on a loop of its own, as the stream has one, with scripted policies in the place of engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import numpy as np
import openai

from megarl.data.sample import Completion
from megarl.rollout.gateway import Gateway, GatewayLimits, OpenSession, SamplingRequest
from megarl.rollout.gateway_messages import AnswerReader
from tests.session_cases import LIMITS, Policy, check_trained, renderer

T = TypeVar("T")
WAIT_S = 60.0
HTTP: Any = httpx.Client(verify=False, timeout=WAIT_S, trust_env=False)  # to load certificates takes longer than most cases
GATEWAY_LIMITS = GatewayLimits(LIMITS, max_new_tokens=1000, max_body_bytes=1 << 20, max_requests=8)


class Script:
    """Writes texts in their order, or the same one for ever, as soon as `gate` is open; keeps the prompts as text."""

    def __init__(self, *texts: str, template: str = "plain") -> None:
        self.texts, self.policy, self.prompts, self.requests = list(texts), Policy(renderer(template)), [], []  # type: ignore[var-annotated]
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting, self.cancelled, self.fault = 0, 0, ""
        self.completions: list[Completion] = []

    async def __call__(self, prompt_ids: np.ndarray, request: SamplingRequest) -> Completion:
        self.prompts.append(self.policy.tokenizer.decode(prompt_ids))
        self.requests.append(request)
        self.waiting += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        if self.fault:
            raise RuntimeError(self.fault)
        completion = self.policy.write(self.texts.pop(0) if len(self.texts) > 1 else self.texts[0])
        if len(completion.token_ids) > request.max_new_tokens:
            within_limit = slice(request.max_new_tokens)
            arrays = (completion.token_ids, completion.logprobs, completion.versions)
            ids, logprobs, versions = (array[within_limit] for array in arrays)
            self.policy.sampled[-1] = completion = Completion(ids, logprobs, "length", versions)
        return completion


class Served:
    """A gateway that serves in a thread."""

    def __init__(
        self,
        tools: str | None = "hermes",
        reasoning: str | None = None,
        template: str = "plain",
        host: str = "127.0.0.1",
        **limits: Any,
    ) -> None:
        self.chat = renderer(template)
        end = int(self.chat.tokenizer.convert_tokens_to_ids("<|turn_end|>"))
        reader = AnswerReader(self.chat.tokenizer, [end], tools, reasoning)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.gateway = Gateway(self.chat, reader, replace(GATEWAY_LIMITS, **limits), temperature=1.0, host=host)
        self.call(self.gateway.serve)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the loop."""

        async def on_loop() -> T:
            return function(*arguments)

        return self.submit(on_loop()).result(WAIT_S)

    def open(self, script: Script) -> OpenSession:
        return self.call(self.gateway.open, script)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds on the loop."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        self.submit(asyncio.wait_for(wait(), WAIT_S)).result()

    def close(self) -> None:
        self.submit(self.gateway.close()).result(WAIT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


def openai_client(opened: OpenSession) -> Any:
    return openai.OpenAI(base_url=f"{opened.url}/v1", api_key=opened.token, max_retries=0, http_client=HTTP)


def check_session(opened: OpenSession, script: Script) -> None:
    """All that the script wrote is trained, and nothing else."""
    check_trained(opened.session.segments, script.policy.sampled)
