"""A node's settings from the launcher's environment variables (see launch/node.sh), and its network."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.recipe import Recipe

# A socket's path has at most 107 bytes, and Ray appends up to 70 to its directory.
MAX_DIRECTORY_LENGTH = 20
CONNECT_TIMEOUT_S = 2.0


class NodeError(Exception):
    """The job cannot start on this node, or lost a part that it needs; the message says which."""


@dataclass(frozen=True)
class NodeSettings:
    """Node `node_rank` of `num_nodes`. The first `trainer_nodes` run `ranks_per_node` trainer ranks each, the others only
    engines. Node 0 is the `master`; Ray's head listens there at `ray_port`."""

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
    def ray_address(self) -> str:
        """The head's numeric address, because Ray compares addresses as texts."""
        return f"{socket.gethostbyname(self.master)}:{self.ray_port}"

    @property
    def temporary(self) -> str:
        """The parent of Ray's directory."""
        root = tempfile.gettempdir()
        return root if len(root) <= MAX_DIRECTORY_LENGTH else "/tmp"

    def head_error(self) -> OSError | None:
        """Connect to the head of Ray; return None where it answers."""
        try:
            socket.create_connection((self.master, self.ray_port), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return error
        return None

    def report(self, topic: str, word: str) -> None:
        """Write a word for the launcher to LOG_DIR/node-N.TOPIC: `pid` once signals are handled; at the end `status` and
        `saved`, the name of the last checkpoint."""
        if self.log_dir is None:
            return
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            (self.log_dir / f"node-{self.node_rank}.{topic}").write_text(f"{word}\n", encoding="utf-8")
        except OSError as error:  # a full disk must not change how the job ends
            print(f"node.sh: LOG_DIR = {self.log_dir}: {error}", file=sys.stderr, flush=True)

    def check(self, recipe: Recipe) -> None:
        """Check the number of ranks. Raises ValueError where the recipe has another one."""
        ranks = self.trainer_nodes * self.ranks_per_node
        if ranks != recipe.trainer.ranks:
            raise ValueError(
                f"TRAINER_NODES * RANKS_PER_NODE = {self.trainer_nodes} * {self.ranks_per_node} = {ranks}: must be "
                f"trainer.ranks = {recipe.trainer.ranks}"
            )

    def check_ray_port(self) -> None:
        """Check the port of Ray's head on this node. Raises NodeError where a program listens there."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a recently closed port is free
            try:
                probe.bind(("", self.ray_port))
            except OSError as error:
                raise NodeError(
                    f"RAY_PORT = {self.ray_port} is taken on node 0 ({error.strerror}), perhaps by the Ray of another job: "
                    "give all nodes another RAY_PORT, or end the program that listens there"
                ) from error


def read_node_settings(environment: Mapping[str, str]) -> NodeSettings:
    """Read the settings. Raises ValueError with the variable, its value and the rule."""

    def whole(name: str, minimum: int, default: int | None = None) -> int:
        value = environment.get(name, "")
        if not value and default is not None:
            return default
        if not value.isdecimal() or int(value) < minimum:
            raise ValueError(f"{name} = {value or 'nothing'}: must be a whole number from {minimum} on")
        return int(value)

    master = environment.get("MASTER_ADDRESS", "")
    if not master:
        raise ValueError("MASTER_ADDRESS is not set: the name or address of node 0, as the others reach it")
    num_nodes, node_rank = whole("NUM_NODES", 1), whole("NODE_RANK", 0)
    trainer_nodes = whole("TRAINER_NODES", 1, num_nodes)
    if node_rank >= num_nodes:
        raise ValueError(f"NODE_RANK = {node_rank}: must be below NUM_NODES = {num_nodes}")
    if trainer_nodes > num_nodes:
        raise ValueError(f"TRAINER_NODES = {trainer_nodes}: must not be above NUM_NODES = {num_nodes}")
    address = environment.get("NODE_ADDRESS")
    try:
        number = socket.gethostbyname(master)
        if not address:
            address = address_towards(number)
    except OSError as error:
        raise ValueError(f"MASTER_ADDRESS = {master}: no way there from this machine ({error})") from error
    if num_nodes > 1 and number != master and number.startswith("127."):
        # Debian resolves a machine's own name to a loopback address, which node 0 would tell the other nodes.
        raise ValueError(
            f"MASTER_ADDRESS = {master}: is {number} on this machine, which other nodes do not reach: give its "
            "number in their network, or correct /etc/hosts"
        )
    return NodeSettings(
        num_nodes=num_nodes,
        node_rank=node_rank,
        ranks_per_node=whole("RANKS_PER_NODE", 1),
        master=master,
        master_port=whole("MASTER_PORT", 1, 29500),
        ray_port=whole("RAY_PORT", 1, 6379),
        trainer_nodes=trainer_nodes,
        address=address,
        max_restarts=whole("MAX_RESTARTS", 0, 0),
        join_timeout_s=whole("JOIN_TIMEOUT_S", 1, 300),
        log_dir=Path(environment["LOG_DIR"]).absolute() if environment.get("LOG_DIR") else None,
    )


def address_towards(number: str) -> str:
    """Return this machine's address (IPv4, as Ray's) on the route to another. Raises OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((number, 9))  # sends nothing; the kernel looks up the route
        return str(probe.getsockname()[0])


def network_environment(address: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that bind gloo, NCCL and vLLM to the interface with `address`; values of the site stay."""
    variables = {"VLLM_HOST_IP": address}
    for name, entries in psutil.net_if_addrs().items():  # none has it behind address translation
        if any(entry.address.partition("%")[0] == address for entry in entries):
            # NCCL takes a name without `=` as a prefix.
            variables |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
            break
    return {variable: value for variable, value in variables.items() if variable not in environment}
