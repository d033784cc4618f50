"""Agents for tests: each does what its row asks for."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai

from megarl.rollout.agent import Result


async def run(row: Mapping[str, Any], client: Any, reward: float = 1.0) -> Any:
    """Do what `fault` names, and else return the reward."""
    match row["fault"]:
        case "raises":
            raise KeyError("board")
        case "exits":
            sys.exit(0)
        case "kills its parent":
            os.kill(os.getppid(), signal.SIGKILL)
            await asyncio.sleep(99)
        case "stops its parent":
            os.kill(os.getppid(), signal.SIGSTOP)
        case "starts many threads":  # which are no processes
            await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.01) for _ in range(100)))
        case "fills memory":
            held = bytearray(600 << 20)
            held[::4096] = bytes(len(held[::4096]))
            await asyncio.sleep(99)
        case "writes to every descriptor":
            for number in range(1, 256):
                with suppress(OSError):
                    os.write(number, b"\xff" * 4096)
        case "closes every descriptor":
            os.closerange(0, 2)
            os.closerange(3, 256)
            os._exit(5)
        case "removes its folder":
            Path.cwd().rmdir()
        case "hangs in C":
            import re

            re.match(r"(a+)+$", "a" * 64 + "b")
        case "ignores signals":
            for number in range(1, 65):
                with suppress(OSError, ValueError):
                    signal.signal(number, signal.SIG_IGN)
            time.sleep(99)
        case "is cut off":
            raise ConnectionRefusedError("no service")
        case "finds no endpoint":
            await client.with_options(max_retries=0).models.list()
        case "finds no host":
            raise socket.gaierror("no host")
        case "is refused a turn":
            raise refusal(os.environ["OPENAI_BASE_URL"])
        case "is refused by a library":
            raise refusal("https://elsewhere", "no turn") from refusal(os.environ["OPENAI_BASE_URL"])
        case "is refused by a service":
            raise refusal("https://elsewhere")
        case "finds no service for its reward":
            try:
                raise refusal(os.environ["OPENAI_BASE_URL"])
            except openai.RateLimitError:
                raise ConnectionRefusedError("no judge")  # noqa: B904
        case "gives rewards by turn":
            return Result([0.5, 0.0, 0.25], {"guesses": 3})
        case "writes its reward itself":
            Path(os.environ["MEGARL_REWARD"]).write_text("7")
    return reward


def refusal(url: str, message: str = "the rollout has had its 3 turns") -> openai.RateLimitError:
    """Return the error of OpenAI's client for a status 429."""
    response: Any = httpx.Response(429, request=httpx.Request("POST", f"{url}/chat/completions"))
    return openai.RateLimitError(message, response=response, body=None)


def answer(row: Mapping[str, Any], client: Any) -> float:
    """Be no coroutine."""
    return 1.0


async def talk(row: Mapping[str, Any], client: Any) -> Any:
    """Ask twice, but for one row."""
    if row["answer"] == "2":
        raise OSError("no board")
    chat: list[dict[str, str]] = []
    for text in (row["question"], "ok"):
        chat.append({"role": "user", "content": text})
        message = (await client.chat.completions.create(model="policy", messages=chat)).choices[0].message
        chat.append({"role": "assistant", "content": message.content})
    return Result(len(chat) / 4, {"messages": len(chat)})
