"""No two processes of the tests are given the same port."""

from __future__ import annotations

import subprocess
import sys

from tests.ports import BLOCK, unused_port

ASK = f"from tests.ports import unused_port as u; print(*[u() for _ in range({BLOCK})]); input()"


def test_processes_at_the_same_time_get_ports_of_their_own() -> None:
    asked = [
        subprocess.Popen([sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        first, second = ({int(port) for port in one.stdout.readline().split()} for one in asked if one.stdout is not None)
        own = {unused_port() for _ in range(BLOCK)}  # while they are there: a block is free again when its process has ended
    finally:
        for one in asked:
            one.communicate("\n", timeout=300)
    assert min(len(first), len(second), len(own)) > BLOCK // 2
    assert not first & second and not own & (first | second)
