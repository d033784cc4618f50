"""`megarl check` of a model on the hub: it fetches the config and the tokenizer, and no weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.planner_cases import QWEN_7B, write_qwen

FILES = {"config.json": json.dumps(QWEN_7B).encode(), "tokenizer_config.json": b"{}", "model.safetensors": b"weights"}
COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, someone/model, by the addresses that `huggingface_hub` asks for."""

    asked: list[str] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path, content = self.path.split("?")[0], None
        if path.startswith("/api/models/someone/model"):
            listed = [{"rfilename": name} for name in FILES]
            content = json.dumps({"id": "someone/model", "sha": COMMIT, "siblings": listed}).encode()
            if "/tree/" in path:
                content = json.dumps(
                    [{"type": "file", "oid": "1", "size": len(FILES[n]), "path": n} for n in FILES]
                ).encode()
        elif path.startswith("/someone/model/resolve/"):
            name = path.rsplit("/", 1)[-1]
            self.asked.append(name)
            content = FILES.get(name)
        self.send_response(404 if content is None else 200)
        content = content or b""
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{len(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def check(folder: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "megarl.cli", "check", str(write_qwen(folder)), "model.path=someone/model"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_config_is_fetched_and_the_weights_are_not(tmp_path: Path, hub: str) -> None:
    Hub.asked.clear()
    result = check(tmp_path, hub)
    assert result.returncode == 0, result.stderr
    assert "not checked: weights and tokenizer of model.path = someone/model" in result.stdout
    assert set(Hub.asked) == {"config.json", "tokenizer_config.json"}


def test_without_a_network_one_command_is_named(tmp_path: Path) -> None:
    result = check(tmp_path, "http://127.0.0.1:9")
    assert result.returncode == 2
    assert "model.path = 'someone/model'" in result.stderr and "hf download someone/model config.json" in result.stderr
