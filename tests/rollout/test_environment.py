"""Environments by themselves: tool calls, the two examples, and processes that raise, hang, die or answer wrongly."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from openai.types.chat import ChatCompletionMessage
from pydantic import TypeAdapter

from megarl.recipe.environment_section import AgentSection, AnyEnvironment, CommandSection, EnvironmentSection
from megarl.recipe.violation import RecipeError
from megarl.reward.fork_server import below
from megarl.rollout.agent import AgentRun, _AgentProcess, load_agent
from megarl.rollout.environment import MalformedCall, Observation, ToolCall, Turn, load_environment, read_call
from megarl.rollout.environment_workers import EnvironmentWorker, Reply, Reset, Step
from recipes.environments.calculator import Calculator, calculate
from recipes.environments.guessing_game import GuessingGame
from tests.sink_cases import wait_for

TOOLS = Calculator.tools
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>'


def test_a_call_is_read_out_of_the_text_around_it() -> None:
    assert read_call(f"let me see\n{CALL} so", TOOLS) == ToolCall("calculator", {"expression": "2*3"})
    assert read_call("2*3 is 6", TOOLS) is None


@pytest.mark.parametrize(
    ("text", "message"),
    {
        CALL.removesuffix("</tool_call>"): "no </tool_call>",
        CALL + CALL: "one call at a time",
        "<tool_call>calculator(2*3)</tool_call>": "no JSON",
        "<tool_call>" + "[" * 10**5 + "</tool_call>": "no JSON",
        "<tool_call>[1]</tool_call>": '"name"',
        CALL.replace("calculator", "browser"): "no tool browser; there is calculator",
        CALL.replace('{"expression": "2*3"}', '"2*3"'): "must be an object",
        CALL.replace("expression", "text"): 'calculator: arguments must keep to required = ["expression"]',
        CALL.replace('"2*3"', "6"): 'calculator: expression must keep to type = "string"',
    }.items(),
)
def test_what_is_wrong_with_a_call_is_said_to_the_policy(text: str, message: str) -> None:
    with pytest.raises(MalformedCall, match=re.escape(message)):
        read_call(text, TOOLS)


def test_the_calculator_answers_calls_and_judges_the_answer() -> None:
    game = Calculator(call_cost=0.25)
    assert game.reset({"question": "2*3", "answer": "6"}, 1) is None
    call = ToolCall("calculator", {"expression": "2*(3-1)/8"})
    assert game.step(Turn("", call)) == Observation([{"role": "tool", "content": "0.5"}], -0.25)
    failed = game.step(Turn("", ToolCall("calculator", {"expression": "1/0"})))
    assert failed.content[0]["content"].startswith("error") and not failed.done  # type: ignore[index]
    assert game.step(Turn("2 times 3 is 6.")) == Observation(reward=1.0, done=True)
    assert game.step(Turn("6 or 7")) == Observation(reward=0.0, done=True)
    with pytest.raises(ValueError, match="'answer' is 'none'"):
        game.reset({"answer": "none"}, 1)


def test_the_calculator_s_examples_are_what_it_would_answer() -> None:
    """A model that was shown no tool calls one as it is shown here."""
    game = Calculator(examples=4)
    messages: Any = game.reset({"question": "Calculate 2 * 3.", "answer": "6"}, 1)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"] * 4 + ["user"]
    assert messages[-1]["content"] == "Calculate 2 * 3."
    assert len({message["content"] for message in messages}) == 3 * 4 + 1, "four different ones"
    for question, call, result, answer in (messages[n : n + 4] for n in range(0, 16, 4)):
        left, right = map(int, re.findall("[0-9]+", question["content"]))
        game.reset({"question": "", "answer": str(left * right)}, 1)
        assert game.step(Turn(call["content"], read_call(call["content"], TOOLS))).content == [result]
        assert game.step(Turn(answer["content"])) == Observation(reward=1.0, done=True)
    with pytest.raises(ValueError, match="environment.options: examples = 5; 0 to 4"):
        Calculator(examples=5)


@pytest.mark.parametrize("text", ["__import__('os')", "2**9", "x", "True", "'a'*9", "(" * 300, "1e999"])
def test_the_calculator_knows_numbers_alone(text: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        calculate(text)


def test_the_guessing_game_says_higher_or_lower_and_pays_by_turns() -> None:
    game = GuessingGame(low=1, high=3, turn_cost=0.25)
    first, number = game.reset({}, seed=5), game._number
    assert isinstance(first, str) and "1 to 3" in first and 1 <= number <= 3
    assert game.step(Turn("4")).content == "Lower." and game.step(Turn("0")).content == "Higher."
    assert game.step(Turn("?")).content == "Say one number."
    assert game.step(Turn(f"{number}!")) == Observation(reward=0.25, done=True)
    numbers = set()
    for seed in range(30):
        game.reset({}, seed)
        numbers.add(game._number)
    assert numbers == {1, 2, 3}
    game.reset({}, 5)
    assert game._number == number, "the seed draws it"


class Worker:
    """A worker for an environment, with a loop."""

    def __init__(self, path: Sequence[str] | None = None, **changes: Any) -> None:
        given = {"target": "tests.environments:Faulty", "max_turns": 3, "max_observation_tokens": 8, "timeout_s": 20.0}
        self.worker = EnvironmentWorker(EnvironmentSection.model_validate(given | changes), path or sys.path)
        self.runner = asyncio.Runner()

    def ask(self, name: str, question: Reset | Step) -> Reply:
        return self.runner.run(self.worker.ask(name, question))

    def reset(self, name: str, fault: str = "", **row: Any) -> Reply:
        return self.ask(name, Reset({"fault": fault} | row, 1))

    def end(self, name: str) -> None:
        self.runner.run(self.worker.end(name))

    @property
    def processes(self) -> list[int]:
        """Of the episodes, and what the user's module has started."""
        return below(self.worker._server.process)

    def close(self) -> None:
        self.worker.close()
        self.runner.close()


