"""`python -m megarl.cluster.node RECIPE [key=value ...]`: one node of a job, as `launch/node.sh` starts it."""

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
from collections.abc import Mapping
from pathlib import Path

from megarl.cluster.cores import thread_environment
from megarl.cluster.job_environment import adapt_environment
from megarl.cluster.node_failure import NodeError
from megarl.cluster.node_settings import NodeSettings, check_port, network_environment, read_node_settings
from megarl.cluster.processes import (
    Orphans,
    SharedMemory,
    Signalled,
    Signals,
    adopt_orphans,
    catch_signals,
    end_descendants,
    start_tied,
)
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.telemetry.exit_status import BAD_INPUT, COMPLETE, FAILED, REQUEUE
from megarl.telemetry.output import endure_output
from megarl.telemetry.run_directory import Resume, RunDirectory, latest_checkpoint

POLL_S = 0.5
# What the doctor does on this node alone, beside waiting for the others.
EXAMINATION_S = 120.0


def main(arguments: list[str]) -> int:
    """The agent's exit status; 2 for what a user must mend, 1 where the nodes are not fit or did not come."""
    if not arguments:
        print("usage: node.sh RECIPE [key=value ...]; its variables are explained in launch/node.sh", file=sys.stderr)
        return BAD_INPUT
    try:
        settings = read_node_settings(os.environ)
        recipe = load_recipe(arguments[0], _overrides(arguments))
        settings.check(recipe)
        # Here already: a rank would say it when all nodes have been examined and Ray runs on them.
        directory = RunDirectory.of(recipe)
        directory.refuse_running()
        directory.check(recipe, Resume.of("--resume" in arguments, "--resume" not in arguments))
    except (RecipeError, ValueError) as error:
        print(error if isinstance(error, RecipeError) else f"node.sh: {error}", file=sys.stderr)
        return BAD_INPUT
    adopt_orphans()
    ray_directory = tempfile.TemporaryDirectory(prefix="megarl-", dir=settings.temporary, ignore_cleanup_errors=True)
    with catch_signals() as signals, ray_directory as temporary:
        status, shared = FAILED, SharedMemory()
        try:
            settings.tell("pid", str(os.getpid()))
            status = _run(settings, recipe, arguments, Path(temporary), signals, shared)
        except Signalled as signalled:  # before any rank was there: nothing is lost, so it may be started again
            status = FAILED if signalled.number == signal.SIGINT else REQUEUE
        except NodeError as error:
            print(f"node {settings.node_rank} of {settings.num_nodes}: {error}", file=sys.stderr, flush=True)
        finally:
            signals.ignore()
            shared.look_closely()
            end_descendants()
            shared.remove()
            if status and settings.log_dir is not None:
                _keep_logs(Path(temporary), settings.log_dir / f"ray-node{settings.node_rank}")
            saved = latest_checkpoint(directory.checkpoints)
            settings.tell("saved", "nothing" if saved is None else saved.name)
            settings.tell("status", str(status))
    return status


def _run(
    settings: NodeSettings,
    recipe: Recipe,
    arguments: list[str],
    directory: Path,
    signals: Signals,
    shared: SharedMemory,
) -> int:
    os.environ.update(network_environment(settings.address))
    os.environ.update(thread_environment(os.environ, recipe.trainer.threads))
    if settings.node_rank == 0 and recipe.rollout.replay is None:
        check_port(settings)  # before the doctor lets the other nodes go on: they would join what listens there
    _ask_doctor(settings, arguments)
    if recipe.rollout.replay is not None:  # no engines, so no Ray
        if not settings.is_trainer:
            raise NodeError("rollout.replay is set, so nothing runs beside the trainer: set NUM_NODES = TRAINER_NODES")
        return _run_agent(settings, arguments, os.environ, signals, shared)
    from megarl.cluster.ray_node import ray_address, ray_environment, start_ray

    os.environ.update(ray_environment(recipe))
    daemons = start_ray(settings, directory)
    if settings.is_trainer:
        environment = {**os.environ, "MEGARL_RAY_ADDRESS": ray_address(settings)}
        return _run_agent(settings, arguments, environment, signals, shared, daemons.pid)
    return _wait_for_end_of_head(settings, daemons, signals, shared, recipe.trainer.collective_timeout_s)


