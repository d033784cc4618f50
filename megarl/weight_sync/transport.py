"""Choose the transport of a run, and say how long each end of a sync waits.

With `mapped` the workers of an engine map the parameters of the trainer ranks, and copy their boxes straight from there.
With `group` the ranks send buckets to the workers in the process group of each engine. Where trainer ranks and workers
share the devices of several nodes, buckets go in two legs: a rank receives what the workers on its device need, and the
workers map its buckets.
"""

from __future__ import annotations

from typing import NamedTuple

from megarl.planner.placement import PlacementError

NUM_BUCKETS = 2  # one is written while the other is read
# How many times `weight_sync.timeout_s` each end waits, counted from the begin of an attempt. An end must wait longer for a
# process that may itself be waiting. Otherwise both give up at the same time, and the error names the wrong process.
RANK_WAITS = 2  # a trainer rank for another rank, in two legs; for an engine it waits once
REPORT_WAITS = 4  # rank 0 at most for an engine's report (`WeightManifest.report_waits`)


class Transport(NamedTuple):
    """A transport and the reason for it; `is_final` if the run may not take another one where shared memory is too small."""

    name: str
    reason: str
    is_final: bool = True

    @property
    def text(self) -> str:
        return f"{self.name}, because {self.reason}"


def choose_transport(
    wanted: str, one_host: bool, obstacle: str | None = None, no_peer_access: tuple[int, int] | None = None
) -> Transport:
    """Resolve `weight_sync.transport`: `auto` takes `mapped` where trainer ranks and engines are on one host; otherwise
    `group`.

    `obstacle` says what in the recipe rules out mapping. `no_peer_access` names two of the run's devices on one host
    that cannot reach each other's memory. Raises PlacementError where this machine, or this run, cannot have the wanted
    transport.
    """
    if not one_host:
        obstacle = "trainer ranks and engines are on several hosts"
    elif obstacle is None and no_peer_access is not None:
        obstacle = "GPUs {} and {} cannot reach each other's memory (no peer access)".format(*no_peer_access)
    if wanted == "mapped" and obstacle is not None:
        raise PlacementError(f"weight_sync.transport = mapped: {obstacle}; use auto")
    if wanted != "auto":
        return Transport(wanted, "weight_sync.transport says so")
    if obstacle is not None:
        return Transport("group", obstacle)
    return Transport("mapped", "trainer ranks and engines share one host", is_final=False)
