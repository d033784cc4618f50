"""Environments by themselves: tool calls, the two examples, and processes that raise, hang, die or answer wrongly."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.environment import Observation, ToolCall, Turn
from megarl.environment.calculator import Calculator, calculate
from megarl.environment.guessing_game import GuessingGame
from megarl.environment.interface import load_environment
from megarl.environment.keeper import Reply, Reset, Step
from megarl.environment.tool_calls import MalformedCall, read_call
from megarl.environment.workers import EnvironmentWorker
from megarl.recipe.environment_section import EnvironmentSection
from megarl.recipe.violation import RecipeError

TOOLS = Calculator.tools
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>'


def test_a_call_is_read_out_of_the_text_around_it() -> None:
    assert read_call(f"let me see\n{CALL} so", TOOLS) == ToolCall("calculator", {"expression": "2*3"})
    assert read_call("2*3 is 6", TOOLS) is None


@pytest.mark.parametrize(
    ("text", "said"),
    {
        CALL.removesuffix("</tool_call>"): "no </tool_call>",
        CALL + CALL: "one call at a time",
        "<tool_call>calculator(2*3)</tool_call>": "no JSON",
        "<tool_call>" + "[" * 10**5 + "</tool_call>": "no JSON",
        "<tool_call>[1]</tool_call>": '"name"',
        CALL.replace("calculator", "browser"): "no tool 'browser'; there is calculator",
        CALL.replace('{"expression": "2*3"}', '"2*3"'): "must be an object",
        CALL.replace("expression", "text"): "'expression' is a required property",
        CALL.replace('"2*3"', "6"): "6 is not of type 'string'",
    }.items(),
)
def test_what_is_wrong_with_a_call_is_said_to_the_policy(text: str, said: str) -> None:
    with pytest.raises(MalformedCall, match=re.escape(said)):
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


def section(**changes: Any) -> EnvironmentSection:
    given = {"target": "tests.environments:Faulty", "max_turns": 3, "max_observation_tokens": 8, "timeout_s": 20.0}
    return EnvironmentSection.model_validate(given | changes)


# What a row asks for, and what is said of it.
FAULTS = {
    "reset raises": "reset raised RuntimeError: no board (environments.py:",
    "reset gives a number": "reset raised TypeError: what reset returned is 7 (int); a text is needed, or a list",
    "raises": "step raised KeyError: 'board' (environments.py:",
    "dies": "crashed: its process died with exit status 3",
    "gives a text": "step raised TypeError: step returned 'well done' (str); an Observation is needed",
    "gives a wrong reward": "Observation.reward is 'much' (str); a number is needed",
    "gives no number": "Observation.reward is nan; a finite number is needed",
    "gives a wrong end": "Observation.done is 1 (int); True or False is needed",
    "gives wrong messages": "Observation.content: message 0 is {'role': 'user'} (dict); role and content, two texts",
}


def test_each_fault_is_said_and_takes_no_other_episode_along() -> None:
    async def play() -> tuple[dict[str, Reply], Reply, Reply, Reply]:
        worker = EnvironmentWorker(section(), sys.path)
        try:
            good = await worker.ask("good", Reset({"fault": ""}, 1))
            said = {}
            for fault in FAULTS:
                said[fault] = await worker.ask(fault, Reset({"fault": fault}, 1))
                if not fault.startswith("reset"):
                    assert said[fault] == Reply(), "reset went well"
                    said[fault] = await worker.ask(fault, Step("x"))
            missing = await worker.ask("row", Reset({"question": 1}, 1))
            assert good == Reply()
            return (
                said,
                missing,
                await worker.ask("good", Step('<tool_call>{"name": "add", "arguments": {"a": "b"}}</tool_call>')),
                await worker.ask("good", Step('<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>')),
            )
        finally:
            worker.close()

    said, missing, malformed, good = asyncio.run(play())
    for fault, words in FAULTS.items():
        assert words in said[fault].failure, said[fault]
    assert missing.failure.startswith("reset raised LookupError: the row has no field 'fault'; it has 'question'")
    assert malformed == Reply(
        [{"role": "tool", "content": "error: arguments of add: 'b' is not of type 'integer'"}], malformed=True
    )
    assert good == Reply([{"role": "user", "content": "a=4"}], reward=0.5)


def test_one_that_hangs_is_ended_at_its_deadline_while_others_answer_and_none_is_left() -> None:
    async def play() -> tuple[Reply, list[Reply], Reply, Reply, list[int]]:
        worker = EnvironmentWorker(section(timeout_s=3.0), sys.path)
        try:
            for name in ("hangs", "good"):
                await worker.ask(name, Reset({"fault": name}, 1))
            hangs = asyncio.create_task(worker.ask("hangs", Step("x")))
            others = [await worker.ask("good", Step("x")) for _ in range(3)]
            assert not hangs.done(), "the others did not wait for it"
            late = await hangs
            gone = await worker.ask("hangs", Step("x"))
            worker._keeper.kill()  # as for want of memory
            lost = await worker.ask("good", Step("x"))
            assert await worker.ask("new", Reset({"fault": ""}, 1)) == Reply(), "another keeper took its place"
            return late, others, gone, lost, [worker._keeper.pid]
        finally:
            worker.close()

    late, others, gone, lost, keepers = asyncio.run(play())
    assert late.failure == "step gave no answer within environment.timeout_s = 3; its process was ended"
    assert others == [Reply([{"role": "user", "content": "ok"}], reward=0.5)] * 3
    assert "gone" in gone.failure and ("died" in lost.failure or "gone" in lost.failure)
    for keeper in keepers:
        with pytest.raises(ProcessLookupError):
            os.kill(keeper, 0)


@pytest.mark.parametrize(
    ("target", "options", "key", "said"),
    [
        ("tests.environments:Unmarked", {}, "environment.target", "is not decorated"),
        ("tests.environments:Nobody", {}, "environment.target", "Nobody"),
        ("tests.environments:Counting", {"speed": 1}, "environment.target", "takes no speed"),
        ("megarl.environment.guessing_game:GuessingGame", {"low": 5, "high": 1}, "environment.options", "low = 5"),
    ],
)
def test_a_class_that_cannot_be_used_is_named_before_the_run(
    target: str, options: dict[str, Any], key: str, said: str
) -> None:
    with pytest.raises(RecipeError, match=said) as refused:
        load_environment(target, options)
    assert refused.value.violations[0].key == key


def test_the_page_says_what_the_code_does() -> None:
    page = (Path(__file__).parents[1] / "docs" / "multi-turn.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (call,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    given = EnvironmentSection.model_validate(yaml.safe_load(recipe)["environment"])
    names: dict[str, Any] = {}
    exec(compile(code, "docs/multi-turn.md", "exec"), names)
    made = names[given.target.split(":")[1]](**given.options)
    assert made.reset({"author": "Eve", "answer": 7}, 1) is None
    said = made.step(Turn(call, read_call(call, made.tools)))
    assert said == Observation([{"role": "tool", "content": "Eve"}], -0.1)
    assert made.step(Turn(" 7 ")) == Observation(reward=1.0, done=True)
    for key in ("timeout_s", "on_error"):
        assert f"`{key}" in page and key in EnvironmentSection.model_fields