OK = Reply([{"role": "user", "content": "ok"}], reward=0.5)


# What a row asks for, and what is said of it.
FAULTS = {
    "reset raises": "reset raised RuntimeError: no board (environments.py:",
    "reset gives a number": "reset raised TypeError: what reset returned is 7 (int); a text is needed, or a list",
    "raises": "step raised KeyError: 'board' (environments.py:",
    "is cut off": "step raised ConnectionRefusedError: no service (environments.py:",
    "dies": "died with exit status 3",
    "gives a text": "step raised TypeError: step returned 'well done' (str); an Observation is needed",
    "gives a wrong reward": "Observation.reward is 'much' (str); a number is needed",
    "gives no number": "Observation.reward is nan; a finite number is needed",
    "gives a wrong end": "Observation.done is 1 (int); True or False is needed",
    "gives wrong messages": "Observation.content: message 0 is {'role': 'user'} (dict); role and content, two texts",
}


def test_each_fault_is_said_and_takes_no_other_episode_along() -> None:
    with closing(Worker()) as worker:
        assert worker.reset("good") == Reply()
        for fault, words in FAULTS.items():
            reply = worker.reset(fault, fault)
            if not fault.startswith("reset"):
                assert reply == Reply(), "reset went well"
                reply = worker.ask(fault, Step("x"))
            assert words in reply.failure, reply
            cause = "" if fault.startswith("reset") or fault == "is cut off" else "crash" if fault == "dies" else "error"
            assert reply.cause == cause, "what follows a turn of the policy has a cause, and is scored, but for an outage"
        missing = worker.ask("row", Reset({"question": 1}, 1))
        malformed = worker.ask("good", Step('<tool_call>{"name": "add", "arguments": {"a": "b"}}</tool_call>'))
        good = worker.ask("good", Step('<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>'))
    assert missing.failure.startswith("reset raised LookupError: the row has no field 'fault'; it has 'question'")
    assert malformed == Reply([{"role": "tool", "content": 'error: add: a must keep to type = "integer"'}], malformed=True)
    assert good == Reply([{"role": "user", "content": "a=4"}], reward=0.5)


