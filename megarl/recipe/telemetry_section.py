"""`telemetry`: what a run measures of itself, and where it writes that."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megarl.recipe.section import Count, FilePath, Positive, Section
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class TensorboardSinkSection(Section):
    kind: Literal["tensorboard"]
    """Event files for TensorBoard, in `tensorboard/` of the run directory."""


class WandbSinkSection(Section):
    kind: Literal["wandb"]
    """A run of Weights & Biases; its files are in `wandb/` of the run directory."""
    project: Annotated[str, Field(min_length=1)] = "megarl"
    """The project there."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files that `wandb sync` sends later; `online` sends each step, and needs an API key."""


class MlflowSinkSection(Section):
    kind: Literal["mlflow"]
    """A run of MLflow."""
    uri: FilePath | None = None
    """A tracking server, as http://host:5000, or a directory; null for `mlflow/` in the run directory."""
    experiment: Annotated[str, Field(min_length=1)] = "megarl"
    """The experiment there; created if it does not exist."""


SinkSection = Annotated[TensorboardSinkSection | WandbSinkSection | MlflowSinkSection, Field(discriminator="kind")]


class ProfileSection(Section):
    kind: Literal["torch", "nsight"] = "torch"
    """`torch` writes a Chrome trace for each step and rank into `profile/` of the run directory; `nsight` marks phases and
    spans by NVTX ranges and has Nsight Systems capture these steps."""
    steps: Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)]
    """The steps to profile, from 1."""
    ranks: Annotated[tuple[Count, ...], Field(min_length=1, strict=False)] = (0,)
    """The trainer ranks to profile, from 0."""


class TelemetrySection(Section):
    device_sync: Literal["always", "never"] = "always"
    """Whether a phase waits for the device before it ends, so that its seconds are correct; with `never` the time counts in
    a later phase, where the host waits for the device."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of one device in 10**12 operations a second, for model FLOPs utilisation (`mfu/<phase>`). null takes the
    vendor's number for the precision of a known GPU, and gives no utilisation on a CPU."""
    sinks: Annotated[tuple[SinkSection, ...], Field(strict=False)] = ()
    """Where metrics and samples go besides the run directory; each kind at most once."""
    samples_per_step: Count = 0
    """Write this many completions of a step, with prompt and reward, into `samples/` of the run directory and the sinks."""
    profile: ProfileSection | None = None
    """Profile some steps of some ranks; null for none."""
    memory_snapshot: bool = False
    """If a rank runs out of memory on a GPU, write the allocator's history into `memory/` of the run directory."""


# What pip calls the module of a kind of sink.
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}


def telemetry_rules(recipe: Recipe) -> Violations:
    """Sinks that are not installed, and samples or profiles of steps and ranks that the run does not have."""
    section, kinds = recipe.telemetry, [sink.kind for sink in recipe.telemetry.sinks]
    for number, sink in enumerate(section.sinks):
        key = f"telemetry.sinks.{number}"
        if sink.kind in kinds[:number]:
            yield Violation(f"{key}.kind", sink.kind, "each kind of sink can be given once", "leave it out")
        # A folder wandb/ or mlflow/ in the working directory is found too, but has no origin.
        spec = importlib.util.find_spec(sink.kind)
        if spec is None or spec.origin is None:  # it is imported when the run has begun
            package = PACKAGES[sink.kind]
            rule = f"the package {package} is not installed; it is in megarl's extra `sinks`"
            yield Violation(f"{key}.kind", sink.kind, rule, f"pip install {package}")
        if sink.kind == "mlflow" and sink.uri is not None and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*@", sink.uri):
            hidden = re.sub(r"//[^/]*@", "//***@", sink.uri)
            rule = "holds a user or a password, and the recipe is kept with every run and sent to its sinks"
            yield Violation(f"{key}.uri", hidden, rule, "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
    if section.samples_per_step > recipe.num_rollouts:
        rule = f"a step has {recipe.num_rollouts} sequences (phases.rollout.prompts x algorithm.group_size)"
        yield Violation("telemetry.samples_per_step", section.samples_per_step, rule, str(recipe.num_rollouts))
    if section.profile is None:
        return
    for number, step in enumerate(section.profile.steps):
        if step > recipe.run.steps:
            rule = f"the run has {recipe.run.steps} steps (run.steps)"
            yield Violation(f"telemetry.profile.steps.{number}", step, rule, str(recipe.run.steps))
    for number, rank in enumerate(section.profile.ranks):
        if rank >= recipe.trainer.ranks:
            rule = f"the run has {recipe.trainer.ranks} ranks (trainer.ranks), and the first is 0"
            yield Violation(f"telemetry.profile.ranks.{number}", rank, rule, str(recipe.trainer.ranks - 1))
