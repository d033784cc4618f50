"""What a run measures of itself, and where it says so."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.recipe.sections import Count, FilePath, Positive, Section


class TensorboardSinkSection(Section):
    kind: Literal["tensorboard"]
    """Event files for TensorBoard, in `tensorboard/` of the run directory."""


class WandbSinkSection(Section):
    kind: Literal["wandb"]
    """A run of Weights & Biases; what it keeps on disk is in `wandb/` of the run directory."""
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
    """The experiment there; it is made if need be."""


SinkSection = Annotated[TensorboardSinkSection | WandbSinkSection | MlflowSinkSection, Field(discriminator="kind")]


class ProfileSection(Section):
    kind: Literal["torch", "nsight"] = "torch"
    """`torch` writes a Chrome trace of each of the steps and ranks into `profile/` of the run directory; `nsight` marks
    phases and spans by NVTX ranges and has Nsight Systems capture these steps."""
    steps: Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)]
    """The steps to profile, from 1."""
    ranks: Annotated[tuple[Count, ...], Field(min_length=1, strict=False)] = (0,)
    """The trainer ranks to profile, from 0."""


class TelemetrySection(Section):
    device_sync: Literal["always", "sampled", "never"] = "always"
    """When a phase ends only once the device has finished it, so that its seconds are its own: `always`; `sampled`, in every
    `device_sync_every`-th step; or `never`, and then a phase's rest is found where the host next waits for the device."""
    device_sync_every: Positive = 10
    """With `device_sync: sampled`, every how many steps."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """What a device can compute at most, in 10**12 operations a second, for the model FLOPs utilisation of each phase
    (`mfu/<phase>`). Without it known GPUs have what their maker says for the precision, and there is none on a CPU."""
    sinks: Annotated[tuple[SinkSection, ...], Field(strict=False)] = ()
    """Where figures and samples go besides the run directory; each kind at most once."""
    samples_per_step: Count = 0
    """Write that many of a step's prompts and completions, with their rewards, into `samples/` of the run directory and into
    the sinks."""
    profile: ProfileSection | None = None
    """Profile some steps of some ranks; null for none."""
    memory_snapshot: bool = False
    """Where a rank runs out of memory, write what held it into `memory/` of the run directory."""
