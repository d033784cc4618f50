"""`python -m megarl.cluster.node RECIPE [key=value ...]`: one node of a job, as `launch/node.sh` starts it.

`ray symmetric-run` does not fit (2.60): it runs its command on the head alone, refuses a machine with a second Ray, and ends
with `ray stop`, which also ends the Rays of other jobs on the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megarl.cluster.cores import thread_environment
from megarl.cluster.job_environment import adapt_environment
from megarl.cluster.node_settings import NodeError, NodeSettings, network_environment, read_node_settings
from megarl.cluster.preemption import LeaveNow, handle_signals
from megarl.cluster.processes import Descendants, start_tied
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.telemetry.disk import endure_output
from megarl.telemetry.exit_status import BAD_INPUT, COMPLETE, FAILED, REQUEUE
from megarl.telemetry.run_directory import Resume, RunDirectory, latest_checkpoint

POLL_S = 0.5
# How long the doctor may examine this node, in addition to the wait for the other nodes.
EXAMINATION_S = 120.0


class ForwardedSignals:
    """Forwards signals to `target`. Without a target, the first signal raises KeyboardInterrupt or LeaveNow."""

    def __init__(self) -> None:
        self.target: Callable[[int], object] | None = None
        handle_signals(self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.target is None:
            self.ignore()
            raise KeyboardInterrupt if number == signal.SIGINT else LeaveNow
        self.target(number)

    def ignore(self) -> None:
        """Ignore signals from now on, because this process is ending and must clean up."""
        self.target = lambda number: None


def main(arguments: list[str]) -> int:
    """Run this node and return the agent's exit status; 2 for bad input, 1 if nodes are unfit or missing."""
    if not arguments:
        print("usage: node.sh RECIPE [key=value ...]; its variables are explained in launch/node.sh", file=sys.stderr)
        return BAD_INPUT
    overrides = [word for word in arguments[1:] if not word.startswith("-")]  # words with a dash belong to the trainer
    try:
        settings = read_node_settings(os.environ)
        recipe = load_recipe(arguments[0], overrides)
        settings.check(recipe)
        # A rank would refuse the directory only after the doctor and the start of Ray.
        directory = RunDirectory.of(recipe)
        directory.refuse_running()
        directory.check(recipe, Resume.of("--resume" in arguments, "--resume" not in arguments))
    except (RecipeError, ValueError) as error:
        print(error if isinstance(error, RecipeError) else f"node.sh: {error}", file=sys.stderr)
        return BAD_INPUT
    status, node = FAILED, Node(settings, recipe, arguments, overrides)
    ray_directory = tempfile.TemporaryDirectory(prefix="megarl-", dir=settings.temporary, ignore_cleanup_errors=True)
    with ray_directory as temporary:
        try:
            settings.report("pid", str(os.getpid()))
            status = node.run(Path(temporary))
        except LeaveNow:  # no rank has started, so nothing is lost
            status = REQUEUE
        except KeyboardInterrupt:
            status = FAILED
        except NodeError as error:
            print(f"node {settings.node_rank} of {settings.num_nodes}: {error}", file=sys.stderr, flush=True)
        finally:
            node.signals.ignore()
            node.descendants.end()
            if status and settings.log_dir is not None:  # Ray's logs vanish with its directory
                for logs in Path(temporary).glob("session_2*/logs"):
                    with contextlib.suppress(OSError):  # a log that cannot be copied must not change the status
                        shutil.copytree(logs, settings.log_dir / f"ray-node{settings.node_rank}", dirs_exist_ok=True)
            saved = latest_checkpoint(directory.checkpoints)
            settings.report("saved", "nothing" if saved is None else saved.name)
            settings.report("status", str(status))
    return status


