"""Environments of clusters, containers and shells that a run repairs, or that the doctor names."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megarl.cluster.job_environment import HOME_CACHES, LONGEST_TEMPORARY, _private_folder, adapt_environment
from megarl.cluster.node_settings import read_node_settings

# The path that Ray appends to its directory. The kernel limits the length of the whole path.
RAY_SOCKET = "/ray/session_2026-11-25_12-36-02_123456_1234567/sockets/plasma_store.1"


def adapted(**environment: str) -> dict[str, str]:
    adapt_environment(environment)
    return environment


def test_a_working_environment_stays_unchanged(tmp_path: Path) -> None:
    fits = {"HOME": str(tmp_path), "TMPDIR": "/tmp", "PYTHONUTF8": "1", "VLLM_PORT": "8000", "MASTER_PORT": "29500",
            "RAY_AUTH_MODE": "token"}  # fmt: skip
    assert adapted(**fits) == fits


def test_ports_of_kubernetes_services_are_dropped() -> None:
    service = "tcp://10.0.0.17:8000"
    result = adapted(HOME="/tmp", VLLM_PORT=service, RAY_PORT=service, MASTER_PORT=service, VLLM_PORT_8000_TCP=service)
    assert not {"VLLM_PORT", "RAY_PORT", "MASTER_PORT"} & result.keys()
    node = {"NUM_NODES": "1", "NODE_RANK": "0", "RANKS_PER_NODE": "1", "MASTER_ADDRESS": "127.0.0.1"}
    settings = read_node_settings(result | node)
    assert (settings.ray_port, settings.master_port) == (6379, 29500)


def test_sockets_fit_below_any_temporary_directory(tmp_path: Path) -> None:
    assert adapted(HOME="/tmp", TMPDIR=str(tmp_path / ("x" * 60)))["TMPDIR"] == "/tmp"
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    longest = str(folder / ("x" * (LONGEST_TEMPORARY - len(str(folder)) - 1)))
    assert adapted(HOME="/tmp", TMPDIR=longest)["TMPDIR"] == longest
    try:
        path = Path(longest + RAY_SOCKET)
        path.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    finally:
        shutil.rmtree(folder)


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.cluster.job_environment.os.access", refusing(tmp_path / "home"))
    home = {"HOME": str(tmp_path / "home"), "TMPDIR": "/tmp"}
    result = adapted(**home)
    assert len(result["RAY_AUTH_TOKEN"]) == 64 and result["RAY_AUTH_TOKEN"] != adapted(**home)["RAY_AUTH_TOKEN"]
    assert all(Path(result[name]).is_relative_to("/tmp") for name in [*HOME_CACHES, "HF_DATASETS_CACHE"])
    assert "HF_HOME" not in result, "cached models are still read from HF_HOME"
    assert adapted(**home, VLLM_CACHE_ROOT="/cache")["VLLM_CACHE_ROOT"] == "/cache"
    for chosen in ({"RAY_AUTH_TOKEN": "a"}, {"RAY_AUTH_TOKEN_PATH": "/a"}, {"RAY_AUTH_MODE": "disabled"},
                   {"MEGARL_RAY_ADDRESS": "10.0.0.1:6379"}):  # fmt: skip
        assert adapted(**home, **chosen).get("RAY_AUTH_TOKEN") == chosen.get("RAY_AUTH_TOKEN")
    several = dict(home)
    adapt_environment(several, is_one_node=False)
    assert "RAY_AUTH_TOKEN" not in several
    given = {"MEGARL_RAY_ADDRESS": "10.0.0.1:6379"}
    assert "RAY_AUTH_MODE" not in adapted(**home, **given), "somebody else's Ray may need no token"
    assert adapted(**home, **given, RAY_AUTH_TOKEN="a")["RAY_AUTH_MODE"] == "token"
    (tmp_path / "home/.ray").mkdir(parents=True)
    (tmp_path / "home/.ray/auth_token").write_text("a")
    assert "RAY_AUTH_TOKEN" not in adapted(**home), "an existing token is used"


AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from megarl.cluster.doctor import check_writable
from megarl.cluster.job_environment import adapt_environment
if os.getuid() == 0:
    os.setuid(65534)
environment = {"HOME": sys.argv[1], "TMPDIR": sys.argv[2]}
adapt_environment(environment)
runs = check_writable("run directory", Path(sys.argv[1]) / "runs")
print(environment["HF_DATASETS_CACHE"], runs.severity.name)
"""


@pytest.mark.parametrize("inside", ["", "home/of/another"])
def test_a_home_that_may_not_be_searched(inside: str) -> None:
    """Schedulers and containers may leave HOME=/root for another user."""
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))
    closed = temporary / "closed"
    try:
        (closed / inside).mkdir(parents=True)
        temporary.chmod(0o777)
        closed.chmod(0)
        command = [sys.executable, "-c", AS_ANOTHER_USER, str(closed / inside), str(temporary)]
        output = subprocess.run(command, capture_output=True, text=True, check=False)
        assert output.stdout.split()[1:] == ["FAIL"], output.stderr
        assert Path(output.stdout.split()[0]).is_relative_to(temporary)
    finally:
        closed.chmod(0o700)
        shutil.rmtree(temporary)


def test_only_this_user_can_write_to_the_caches(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert _private_folder(folder) == folder == _private_folder(folder)
    folder.chmod(0o777)
    assert _private_folder(folder) != folder
    folder.rmdir()
    folder.symlink_to(tmp_path)
    result = _private_folder(folder)
    assert result != folder and result.stat().st_mode & 0o777 == 0o700


def refusing(home: Path):  # type: ignore[no-untyped-def]
    """Return an os.access for a read-only `home`, because root may write anywhere except on a read-only mount."""
    real = os.access

    def access(path: Path, mode: int) -> bool:
        return real(path, mode) and not (mode & os.W_OK and Path(path).is_relative_to(home))

    home.mkdir()
    return access
