"""The endpoint with the clients that people use, unchanged: they get what their providers would send, and the session keeps
the tokens that were sampled."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from megarl.rollout.gateway import OpenSession
from tests.chat_templates import ADD, KEEPING
from tests.gateway_cases import HTTP, WAIT_S, Script, Served, check_session, openai_client

pytestmark = pytest.mark.agent
CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
ANTHROPIC_ADD = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}
ASKED: Any = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


def anthropic_client(opened: OpenSession) -> Any:
    return anthropic.Anthropic(base_url=opened.url, auth_token=opened.token, timeout=WAIT_S)


def post(opened: OpenSession, path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {opened.token}"}
    return HTTP.post(f"{opened.url}/v1/{path}", json=body, headers=headers)


def one_segment(opened: OpenSession, script: Script) -> None:
    check_session(opened, script)
    assert opened.session.counts == {"begun": 1}, "every turn continues the one before"


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_openai_s_client_calls_tools_and_goes_on(served: Served, streams: bool) -> None:
    script = Script(f"Let me see. {CALL}{CALL}", "It is 2.", "Bye.")
    opened = served.open(script)
    client = openai_client(opened)
    messages: list[Any] = list(ASKED)
    replies = []
    for _ in range(3):
        if streams:
            with client.chat.completions.stream(model="any", messages=messages, tools=[ADD]) as events:
                reply = events.get_final_completion().choices[0]
        else:
            reply = client.chat.completions.create(model="any", messages=messages, tools=[ADD]).choices[0]
        replies.append(reply)
        messages.append(reply.message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in reply.message.tool_calls or []]
        if not reply.message.tool_calls:
            messages.append({"role": "user", "content": "And?"})
    calls = replies[0].message.tool_calls
    assert (
        calls is not None
        and [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [("add", {"a": 1})] * 2
    )
    assert replies[0].message.content == "Let me see. " and calls[0].id != calls[1].id
    assert [reply.finish_reason for reply in replies] == ["tool_calls", "stop", "stop"]
    assert replies[1].message.content == "It is 2."
    one_segment(opened, script)
    assert f"Let me see. {CALL}{CALL}<|turn_end|><|tool|>2<|turn_end|>" in script.prompts[1], "spaces as they were sampled"


def test_openai_s_asynchronous_client_runs_many_turns_at_once(served: Served) -> None:
    scripts = [Script(f"I am {number}.") for number in range(5)]
    opened = [served.open(script) for script in scripts]

    async def talk(number: int) -> list[str]:
        client: Any = openai.AsyncOpenAI(base_url=f"{opened[number].url}/v1", api_key=opened[number].token, timeout=WAIT_S)
        messages: list[Any] = list(ASKED)
        for _ in range(4):
            stream = await client.chat.completions.create(model="any", messages=messages, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Who?"}]
        return [message["content"] for message in messages[1::2]]

    async def all_of_them() -> list[list[str]]:
        return await asyncio.gather(*(talk(number) for number in range(5)))

    assert asyncio.run(all_of_them()) == [[f"I am {number}."] * 4 for number in range(5)]
    for session, script in zip(opened, scripts, strict=True):
        one_segment(session, script)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_anthropic_s_client_calls_tools_and_goes_on(served: Served, streams: bool) -> None:
    script = Script(f"Let me see. {CALL}", "It is 2.", "Bye.")
    opened = served.open(script)
    client = anthropic_client(opened)
    messages: list[Any] = list(ASKED)
    reasons = []
    for _ in range(3):
        request: Any = dict(model="any", max_tokens=99, system="Be kind.", messages=messages, tools=[ANTHROPIC_ADD])
        if streams:
            with client.messages.stream(**request) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**request)
        reasons.append(reply.stop_reason)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "2"}]}
            for block in reply.content
            if block.type == "tool_use" and block.input == {"a": 1}
        ]
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results or "And?"}]
    assert reasons == ["tool_use", "end_turn", "end_turn"]
    one_segment(opened, script)
    assert script.prompts[0].endswith("<|system|>Be kind.<|turn_end|><|user|>What is it?<|turn_end|><|assistant|>")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_litellm_runs_unchanged(served: Served, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    script = Script(CALL, "It is 2.")
    opened = served.open(script)
    messages: list[Any] = list(ASKED)
    for _ in range(2):
        options: Any = dict(model="openai/any", api_base=f"{opened.url}/v1", api_key=opened.token, timeout=WAIT_S)
        answer = litellm.completion(messages=messages, tools=[ADD], stream=streams, **options)
        whole: Any = litellm.stream_chunk_builder(list(answer)) if streams else answer
        message = whole.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls or []]
    assert messages[-1]["content"] == "It is 2."
    one_segment(opened, script)


def test_an_agent_of_pydantic_ai_runs_unchanged(served: Served) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    script = Script(f"I add. {CALL}", CALL, "It is 3.")
    opened = served.open(script)
    provider = OpenAIProvider(base_url=f"{opened.url}/v1", api_key=opened.token)
    agent = Agent(OpenAIChatModel("any", provider=provider), system_prompt="Be kind.")
    given = []

    @agent.tool_plain
    def add(a: int) -> int:
        given.append(a)
        return a + len(given)

    assert agent.run_sync("What is it?").output == "It is 3."
    assert given == [1, 1]
    one_segment(opened, script)


def test_answers_follow_the_schemas_of_their_providers(served: Served) -> None:
    """OpenAI's and Anthropic's own types, and vLLM's."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion import protocol as completion

    opened = served.open(Script(f"Well. {CALL}"))
    for more in ({}, {"tools": [ADD]}, {"n": 2}, {"logprobs": True}, {"max_tokens": 3}):
        whole = post(opened, "chat/completions", model="any", messages=ASKED, **more).json()
        ChatCompletion.model_validate(whole)
        chat.ChatCompletionResponse.model_validate(whole)
        options = {"include_usage": True}
        streamed = events_of(
            post(opened, "chat/completions", model="any", messages=ASKED, stream=True, stream_options=options, **more)
        )
        for chunk in streamed:
            ChatCompletionChunk.model_validate(chunk)
            chat.ChatCompletionStreamResponse.model_validate(chunk)
        assert streamed[-1]["usage"] == whole["usage"]
        text = post(
            opened, "completions", model="any", prompt="Once", **({"n": 2} if "n" in more else {"logprobs": 0})
        ).json()
        Completion.model_validate(text)
        completion.CompletionResponse.model_validate(text)
        for chunk in events_of(post(opened, "completions", model="any", prompt="Once", stream=True)):
            Completion.model_validate(chunk)
            completion.CompletionStreamResponse.model_validate(chunk)
    for more in ({}, {"tools": [ANTHROPIC_ADD]}, {"max_tokens": 3}):
        request: Any = {"model": "any", "messages": ASKED, "max_tokens": 99} | more
        whole = post(opened, "messages", **request).json()
        Message.model_validate(whole)
        AnthropicMessagesResponse.model_validate(whole)
        for event in events_of(post(opened, "messages", stream=True, **request)):
            TypeAdapter(RawMessageStreamEvent).validate_python(event)


