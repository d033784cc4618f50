"""Fill in the sbatch file of launch/slurm for a recipe. No torch, so that `megarl launch` is quick."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.planner.placement import NodesNeeded, PlacementError, count, nodes_needed, refuse_devices
from megarl.recipe.recipe import Recipe

CHECKOUT = Path(__file__).resolve().parents[2]
FILES = CHECKOUT / "launch" / "slurm"
END_OF_SETTINGS = "# ---- end of the settings ----"
# sbatch and a shell read such a text as one word without quotes.
_WORD = re.compile(r"[\w.,:@/+=%-]+")


@dataclass(frozen=True)
class SlurmJob:
    """A job for a run: trainer ranks on the first nodes, engines on the same or on further nodes."""

    needed: NodesNeeded
    devices_per_node: int  # GPUs to ask for on each node; 0 on CPUs

    @property
    def file(self) -> Path:
        """The sbatch file in the checkout."""
        kind = "separate" if self.needed.rollout_nodes else "colocated" if self.needed.num_nodes > 1 else "one_node"
        return FILES / f"{kind}.sbatch"


def fit_job(recipe: Recipe, devices_per_node: int, ranks_per_node: int | None, max_nodes: int | None) -> SlurmJob:
    """Return the smallest job for a recipe on nodes with `devices_per_node` GPUs (0: only CPUs).

    Trainer nodes get `ranks_per_node` ranks, or as many as fit. Raises PlacementError with the arithmetic if no job fits, or
    if the job needs more than `max_nodes`.
    """
    if ranks_per_node is None and devices_per_node == 0:
        raise PlacementError("--devices-per-node = 0: on CPUs say how many ranks a node takes: --ranks-per-node 2")
    refuse_devices(recipe, devices_per_node)
    needed = nodes_needed(recipe, devices_per_node, ranks_per_node)
    job = SlurmJob(needed, devices_per_node)
    if max_nodes is not None and job.needed.num_nodes > max_nodes:
        raise PlacementError(
            f"{describe(recipe, job)}, and --nodes = {max_nodes} is fewer: allow more nodes, or lower the recipe's numbers"
        )
    return job


def describe(recipe: Recipe, job: SlurmJob) -> str:
    """Return the arithmetic of a job in one line."""
    needed, rollout = job.needed, recipe.rollout
    text = (
        f"trainer.ranks = {recipe.trainer.ranks}, {needed.ranks_per_node} on a node: {count(needed.trainer_nodes, 'node')}"
    )
    if recipe.has_engines:
        where = f"{needed.rollout_nodes} more" if needed.rollout_nodes else "on the same"
        served = "".join(f" and teachers.{name}.engine" for name in recipe.served)
        text += f"; rollout.engines = {rollout.engines} of {count(rollout.layout.workers, 'worker')} each{served}: {where}"
    return f"{text}; {count(job.needed.num_nodes, 'node')} in all"


def fill(job: SlurmJob, options: Mapping[str, str], variables: Mapping[str, str], arguments: Sequence[str]) -> str:
    """Return the job's sbatch file with options, variables and the run's arguments filled in. Raises ValueError for an
    option that is not a single word, and outside a checkout."""
    if not job.file.is_file():
        raise ValueError(f"{job.file} is missing: jobs start from a checkout of megarl, not from an installed package alone")
    text = job.file.read_text(encoding="utf-8")
    options = {"nodes": str(job.needed.num_nodes), "gpus-per-node": str(job.devices_per_node), **options}
    for name, value in options.items():
        if not _WORD.fullmatch(value):
            raise ValueError(f"--{name} = {value!r}: must be one word of letters, digits and .,:@/+=%-")
        text = _replace(rf"^##?SBATCH --{name}=.*$", f"#SBATCH --{name}={value}", text)
    # The job looks up relative paths of a recipe, and the run directory, from the checkout.
    if Path.cwd() != CHECKOUT:
        raise ValueError(f"a job starts in {CHECKOUT}, and this is {Path.cwd()}: call megarl launch there")
    values = {
        "MEGARL_DIR": str(CHECKOUT),
        "RANKS_PER_NODE": str(job.needed.ranks_per_node),
        "TRAINER_NODES": str(job.needed.trainer_nodes),
        **variables,
    }
    for name, value in values.items():
        # The computed value takes precedence over the environment.
        text = _replace(rf'^: "\$\{{{name}:=[^}}]*\}}"', f"{name}={shlex.quote(value)}", text)
    return _replace(f"^{END_OF_SETTINGS}$", f"set -- {shlex.join(arguments)}\n{END_OF_SETTINGS}", text)


def submit_job(text: str) -> int:
    """Submit a file's text; sbatch prints the job's number. Return sbatch's exit status. Raises ValueError without
    sbatch."""
    if shutil.which("sbatch") is None:
        raise ValueError(
            "--submit: there is no sbatch on PATH; print the file without --submit, and submit it where there is sbatch"
        )
    return subprocess.run(["sbatch"], input=text, encoding="utf-8", check=False).returncode


def _replace(pattern: str, new: str, text: str) -> str:
    text, count = re.subn(pattern, lambda _: new, text, flags=re.MULTILINE)
    assert count == 1, f"{pattern} is {count} times in the sbatch file, and belongs there once"
    return text
