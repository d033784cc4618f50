"""What clients of the endpoint send and get, in the shapes of OpenAI and Anthropic. Pure: bodies in, bodies out.

A request becomes messages as chat templates read them. Parameters that would change the sampling distribution are refused,
since the loss takes the recipe's distribution; those that only describe the request are accepted without effect.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np

from megarl.data.sample import Completion
from megarl.data.tokenizer import Message

logger = logging.getLogger(__name__)

Body = dict[str, Any]
# The values of parameters that leave the distribution, or the answer, as it is; others are refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "response_format": ({"type": "text"},), "best_of": (1,),
    "echo": (False,), "suffix": ("",), "parallel_tool_calls": (True,), "top_logprobs": (0,), "modalities": (["text"],),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}), "functions": ([],),
}  # fmt: skip
READ = frozenset((
    "model", "messages", "prompt", "system", "tools", "stream", "stream_options", "n", "stop", "stop_sequences",
    "max_tokens", "max_completion_tokens", "logprobs", "temperature",
))  # fmt: skip
# Names and hints. A client's `seed` has no effect either: the members of a group must differ.
IGNORED = frozenset((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "cache_control", "reasoning_effort", "verbosity", "thinking", "seed",
))  # fmt: skip
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
ANTHROPIC_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
MAX_STOPS = 16


class RequestError(Exception):
    """A request that is answered with an error. Clients of both providers retry it only if `retries`."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None, retries: bool = False):
        super().__init__(message)
        self.status, self.code, self.param, self.retries = status, code, param, retries

    def body(self, anthropic: bool) -> Body:
        kind = "api_error" if self.status >= 500 else ANTHROPIC_ERRORS.get(self.status, "invalid_request_error")
        if anthropic:
            return {"type": "error", "error": {"type": kind, "message": str(self)}, "request_id": None}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def refused(param: str, message: str) -> RequestError:
    return RequestError(400, f"{param}: {message}", "invalid_value", param)


@dataclass(frozen=True)
class Request:
    """A checked request: either `messages`, or a `prompt` of text or tokens."""

    model: str
    stream: bool
    messages: list[Message] | None
    prompt: str | list[int] | None
    tools: list[Body] | None
    reads_calls: bool  # whether tool calls are parsed for the client
    num_completions: int
    stop: tuple[str, ...]
    max_new_tokens: int | None
    logprobs: bool
    with_usage: bool  # a chunk with usage ends the stream


@dataclass(frozen=True, eq=False)
class ClientAnswer:
    """One completion: its tokens, and the message or text that the client gets. `stop` is the client's stop string that
    ended it."""

    completion: Completion
    message: Message
    text: str
    stop: str | None

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.message.get("tool_calls") else self.completion.finish_reason


def read_chat(body: Any, temperature: float, max_completions: int) -> Request:
    """Check a body of /v1/chat/completions. Raises RequestError."""
    body = _checked(body, temperature)
    messages = [_openai_message(message) for message in _typed(body, "messages", list, [])]
    tools = _typed(body, "tools", list, None) or None
    for tool in tools or ():
        if not (isinstance(tool, dict) and isinstance(tool.get("function"), dict)):
            raise refused("tools", "each one must be of the type function, with its name in `function`")
        _name(tool["function"], "tools")
    return _request(body, max_completions, messages=messages, tools=tools, logprobs=_typed(body, "logprobs", bool, False))


def read_completion(body: Any, temperature: float, max_completions: int) -> Request:
    """Check a body of /v1/completions. Raises RequestError."""
    body = _checked(body, temperature)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        (prompt,) = prompt
    tokens = isinstance(prompt, list) and all(type(token) is int and 0 <= token < 2**31 for token in prompt)
    if not prompt or not (isinstance(prompt, str) or tokens):
        raise refused("prompt", "one text or one list of token ids is needed")
    logprobs = _typed(body, "logprobs", int, None)
    if logprobs:
        raise refused("logprobs", "engines report the log-probability of the sampled token only; set it to 0")
    return _request(body, max_completions, prompt=prompt, logprobs=logprobs is not None)