def events_of(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_completions_of_text_go_on_from_their_tokens(served: Served) -> None:
    script = Script(" upon a time", " there was")
    opened = served.open(script)
    client, text = openai_client(opened), ""
    for more in ("Once", ","):
        text += more
        text += client.completions.create(model="any", prompt=text, max_tokens=500).choices[0].text
    assert text == "Once upon a time, there was"
    one_segment(opened, script)
    client.completions.create(model="any", prompt="Once")
    ids = opened.session.segments[0].tokens.tolist()
    assert client.completions.create(model="any", prompt=[*ids, 5]).choices[0].finish_reason == "stop"
    client.completions.create(model="any", prompt=[5, 6])
    check_session(opened, script)
    assert opened.session.counts == {"begun": 3}, "what does not go on from a turn begins a segment"


def test_log_probabilities_are_those_of_the_sampled_tokens(served: Served) -> None:
    opened = served.open(Script("ab"))
    choice = openai_client(opened).chat.completions.create(model="any", messages=ASKED, logprobs=True).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [(token.token, token.logprob) for token in choice.logprobs.content] == [
        ("a", 0.0),
        ("b", -1.0),
        ("<|turn_end|>", -2.0),
    ]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages"])
def test_a_stop_string_ends_what_the_client_gets_and_what_is_trained(served: Served, path: str) -> None:
    script = Script("one two END three END")
    opened = served.open(script)
    stop: Any = {"stop_sequences": ["END", "none"], "max_tokens": 99} if path == "messages" else {"stop": ["END", "none"]}
    prompt: Any = {"prompt": "?"} if path == "completions" else {"messages": ASKED}
    answer = post(opened, path, model="any", **prompt, **stop).json()
    if path == "messages":
        assert answer["content"] == [{"type": "text", "text": "one two "}]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    else:
        choice = answer["choices"][0]
        assert (choice["text"] if path == "completions" else choice["message"]["content"]) == "one two "
        assert choice["finish_reason"] == "stop"
    (segment,) = opened.session.segments
    assert served.chat.tokenizer.decode(segment.completion.token_ids) == "one two END", "the tokens up to the stop string"
    assert segment.completion.token_ids.tolist() == script.policy.sampled[0].token_ids[:11].tolist()


def test_reasoning_is_told_from_the_answer_and_stays_in_the_prompt() -> None:
    """By a reasoning parser of vLLM; OpenAI's clients do not send it back, Anthropic's do."""
    thoughts = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    template = KEEPING["plain"].replace("{{ m.content }}", thoughts)
    with closing(Served(None, "deepseek_r1", template)) as served:
        script = Script("<think>two and two</think>4", "<think>hm</think>ok", template=template)
        opened = served.open(script)
        client = openai_client(opened)
        first = client.chat.completions.create(model="any", messages=ASKED).choices[0].message
        assert first.content == "4" and first.reasoning_content == "two and two"
        history: list[Any] = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "?"}]
        reply = anthropic_client(opened).messages.create(model="any", max_tokens=99, messages=history)
        assert "<think>two and two</think>4<|turn_end|><|user|>?" in script.prompts[1]
        assert [block.type for block in reply.content] == ["thinking", "text"]
        history += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "!"}]
        anthropic_client(opened).messages.create(model="any", max_tokens=99, messages=history)
        assert "<think>hm</think>ok<|turn_end|><|user|>!" in script.prompts[2]
        one_segment(opened, script)