@dataclass
class Node:
    """The programs of this node: the doctor, Ray's daemons, and the agent of the ranks."""

    settings: NodeSettings
    recipe: Recipe
    arguments: list[str]
    overrides: list[str]
    signals: ForwardedSignals = field(default_factory=ForwardedSignals)
    descendants: Descendants = field(default_factory=Descendants)

    def run(self, directory: Path) -> int:
        """Run this node to its end with Ray's files in `directory`; return the exit status."""
        settings, recipe = self.settings, self.recipe
        os.environ.update(network_environment(settings.address))
        os.environ.update(thread_environment(os.environ, recipe.trainer.threads))
        has_engines = recipe.has_engines
        self._run_doctor()
        if not has_engines:
            if not settings.is_trainer:
                why = "no engines run (rollout.replay, run.kind)"
                raise NodeError(f"{why}, so only trainer ranks do: set NUM_NODES = TRAINER_NODES")
            return self._run_agent(os.environ)
        from megarl.cluster.ray_cluster import reconnect_environment, start_node_daemons

        os.environ.update(reconnect_environment(recipe))  # Ray reads it at its first use
        daemons = start_node_daemons(settings, directory)
        if settings.is_trainer:
            return self._run_agent({**os.environ, "MEGARL_RAY_ADDRESS": settings.ray_address}, daemons.pid)
        return self._wait_for_head(daemons)

    def _run_doctor(self) -> None:
        """Run the doctor, which prints its findings. Raises NodeError if a node is unfit."""
        settings = self.settings
        command = [sys.executable, "-m", "megarl.cli", "doctor", self.arguments[0], *self.overrides]
        command += ["--nodes", str(settings.num_nodes), "--node-rank", str(settings.node_rank)]
        command += ["--master", f"{settings.master}:{settings.master_port}", "--timeout-s", f"{settings.join_timeout_s:g}"]
        if self.recipe.has_engines:  # before the other nodes join, which would join any program that listens there
            command += ["--ray-port", str(settings.ray_port)]
        deadline_s = 3 * settings.join_timeout_s + EXAMINATION_S
        try:
            status = start_tied(command, os.environ, signal.SIGKILL).wait(deadline_s)
        except subprocess.TimeoutExpired:
            rule = f"3 * JOIN_TIMEOUT_S + {EXAMINATION_S:g} = {deadline_s:g} s"
            raise NodeError(f"the doctor has not ended within {rule}") from None
        if status:
            raise NodeError(f"the doctor finds the nodes unfit (exit status {status}); its findings stand above")

    def _run_agent(self, environment: Mapping[str, str], *other_children: int) -> int:
        """Run the agent of this node's ranks, forward signals to it, and return its exit status."""
        settings = self.settings
        options = ["--nnodes", str(settings.trainer_nodes), "--node-rank", str(settings.node_rank)]
        options += ["--nproc-per-node", str(settings.ranks_per_node), "--max-restarts", str(settings.max_restarts)]
        options += ["--master-addr", settings.master, "--master-port", str(settings.master_port)]
        options += ["--local-addr", settings.address]
        if settings.log_dir is not None:
            options += ["--log-dir", str(settings.log_dir / f"node{settings.node_rank}"), "--tee", "3"]
        resume = [] if any(word.startswith("--resume") for word in self.arguments) else ["--resume-if-saved"]
        command = [sys.executable, "-m", "megarl.cluster.node_agent", *options, "-m", "megarl", *self.arguments, *resume]
        agent = start_tied(command, environment, signal.SIGTERM)
        forwarded: list[int] = []

        def forward(number: int) -> None:
            forwarded.append(number)
            agent.send_signal(number)

        self.signals.target = forward
        while (status := agent.poll()) is None:
            self.descendants.tend((agent.pid, *other_children))
            time.sleep(POLL_S)
        if -status in forwarded and -status != signal.SIGINT:
            return REQUEUE  # the agent had no handler yet, and so no ranks
        return status if status >= 0 else 128 - status

    def _wait_for_head(self, daemons: subprocess.Popen[bytes]) -> int:
        """Wait on a node of engines until Ray's head ends. Engines must live until the trainer has saved, so only the second
        signal ends the wait. A head that has ended refuses connections; a lost machine or network may be silent for
        `trainer.collective_timeout_s`."""
        settings, silent_s = self.settings, self.recipe.trainer.collective_timeout_s
        self.signals.target = lambda number: setattr(self.signals, "target", None)
        last_answer = time.monotonic()
        while True:
            self.descendants.tend((daemons.pid,))
            have_daemons_ended = daemons.poll() is not None
            error = settings.head_error()
            if have_daemons_ended and not isinstance(error, ConnectionRefusedError):
                time.sleep(POLL_S)  # the head may be ending right now
                error = settings.head_error()
            if isinstance(error, ConnectionRefusedError):
                return COMPLETE
            if have_daemons_ended:
                raise NodeError(f"Ray on this node ended with status {daemons.returncode} before node 0 did")
            if error is None:
                last_answer = time.monotonic()
            elif time.monotonic() - last_answer > silent_s:
                rule = f"trainer.collective_timeout_s = {silent_s:g}"
                raise NodeError(f"node 0 at {settings.master}:{settings.ray_port} has not answered for {rule}: {error}")
            time.sleep(POLL_S)


if __name__ == "__main__":
    endure_output()
    adapt_environment(os.environ, is_one_node=os.environ.get("NUM_NODES") == "1")
    sys.exit(main(sys.argv[1:]))