def _ask_doctor(settings: NodeSettings, arguments: list[str]) -> None:
    """Shows what is not well. Raises NodeError where a node is not fit."""
    where = ["--nodes", str(settings.num_nodes), "--node-rank", str(settings.node_rank)]
    where += ["--master", f"{settings.master}:{settings.master_port}", "--timeout-s", f"{settings.join_timeout_s:g}"]
    command = [sys.executable, "-m", "megarl.cli", "doctor", arguments[0], *_overrides(arguments), *where, "--json"]
    process = start_tied(command, os.environ, signal.SIGKILL, subprocess.PIPE, merged=False)
    deadline_s = 3 * settings.join_timeout_s + EXAMINATION_S
    try:
        said, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise NodeError(
            f"the doctor has not ended within 3 * JOIN_TIMEOUT_S + {EXAMINATION_S:g} = {deadline_s:g} s"
        ) from None
    try:
        findings = [one for one in json.loads(said) if one["verdict"] != "ok"]
    except ValueError:
        raise NodeError(f"the doctor ended with status {process.returncode}: {said.decode()[-3000:]}") from None
    for one in findings:
        fix = f" -> {one['fix']}" if one["fix"] else ""
        line = f"node {settings.node_rank}: {one['verdict']} {one['check']}: {one['found']}{fix}"
        print(line, file=sys.stderr, flush=True)
    if process.returncode:
        raise NodeError("the doctor finds the nodes unfit; what it says stands above")


def _run_agent(
    settings: NodeSettings,
    arguments: list[str],
    environment: Mapping[str, str],
    signals: Signals,
    shared: SharedMemory,
    *others: int,
) -> int:
    """torchrun's agent for the ranks of this node, to its end; signals go to it. `others` are this process's children
    besides."""
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
        orphans.end((agent.pid, *others))
        shared.look()
        time.sleep(POLL_S)
    if -status in passed_on and -status != signal.SIGINT:
        return REQUEUE  # it had no handler yet, and so no ranks
    return status if status >= 0 else 128 - status


def _wait_for_end_of_head(
    settings: NodeSettings, daemons: subprocess.Popen[bytes], signals: Signals, shared: SharedMemory, silent_s: float
) -> int:
    """On a node of engines alone. Engines must live until the trainer has saved, so the first signal is only noted. A head
    that has ended refuses connections at once; one whose machine or network has gone says nothing, for `silent_s`."""
    from megarl.cluster.ray_node import head_answers

    def once(number: int) -> None:
        signals.target = None

    signals.target = once
    heard, orphans = time.monotonic(), Orphans()
    while True:
        orphans.end((daemons.pid,))
        shared.look()
        error = head_answers(settings)
        if error is None:
            heard = time.monotonic()
        elif isinstance(error, ConnectionRefusedError):
            return COMPLETE
        elif time.monotonic() - heard > silent_s:
            rule = f"trainer.collective_timeout_s = {silent_s:g}"
            raise NodeError(f"node 0 at {settings.master}:{settings.ray_port} has not answered for {rule}: {error}")
        if daemons.poll() is not None:
            time.sleep(POLL_S)
            if isinstance(head_answers(settings), ConnectionRefusedError):
                return COMPLETE
            raise NodeError(f"Ray on this node ended with status {daemons.returncode} before node 0 did")
        time.sleep(POLL_S)


def _overrides(arguments: list[str]) -> list[str]:
    """Behind the recipe's name; what begins with a dash is the trainer's."""
    return [word for word in arguments[1:] if not word.startswith("-")]


def _keep_logs(directory: Path, target: Path) -> None:
    """Ray's own logs of a job that failed, which would be gone with its directory."""
    for logs in directory.glob("session_2*/logs"):
        with contextlib.suppress(OSError):  # what cannot be copied is left out: the job's own status counts
            shutil.copytree(logs, target, dirs_exist_ok=True)


if __name__ == "__main__":
    endure_output()
    adapt_environment(os.environ, is_one_node=os.environ.get("NUM_NODES") == "1")
    sys.exit(main(sys.argv[1:]))