def test_one_that_dies_between_turns_has_crashed_by_what_the_turn_before_did_if_there_was_one() -> None:
    with closing(Worker()) as worker:
        worker.reset("one", "dies between turns")
        first = worker.ask("one", Step("x"))
        wait_for(lambda: not worker.processes)
        second, again = worker.ask("one", Step("x")), worker.reset("one")
        os.kill(worker.processes[0], signal.SIGKILL)
        wait_for(lambda: not worker.processes)
        without_turns = worker.ask("one", Step("x", is_first=True))
    assert first.failure == again.failure == "", "the turn itself was answered"
    assert second.cause == "crash" and second.failure.endswith("died with exit status 9")
    assert without_turns.cause == "" and without_turns.failure.endswith("died with signal 9")


STARTS_A_HELPER = """
import subprocess
from tests.environments import Faulty as Base
from megarl.rollout.environment import environment

HELPER = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

@environment
class Asks(Base):
    def step(self, turn):
        HELPER.stdin.write(b"ok\\n")
        HELPER.stdin.flush()
        assert HELPER.stdout.readline() == b"ok\\n"
        return super().step(turn)
"""


def test_what_the_user_s_module_starts_outlives_each_episode_and_not_the_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts_a_helper.py").write_text(STARTS_A_HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    with closing(Worker(target="starts_a_helper:Asks")) as worker:
        for name in ("one", "two"):
            worker.reset(name)
            assert worker.ask(name, Step("x")) == OK
            worker.end(name)
            wait_for(lambda: len(worker.processes) <= 1)
        (helper,) = worker.processes
    wait_for(lambda: not Path(f"/proc/{helper}").exists())


def test_one_that_hangs_is_ended_at_its_deadline_while_others_answer_and_none_is_left() -> None:
    with closing(Worker(timeout_s=3.0)) as worker:

        async def play() -> Reply:
            hangs = asyncio.create_task(worker.worker.ask("hangs", Step("x")))
            assert [await worker.worker.ask("good", Step("x")) for _ in range(3)] == [OK] * 3
            assert not hangs.done(), "the others did not wait for it"
            return await hangs

        for name in ("hangs", "good"):
            worker.reset(name, name)
        late = worker.runner.run(play())
        gone, server = worker.ask("hangs", Step("x")), worker.worker._server.process
        os.kill(server, signal.SIGKILL)  # as for want of memory
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # its children are killed with it
        lost = worker.ask("good", Step("x"))
        assert worker.reset("new") == Reply(), "another keeper took its place"
        keeper = worker.worker._server.process
    assert late.failure == "step gave no answer within environment.timeout_s = 3"
    assert (late.cause, gone.cause, lost.cause) == ("wall_time", "", "")
    assert "gone" in gone.failure and "gone with its fork server" in lost.failure
    with pytest.raises(ProcessLookupError):
        os.kill(keeper, 0)


# More than the limit, for every episode by fork.
LARGE = """
from tests.environments import Faulty, environment

held = bytearray(300 << 20)
held[::4096] = bytes(len(held[::4096]))
Large = environment(type("Large", (Faulty,), {}))
"""


def test_an_episode_that_takes_too_much_memory_is_ended_alone(tmp_path: Path) -> None:
    """What its module has loaded is not its own, and what its processes share is."""
    (tmp_path / "large_environment.py").write_text(LARGE)
    names = ("fills", "fills and forks", "good")
    with closing(Worker([str(tmp_path), *sys.path], target="large_environment:Large", memory_mib=200)) as worker:
        for name in names:
            worker.reset(name, name)
        *over, good = (worker.ask(name, Step("x")) for name in names)
    assert all(reply.cause == "memory" and "environment.memory_mib = 200" in reply.failure for reply in over), over
    assert good == OK


