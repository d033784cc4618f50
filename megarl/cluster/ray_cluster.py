"""Ray for one run: a small local cluster, or the one the launcher made."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray._private.authentication import authentication_token_setup as authentication

from megarl.rollout import RolloutError

# Warns in every process that Ray's token authentication is on, which is as it should be.
logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)

NAMESPACE = "megarl"
OBJECT_STORE_BYTES = 256 << 20
# A launcher gives each node of a job one of its own; what is to run there asks for a little of it.
NODE_RESOURCE = "megarl_node_"
NODE_SHARE = 0.001
# Ray itself tries a dead address for minutes, and then ends the process.
REACH_S = 10.0

# What torchrun says about a trainer rank. vLLM would take it for its own in any process that inherits it.
TORCHRUN_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip


class ClusterError(ValueError):
    """A Ray cluster that this run cannot use; the message says why and what to do."""


def start_cluster(address: str | None = None) -> str:
    """Start Ray on this machine, or join the cluster at `address`; the address other processes join by."""
    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    if address is not None:
        return join_cluster(address)
    try:
        with _without_torchrun():
            ray.init(
                address="local",
                namespace=NAMESPACE,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
            )
    except OSError as error:  # no place for its token or its sockets
        raise ClusterError(
            f"Ray does not start on this machine: {error}; start the run with megarl train, which gives Ray other places, "
            "or set HOME to a directory that can be written, and TMPDIR to a short one"
        ) from error
    return ray.get_runtime_context().gcs_address


def join_cluster(address: str) -> str:
    """Connect this process (a trainer rank) to a running cluster; returns its address. Raises ClusterError where nobody
    listens there, or where other versions of Ray or Python do."""
    if not ray.is_initialized():
        _reach(address)
        # A cluster that a rank started asks for this machine's token, and with an address given Ray shows it none by itself
        # (2.60); it has no public call that says so after its import.
        authentication.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        try:
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
            )
        except (RuntimeError, ConnectionError, ValueError) as error:
            ray.shutdown()
            raise ClusterError(
                f"the Ray cluster at {address} does not take this process: {' '.join(str(error).split())}; end that Ray on "
                f"every node (ray stop) and start the job again, or give another MEGARL_RAY_ADDRESS"
            ) from error
    return address


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"MEGARL_RAY_ADDRESS = {address} is not HOST:PORT, as in 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray answers at {address} within {REACH_S:g} s ({error}): start its head there (launch/node.sh does), or "
            f"give another MEGARL_RAY_ADDRESS; without one a run on a single node starts its own"
        ) from error


def numbered_nodes() -> dict[int, dict[str, Any]]:
    """The cluster's living nodes that a launcher gave numbers, by these, as `ray.nodes` has them."""
    found = {}
    for node in ray.nodes():
        for name in node["Resources"] if node["Alive"] else ():
            number = name.removeprefix(NODE_RESOURCE)
            if number != name and number.isdigit():
                found[int(number)] = node
    return found


def own_node() -> int | None:
    """The number of the node that this process is on; None where nodes have none."""
    own = ray.get_runtime_context().get_node_id()
    return next((number for number, node in numbered_nodes().items() if node["NodeID"] == own), None)


def node_share(node: int) -> dict[str, float]:
    """The resources that put an actor or a task on a node of the job; none where nodes have no numbers, as in a Ray of this
    machine alone. Raises RolloutError where the node is gone."""
    alive = numbered_nodes()
    if not alive:
        return {}
    if node not in alive:
        raise RolloutError(f"node {node} is gone from the Ray cluster, which has the nodes {sorted(alive)} left")
    return {f"{NODE_RESOURCE}{node}": NODE_SHARE}


def stop_cluster() -> None:
    """Leave the cluster, and end it where this process started it."""
    if ray.is_initialized():
        ray.shutdown()


def daemon_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What Ray's daemons, and all workers they start, are to find in their environment, from that of a trainer rank or of a
    launcher."""
    # Ray gives workers the lowest priority but four; engines starve wherever anything else runs on the machine
    # (starting one took 110 s in place of 20 beside busy neighbours).
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    return settings | {name: value for name, value in environment.items() if name not in TORCHRUN_VARIABLES}


@contextmanager
def _without_torchrun() -> Iterator[None]:
    """The environment of the daemons for as long as they are started from this process."""
    kept = dict(os.environ)
    wanted = daemon_environment(kept)
    for name in kept.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted.keys() - kept.keys():
            os.environ.pop(name, None)
        os.environ.update(kept)
