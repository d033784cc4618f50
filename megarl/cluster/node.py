"""`python -m megarl.cluster.node RECIPE [key=value ...]`: one node of a job, as `launch/node.sh` starts it.

`ray symmetric-run` does not serve here (2.60): it runs its command on the head alone, refuses a machine with a second Ray,
and ends with `ray stop`, which ends the Rays of other jobs on the machine too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megarl.cluster.cores import thread_environment
from megarl.cluster.job_environment import adapt_environment
from megarl.cluster.node_settings import NodeError, NodeSettings, network_environment, read_node_settings
from megarl.cluster.processes import Orphans, SharedMemory, adopt_orphans, end_descendants, start_tied
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.telemetry.exit_status import BAD_INPUT, COMPLETE, FAILED, REQUEUE
from megarl.telemetry.output import endure_output
from megarl.telemetry.run_directory import Resume, RunDirectory, latest_checkpoint

POLL_S = 0.5
# What the doctor may take for this node alone, besides waiting for the others.
EXAMINATION_S = 120.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Signalled(Exception):
    """A signal arrived before there was a process to pass it on to."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class ForwardedSignals:
    """Passes signals on to `target` once it is set; before, the first signal raises `Signalled`."""

    def __init__(self) -> None:
        self.target: Callable[[int], None] | None = None
        for number in FORWARDED:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.target is None:
            self.ignore()
            raise Signalled(number)
        self.target(number)

    def ignore(self) -> None:
        """Ignore signals: this process is ending, and must be able to clean up."""
        self.target = lambda number: None


def main(arguments: list[str]) -> int:
    """Run this node and return the agent's exit status; 2 for bad input, 1 where nodes are unfit or missing."""
    if not arguments:
        print("usage: node.sh RECIPE [key=value ...]; its variables are explained in launch/node.sh", file=sys.stderr)
        return BAD_INPUT
    try:
        settings = read_node_settings(os.environ)
        recipe = load_recipe(arguments[0], _overrides(arguments))
        settings.check(recipe)
        # A rank would refuse the directory only after the doctor and the start of Ray.
        directory = RunDirectory.of(recipe)
        directory.refuse_running()
        directory.check(recipe, Resume.of("--resume" in arguments, "--resume" not in arguments))
    except (RecipeError, ValueError) as error:
        print(error if isinstance(error, RecipeError) else f"node.sh: {error}", file=sys.stderr)
        return BAD_INPUT
    adopt_orphans()
    status, shared, signals = FAILED, SharedMemory(), ForwardedSignals()
    ray_directory = tempfile.TemporaryDirectory(prefix="megarl-", dir=settings.temporary, ignore_cleanup_errors=True)
    with ray_directory as temporary:
        try:
            settings.report("pid", str(os.getpid()))
            status = _run(settings, recipe, arguments, Path(temporary), signals, shared)
        except Signalled as signalled:  # no rank has started, so nothing is lost
            status = FAILED if signalled.number == signal.SIGINT else REQUEUE
        except NodeError as error:
            print(f"node {settings.node_rank} of {settings.num_nodes}: {error}", file=sys.stderr, flush=True)
        finally:
            signals.ignore()
            shared.scan()
            end_descendants()
            shared.remove()
            if status and settings.log_dir is not None:  # Ray's logs would go with its directory
                for logs in Path(temporary).glob("session_2*/logs"):
                    with contextlib.suppress(OSError):  # a log that cannot be copied must not change the status
                        shutil.copytree(logs, settings.log_dir / f"ray-node{settings.node_rank}", dirs_exist_ok=True)
            saved = latest_checkpoint(directory.checkpoints)
            settings.report("saved", "nothing" if saved is None else saved.name)
            settings.report("status", str(status))
    return status


def _run(
    settings: NodeSettings,
    recipe: Recipe,
    arguments: list[str],
    directory: Path,
    signals: ForwardedSignals,
    shared: SharedMemory,
) -> int:
    os.environ.update(network_environment(settings.address))
    os.environ.update(thread_environment(os.environ, recipe.trainer.threads))
    has_engines = recipe.rollout.replay is None
    if settings.node_rank == 0 and has_engines:
        settings.check_ray_port()  # before the doctor: the other nodes would join whatever listens there
    _ask_doctor(settings, arguments)
    if not has_engines:
        if not settings.is_trainer:
            raise NodeError("rollout.replay is set, so only trainer ranks run: set NUM_NODES = TRAINER_NODES")
        return _run_agent(settings, arguments, os.environ, signals, shared)
    from megarl.cluster.ray_cluster import reconnect_environment, start_node_daemons

    os.environ.update(reconnect_environment(recipe))  # Ray reads it when it is first used
    daemons = start_node_daemons(settings, directory)
    if settings.is_trainer:
        environment = {**os.environ, "MEGARL_RAY_ADDRESS": settings.ray_address}
        return _run_agent(settings, arguments, environment, signals, shared, daemons.pid)
    return _wait_for_end_of_head(settings, daemons, signals, shared, recipe.trainer.collective_timeout_s)