def read_anthropic(body: Any, temperature: float, max_completions: int) -> Request:
    """Check a body of /v1/messages. Raises RequestError."""
    body = _checked(body, temperature)
    system = [] if body.get("system") is None else [{"role": "system", "content": _text(body["system"], "system")}]
    messages = [
        part for message in _typed(body, "messages", list, []) for part in _anthropic_messages(_object(message, "messages"))
    ]
    tools = []
    for tool in _typed(body, "tools", list, None) or ():
        if _object(tool, "tools").get("type", "custom") != "custom":
            raise refused("tools", f"the provider's own tool {tool['type']!r} does not exist here")
        function = {"name": _name(tool, "tools"), "description": tool.get("description", "")}
        tools.append({"type": "function", "function": function | {"parameters": tool.get("input_schema") or {}}})
    if body.get("max_tokens") is None:
        raise refused("max_tokens", "it is required")
    if body.get("n") not in (None, 1):
        raise refused("n", "this route gives one answer")
    return _request(body, max_completions, messages=[*system, *messages], tools=tools or None)


def _checked(body: Any, temperature: float) -> Body:
    """Return a body whose parameters keep the recipe's distribution."""
    body = _object(body, "body")
    for name, value in body.items():
        if value is None or name in READ or name in IGNORED:
            continue
        if name not in NEUTRAL:
            raise refused(name, "this endpoint does not know the parameter; remove it")
        if value not in NEUTRAL[name]:
            allowed = " or ".join(json.dumps(one) for one in NEUTRAL[name])
            raise refused(name, f"it would change what the policy samples, unknown to the loss; allowed: {allowed}")
    wanted = _typed(body, "temperature", (int, float), None)
    if wanted is not None and abs(wanted - temperature) > 1e-6:
        raise refused("temperature", f"{wanted} is not the recipe's {temperature}, which the loss expects; omit it")
    return body


def _request(
    body: Body,
    max_completions: int,
    messages: list[Message] | None = None,
    prompt: str | list[int] | None = None,
    tools: list[Body] | None = None,
    logprobs: bool = False,
) -> Request:
    stop = body.get("stop", body.get("stop_sequences")) or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MAX_STOPS or not all(isinstance(text, str) and text for text in stop):
        raise refused("stop", f"a text, or up to {MAX_STOPS} of them, is needed")
    num_completions = _typed(body, "n", int, 1)
    if not 1 <= num_completions <= max_completions:
        raise refused("n", f"{num_completions} is not from 1 to {max_completions}")
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    max_new_tokens = _typed(body, name, int, None)
    if max_new_tokens is not None and max_new_tokens < 1:
        raise refused(name, "at least 1 is needed")
    if messages is not None and not messages:
        raise refused("messages", "at least one is needed")
    return Request(
        model=_typed(body, "model", str, "policy"),
        stream=_typed(body, "stream", bool, False),
        messages=messages,
        prompt=prompt,
        tools=tools,
        reads_calls=tools is not None and body.get("tool_choice") not in ("none", {"type": "none"}),
        num_completions=num_completions,
        stop=tuple(stop),
        max_new_tokens=max_new_tokens,
        logprobs=logprobs,
        with_usage=bool(_typed(body, "stream_options", dict, {}).get("include_usage")),
    )


