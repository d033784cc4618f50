"""The command line. Commands import what they need themselves, so that `megarl check` loads no torch."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from megarl.telemetry.exit_status import BAD_INPUT, REQUEUE

if TYPE_CHECKING:
    from megarl.recipe import Recipe, RecipeError
    from megarl.recipe.model_section import Fetch
    from megarl.telemetry.run_directory import Resume

app = typer.Typer(
    help="Train language models by reinforcement learning, Megatron-first.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as run.steps=3 or rollout.temperature=0.7."),
]
CheckArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE... [KEY=VALUE]...", help="Recipes, YAML files, and overrides that hold for all of them."),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory, as runs/NAME.")]


@app.command()
def check(
    arguments: CheckArgument = None,
    plan: Annotated[bool, typer.Option("--plan", help="Forecast each phase: plan, memory, operations, time.")] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="KIND|RUN_DIR",
            help="Lengths to plan: uniform, log-normal (default), long-tail, or an earlier run's directory.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the lengths and of the plan; 1 by default.")] = None,
    tflops: Annotated[
        float | None, typer.Option(help="Sustained 10**12 operations a second of one device; goes before device.tflops.")
    ] = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Propose layouts, engines and caps for the device.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as one JSON document.")] = False,
    devices_per_node: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs of each node to place the run on; 0 for CPUs."),
    ] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Trainer ranks on a node; as many as fit.")] = None,
) -> None:
    """Prove recipes without touching a device, and show what each phase will do."""
    if not arguments:
        _fail("no recipe; give a YAML file, as recipes/quickstart.yaml")
    recipes: list[str] = []
    overrides: list[str] = []
    for argument in arguments:  # with `=` in it and no file of that name, an argument is an override
        is_named = Path(argument).suffix in (".yaml", ".yml") or not recipes
        is_recipe = Path(argument).exists() or ("=" not in argument and is_named)
        (recipes if is_recipe else overrides).append(argument)
    if not recipes:
        _fail(f"no recipe among {' '.join(arguments)}; give a YAML file, as recipes/quickstart.yaml")
    if tflops is not None and not (0 < tflops < math.inf):
        _fail(f"--tflops = {tflops:g}: must be above 0, as --tflops 400")
    for name, value in (("--lengths", lengths), ("--seed", seed), ("--tflops", tflops)):
        if value is not None and not (plan or suggest or as_json):
            _fail(f"{name} = {value}: nothing reads it without --plan, --suggest or --json")
    from megarl.planner.check import CheckRequest, check_recipes
    from megarl.telemetry.metrics_file import read_metrics

    seed = 1 if seed is None else seed
    request = CheckRequest(plan, suggest, as_json, lengths, seed, tflops, read_metrics, devices_per_node, ranks_per_node)
    status, document = check_recipes(recipes, overrides, request, _console(), _print_violations)
    if as_json:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    raise typer.Exit(status)


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last checkpoint.")] = False,
    if_saved: Annotated[
        bool, typer.Option("--resume-if-saved", help="The same where there is one, else start anew.")
    ] = False,
) -> None:
    """Check a recipe, then train it on this machine with torchrun."""
    from megarl.cluster.cores import thread_environment
    from megarl.cluster.preemption import handle_signals, hold_signals
    from megarl.models.model_files import model_directory

    handle_signals(_leave)
    loaded = _load(recipe, overrides or [], fetch=model_directory)
    from megarl.telemetry.run_directory import Resume, RunDirectory

    try:
        how = Resume.of(resume, if_saved)
        directory = RunDirectory.of(loaded)
        directory.refuse_running()
        directory.check(loaded, how)  # before any process starts
    except ValueError as error:
        _fail(f"error: {error}")
    command = train_command(recipe, overrides or [], loaded.trainer.ranks, how)
    environment = {**os.environ, **thread_environment(os.environ, loaded.trainer.threads)}
    sys.stdout.flush()
    # Replaces this process, so that signals reach the agent and its exit status is ours.
    hold_signals()
    os.execve(command[0], command, environment)


@app.command()
def launch(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="As a job of Slurm; the only way so far.")] = False,
    devices_per_node: Annotated[int, typer.Option(min=0, help="GPUs of each node; 0 for a job on CPUs.")] = 8,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Trainer ranks on a node; as many as fit.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="The most nodes that the job may have.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="The account that pays.")] = None,
    time: Annotated[str | None, typer.Option(metavar="TIME", help="Time limit of one start, as 24:00:00.")] = None,
    container: Annotated[str | None, typer.Option(help="pyxis:IMAGE or apptainer:IMAGE.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand the file to sbatch; without this it is printed.")] = False,
) -> None:
    """Fill the sbatch file of launch/slurm that fits a recipe, and print or submit it."""
    from megarl.cluster.slurm_job import describe, fill, fit_job, submit_job
    from megarl.recipe.model_section import fetch_config
    from megarl.telemetry.run_directory import Resume, RunDirectory

    if not slurm:
        _fail("launch where? --slurm; on this machine alone, megarl train RECIPE")
    loaded = _load(recipe, overrides or [], fetch=fetch_config)
    given = {"job-name": loaded.run.name, "partition": partition, "account": account, "time": time}
    options = {name: value for name, value in given.items() if value is not None}
    try:
        job = fit_job(loaded, devices_per_node, ranks_per_node, nodes)
        variables = {} if container is None else {"CONTAINER": container}
        text = fill(job, options, variables, [recipe, *(overrides or [])])
        # As the job does when it starts, if the directory is visible from here.
        RunDirectory.of(loaded).check(loaded, Resume.IF_SAVED)
        typer.echo(f"{describe(loaded, job)}: {job.file}", err=True)
        if submit:
            raise typer.Exit(submit_job(text))
    except ValueError as error:
        _fail(f"error: {error}")
    typer.echo(text, nl=False)


@app.command("eval")
def evaluate(
    source: Annotated[str, typer.Argument(metavar="RECIPE|RUN_DIR", help="A recipe, or a run, for its last checkpoint.")],
    overrides: OverridesArgument = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="A Hugging Face directory or hub name to evaluate.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The metrics as one JSON document.")] = False,
) -> None:
    """Let rollout engines answer the held-out prompts of a recipe's `evaluation`, and report how well they do."""
    run = Path(source) if Path(source).is_dir() else None
    if run is not None and not (run / "recipe.yaml").is_file():
        _fail(f"{source}: a directory without recipe.yaml; give a run directory, as runs/NAME, or a recipe")
    from megarl.cluster.job_environment import adapt_environment
    from megarl.models.model_files import model_directory

    adapt_environment(os.environ)
    loaded = _load(source if run is None else str(run / "recipe.yaml"), overrides or [], fetch=model_directory)
    from ray.exceptions import RayError

    from megarl.planner.placement import PlacementError
    from megarl.rollout import RolloutError, evaluation

    try:
        result = evaluation.evaluate(loaded, model, run)
    except (ValueError, RolloutError, PlacementError, TimeoutError, RayError) as error:
        _fail(f"error: {error}")
    typer.echo(evaluation.report(loaded, result, as_json))


