"""The agent's command line: torchrun's, for a recipe."""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as launcher

from megarl.cluster.agent_watch import Agent, Leaving
from megarl.cluster.preemption import SIGNALS, handle_signals, take_held_signals
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.recipe.run_section import RunSection
from megarl.telemetry.exit_status import BAD_INPUT, COMPLETE, FAILED, REQUEUE
from megarl.telemetry.run_directory import RunDirectory


def main(arguments: list[str]) -> int:
    """Exit status of the ranks; BAD_INPUT before anything starts: violations, or nodes that come and go."""
    options = torchrun.parse_args(arguments)
    if options.rdzv_backend != "static" and not options.standalone and options.nnodes not in ("1", "1:1"):
        # There each agent counts its own restarts, and ranks look for their peers under that count.
        print(
            f"--rdzv-backend = {options.rdzv_backend}: not on several nodes (--nnodes = {options.nnodes}), where ranks of "
            "unlike starts would wait for each other; name the nodes' master: --master-addr HOST --node-rank N",
            file=sys.stderr,
        )
        return BAD_INPUT
    try:
        recipe = _recipe(options)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    # Another module than megarl.train has no recipe, and gets the default.
    leaving = Leaving(RunSection.model_fields["grace_s"].default if recipe is None else recipe.run.grace_s)
    run = None if recipe is None else RunDirectory.of(recipe)
    handle_signals(leaving.note)
    kept = [name for name in options.signals_to_handle.split(",") if name not in {one.name for one in SIGNALS}]
    options.signals_to_handle = ",".join(kept)
    agents: list[Agent] = []

    def make(*arguments: Any, **settings: Any) -> Agent:
        agents.append(Agent(leaving, run, *arguments, **settings))
        return agents[0]

    # torch's launcher makes the agent itself and has no place to name another one (2.13).
    launcher.LocalElasticAgent = make  # type: ignore[assignment,misc]
    try:
        take_held_signals()  # those that came during the imports
        torchrun.run(options)
    except ChildFailedError:
        verdict = agents[0].verdict
        print(f"megarl.cluster.agent: {verdict.sentence} (exit status {verdict.status})", file=sys.stderr, flush=True)
        return verdict.status
    except SignalException as error:
        print(f"megarl.cluster.agent: ended by {error.sigval.name}", file=sys.stderr, flush=True)
        return REQUEUE if error.sigval in SIGNALS else FAILED
    finally:
        for agent in agents:
            agent.close()
    return COMPLETE


def _recipe(options: Any) -> Recipe | None:
    if not options.module or options.training_script != "megarl.train":
        return None
    words = [word for word in options.training_script_args if not word.startswith("--")]
    return load_recipe(words[0], words[1:]) if words else None