def _openai_message(message: Any) -> Message:
    """Return a message as chat templates read it."""
    message = _object(message, "messages")
    role = ROLES.get(message.get("role")) if isinstance(message.get("role"), str) else None
    if role is None:
        raise refused("messages", f"role must be one of {', '.join(ROLES)}")
    shown: Message = {"role": role, "content": _text(message.get("content"), "messages")}
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        shown["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        shown["name"] = message["name"]
    if role != "assistant":
        return shown
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        shown["reasoning_content"] = reasoning
    calls = []
    for call in _typed(message, "tool_calls", list, []):
        function = _object(_object(call, "messages").get("function"), "messages")
        calls.append(tool_call(_name(function, "messages"), function.get("arguments", ""), call.get("id")))
    return shown | ({"tool_calls": calls} if calls else {})


def tool_call(name: str, arguments: Any, number: Any = None) -> Body:
    """Return a call as chat templates read it: with an object of arguments, if they are one."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # else the template shows the text
            arguments = json.loads(arguments)
    function = {"name": name, "arguments": arguments}
    return {"id": number or f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def _anthropic_messages(message: Body) -> Iterator[Message]:
    """Split a message of Anthropic's into those that chat templates know."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refused("messages", "role must be user or assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise refused("messages", "content must be a text or a list of blocks")
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = _object(block, "messages").get("type")
        if kind == "tool_result" and role == "user":
            result = _text(block.get("content"), "messages")
            yield {"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id"))}
        elif kind == "tool_use" and role == "assistant":
            calls.append(tool_call(_name(block, "messages"), block.get("input") or {}, block.get("id")))
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            thoughts.append(block.get("thinking") if isinstance(block.get("thinking"), str) else "")
        else:
            texts.append(block)
    if role == "assistant" or texts:
        shown: Message = {"role": role, "content": _text(texts, "messages")}
        shown |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
        yield shown | ({"tool_calls": calls} if calls else {})


def _text(content: Any, where: str) -> str:
    """Return the text of a message's content."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "\n".join(part["text"] for part in content)
    raise refused(where, "content must be text; the policy reads nothing else")


def _object(value: Any, where: str) -> Body:
    if not isinstance(value, dict):
        raise refused(where, "an object is needed")
    return value


def _name(value: Body, where: str) -> str:
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise refused(where, "a function's name must be a text")
    return value["name"]


def _typed(body: Body, name: str, kinds: Any, default: Any) -> Any:
    """Return a parameter of one of some types, or the default for null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise refused(name, f"{str(value)[:40]!r} has the wrong type")
    return value


def _usage(num_prompt_tokens: int, answers: Sequence[ClientAnswer]) -> Body:
    sampled = sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": sampled, "total_tokens": num_prompt_tokens + sampled}


