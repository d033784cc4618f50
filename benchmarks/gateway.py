"""What does the endpoint add to an engine's time, and does it forget the sessions that ended?

    python benchmarks/gateway.py [--rate N] [--talking N] [--seconds S] [--sessions N] [--json PATH] [--check]

It takes three minutes; `--rate 20 --talking 40 --seconds 3 --sessions 20` takes ten seconds and shows that it runs.

Load: a process of its own holds conversations of 8 turns over HTTP, in so many sessions at a time, and
sends requests at a fixed rate whether or not earlier ones were answered. Engines answer by the clock, after 1 second. The
latency added is what the client measured beyond that second. Each answer names its session, and the client compares.

Memory: so many sessions are opened, have a turn, and end, without HTTP; memory after the first tenth is compared
with that at the end.

Targets (with --check, exit 1 when one is missed), on two cores: 1,000 sessions at a time, 500 requests a second, added
latency p99 <= 25 ms, no answer of another session, no request without an answer; over 100,000 sessions memory grows by less
than 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' tokenizer

from megarl.data.sample import Completion  # noqa: E402
from megarl.data.tokenizer import ChatRenderer, load_tokenizer  # noqa: E402
from megarl.rollout.gateway import Gateway, GatewayLimits, OpenSession, SamplingRequest  # noqa: E402
from megarl.rollout.gateway_messages import AnswerReader, read_chat  # noqa: E402
from megarl.rollout.loop_thread import collect_seldom  # noqa: E402
from megarl.rollout.session import SessionLimits  # noqa: E402

ENGINE_S, TURNS, TOKENS = 1.0, 8, 64
P99_S, GROWTH = 0.025, 0.02
LIMITS = GatewayLimits(SessionLimits(4096, 4096), max_new_tokens=TOKENS)
Address = tuple[int, str, str]  # a session's number, address and token
Asked = tuple[float, float]  # when a request was sent, and the seconds that the endpoint added


@dataclass(frozen=True)
class Sizes:
    rate: float = 500.0  # requests a second
    talking: int = 1000  # sessions at the same time
    seconds: float = 20.0
    sessions: int = 100_000  # of the memory's part


def make_gateway(folder: str) -> Gateway:
    from tests.tiny_models import save_tiny_tokenizer

    save_tiny_tokenizer(Path(folder))
    tokenizer = load_tokenizer(folder)
    return Gateway(ChatRenderer(tokenizer, len(tokenizer)), AnswerReader(tokenizer, [1]), LIMITS, temperature=1.0)


def engine(tokenizer: Any, number: int, engine_s: float) -> Any:
    """An engine that needs so long, and says which session it serves."""
    ids = np.array([*tokenizer(f"session {number} says ".ljust(TOKENS - 1, "."))["input_ids"], 1], np.int32)
    completion = Completion(ids, np.zeros(len(ids), np.float32), "stop", np.zeros(len(ids), np.int64))

    async def sample(prompt_ids: np.ndarray, request: SamplingRequest) -> Completion:
        if engine_s:
            await asyncio.sleep(engine_s)
        return completion

    return sample


async def talk(client: aiohttp.ClientSession, address: Address, begins: float, every_s: float, ends: float) -> list[Asked]:
    """Hold a conversation with a request every so often; return when each was sent, and its added seconds: NaN for a wrong
    answer."""
    number, url, token = address
    messages: list[dict[str, str]] = []
    timings = []
    for turn in range(TURNS):
        due = begins + turn * every_s
        if due > ends:
            break
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        messages.append({"role": "user", "content": f"Session {number}, turn {turn}: what is next?"})
        sent = time.perf_counter()
        body = {"model": "any", "messages": messages}
        async with client.post(
            f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {token}"}
        ) as response:
            answer = await response.json()
        seconds = time.perf_counter() - sent
        text = answer["choices"][0]["message"]["content"] if response.status == 200 else ""
        timings.append((sent, seconds - ENGINE_S if text.startswith(f"session {number} says ") else float("nan")))
        messages.append({"role": "assistant", "content": text})
    return timings


async def load(addresses: list[Address], sizes: Sizes) -> list[Asked]:
    """Hold all conversations: `talking` at a time, which begin evenly."""
    every_s = sizes.talking / sizes.rate
    begins = time.perf_counter() + 1.0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as client:
        conversations = []
        for place, address in enumerate(addresses):
            round_, slot = divmod(place, sizes.talking)
            start = begins + (round_ * TURNS + slot / sizes.talking) * every_s
            if start < begins + sizes.seconds:
                conversations.append(talk(client, address, start, every_s, begins + sizes.seconds))
        return [request for conversation in await asyncio.gather(*conversations) for request in conversation]


def load_process(pipe: Any, addresses: list[Address], sizes: Sizes) -> None:
    gc.disable()  # its own pauses would count as the endpoint's
    pipe.send(asyncio.run(load(addresses, sizes)))


async def measure_load(gateway: Gateway, tokenizer: Any, sizes: Sizes) -> dict[str, Any]:
    rounds = int(np.ceil(sizes.seconds / (TURNS * sizes.talking / sizes.rate)))
    opened: list[OpenSession] = [
        gateway.open(engine(tokenizer, number, ENGINE_S)) for number in range(rounds * sizes.talking)
    ]
    gateway.serve()
    collect_seldom()  # as rank 0 does
    addresses = [(number, f"{open_session.url}/v1", open_session.token) for number, open_session in enumerate(opened)]
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=load_process, args=(theirs, addresses, sizes))
    process.start()
    theirs.close()
    begun, busy = time.perf_counter(), time.process_time()
    sent, added = np.array(await asyncio.to_thread(ours.recv)).T
    seconds, busy = time.perf_counter() - begun, time.process_time() - busy
    process.join()
    segments = sum(len(open_session.session.segments) for open_session in opened if open_session.session.segments)
    talked = sum(bool(open_session.session.segments) for open_session in opened)
    for open_session in opened:
        gateway.end(open_session)
    right = added[~np.isnan(added)] if not np.isnan(added).all() else added
    return {
        "requests": len(added),
        "rate": (len(sent) - 1) / float(np.ptp(sent)),
        "wrong": int(np.isnan(added).sum()),
        "segments_a_session": segments / max(1, talked),
        **{f"added_p{q}_s": float(np.percentile(right, q)) for q in (50, 90, 99)},
        "busy_share": busy / seconds,
    }


async def measure_memory(gateway: Gateway, tokenizer: Any, sessions: int) -> dict[str, Any]:
    process, sample = psutil.Process(), engine(tokenizer, 0, 0.0)
    request = read_chat({"messages": [{"role": "user", "content": "What is next? " * 8}]}, 1.0, 1)
    early, begun = 0, time.perf_counter()
    for number in range(sessions):
        opened = gateway.open(sample)
        turn = opened.session.next_turn(request.messages or [])
        await gateway.complete(opened, request, turn, 0)
        gateway.end(opened)
        if number == sessions // 10:
            gc.collect()
            early = process.memory_info().rss
    gc.collect()
    growth = process.memory_info().rss / early - 1.0
    return {"sessions": sessions, "growth": growth, "session_s": (time.perf_counter() - begun) / sessions}


async def measure(sizes: Sizes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        gateway = make_gateway(folder)
    tokenizer = gateway.tokenizer
    memory = await measure_memory(gateway, tokenizer, sizes.sessions) if sizes.sessions else None
    result = await measure_load(gateway, tokenizer, sizes)
    await gateway.close()
    return {"load": result, "memory": memory}


def missed(result: dict[str, Any], sizes: Sizes) -> list[str]:
    """Name the targets that a result misses."""
    load, memory = result["load"], result["memory"]
    names = []
    if load["wrong"]:
        names.append(f"{load['wrong']} answers are wrong, or of another session")
    if not load["rate"] >= 0.99 * sizes.rate:
        names.append(f"{load['rate']:.0f} requests a second, of {sizes.rate:.0f}")
    if not load["added_p99_s"] <= P99_S:  # NaN if no answer is right
        names.append(f"added latency p99 {load['added_p99_s'] * 1e3:.1f} ms, more than {P99_S * 1e3:.0f} ms")
    if load["segments_a_session"] != 1.0:
        names.append(f"{load['segments_a_session']:.2f} segments a conversation, and each one goes on")
    if memory is not None and not memory["growth"] <= GROWTH:
        names.append(f"memory grows by {memory['growth']:.1%} over {memory['sessions']} sessions")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=Sizes.rate)
    parser.add_argument("--talking", type=int, default=Sizes.talking)
    parser.add_argument("--seconds", type=float, default=Sizes.seconds)
    parser.add_argument("--sessions", type=int, default=Sizes.sessions)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.rate, arguments.talking, arguments.seconds, arguments.sessions)
    if sizes.talking < 1.5 * ENGINE_S * sizes.rate:
        parser.error(
            f"--talking {sizes.talking} sessions, which wait {ENGINE_S:g} s, cannot send {sizes.rate:g} requests a second"
        )
    result = asyncio.run(measure(sizes))
    load, memory = result["load"], result["memory"]
    table = Table("sessions", "requests", "a second", "added p50", "p90", "p99", "the gateway's core")
    times = [f"{load[f'added_p{q}_s'] * 1e3:.1f} ms" for q in (50, 90, 99)]
    table.add_row(str(sizes.talking), str(load["requests"]), f"{load['rate']:.0f}", *times, f"{load['busy_share']:.0%}")
    Console(width=120).print(table)
    if memory is not None:
        print(f"memory: {memory['growth']:+.2%} over {memory['sessions']} sessions of {memory['session_s'] * 1e3:.2f} ms")
    if arguments.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        content = {"commit": commit, "device": device, "config": vars(sizes), **result}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    names = missed(result, sizes)
    print(
        f"gateway: added latency p99 {times[2]} (target {P99_S * 1e3:.0f} ms)"
        + "".join(f"; MISSED: {name}" for name in names)
    )
    return 1 if arguments.check and names else 0


if __name__ == "__main__":
    sys.exit(main())
