"""Start or join Ray for one run: a local cluster that a rank starts, or the launcher's cluster with its head on node 0."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from megarl.cluster.job_environment import RAY_TOKEN, home_directory, lacks_ray_token
from megarl.cluster.node_settings import NodeError, NodeSettings
from megarl.cluster.processes import start_tied
from megarl.recipe import Recipe
from megarl.rollout import RolloutError
from megarl.telemetry.disk import write_whole

NAMESPACE = "megarl"
OBJECT_STORE_BYTES = 256 << 20
# The launcher gives each node a resource with the node's number. An actor that must run on a node requests a small share.
NODE_RESOURCE = "megarl_node_"
NODE_SHARE = 0.001
# Ray tries a dead address for minutes and then ends the process.
CONNECT_TIMEOUT_S = 10.0
GCS_TIMEOUT_S = 2.0
POLL_S = 0.5
# How long after a collective's deadline a rank may still report, before Ray ends the rank silently.
LAST_WORDS_S = 60.0
JOIN_OPTIONS: dict[str, Any] = {
    "namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.WARNING, "configure_logging": False,
}  # fmt: skip
# By default Ray gives workers a low priority, and engines starve: an engine took 110 s to start instead of 20 s.
DAEMON_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
# torchrun's variables of a trainer rank. vLLM would read them in any process that inherits them.
TORCHRUN_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip


class ClusterError(ValueError):
    """A Ray cluster that this run cannot use; the message says why and what to do."""


def start_cluster(address: str | None = None) -> str:
    """Start Ray on this machine, or join the cluster at `address`; return the address by which other processes join."""
    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    if address is not None:
        return join_cluster(address)
    for name, value in DAEMON_SETTINGS.items():
        os.environ.setdefault(name, value)
    # Ray's daemons inherit the environment of this process.
    torchrun_variables = {name: os.environ.pop(name) for name in TORCHRUN_VARIABLES if name in os.environ}
    try:
        ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **JOIN_OPTIONS)
    except OSError as error:  # no place for its token or its sockets
        raise ClusterError(
            f"Ray does not start on this machine: {error}; start the run with megarl train, which gives Ray other places, "
            "or set HOME to a directory that can be written, and TMPDIR to a short one"
        ) from error
    finally:
        os.environ.update(torchrun_variables)
    return ray.get_runtime_context().gcs_address


def join_cluster(address: str) -> str:
    """Connect this trainer rank to a running cluster and return the cluster's address. Raises ClusterError if no Ray listens
    there, or Ray's or Python's version differs."""
    if ray.is_initialized():
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"MEGARL_RAY_ADDRESS = {address} is not HOST:PORT, as in 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray answers at {address} within {CONNECT_TIMEOUT_S:g} s ({error}): start its head there (launch/node.sh "
            "does), or give another MEGARL_RAY_ADDRESS; without one a run on a single node starts its own"
        ) from error
    try:
        ray.init(address=address, **JOIN_OPTIONS)
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        ray.shutdown()
        raise ClusterError(
            f"the Ray cluster at {address} does not take this process: {' '.join(str(error).split())}; end that Ray on "
            f"every node (ray stop) and start the job again, or give another MEGARL_RAY_ADDRESS"
        ) from error
    return address


def stop_cluster() -> None:
    """Leave the cluster, and end the cluster if this process started it."""
    if ray.is_initialized():
        ray.shutdown()


def numbered_nodes() -> dict[int, dict[str, Any]]:
    """Return the living nodes that a launcher numbered, by number, as `ray.nodes` describes the nodes."""
    nodes = {}
    for node in ray.nodes():
        for name in node["Resources"] if node["Alive"] else ():
            number = name.removeprefix(NODE_RESOURCE)
            if number != name and number.isdigit():
                nodes[int(number)] = node
    return nodes


def node_share(node: int) -> dict[str, float]:
    """Return the resources that place an actor or a task on a node; empty if nodes have no numbers, as on one machine.
    Raises RolloutError if the node is gone."""
    alive = numbered_nodes()
    if not alive:
        return {}
    if node not in alive:
        raise RolloutError(f"node {node} is gone from the Ray cluster, which has the nodes {sorted(alive)} left")
    return {f"{NODE_RESOURCE}{node}": NODE_SHARE}


def reconnect_environment(recipe: Recipe) -> dict[str, str]:
    """Return the variables that keep processes alive while Ray's head is out of reach. By default Ray ends processes after a
    minute without naming the phase; megarl's deadlines must pass first."""
    timeout_s = math.ceil(recipe.trainer.collective_timeout_s + LAST_WORDS_S)
    return {"RAY_gcs_rpc_server_reconnect_timeout_s": str(timeout_s)}