def _head(kind: str, prefix: str, model: str) -> Body:
    return {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _wire_message(message: Message) -> Body:
    """Return the assistant's message as OpenAI's clients read it."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    shown = [call | {"function": call["function"] | {"arguments": _json(call["function"]["arguments"])}} for call in calls]
    return message | {"content": message["content"] or None, "tool_calls": shown}


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _tokens(tokenizer: Any, answer: ClientAnswer) -> list[tuple[str, float]]:
    ids, logprobs = answer.completion.token_ids.tolist(), answer.completion.logprobs.tolist()
    return [(tokenizer.decode([token]), logprob) for token, logprob in zip(ids, logprobs, strict=True)]


def _chat_logprobs(tokenizer: Any, request: Request, answer: ClientAnswer) -> Body | None:
    if not request.logprobs:
        return None
    pairs = _tokens(tokenizer, answer)
    content = [{"token": t, "bytes": list(t.encode()), "logprob": logprob, "top_logprobs": []} for t, logprob in pairs]
    return {"content": content, "refusal": None}


def write_chat(tokenizer: Any, request: Request, num_prompt_tokens: int, answers: Sequence[ClientAnswer]) -> Body:
    choices = [
        {
            "index": index,
            "message": {"refusal": None, **_wire_message(answer.message)},
            "finish_reason": answer.finish_reason,
            "logprobs": _chat_logprobs(tokenizer, request, answer),
        }
        for index, answer in enumerate(answers)
    ]
    return _head("chat.completion", "chatcmpl", request.model) | {
        "choices": choices, "usage": _usage(num_prompt_tokens, answers)
    }  # fmt: skip


def stream_chat(tokenizer: Any, request: Request, num_prompt_tokens: int, answers: Sequence[ClientAnswer]) -> Iterator[str]:
    """Yield the events of a chat completion; the tokens are sampled already."""
    head = _head("chat.completion.chunk", "chatcmpl", request.model)
    for index, answer in enumerate(answers):
        message = _wire_message(answer.message)
        deltas: list[Body] = [{"role": "assistant", "content": ""}]
        if message.get("reasoning_content"):
            deltas.append({"reasoning_content": message["reasoning_content"]})
        deltas.append({"content": message["content"] or ""})
        deltas += [{"tool_calls": [{"index": number} | call]} for number, call in enumerate(message.get("tool_calls", ()))]
        for number, delta in enumerate([*deltas, {}]):
            choice = {"index": index, "delta": delta, "finish_reason": None if delta else answer.finish_reason}
            choice["logprobs"] = _chat_logprobs(tokenizer, request, answer) if number == 1 else None
            yield _event(head | {"choices": [choice]})
    if request.with_usage:
        yield _event(head | {"choices": [], "usage": _usage(num_prompt_tokens, answers)})
    yield "data: [DONE]\n\n"


def write_completion(tokenizer: Any, request: Request, num_prompt_tokens: int, answers: Sequence[ClientAnswer]) -> Body:
    choices = []
    for index, answer in enumerate(answers):
        reason = answer.completion.finish_reason
        choice: Body = {"index": index, "text": answer.text, "finish_reason": reason, "logprobs": None}
        if request.logprobs:
            pairs = _tokens(tokenizer, answer)
            offsets = np.cumsum([0, *(len(token) for token, _ in pairs)])[:-1].tolist()
            tokens, logprobs = [token for token, _ in pairs], [logprob for _, logprob in pairs]
            choice["logprobs"] = {
                "tokens": tokens,
                "token_logprobs": logprobs,
                "top_logprobs": [{t: p} for t, p in pairs],
                "text_offset": offsets,
            }
        choices.append(choice)
    return _head("text_completion", "cmpl", request.model) | {
        "choices": choices,
        "usage": _usage(num_prompt_tokens, answers),
    }


def stream_completion(
    tokenizer: Any, request: Request, num_prompt_tokens: int, answers: Sequence[ClientAnswer]
) -> Iterator[str]:
    """Yield the events of a text completion."""
    whole = write_completion(tokenizer, request, num_prompt_tokens, answers)
    usage, choices = whole.pop("usage"), whole.pop("choices")
    for choice in choices:
        yield _event(whole | {"choices": [choice]})
    if request.with_usage:
        yield _event(whole | {"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def write_anthropic(tokenizer: Any, request: Request, num_prompt_tokens: int, answers: Sequence[ClientAnswer]) -> Body:
    (answer,) = answers
    message, content = answer.message, []
    if message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(answer.finish_reason, "end_turn")
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": "stop_sequence" if answer.stop is not None and reason == "end_turn" else reason,
        "stop_sequence": answer.stop,
        "usage": {"input_tokens": num_prompt_tokens, "output_tokens": len(answer.completion.token_ids)},
    }


def stream_anthropic(
    tokenizer: Any, request: Request, num_prompt_tokens: int, answers: Sequence[ClientAnswer]
) -> Iterator[str]:
    """Yield the events of a message."""
    whole = write_anthropic(tokenizer, request, num_prompt_tokens, answers)
    opening = whole | {"content": [], "stop_reason": None, "stop_sequence": None}
    opening["usage"] = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
    yield _named_event("message_start", {"message": opening})
    for index, block in enumerate(whole["content"]):
        kind = block["type"]
        deltas = {
            "text": [{"type": "text_delta", "text": block.get("text")}],
            "thinking": [{"type": "thinking_delta", "thinking": block.get("thinking")}],
            "tool_use": [{"type": "input_json_delta", "partial_json": json.dumps(block.get("input"))}],
        }[kind]
        empty = {"text": {"text": ""}, "thinking": {"thinking": ""}, "tool_use": {"input": {}}}[kind]
        yield _named_event("content_block_start", {"index": index, "content_block": block | empty})
        yield from (_named_event("content_block_delta", {"index": index, "delta": delta}) for delta in deltas)
        yield _named_event("content_block_stop", {"index": index})
    ending = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    yield _named_event("message_delta", {"delta": ending, "usage": whole["usage"]})
    yield _named_event("message_stop", {})


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _named_event(name: str, data: Body) -> str:
    return f"event: {name}\n{_event({'type': name} | data)}"


def error_event(error: RequestError, anthropic: bool) -> str:
    """Return the event of an error in the middle of a stream."""
    return f"event: error\n{_event(error.body(True))}" if anthropic else _event(error.body(False))


class AnswerReader:
    """Turns sampled tokens into the message or text that a client gets; vLLM's parsers find tool calls and reasoning."""

    def __init__(
        self, tokenizer: Any, stop_ids: Iterable[int], tool_parser: str | None = None, reasoning_parser: str | None = None
    ) -> None:
        """The parsers have vLLM's names, as `hermes` or `qwen3`. Raises ValueError for others."""
        self._tokenizer, self._stops = tokenizer, frozenset(stop_ids)
        self._parser: Any = None
        if tool_parser is None and reasoning_parser is None:
            return
        # vLLM takes seconds to import, and only an endpoint with parsers needs it.
        from vllm.parser import ParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer

        self._tokenizer = get_cached_tokenizer(tokenizer)
        try:
            self._parser = ParserManager.get_parser(
                tool_parser, reasoning_parser, enable_auto_tools=True, tokenizer=self._tokenizer
            )
        except TypeError as error:
            raise ValueError(f"vLLM has no such parser for this model: {error}") from error

    def read(self, completion: Completion, prompt_ids: np.ndarray, request: Request) -> ClientAnswer:
        """Return the answer of a completion, which ends where one of the client's stop strings is complete: later tokens are
        no part of it."""
        completion, text, stop = self._stopped(completion, request.stop)
        if request.messages is None:
            return ClientAnswer(completion, {}, text, stop)
        message: Message = {"role": "assistant", "content": text}
        if self._parser is not None:
            message |= self._parsed(text, completion.token_ids, prompt_ids, request)
        return ClientAnswer(completion, message, text, stop)

    def _stopped(self, completion: Completion, stops: Sequence[str]) -> tuple[Completion, str, str | None]:
        ids = completion.token_ids.tolist()
        text = self._text(ids)
        first = min(((text.find(stop) + len(stop), stop) for stop in stops if stop in text), default=None)
        if first is None:
            return completion, text, None
        fewest, most = 1, len(ids)
        while fewest < most:  # the least number of tokens that complete the stop string
            middle = (fewest + most) // 2
            fewest, most = (fewest, middle) if first[1] in self._text(ids[:middle]) else (middle + 1, most)
        routing = completion.routing
        kept = Completion(
            completion.token_ids[:fewest],
            completion.logprobs[:fewest],
            "stop",
            completion.versions[:fewest],
            None if routing is None else routing[: len(routing) - (len(ids) - fewest)],
        )
        return kept, text[: first[0] - len(first[1])], first[1]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._stops else ids)

    def _parsed(self, text: str, ids: np.ndarray, prompt_ids: np.ndarray, request: Request) -> Message:
        """Return what the parsers find in a turn."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        choice = {"tools": request.tools, "tool_choice": "auto" if request.reads_calls else "none"} if request.tools else {}
        try:
            given = ChatCompletionRequest(messages=[], model=request.model, **choice)
            parser = self._parser(self._tokenizer, given.tools)
            parser.set_prompt_token_ids(prompt_ids.tolist())
            reasoning, content, calls = parser.parse(text, given, request.reads_calls, ids.tolist())
        except Exception as error:  # parsers raise what they like about text that is no call
            logger.debug("a parser refuses a turn, which its client gets as text: %s", error)
            return {}
        message: Message = {"content": content or ""}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [tool_call(call.name, call.arguments) for call in calls]
        return message
