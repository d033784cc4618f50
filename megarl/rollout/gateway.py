"""The endpoint through which agents that nobody here wrote talk to the policy: OpenAI's and Anthropic's routes.

It serves on the loop that calls `serve`, beside the stream, and listens on loopback. A session has an address and a bearer
token of its own; a request becomes a turn of that session, which the session's `sample` lets an engine complete. `sample`
waits while weights change, so requests are held and not failed. A client that leaves, and the end of the session, cancel
`sample`; what was sampled for nobody is not trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megarl.data.sample import Completion
from megarl.data.tokenizer import ChatRenderer
from megarl.rollout import gateway_messages as wire
from megarl.rollout.gateway_messages import AnswerReader, ClientAnswer, Request, RequestError
from megarl.rollout.session import ContextTooLong, Session, SessionLimits, TooManySegments, TurnPrompt

logger = logging.getLogger(__name__)

KEEPALIVE_S = 10.0  # between comments in a stream whose tokens are not sampled yet
LARGE_BODY_BYTES = 16 << 10  # tokenizing a larger one takes milliseconds: in a thread, while the loop serves others
REMEMBERED_ENDS = 4096  # ended sessions that are answered with 410 instead of 404


@dataclass(frozen=True)
class SamplingRequest:
    """How one completion is sampled, beside what the recipe says. `number` counts the completions of its session."""

    max_new_tokens: int
    number: int


Sample = Callable[[np.ndarray, SamplingRequest], Awaitable[Completion]]


@dataclass(frozen=True)
class GatewayLimits:
    """What a client may ask for. `max_completions` is the largest `n`; a session may have `max_turns` completions."""

    session: SessionLimits
    max_new_tokens: int
    max_turns: int | None = None
    max_requests: int = 64  # of a session at the same time
    max_completions: int = 16
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 60.0


@dataclass(eq=False)
class OpenSession:
    """A session that clients can reach. OpenAI's clients take `url` + "/v1" and `token`, Anthropic's `url` and `token`.
    `fault` is the first error that no client caused, as one of `sample`; `is_exhausted` says that a request was refused
    because the rollout has reached its turns, tokens or segments."""

    name: str
    url: str
    token: str
    session: Session
    sample: Sample
    fault: str = ""
    is_exhausted: bool = False
    num_sampled: int = 0  # completions that were asked for
    num_turns: int = 0  # those of them that were not given up
    num_new_segments: int = 0  # that requests under way begin
    num_requests: int = 0  # under way
    work: set[asyncio.Task[Any]] = field(default_factory=set)
    in_use: asyncio.Lock = field(default_factory=asyncio.Lock)  # one request at a time uses the session


@dataclass(frozen=True)
class Protocol:
    """How a route reads a body, and writes its answers."""

    read: Callable[[Any, float, int], Request]
    write: Callable[[Any, Request, int, Sequence[ClientAnswer]], wire.Body]
    stream: Callable[[Any, Request, int, Sequence[ClientAnswer]], Iterator[str]]
    is_anthropic: bool = False


PROTOCOLS = {
    "chat/completions": Protocol(wire.read_chat, wire.write_chat, wire.stream_chat),
    "completions": Protocol(wire.read_completion, wire.write_completion, wire.stream_completion),
    "messages": Protocol(wire.read_anthropic, wire.write_anthropic, wire.stream_anthropic, is_anthropic=True),
}


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the process's own


class Gateway:
    """Serves sessions. All methods but the constructor run on the loop that serves."""

    def __init__(
        self,
        chat: ChatRenderer,
        reader: AnswerReader,
        limits: GatewayLimits,
        temperature: float,
        host: str = "127.0.0.1",
    ) -> None:
        """`temperature` is the one at which engines sample; requests with another are refused."""
        self._chat, self._reader, self._limits, self._temperature = chat, reader, limits, temperature
        self._sessions: dict[str, OpenSession] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=2048)
        # Else a body waits up to 40 ms for the client to acknowledge its headers; accepted sockets inherit the option.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        for path, protocol in PROTOCOLS.items():
            app.add_api_route(f"/s/{{session}}/v1/{path}", self._route(protocol), methods=["POST"], response_model=None)
        app.add_api_route("/s/{session}/v1/models", self._models, methods=["GET"], response_model=None)
        app.add_exception_handler(HTTPException, _http_error)
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            ws="none",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    def serve(self) -> None:
        """Begin to answer, on the running loop. Connections of earlier clients wait in the socket's queue."""
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """End all sessions and the server."""
        for opened in list(self._sessions.values()):
            self.end(opened)
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
        self._socket.close()

    def open(self, sample: Sample) -> OpenSession:
        """Register a session, whose turns `sample` completes: it gets the whole prompt, int32. If it raises, the client gets
        503, and `fault` has the message."""
        name = secrets.token_hex(16)
        session = Session(self._chat, self._limits.session)
        opened = OpenSession(name, f"{self.url}/s/{name}", secrets.token_urlsafe(32), session, sample)
        self._sessions[name] = opened
        return opened

    def end(self, opened: OpenSession) -> None:
        """Answer no more requests of a session, and cancel those that wait. Its tokens stay in `opened.session`."""
        if self._sessions.pop(opened.name, None) is None:
            return
        for task in list(opened.work):
            task.cancel()
        self._ended[opened.name] = None
        if len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)

    def _route(self, protocol: Protocol) -> Callable[..., Any]:
        async def route(session: str, http: HttpRequest) -> Response:
            try:
                return await self._answer(session, http, protocol)
            except RequestError as error:
                return _error_response(error, protocol.is_anthropic)
            except Exception as error:  # templates raise what they like about a client's odd values
                logger.warning("a request of an agent cannot be read", exc_info=True)
                return _error_response(RequestError(400, f"cannot be read: {error}"), protocol.is_anthropic)

        return route

    async def _models(self, session: str, http: HttpRequest) -> Response:
        try:
            self._admitted(session, http)
        except RequestError as error:
            return _error_response(error, False)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "megarl"}
        return _json_response({"object": "list", "data": [model]})

    async def _answer(self, name: str, http: HttpRequest, protocol: Protocol) -> Response:
        """Return the response to a request, which its own `__call__` completes while it watches the client."""
        opened = self._admitted(name, http)
        if opened.num_requests >= self._limits.max_requests:
            limit = self._limits.max_requests
            raise RequestError(429, f"the session has {limit} requests under way", "rate_limit_exceeded", retries=True)
        opened.num_requests += 1
        try:
            content = await self._body(http)
            async with opened.in_use:
                self._check_open(opened)
                read = partial(self._read, opened, protocol, content)
                request, turn = await asyncio.to_thread(read) if len(content) > LARGE_BODY_BYTES else read()
                self._check_open(opened)
                self._count(opened, request, turn)
        except BaseException:  # all else is the response's
            opened.num_requests -= 1
            raise
        return _Answering(self, opened, protocol, request, turn)

    def _admitted(self, name: str, http: HttpRequest) -> OpenSession:
        """Return the session that a request names and has the token of."""
        opened = self._sessions.get(name)
        if opened is None and name in self._ended:
            raise RequestError(410, "the session has ended", "session_ended")
        if opened is None:
            raise RequestError(404, "there is no such session", "session_not_found")
        kind, _, token = http.headers.get("authorization", "").partition(" ")
        token = token if kind.lower() == "bearer" else http.headers.get("x-api-key", "")
        if not hmac.compare_digest(token.strip().encode(), opened.token.encode()):
            raise RequestError(401, "the API key is not the one of this session", "invalid_api_key")
        return opened

    async def _body(self, http: HttpRequest) -> bytearray:
        """Return a body within the limits of size and time."""
        limit, content = self._limits.max_body_bytes, bytearray()
        too_large = RequestError(413, f"the body has more than {limit} bytes", "request_too_large")
        length = http.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                async for part in http.stream():
                    content += part
                    if len(content) > limit:
                        raise too_large
            return content
        except TimeoutError:
            raise RequestError(408, "the body did not arrive in time", "request_timeout") from None
        except ClientDisconnect:
            raise RequestError(400, "the client left", "client_disconnected") from None

    def _check_open(self, opened: OpenSession) -> None:
        if opened.name not in self._sessions:
            raise RequestError(410, "the session has ended", "session_ended")

    def _read(self, opened: OpenSession, protocol: Protocol, content: bytearray) -> tuple[Request, TurnPrompt]:
        """Return the request in a body, and its prompt. May run in a thread, while no other request uses the session."""
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is not valid JSON: {error}", "invalid_json") from None
        request = protocol.read(body, self._temperature, self._limits.max_completions)
        limit = self._limits.max_turns
        if limit is not None and opened.num_turns + request.num_completions > limit:
            opened.is_exhausted = True
            raise RequestError(429, f"the rollout has had its {limit} turns", "insufficient_quota")
        try:
            if request.messages is not None:
                turn = opened.session.next_turn(request.messages, request.tools)
            elif isinstance(request.prompt, str):
                turn = opened.session.next_text(request.prompt)
            else:
                turn = opened.session.next_tokens(request.prompt or [])
            opened.session.check_segments(opened.num_new_segments + _num_new_segments(request, turn))
        except ContextTooLong as error:
            opened.is_exhausted = True
            # Anthropic's clients look for these words.
            raise RequestError(400, f"prompt is too long: {error}", "context_length_exceeded", "messages") from None
        except TooManySegments as error:
            opened.is_exhausted = True
            raise RequestError(429, str(error), "insufficient_quota") from None
        except ValueError as error:
            raise RequestError(400, str(error), "invalid_value", "messages") from None
        return request, turn

    def _count(self, opened: OpenSession, request: Request, turn: TurnPrompt) -> None:
        """Note that a request is under way."""
        opened.is_exhausted = False  # a client that was refused may have shortened its history
        opened.num_sampled += request.num_completions
        opened.num_turns += request.num_completions
        opened.num_new_segments += _num_new_segments(request, turn)

    async def complete(self, opened: OpenSession, request: Request, turn: TurnPrompt, first: int) -> list[ClientAnswer]:
        """Sample the completions of a request, and record them in its session. `first` is the number of the first one.
        Raises RequestError for a fault of `sample`."""
        limits = [self._limits.max_new_tokens, turn.max_new_tokens]
        max_new_tokens = min(limits if request.max_new_tokens is None else [*limits, request.max_new_tokens])
        wanted = [SamplingRequest(max_new_tokens, first + number) for number in range(request.num_completions)]
        self._check_open(opened)
        try:
            async with asyncio.TaskGroup() as tasks:
                sampled = [tasks.create_task(_awaited(opened.sample(turn.prompt_ids, asked_for))) for asked_for in wanted]
            answers = [self._reader.read(task.result(), turn.prompt_ids, request) for task in sampled]
            async with opened.in_use:
                for answer in answers:
                    opened.session.record(turn, answer.completion, answer.message or answer.text)
        except Exception as error:  # whatever `sample` raises: the run decides what becomes of the rollout
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            logger.warning("a request of an agent got no completion", exc_info=cause)
            opened.fault = opened.fault or f"{type(cause).__name__}: {cause}"
            raise RequestError(503, f"the engine gave no completion: {opened.fault}", "engine_fault") from cause
        return answers

    @property
    def tokenizer(self) -> Any:
        return self._chat.tokenizer