def start_node_daemons(settings: NodeSettings, directory: Path) -> subprocess.Popen[bytes]:
    """Start this node's daemons with `ray start --block` and wait until all nodes have joined. Raises NodeError with the
    names of late nodes."""
    end = time.monotonic() + settings.join_timeout_s
    while settings.node_rank and (error := settings.head_error()) is not None:
        if time.monotonic() > end:
            raise NodeError(
                f"Ray's head at {settings.master}:{settings.ray_port} did not answer within JOIN_TIMEOUT_S = "
                f"{settings.join_timeout_s:g}: {error}"
            )
        time.sleep(POLL_S)
    _wait_for_token(settings, end)
    # Two nodes may share a machine and its address, so only the head's port is fixed.
    options = ["--node-ip-address", settings.address, "--temp-dir", str(directory)]
    options += ["--resources", json.dumps({f"{NODE_RESOURCE}{settings.node_rank}": 1})]
    options += ["--num-cpus", str(len(os.sched_getaffinity(0)))]  # the cores that Slurm granted
    options += ["--object-store-memory", str(OBJECT_STORE_BYTES), "--disable-usage-stats", "--include-log-monitor=false"]
    options += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if settings.node_rank:
        options += ["--address", settings.ray_address]
    else:
        with socket.socket() as probe:  # the client server is unused but mandatory, and refuses port 0 (Ray 2.60)
            probe.bind(("", 0))
            options += ["--ray-client-server-port", str(probe.getsockname()[1])]
        options += ["--head", "--port", str(settings.ray_port), "--include-dashboard=false", "--no-monitor"]
    log = directory / "ray-start.log"
    with log.open("wb") as output:
        # Signals are blocked, because the engines must live until the ranks have saved.
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        inherited = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
        process = start_tied(command, DAEMON_SETTINGS | inherited, signal.SIGKILL, output, block_signals=True)
    _wait_for_nodes(settings, process, log, end)
    return process


def _wait_for_token(settings: NodeSettings, end: float) -> None:
    """Wait for the token that Ray requires: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token (2.60).

    Node 0 makes the file; other nodes may see it later. RAY_AUTH_MODE=disabled needs no token. Raises NodeError at `end`.
    """
    way_out = "give all nodes the ~/.ray/auth_token of node 0, or set the same RAY_AUTH_TOKEN"
    if settings.node_rank == 0 and lacks_ray_token(os.environ) and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        try:
            write_whole(home_directory(os.environ) / RAY_TOKEN, secrets.token_hex(32))
        except OSError as error:
            raise NodeError(f"no token for Ray can be saved here ({error}): {way_out}") from error
    while lacks_ray_token(os.environ):
        if time.monotonic() > end:
            raise NodeError(f"no token for Ray here within JOIN_TIMEOUT_S: {way_out}")
        time.sleep(POLL_S)


def _wait_for_nodes(settings: NodeSettings, process: subprocess.Popen[bytes], log: Path, end: float) -> None:
    """Wait until all nodes have joined, so that no node starts ranks that would wait forever. Raises NodeError at `end`."""
    wanted = {f"{NODE_RESOURCE}{number}" for number in range(settings.num_nodes)}
    present: set[str] = set()
    head_message = ""
    while not wanted <= present:
        if process.poll() is not None:
            text = log.read_text(encoding="utf-8", errors="replace").strip()[-3000:]
            raise NodeError(f"`ray start` ended with status {process.returncode}:\n{text}")
        if time.monotonic() > end:
            late = ", ".join(sorted(wanted - present))
            raise NodeError(f"Ray: {late} did not join within JOIN_TIMEOUT_S = {settings.join_timeout_s:g}{head_message}")
        time.sleep(POLL_S)
        if settings.head_error() is None:
            try:
                nodes = GcsClient(address=settings.ray_address).get_all_node_info(timeout=GCS_TIMEOUT_S).values()
                present = {name for node in nodes if node.state == GcsNodeInfo.ALIVE for name in node.resources_total}
            except (ray.exceptions.RayError, RuntimeError) as error:  # the head is slow, or about to end
                head_message = f"; the head's last answer: {error}"