def test_requests_are_held_while_weights_change(served: Served) -> None:
    """The engine's answer takes as long as it takes, for whole and streamed answers; other sessions go on."""
    script = Script("Here.")
    opened, other = served.open(script), served.open(Script("There."))
    served.call(script.gate.clear)

    async def ask() -> list[str]:
        client: Any = openai.AsyncOpenAI(base_url=f"{opened.url}/v1", api_key=opened.token, timeout=WAIT_S, max_retries=0)
        whole = asyncio.create_task(client.chat.completions.create(model="any", messages=ASKED))
        stream = await client.chat.completions.create(model="any", messages=ASKED, stream=True)
        await asyncio.to_thread(served.until, lambda: script.waiting == 2)  # while both requests are sent
        busy: Any = openai.AsyncOpenAI(base_url=f"{other.url}/v1", api_key=other.token, timeout=WAIT_S)
        answer = await busy.chat.completions.create(model="any", messages=ASKED)
        assert answer.choices[0].message.content == "There." and not whole.done()
        served.call(script.gate.set)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return [(await whole).choices[0].message.content, text]

    assert asyncio.run(ask()) == ["Here.", "Here."]
    check_session(opened, script)


def test_lengths_are_those_of_the_request_and_of_the_limits(served: Served) -> None:
    script = Script("x" * 2000)
    opened = served.open(script)
    for more, limit in (
        ({}, 1000),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 5000}, 1000),
    ):
        answer = post(opened, "chat/completions", model="any", messages=ASKED, **more).json()
        assert script.requests[-1].max_new_tokens == limit == answer["usage"]["completion_tokens"]
        assert answer["choices"][0]["finish_reason"] == "length"
    assert [request.number for request in script.requests] == [0, 1, 2, 3], "each completion has a number of its own"


