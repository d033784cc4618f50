"""Ray on the nodes of a job: its head on node 0, which the others join."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray._private.authentication import authentication_token_setup as authentication
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from megarl.cluster.node_failure import NodeError
from megarl.cluster.node_settings import NodeSettings
from megarl.cluster.processes import start_tied
from megarl.cluster.ray_cluster import OBJECT_STORE_BYTES, daemon_environment
from megarl.recipe import Recipe

CONNECT_S = 2.0
POLL_S = 0.5
# What a rank has beyond a collective's deadline to say what happened, before Ray ends it without a word.
LAST_WORDS_S = 60.0


def ray_address(settings: NodeSettings) -> str:
    """Of the head, by its number: Ray compares addresses as texts, and a name would be another one."""
    return f"{socket.gethostbyname(settings.master)}:{settings.ray_port}"


def ray_environment(recipe: Recipe) -> dict[str, str]:
    """What every process that uses Ray finds in its environment."""
    # Ray ends drivers, raylets and workers that have not reached its head for a minute, with no word of which phase that was
    # in; megarl's own deadlines come first.
    patience_s = math.ceil(recipe.trainer.collective_timeout_s + LAST_WORDS_S)
    return {"RAY_gcs_rpc_server_reconnect_timeout_s": str(patience_s)}


def start_ray(settings: NodeSettings, directory: Path) -> subprocess.Popen[bytes]:
    """Start this node's daemons and wait until every node of the job is there; `ray start --block`, which ends with them.

    Raises NodeError naming the nodes that did not come in time.
    """
    end = time.monotonic() + settings.join_timeout_s
    if settings.node_rank:
        _wait_for_head(settings, end)
    _agree_on_token(settings, end)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *_options(settings, directory)]
    log = directory / "ray-start.log"
    with log.open("wb") as output:
        # Killed with this process; the daemons are tied to it in the same way. Deaf: the engines are needed until the ranks
        # have saved.
        process = start_tied(command, daemon_environment(os.environ), signal.SIGKILL, output, deaf=True)
    _wait_for_nodes(settings, process, log, end)
    return process


def _options(settings: NodeSettings, directory: Path) -> list[str]:
    # Two nodes of a job, or nodes of two jobs, may share a machine and its address, so no port is fixed but the head's.
    options = ["--node-ip-address", settings.address, "--temp-dir", str(directory)]
    options += ["--resources", json.dumps({f"megarl_node_{settings.node_rank}": 1})]
    options += ["--num-cpus", str(len(os.sched_getaffinity(0)))]  # what Slurm granted, where it binds tasks to cores
    options += ["--object-store-memory", str(OBJECT_STORE_BYTES), "--disable-usage-stats", "--include-log-monitor=false"]
    options += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if settings.node_rank:
        return [*options, "--address", ray_address(settings)]
    with socket.socket() as probe:  # for a server that is not used, but cannot be left out; 0 is refused (Ray 2.60)
        probe.bind(("", 0))
        options += ["--ray-client-server-port", str(probe.getsockname()[1])]
    return [*options, "--head", "--port", str(settings.ray_port), "--include-dashboard=false", "--no-monitor"]


def _agree_on_token(settings: NodeSettings, end: float) -> None:
    """Ray asks who joins for a token (2.60: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token), unless the site has
    set RAY_AUTH_MODE=disabled. A file that node 0 makes may take its time to be seen here. Raises NodeError where this node
    has none at the `end`."""
    if not authentication.enable_token_auth_by_default():
        return
    while True:
        try:
            authentication.ensure_token_if_auth_enabled(create_token_if_missing=settings.node_rank == 0)
            return
        except (RuntimeError, OSError, ray.exceptions.AuthenticationError) as error:
            if time.monotonic() > end or isinstance(error, OSError):  # node 0 cannot save the token that it has made
                raise NodeError(
                    "no token for Ray here within JOIN_TIMEOUT_S: give all nodes the ~/.ray/auth_token of node 0, or set "
                    f"RAY_AUTH_TOKEN alike ({error})"
                ) from error
        time.sleep(POLL_S)
        authentication.AuthenticationTokenLoader.instance().reset_cache()  # it keeps that there was none


def head_answers(settings: NodeSettings) -> OSError | None:
    """None where the head takes a connection, else what speaks against it."""
    try:
        with socket.create_connection((settings.master, settings.ray_port), CONNECT_S):
            return None
    except OSError as error:
        return error


def _wait_for_head(settings: NodeSettings, end: float) -> None:
    while (error := head_answers(settings)) is not None:
        if time.monotonic() > end:
            raise NodeError(
                f"Ray's head at {settings.master}:{settings.ray_port} did not answer within JOIN_TIMEOUT_S = "
                f"{settings.join_timeout_s:g}: {error}"
            )
        time.sleep(POLL_S)


def _wait_for_nodes(settings: NodeSettings, process: subprocess.Popen[bytes], log: Path, end: float) -> None:
    """On every node, so that none starts ranks that would wait for the others in vain."""
    wanted = {f"megarl_node_{number}" for number in range(settings.num_nodes)}
    there: set[str] = set()
    trouble = ""
    while not wanted <= there:
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace").strip()[-3000:]
            raise NodeError(f"`ray start` ended with status {process.returncode}:\n{said}")
        if time.monotonic() > end:
            late = ", ".join(sorted(wanted - there))
            raise NodeError(f"Ray: {late} did not join within JOIN_TIMEOUT_S = {settings.join_timeout_s:g}{trouble}")
        time.sleep(POLL_S)
        if head_answers(settings) is None:
            try:
                there = _present(ray_address(settings))
            except (ray.exceptions.RayError, RuntimeError) as error:  # the head is slow, or about to end
                trouble = f"; the head last said: {error}"


def _present(address: str) -> set[str]:
    """The resources of all living nodes."""
    nodes = GcsClient(address=address).get_all_node_info(timeout=CONNECT_S)
    return {name for node in nodes.values() if node.state == GcsNodeInfo.ALIVE for name in node.resources_total}