def test_what_an_environment_has_started_is_ended_with_it_and_with_the_worker(tmp_path: Path) -> None:
    waiting = {name: select.poll() for name in ("ended", "left")}
    with ExitStack() as stack:
        with closing(Worker()) as worker:
            for name, poll in waiting.items():
                held = tmp_path / name
                os.mkfifo(held)
                reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
                stack.callback(os.close, reader)
                poll.register(reader, 0)  # it tells of its end anyhow: the last process that holds the other end is gone
                worker.reset(name, "starts", left_open=str(held))
                assert worker.ask(name, Step("x")) == OK
            worker.end("ended")
            assert waiting["ended"].poll(20000) and not waiting["left"].poll(0)
        assert waiting["left"].poll(20000)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("recipes.environments.guessing_game:GuessingGame", {"low": 5, "high": 1}, "raised ValueError: .*low = 5"),
        ("tests.environments:Faulty", {"hangs": True}, "its constructor gave no answer within environment.timeout_s = 0.5"),
    ],
)
def test_an_environment_is_made_once_for_trial_in_a_process_of_its_own(
    target: str, options: dict[str, Any], message: str
) -> None:
    load_environment(target, options)  # on each rank: it makes none
    limit_s = 0.5 if "hangs" in options else 20.0
    with (
        closing(Worker(target=target, options=options, timeout_s=limit_s)) as worker,
        pytest.raises(ValueError, match=f"environment.options = .*{target}.*{message}"),
    ):
        worker.runner.run(worker.worker.ready())


@pytest.mark.parametrize(
    ("load", "target", "options", "key", "message"),
    [
        (load_environment, "environments:Unmarked", {}, "target", "is not decorated"),
        (load_environment, "environments:Nobody", {}, "target", "Nobody"),
        (load_environment, "environments:Counting", {"speed": 1}, "target", "takes no speed"),
        (load_environment, "environments:Needy", {}, "options", "missing a required argument: 'board'"),
        (load_environment, "environments:Schemaless", {}, "target", "schema of its tool 'add' is invalid: 'much' is not"),
        (load_agent, "agents:answer", {}, "target", "is no coroutine"),
        (load_agent, "agents:run", {"speed": 1}, "options", "unexpected keyword argument 'speed'"),
    ],
)
def test_a_class_or_an_agent_that_cannot_be_used_is_named_before_the_run(
    load: Callable[..., Any], target: str, options: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        load(f"tests.{target}", options)
    assert refused.value.violations[0].key == f"environment.{key}"


def test_the_page_says_what_the_code_does() -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text().partition("## A class that answers turns")[2]
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (call,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    given = EnvironmentSection.model_validate(yaml.safe_load(recipe)["environment"])
    names: dict[str, Any] = {}
    exec(compile(code, "docs/agents.md", "exec"), names)
    environment = names[given.target.split(":")[1]](**given.options)
    assert environment.reset({"author": "Eve", "answer": 7}, 1) is None
    observation = environment.step(Turn(call, read_call(call, environment.tools)))
    assert observation == Observation([{"role": "tool", "content": "Eve"}], -0.1)
    assert environment.step(Turn(" 7 ")) == Observation(reward=1.0, done=True)


@pytest.mark.parametrize("told_of_the_tool", [True, False])
def test_the_page_takes_an_agent_to_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_of_the_tool: bool) -> None:
    """What a reader copies: the agent runs with a client, and the sections are legal."""
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text().partition("## A class that answers turns")[0]
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    recipes = [yaml.safe_load(block)["environment"] for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    agent, command = map(TypeAdapter(AnyEnvironment).validate_python, recipes)
    assert isinstance(agent, AgentSection) and isinstance(command, CommandSection)
    (tmp_path / "my_agent.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    run = load_agent(agent.target, agent.options)
    replies = ["is it 7?" if told_of_the_tool else "no", "it is 7"]

    async def create(model: str, messages: list[dict[str, str]]) -> Any:
        message = ChatCompletionMessage(role="assistant", content=replies[len(messages) // 2])
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    assert asyncio.run(run({"question": "3+4", "answer": "7"}, client)) == float(told_of_the_tool)
    for name in (
        *re.findall(r"^\| `(\w+)`[^|]* \| (?:answers|tokens|token|an agent|its)", page, re.MULTILINE),
        "host",
        "max_concurrent",
    ):
        assert name in AgentSection.model_fields, name
    process = _AgentProcess(lambda question: None, tmp_path, 1, writes_row=True)
    environment = process._environment(AgentRun({}, "http://127.0.0.1:1/s/1", "key", 1))
    assert set(re.findall(r"`((?:OPENAI|ANTHROPIC|MEGARL)_\w+)`", page)) <= environment.keys()
