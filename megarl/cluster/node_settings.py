"""A node's settings from the launcher's environment variables (see launch/node.sh), and its network."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from megarl.recipe import Recipe

# A socket's path has at most 107 bytes, and Ray appends up to 70 to its directory.
MAX_DIRECTORY_LENGTH = 20
CONNECT_TIMEOUT_S = 2.0


class NodeError(Exception):
    """The job cannot start on this node, or has lost a necessary part; the message names the reason."""


class NodeSettings(BaseModel):
    """Node `node_rank` of `num_nodes`. The first `trainer_nodes` nodes run `ranks_per_node` trainer ranks each, the other
    nodes only engines. Node 0 is the `master`; Ray's head listens there at `ray_port`. The launcher's variables have the
    fields' names, except MASTER_ADDRESS and NODE_ADDRESS."""

    model_config = ConfigDict(frozen=True, alias_generator=str.upper)

    num_nodes: PositiveInt
    node_rank: NonNegativeInt
    ranks_per_node: PositiveInt
    master: str = Field(alias="MASTER_ADDRESS")
    master_port: PositiveInt = 29500
    ray_port: PositiveInt = 6379
    trainer_nodes: PositiveInt
    address: str = Field("", alias="NODE_ADDRESS")  # of this node, for the other nodes
    max_restarts: NonNegativeInt = 0
    join_timeout_s: PositiveInt = 300
    log_dir: Path | None = None

    @property
    def is_trainer(self) -> bool:
        return self.node_rank < self.trainer_nodes

    @property
    def ray_address(self) -> str:
        """The head's numeric address and port. Ray compares addresses as texts."""
        return f"{socket.gethostbyname(self.master)}:{self.ray_port}"

    @property
    def temporary(self) -> str:
        """The parent of Ray's directory."""
        root = tempfile.gettempdir()
        return root if len(root) <= MAX_DIRECTORY_LENGTH else "/tmp"

    def head_error(self) -> OSError | None:
        """Connect to the head of Ray; return the error, or None if the head answers."""
        try:
            socket.create_connection((self.master, self.ray_port), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return error
        return None

    def report(self, topic: str, word: str) -> None:
        """Write a word for the launcher to LOG_DIR/node-N.TOPIC: `pid` once signals are handled; `status` and `saved` (the
        name of the last checkpoint) at the end."""
        if self.log_dir is None:
            return
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            (self.log_dir / f"node-{self.node_rank}.{topic}").write_text(f"{word}\n", encoding="utf-8")
        except OSError as error:  # a full disk must not change how the job ends
            print(f"node.sh: LOG_DIR = {self.log_dir}: {error}", file=sys.stderr, flush=True)

    def check(self, recipe: Recipe) -> None:
        """Check the number of ranks. Raises ValueError if the recipe has another number."""
        ranks = self.trainer_nodes * self.ranks_per_node
        if ranks != recipe.trainer.ranks:
            raise ValueError(
                f"TRAINER_NODES * RANKS_PER_NODE = {self.trainer_nodes} * {self.ranks_per_node} = {ranks}: must be "
                f"trainer.ranks = {recipe.trainer.ranks}"
            )


def read_node_settings(environment: Mapping[str, str]) -> NodeSettings:
    """Read the settings. Raises ValueError with every wrong variable, its value and the rule."""
    given = {name: value for name, value in environment.items() if value}
    try:
        settings = NodeSettings.model_validate({"TRAINER_NODES": given.get("NUM_NODES", "1")} | given)
    except ValidationError as error:
        faults = [(str(fault["loc"][0]), fault["msg"]) for fault in error.errors()]
        raise ValueError("; ".join(f"{name} = {given.get(name, 'nothing')}: {rule}" for name, rule in faults)) from error
    num_nodes, master = settings.num_nodes, settings.master
    if settings.node_rank >= num_nodes:
        raise ValueError(f"NODE_RANK = {settings.node_rank}: must be below NUM_NODES = {num_nodes}")
    if settings.trainer_nodes > num_nodes:
        raise ValueError(f"TRAINER_NODES = {settings.trainer_nodes}: must not be above NUM_NODES = {num_nodes}")
    try:
        number = socket.gethostbyname(master)
        address = settings.address or address_towards(number)
    except OSError as error:
        raise ValueError(f"MASTER_ADDRESS = {master}: no way there from this machine ({error})") from error
    if num_nodes > 1 and number != master and number.startswith("127."):
        # Debian resolves a machine's own name to a loopback address, and node 0 would give this address to the other nodes.
        raise ValueError(
            f"MASTER_ADDRESS = {master}: is {number} on this machine, which other nodes do not reach: give its "
            "number in their network, or correct /etc/hosts"
        )
    log_dir = None if settings.log_dir is None else settings.log_dir.absolute()
    return settings.model_copy(update={"address": address, "log_dir": log_dir})


def address_towards(number: str) -> str:
    """Return this machine's address (IPv4, as Ray's) on the route to another. Raises OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((number, 9))  # sends nothing; the kernel looks up the route
        return str(probe.getsockname()[0])


def network_environment(address: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that bind gloo, NCCL and vLLM to the interface with `address`; the site's variables stay."""
    variables = {"VLLM_HOST_IP": address}
    for name, entries in psutil.net_if_addrs().items():  # behind address translation no interface has the address
        if any(entry.address.partition("%")[0] == address for entry in entries):
            # NCCL takes a name without `=` as a prefix.
            variables |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
            break
    return {variable: value for variable, value in variables.items() if variable not in environment}