@app.command()
def export(
    run_dir: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write, in Hugging Face format.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapters of actor.lora alone, in PEFT's format.")] = False,
) -> None:
    """Write a run's last checkpoint as a Hugging Face directory, adapters merged in."""
    _need_run(run_dir)
    # Without the libraries' import warnings, which a user cannot fix.
    command = [sys.executable, "-W", "ignore", "-m", "megarl.megatron.export", str(run_dir), str(out)]
    command += ["--adapter"] if adapter else []
    sys.stdout.flush()
    os.execv(command[0], command)


@app.command()
def report(
    run_dir: RunArgument,
    other: Annotated[Path | None, typer.Argument(metavar="[OTHER_DIR]", help="Another run, to compare with.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page; RUN_DIR/report.html, or OTHER_DIR/report-vs-NAME.html for two runs."),
    ] = None,
) -> None:
    """Say whether a run learns, where its time goes and what to change: its curve here, the rest as one page."""
    for directory, name in ((run_dir, "RUN_DIR"), (other, "OTHER_DIR")):
        if directory is not None:
            _need_run(directory, name)
    from megarl.telemetry.report import compare
    from megarl.telemetry.report import report as write_report

    try:
        if other is None:
            write_report(run_dir, output)
        else:
            compare(run_dir, other, output)
    except (ValueError, OSError) as error:
        _fail(f"error: {error}")


@app.command()
def samples(
    run_dir: RunArgument,
    step: Annotated[int | None, typer.Option(help="The step; the last one with samples if not given.")] = None,
    rollout: Annotated[int | None, typer.Option(help="The rollout of that step; all that were kept if not given.")] = None,
) -> None:
    """Show sampled rollouts as conversations: segments, tokens, weight versions, rewards and masks."""
    _need_run(run_dir)
    from megarl.telemetry.samples import conversations, read_samples

    try:
        rows = read_samples(run_dir, step)
        stored = sorted({row["rollout"] for row in rows})
        if rollout is not None and rollout not in stored:
            raise ValueError(f"--rollout = {rollout}: the step kept {', '.join(map(str, stored))}")
    except (ValueError, OSError) as error:
        _fail(f"error: {error}")
    for text in conversations([row for row in rows if rollout in (None, row["rollout"])]):
        _console().print(text + "\n", soft_wrap=True)


