"""What the launcher says about a node, in variables of the environment, and what follows from it about the network."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.cluster.node_failure import NodeError
from megarl.recipe import Recipe

# A socket's path holds 107 bytes; Ray puts up to 70 behind its directory.
LONGEST_DIRECTORY = 20


@dataclass(frozen=True)
class NodeSettings:
    """This node is number `node_rank` of `num_nodes`; the first `trainer_nodes` run `ranks_per_node` trainer ranks each, the
    others only engines. They meet at node 0, `master`; Ray's head listens at its `ray_port`."""

    num_nodes: int
    node_rank: int
    ranks_per_node: int
    master: str
    master_port: int
    ray_port: int
    trainer_nodes: int
    address: str  # of this node, as the others reach it
    max_restarts: int
    join_timeout_s: float
    log_dir: Path | None

    @property
    def is_trainer(self) -> bool:
        return self.node_rank < self.trainer_nodes

    @property
    def temporary(self) -> str:
        """Where Ray's directory may lie."""
        root = tempfile.gettempdir()
        return root if len(root) <= LONGEST_DIRECTORY else "/tmp"

    def tell(self, what: str, word: str) -> None:
        """Leave a word for whoever started the nodes, in LOG_DIR where there is one: `pid`, once signals are taken; `status`
        and the name of the last checkpoint, `saved`, at the end."""
        if self.log_dir is None:
            return
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            (self.log_dir / f"node-{self.node_rank}.{what}").write_text(f"{word}\n", encoding="utf-8")
        except OSError as error:  # a full disk must not change how the job ends
            print(f"node.sh: LOG_DIR = {self.log_dir}: {error}", file=sys.stderr, flush=True)

    def check(self, recipe: Recipe) -> None:
        """Raises ValueError where the ranks are not those of the recipe."""
        ranks = self.trainer_nodes * self.ranks_per_node
        if ranks != recipe.trainer.ranks:
            raise ValueError(
                f"TRAINER_NODES * RANKS_PER_NODE = {self.trainer_nodes} * {self.ranks_per_node} = {ranks}: must be "
                f"trainer.ranks = {recipe.trainer.ranks}"
            )


def read_node_settings(environment: Mapping[str, str]) -> NodeSettings:
    """Raises ValueError with the variable, its value and the rule."""
    master = environment.get("MASTER_ADDRESS", "")
    if not master:
        raise ValueError("MASTER_ADDRESS is not set: the name or address of node 0, as the others reach it")
    num_nodes = _whole(environment, "NUM_NODES", 1)
    node_rank = _whole(environment, "NODE_RANK", 0)
    trainer_nodes = _whole(environment, "TRAINER_NODES", 1, num_nodes)
    if node_rank >= num_nodes:
        raise ValueError(f"NODE_RANK = {node_rank}: must be below NUM_NODES = {num_nodes}")
    if trainer_nodes > num_nodes:
        raise ValueError(f"TRAINER_NODES = {trainer_nodes}: must not be above NUM_NODES = {num_nodes}")
    number = _number(master)
    if num_nodes > 1 and number != master and number.startswith("127."):
        # Debian gives a machine's own name such a number. Node 0 would tell it to nodes that cannot reach it.
        raise ValueError(
            f"MASTER_ADDRESS = {master}: is {number} on this machine, which other nodes do not reach: give its "
            "number in their network, or mend /etc/hosts"
        )
    return NodeSettings(
        num_nodes=num_nodes,
        node_rank=node_rank,
        ranks_per_node=_whole(environment, "RANKS_PER_NODE", 1),
        master=master,
        master_port=_whole(environment, "MASTER_PORT", 1, 29500),
        ray_port=_whole(environment, "RAY_PORT", 1, 6379),
        trainer_nodes=trainer_nodes,
        address=environment.get("NODE_ADDRESS") or own_address(master),
        max_restarts=_whole(environment, "MAX_RESTARTS", 0, 0),
        join_timeout_s=_whole(environment, "JOIN_TIMEOUT_S", 1, 300),
        log_dir=Path(environment["LOG_DIR"]).absolute() if environment.get("LOG_DIR") else None,
    )


def _whole(environment: Mapping[str, str], name: str, least: int, absent: int | None = None) -> int:
    value = environment.get(name, "")
    if not value and absent is not None:
        return absent
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{name} = {value or 'nothing'}: must be a whole number from {least} on")
    return int(value)


def own_address(master: str) -> str:
    """This machine's address (IPv4, as all of Ray's are) on the way to `master`. Raises ValueError where there is no way."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((_number(master), 9))  # sends nothing: it only asks the kernel for the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"MASTER_ADDRESS = {master}: no way there from this machine ({error})") from error


def _number(master: str) -> str:
    try:
        return socket.gethostbyname(master)
    except OSError as error:
        raise ValueError(f"MASTER_ADDRESS = {master}: no way there from this machine ({error})") from error


def check_port(settings: NodeSettings) -> None:
    """Raises NodeError where something listens at the port of Ray's head, on node 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed a moment ago is free
        try:
            probe.bind(("", settings.ray_port))
        except OSError as error:
            raise NodeError(
                f"RAY_PORT = {settings.ray_port} is taken on node 0 ({error.strerror}), perhaps by the Ray of another job: "
                "give all nodes another RAY_PORT, or end what listens there"
            ) from error


def interface_of(address: str) -> str | None:
    """The network interface with this address; None where it has no name here, as behind a translation of addresses."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def network_environment(address: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What has gloo, NCCL and vLLM speak over the interface that reaches node 0, where the site has not said otherwise."""
    name = interface_of(address)
    wanted = {"VLLM_HOST_IP": address}
    if name is not None:
        wanted |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # `=`: this name, not all that begin so
    return {key: value for key, value in wanted.items() if key not in environment}
