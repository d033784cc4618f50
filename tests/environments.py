"""Environments for tests, as a user would write them."""

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

from megarl.rollout.environment import Environment, Messages, Observation, Turn, environment


@environment
class Counting(Environment):
    """Says how many digits a turn had, with as much reward, until one ends with one of every fourth character or `turns` are
    over; for a row that says `breaks` it raises in the second turn."""

    def __init__(self, turns: int = 3, longest: int = 2) -> None:
        self.left, self.longest = turns, longest

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        self.name = f"{row['question']}{seed % 10}"
        self.breaks = row.get("breaks", False)
        return None

    def step(self, turn: Turn) -> Observation:
        digits = sum(character.isdigit() for character in turn.text)
        self.left -= 1
        if self.breaks and self.left == 1:
            raise RuntimeError("the counter broke")
        done = self.left == 0 or (not self.breaks and turn.text != "" and ord(turn.text[-1]) % 4 == 0)
        return Observation(f"{digits}{self.name}"[: self.longest], float(digits), done)


@environment
class Faulty(Environment):
    """Does what the row's `fault` says, in reset or in its first step."""

    tools = {"add": {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}}

    def __init__(self, asks: str = "go", hangs: bool = False) -> None:
        if hangs:
            time.sleep(3600)
        self.asks = asks

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        self.fault, self.left_open = row["fault"], row.get("left_open", "")
        if self.fault == "reset raises":
            raise RuntimeError("no board")
        if self.fault == "reset gives a number":
            return 7  # type: ignore[return-value]
        return f"{self.asks}{seed % 7}" if self.fault == "asks" else None

    def step(self, turn: Turn) -> Observation:
        match self.fault:
            case "raises":
                raise KeyError("board")
            case "hangs":
                time.sleep(3600)
            case "starts":
                with open(self.left_open, "w") as held:
                    subprocess.Popen(["sleep", "3600"], stdout=held)
                    subprocess.Popen(["sleep", "3600"], stdout=held, start_new_session=True)
            case "fills":
                memory = bytearray(300 << 20)
                memory[::4096] = bytes(len(memory[::4096]))
                time.sleep(3600)
            case "fills and forks":
                chunks = []  # little by little, so that no process has much for itself
                for _ in range(3):
                    chunks.append(bytearray(100 << 20))
                    chunks[-1][::4096] = bytes(len(chunks[-1][::4096]))
                    if os.fork() == 0:
                        break
                time.sleep(3600)
            case "is cut off":
                raise ConnectionRefusedError("no service")
            case "dies":
                os._exit(3)
            case "dies between turns":
                threading.Timer(0.05, os._exit, [9]).start()
            case "gives a text":
                return "well done"  # type: ignore[return-value]
            case "gives a wrong reward":
                return Observation("x", reward="much")  # type: ignore[arg-type]
            case "gives no number":
                return Observation("x", reward=float("nan"))
            case "gives a wrong end":
                return Observation("x", done=1)  # type: ignore[arg-type]
            case "gives wrong messages":
                return Observation([{"role": "user"}])
            case "says too much":
                return Observation("x" * 1000)
        return Observation("ok" if turn.call is None else f"a={turn.call.arguments['a']}", 0.5)


class Unmarked(Environment):
    """Without the decorator."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        return None

    def step(self, turn: Turn) -> Observation:
        return Observation()


@environment
class Needy(Unmarked, Environment):
    """With an option that has no default; none is made before there is a process for it."""

    def __init__(self, board: str) -> None:
        raise AssertionError(f"made with {board}")


@environment
class Schemaless(Unmarked, Environment):
    """With a tool whose schema is none."""

    tools = {"add": {"type": "much"}}