@app.command()
def trace(
    run_dir: RunArgument,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write; RUN/trace.json if not given.")] = None,
) -> None:
    """Merge what all ranks wrote of their steps into one file for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    _need_run(run_dir)
    from megarl.telemetry.trace import merge

    try:
        merged = json.dumps(merge(run_dir))
    except ValueError as error:
        _fail(str(error))
    path = out or Path(run_dir) / "trace.json"
    try:
        path.write_text(merged, encoding="utf-8")
    except OSError as error:
        _fail(f"error: {path}: {error}")
    typer.echo(path)


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="Also look at what this recipe needs.")] = None,
    overrides: OverridesArgument = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job; run this on each of them at the same time.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of them this is, from 0.")] = 0,
    master: Annotated[str, typer.Option(metavar="HOST:PORT", help="Node 0, as the others reach it.")] = "127.0.0.1:29500",
    ray_port: Annotated[int | None, typer.Option(help="The port of Ray's head, if this is node 0 of a job.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the other nodes.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as one JSON document.")] = False,
) -> None:
    """Examine this node, and with --nodes all of a job: what would stop a run, and what to do about it. Exit status 1 for
    a node that is not fit."""
    from megarl.cluster.doctor import DoctorOptions, Severity, examine

    host, _, port = master.rpartition(":")
    if not host or not port.isdigit():
        _fail(f"--master = {master!r}: must be HOST:PORT, as node0:29500")
    if node_rank >= nodes:
        _fail(f"--node-rank = {node_rank}: must be below --nodes = {nodes}")
    options = DoctorOptions(
        num_nodes=nodes, node_rank=node_rank, master=(host, int(port)), ray_port=ray_port, timeout_s=timeout_s
    )
    if recipe is not None:
        loaded = _load(recipe, overrides or [])
        options = replace(
            options,
            run_dir=Path(loaded.run.dir),
            model=loaded.model.path,
            precision=loaded.trainer.precision,
            code=any(part.kind == "code" for part in loaded.reward),
        )
    findings = []
    for finding in examine(options):
        findings.append(finding)
        if not as_json:
            color = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "red"}[finding.severity]
            line = f"[{color}]{finding.severity:4}[/{color}] {escape(finding.check)}: {escape(finding.message)}"
            _console().print(line + (f"\n     -> {escape(finding.fix)}" if finding.fix else ""), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    raise typer.Exit(1 if any(finding.severity == Severity.FAIL for finding in findings) else 0)


def train_command(recipe: str, overrides: list[str], ranks: int, resume: Resume) -> list[str]:
    """Return the command that trains on one machine."""
    launcher = [sys.executable, "-m", "megarl.cluster.node_agent", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "megarl", recipe, *overrides, *([resume.value] if resume.value else [])]


def _leave(number: int, frame: object) -> None:
    """Handle a signal before the agent starts: nothing can be lost yet."""
    raise SystemExit(REQUEUE)


def _load(path: str, overrides: list[str], fetch: Fetch | None = None) -> Recipe:
    from megarl.recipe import RecipeError, load_recipe

    try:
        return load_recipe(path, overrides, fetch)
    except RecipeError as error:
        _print_violations(path, error)
        raise typer.Exit(BAD_INPUT) from None


def _print_violations(path: str, error: RecipeError) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    count = len(error.violations)
    console.print(f"[bold red]{escape(path)}: {count} violation{'s' if count > 1 else ''}[/]")
    for violation in error.violations:
        console.print(f"  [bold]{escape(violation.key)}[/] = {escape(violation.shown_value)}: {escape(violation.rule)}")
        if violation.nearest:
            console.print(f"      [green]nearest: {escape(violation.nearest)}[/]")


def _console() -> Console:
    # A pipe has no width; tables must not wrap there.
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=150)


def _need_run(run_dir: Path, name: str = "RUN_DIR") -> None:
    if not run_dir.is_dir():
        _fail(f"{name} = {str(run_dir)!r}: no such directory; give a run directory, as runs/NAME")


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(BAD_INPUT)


if __name__ == "__main__":
    app()