REFUSED: dict[str, Any] = {
    "temperature": 0.3, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
    "repetition_penalty": 1.1, "logit_bias": {"5": 100}, "response_format": {"type": "json_object"},
    "tool_choice": "required", "parallel_tool_calls": False, "guided_json": {}, "top_logprobs": 3, "n": 99,
    "stop": [1], "max_tokens": 0, "best_of": 2,
    "chat_template": "x", "min_tokens": 4, "prediction": {},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_distribution_is_refused_with_its_name(served: Served, name: str) -> None:
    opened = served.open(Script("no"))
    answer = post(opened, "chat/completions", model="any", messages=ASKED, tools=[ADD], **{name: REFUSED[name]})
    assert (
        answer.status_code == 400 and answer.json()["error"]["param"] == name and name in answer.json()["error"]["message"]
    )
    answer = post(opened, "messages", model="any", messages=ASKED, **{"max_tokens": 9, name: REFUSED[name]})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert not opened.session.segments


def test_what_leaves_the_distribution_as_it_is_is_accepted(served: Served) -> None:
    opened = served.open(Script("yes"))
    neutral: Any = dict(
        temperature=1.0, top_p=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, response_format={"type": "text"},
        tool_choice="auto", parallel_tool_calls=True, n=1, user="me", metadata={"a": "b"}, seed=5, store=False, stop=None,
        reasoning_effort="low", logprobs=False,
    )  # fmt: skip
    client = openai_client(opened)
    assert (
        client.chat.completions.create(model="any", messages=ASKED, tools=[ADD], **neutral).choices[0].message.content
        == "yes"
    )
    neutral = dict(tool_choice={"type": "auto"}, metadata={"user_id": "me"}, thinking={"type": "disabled"})
    body = dict(temperature=1.0, top_p=1.0, top_k=-1)
    reply = anthropic_client(opened).messages.create(
        model="any", max_tokens=9, messages=ASKED, tools=[ANTHROPIC_ADD], extra_body=body, **neutral
    )
    assert reply.content[0].text == "yes"


def test_tool_choice_none_leaves_calls_as_text(served: Served) -> None:
    client = openai_client(served.open(Script(CALL)))
    message = client.chat.completions.create(model="any", messages=ASKED, tools=[ADD], tool_choice="none").choices[0].message
    assert message.content == CALL and not message.tool_calls


def test_an_answer_does_not_wait_for_its_headers_to_be_acknowledged(served: Served) -> None:
    """Nagle's algorithm would add 40 ms to each answer of a connection that stays open."""
    post(served.open(Script("x")), "chat/completions", model="any", messages=ASKED)
    connections: Any = served.gateway._server.server_state.connections
    sockets = [connection.transport.get_extra_info("socket") for connection in connections]
    assert sockets and all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in sockets)


def test_the_model_is_listed(served: Served) -> None:
    assert [model.id for model in openai_client(served.open(Script("x"))).models.list()] == ["policy"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_an_address_of_ipv6_serves() -> None:
    with closing(Served(host="::1")) as served:
        assert openai_client(served.open(Script("x"))).chat.completions.create(model="any", messages=ASKED).choices