def _ask_doctor(settings: NodeSettings, arguments: list[str]) -> None:
    """Print the doctor's warnings and failures. Raises NodeError where a node is unfit."""
    command = [sys.executable, "-m", "megarl.cli", "doctor", arguments[0], *_overrides(arguments), "--json"]
    command += ["--nodes", str(settings.num_nodes), "--node-rank", str(settings.node_rank)]
    command += ["--master", f"{settings.master}:{settings.master_port}", "--timeout-s", f"{settings.join_timeout_s:g}"]
    process = start_tied(command, os.environ, signal.SIGKILL, subprocess.PIPE, merge_errors=False)
    deadline_s = 3 * settings.join_timeout_s + EXAMINATION_S
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        rule = f"3 * JOIN_TIMEOUT_S + {EXAMINATION_S:g} = {deadline_s:g} s"
        raise NodeError(f"the doctor has not ended within {rule}") from None
    try:
        findings = json.loads(output)
    except ValueError:
        raise NodeError(f"the doctor ended with status {process.returncode}: {output.decode()[-3000:]}") from None
    for finding in findings:
        if finding["severity"] != "ok":
            line = f"node {settings.node_rank}: {finding['severity']} {finding['check']}: {finding['message']}"
            print(line + (f" -> {finding['fix']}" if finding["fix"] else ""), file=sys.stderr, flush=True)
    if process.returncode:
        raise NodeError("the doctor finds the nodes unfit; its findings stand above")


def _run_agent(
    settings: NodeSettings,
    arguments: list[str],
    environment: Mapping[str, str],
    signals: ForwardedSignals,
    shared: SharedMemory,
    *other_children: int,
) -> int:
    """Run the agent of this node's ranks to its end, pass signals on to it, and return its exit status."""
    options = ["--nnodes", str(settings.trainer_nodes), "--node-rank", str(settings.node_rank)]
    options += ["--nproc-per-node", str(settings.ranks_per_node), "--max-restarts", str(settings.max_restarts)]
    options += ["--master-addr", settings.master, "--master-port", str(settings.master_port)]
    options += ["--local-addr", settings.address]
    if settings.log_dir is not None:
        options += ["--log-dir", str(settings.log_dir / f"node{settings.node_rank}"), "--tee", "3"]
    resume = [] if any(word.startswith("--resume") for word in arguments) else ["--resume-if-saved"]
    command = [sys.executable, "-m", "megarl.cluster.agent", *options, "-m", "megarl", *arguments, *resume]
    agent = start_tied(command, environment, signal.SIGTERM)
    passed_on: list[int] = []

    def pass_on(number: int) -> None:
        passed_on.append(number)
        agent.send_signal(number)

    signals.target = pass_on
    orphans = Orphans()
    while (status := agent.poll()) is None:
        orphans.end((agent.pid, *other_children))
        shared.scan_changes()
        time.sleep(POLL_S)
    if -status in passed_on and -status != signal.SIGINT:
        return REQUEUE  # the agent had no handler yet, and so no ranks
    return status if status >= 0 else 128 - status


def _wait_for_end_of_head(
    settings: NodeSettings,
    daemons: subprocess.Popen[bytes],
    signals: ForwardedSignals,
    shared: SharedMemory,
    silent_s: float,
) -> int:
    """Wait on a node of engines alone until Ray's head ends. Engines must live until the trainer has saved, so the first
    signal is only noted. A head that has ended refuses connections; a head whose machine or network is gone may stay silent
    for `silent_s`."""

    def note_first(number: int) -> None:
        signals.target = None

    signals.target = note_first
    last_answer, orphans = time.monotonic(), Orphans()
    while True:
        orphans.end((daemons.pid,))
        shared.scan_changes()
        have_daemons_ended = daemons.poll() is not None
        error = settings.head_error()
        if isinstance(error, ConnectionRefusedError):
            return COMPLETE
        if have_daemons_ended:
            time.sleep(POLL_S)  # the head may be ending right now
            if isinstance(settings.head_error(), ConnectionRefusedError):
                return COMPLETE
            raise NodeError(f"Ray on this node ended with status {daemons.returncode} before node 0 did")
        if error is None:
            last_answer = time.monotonic()
        elif time.monotonic() - last_answer > silent_s:
            rule = f"trainer.collective_timeout_s = {silent_s:g}"
            raise NodeError(f"node 0 at {settings.master}:{settings.ray_port} has not answered for {rule}: {error}")
        time.sleep(POLL_S)


def _overrides(arguments: list[str]) -> list[str]:
    """Return the recipe's overrides; words with a dash belong to the trainer."""
    return [word for word in arguments[1:] if not word.startswith("-")]


if __name__ == "__main__":
    endure_output()
    adapt_environment(os.environ, is_one_node=os.environ.get("NUM_NODES") == "1")
    sys.exit(main(sys.argv[1:]))