def _num_new_segments(request: Request, turn: TurnPrompt) -> int:
    """Return how many segments the completions of a request begin: one of them may continue a segment."""
    return request.num_completions - (turn.state is not None)


async def _awaited(value: Awaitable[Completion]) -> Completion:
    return await value


class _Answering(Response):
    """Completes a request while it watches the client: when that leaves, the answer is dropped. A stream has its headers
    at once, and comments while the tokens are sampled."""

    def __init__(
        self, gateway: Gateway, opened: OpenSession, protocol: Protocol, request: Request, turn: TurnPrompt
    ) -> None:
        self.status_code, self.background = 200, None
        self._gateway, self._opened, self._protocol, self._request, self._turn = gateway, opened, protocol, request, turn
        # Counted before anything is awaited, so that the numbers follow the order of the requests.
        self._first = opened.num_sampled - request.num_completions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        opened, request, anthropic = self._opened, self._request, self._protocol.is_anthropic
        work = asyncio.create_task(self._gateway.complete(opened, request, self._turn, self._first))
        gone = asyncio.create_task(_disconnected(receive))
        opened.work.add(work)
        try:
            if request.stream:
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not (await asyncio.wait({work, gone}, timeout=KEEPALIVE_S, return_when="FIRST_COMPLETED"))[0]:
                if request.stream:
                    await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
            if not work.done():
                return
            try:
                answers = [] if work.cancelled() else work.result()
                if not answers:
                    raise RequestError(410, "the session has ended", "session_ended")
            except RequestError as error:
                if not request.stream:
                    await _error_response(error, anthropic)(scope, receive, send)
                    return
                events = wire.error_event(error, anthropic)
            else:
                given = self._gateway.tokenizer, request, len(self._turn.prompt_ids), answers
                if not request.stream:
                    await _json_response(self._protocol.write(*given))(scope, receive, send)
                    return
                events = "".join(self._protocol.stream(*given))
            await send({"type": "http.response.body", "body": events.encode()})
        finally:
            opened.num_requests -= 1
            opened.num_new_segments -= _num_new_segments(request, self._turn)
            if not work.done() or work.cancelled() or work.exception() is not None:
                opened.num_turns -= request.num_completions
            opened.work.discard(work)
            for task in (work, gone):
                task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json_response(body: wire.Body, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")


def _error_response(error: RequestError, anthropic: bool) -> Response:
    """Return an error in its provider's shape. Both providers' clients obey `x-should-retry`."""
    headers = {"x-should-retry": "true", "retry-after": "1"} if error.retries else {"x-should-retry": "false"}
    return _json_response(error.body(anthropic), error.status, headers)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    """Answer a request for a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    anthropic = http.url.path.endswith("/messages")
    return _error_response(RequestError(error.status_code, f"{http.method} {http.url.path}: {error.detail}"), anthropic)
