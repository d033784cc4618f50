"""The sinks of a run: TensorBoard, Weights & Biases and MLflow get every step. No step waits for a sink, and no sink ends a
run.

Each sink has its own thread, because a service may be slow or down, or its disk may be full. Failed calls are counted, and
the first failure is reported; metrics.jsonl has every step. To add a sink, write a class here, an entry in SINKS and a
section in `recipe/telemetry_section.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import yaml

from megarl.recipe import Recipe
from megarl.recipe.telemetry_section import MlflowSinkSection, TensorboardSinkSection, WandbSinkSection
from megarl.telemetry.disk import write_whole
from megarl.telemetry.exit_status import COMPLETE, FAILED, REQUEUE, Preempted
from megarl.telemetry.metrics_file import is_number
from megarl.telemetry.run_directory import dotted

logger = logging.getLogger(__name__)
MOST_WAITING = 512  # pending calls of a sink; further calls are dropped
# How long the end of a run waits for pending calls: after a complete run, and after a run that fails or leaves.
CLOSE_S, HURRY_S = 30.0, 5.0
Row = Mapping[str, Any]


class Sink(Protocol):
    """A destination for a run's metrics. One thread makes the calls in the order of steps; a call may raise any error."""

    def write(self, step: int, metrics: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Write the metrics of a step, as in its line of metrics.jsonl, and its sample table, as in its file in `samples/`;
        a step may have no samples."""

    def close(self, status: int) -> None:
        """Write buffered content. `status` is the run's: COMPLETE, REQUEUE (the run will be resumed) or FAILED."""


class Memory:
    """A sink's file in the run directory: the id of the run at the service, and the last step that the sink got.

    The step is written before the sink gets the step, so a kill may lose a step but never repeats a step.
    """

    def __init__(self, path: Path, new: bool) -> None:
        """`new`: ignore the file of an earlier start."""
        self._path = path
        content: dict[str, Any] = {"id": None, "step": 0}
        if path.is_file() and not new:
            with contextlib.suppress(ValueError):  # a dead node tore the file: the sink starts another run
                content |= json.loads(path.read_bytes())
        self.id: str | None = content["id"]
        self.step: int = content["step"]

    def keep(self, id: str | None = None, step: int | None = None) -> None:
        """Save the given values and keep the others."""
        self.id = self.id if id is None else id
        self.step = self.step if step is None else step
        write_whole(self._path, json.dumps({"id": self.id, "step": self.step}))


@dataclass(frozen=True)
class SinkStart:
    """What a sink gets when it opens. `recipe` is plain data with every default; the run continues after step `done`."""

    run: Path
    name: str
    recipe: dict[str, Any]
    done: int
    memory: Memory


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers, because sinks draw no curves of texts, lists or NaN."""
    return {key: float(value) for key, value in metrics.items() if is_number(value) and key != "step"}


class TensorboardSink:
    """Event files in `tensorboard/` of the run directory: metrics as scalars, samples as a table of text."""

    COLUMNS = ("sample", "reward", "advantage", "completion_tokens", "finish_reason", "prompt", "completion")

    def __init__(self, section: TensorboardSinkSection, start: SinkStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Readers drop earlier events from the purge step on.
        self._writer = SummaryWriter(str(start.run / "tensorboard"), purge_step=start.done + 1)
        text = yaml.safe_dump(start.recipe, sort_keys=False)
        self._writer.add_text("recipe", f"```\n{text}\n```", start.done + 1)

    def write(self, step: int, metrics: Mapping[str, Any], rows: Sequence[Row]) -> None:
        for key, value in numbers(metrics).items():
            self._writer.add_scalar(key, value, step)
        lines = [f"| {' | '.join(self.COLUMNS)} |", f"|{' --- |' * len(self.COLUMNS)}"]
        for row in rows:  # one line of markdown each
            cells = [str(row[name]).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ↵ ") for name in self.COLUMNS]
            lines.append(f"| {' | '.join(cells)} |")
        if rows:
            self._writer.add_text("samples", "\n".join(lines), step)
        self._writer.flush()

    def close(self, status: int) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases (wandb 0.31), on disk or online: metrics as its history, samples as a table of each step."""

    # Send no code, console, packages or description of the machine.
    QUIET: Mapping[str, Any] = {
        "console": "off", "disable_code": True, "disable_git": True, "save_code": False, "disable_job_creation": True,
        "silent": True, "x_disable_machine_info": True, "x_disable_meta": True, "x_disable_stats": True,
        "x_save_requirements": False,
    }  # fmt: skip
    FINISH_S = 20.0  # to send the rest at the end; the files stay
    LOGIN_S = 1.0  # to wait at a prompt for an API key, where neither WANDB_API_KEY nor netrc has one

    def __init__(self, section: WandbSinkSection, start: SinkStart) -> None:
        import wandb

        if start.memory.id is None:
            start.memory.keep(id=secrets.token_hex(4))
        self._table = wandb.Table
        self._run = wandb.init(
            project=section.project,
            name=start.name,
            id=start.memory.id,
            resume="allow",
            config=start.recipe,
            dir=str(start.run),
            settings=wandb.Settings(
                mode=section.mode, finish_timeout=self.FINISH_S, login_timeout=self.LOGIN_S, **self.QUIET
            ),
        )

    def write(self, step: int, metrics: Mapping[str, Any], rows: Sequence[Row]) -> None:
        # A column has one type, so the parts of a reward, whose names differ between rows, become text.
        data = [[str(value) if isinstance(value, dict) else value for value in row.values()] for row in rows]
        samples = {"samples": self._table(columns=[*rows[0]], data=data)} if rows else {}
        self._run.log(numbers(metrics) | samples, step=step)

    def close(self, status: int) -> None:
        self._run.finish(exit_code=0 if status == COMPLETE else 1)


class MlflowSink:
    """A run of MLflow (mlflow-skinny 3.17), at a tracking server or in a directory: the recipe's values as parameters,
    samples as an artifact of each step."""

    # Limits of a server for one call and one value.
    MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000

    def __init__(self, section: MlflowSinkSection, start: SinkStart) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        uri = str((start.run / "mlflow").resolve()) if section.uri is None else section.uri
        self._client = MlflowClient(tracking_uri=uri)
        if start.memory.id is None:
            known = self._client.get_experiment_by_name(section.experiment)
            experiment = self._client.create_experiment(section.experiment) if known is None else known.experiment_id
            run = self._client.create_run(experiment, run_name=start.name)
            start.memory.keep(id=run.info.run_id)
            values = {
                key: value if isinstance(value, str) else json.dumps(value) for key, value in dotted(start.recipe).items()
            }
            params = [Param(key, text[: self.LONGEST_PARAM]) for key, text in values.items()]
            for first in range(0, len(params), self.MOST_PARAMS):
                self._client.log_batch(run.info.run_id, params=params[first : first + self.MOST_PARAMS])
        assert start.memory.id is not None
        self._id: str = start.memory.id
        self._client.update_run(self._id, status="RUNNING")
        # Named after this start: a resumed run may have another recipe.
        self._client.log_dict(self._id, start.recipe, f"recipe-from-step-{start.done + 1:06d}.yaml")

    def write(self, step: int, metrics: Mapping[str, Any], rows: Sequence[Row]) -> None:
        now = int(time.time() * 1000)
        points = [self._metric(key, value, now, step) for key, value in numbers(metrics).items()]
        for first in range(0, len(points), self.MOST_METRICS):
            self._client.log_batch(self._id, metrics=points[first : first + self.MOST_METRICS])
        if rows:
            columns = list(rows[0])  # MLflow shows this form as a table
            table = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
            self._client.log_text(self._id, json.dumps(table), f"samples/step-{step:06d}.json")

    def close(self, status: int) -> None:
        self._client.set_terminated(self._id, status={COMPLETE: "FINISHED", REQUEUE: "KILLED", FAILED: "FAILED"}[status])


# Kind: class, library, and environment variables that the library reads at import.
SINKS: dict[str, tuple[Callable[[Any, SinkStart], Sink], str, dict[str, str]]] = {
    "tensorboard": (TensorboardSink, "torch.utils.tensorboard", {}),
    # Send no error and usage reports to the library's makers.
    "wandb": (WandbSink, "wandb", {"WANDB_ERROR_REPORTING": "false"}),
    # Without MLFLOW_ALLOW_FILE_STORE, 3.17 refuses a directory.
    "mlflow": (MlflowSink, "mlflow.tracking", {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}),
}
# Kinds that drop what an earlier start wrote about repeated steps; other kinds keep it.
REWINDS = ("tensorboard",)


class Relay:
    """Passes steps to one sink in a thread. The thread opens the sink; if that fails, it tries again at the next call."""

    def __init__(self, key: str, kind: str, memory: Memory, open_sink: Callable[[], Sink]) -> None:
        """`key` is the sink's recipe key, for messages."""
        self._key, self._kind, self._memory, self._open_sink = key, kind, memory, open_sink
        self._last_step = 0 if kind in REWINDS else memory.step
        # Each step with its metrics and samples, then the run's status.
        self._calls: queue.Queue[tuple[int, Mapping[str, Any], Sequence[Row]] | int] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._failures = 0
        self._has_warned = False
        # A daemon thread, so that a sink that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"sink {kind}", daemon=True)
        self._thread.start()

    def put(self, step: int, metrics: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Queue a step, unless the sink has it from an earlier start."""
        if step > self._last_step:
            self._put((step, metrics, rows), f"step {step}")

    def end(self, status: int) -> None:
        """Queue the end of the run, after which no step comes. Returns at once."""
        self._put(status, "its end")

    def _put(self, item: tuple[int, Mapping[str, Any], Sequence[Row]] | int, name: str) -> None:
        try:
            self._calls.put_nowait(item)
        except queue.Full:
            self._fail(f"{name} left out: {MOST_WAITING} calls wait for it")

    def wait(self, timeout_s: float) -> None:
        """Wait for the calls before the end."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"still at work after {timeout_s:.0f} s; its pending calls are left out")

    def take_failures(self) -> int:
        """Return how many calls failed since the last call of this method."""
        with self._lock:
            failures, self._failures = self._failures, 0
        return failures

    def _work(self) -> None:
        """Make the calls. A service's library may raise any error; the run goes on, and so do later calls."""
        sink: Sink | None = None
        with self._counted("not opened"):
            sink = self._open_sink()
        while not isinstance(item := self._calls.get(), int):
            step, metrics, rows = item
            with self._counted(f"step {step} not written"):
                sink = self._open_sink() if sink is None else sink
                self._memory.keep(step=step)
                sink.write(step, metrics, rows)
        if sink is not None:
            with self._counted("not closed"):
                sink.close(item)

    @contextlib.contextmanager
    def _counted(self, content: str) -> Iterator[None]:
        """Count an error of the body, and go on."""
        try:
            yield
        except Exception as error:  # a library of a service raises anything
            self._fail(f"{content}: {type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._failures += 1
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            text = "the run goes on, and metrics.jsonl has every step (telemetry/sink_failures counts later failures)"
            logger.warning("%s (%s): %s; %s", self._key, self._kind, reason, text)


class Sinks:
    """All sinks of a run. A context manager: leaving it waits for pending calls, within bounds."""

    def __init__(self, relays: Sequence[Relay]) -> None:
        self._relays = relays

    def write(self, step: int, metrics: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Queue a step's metrics and its sample table, which may be empty. Returns at once."""
        for relay in self._relays:
            relay.put(step, metrics, rows)

    def metrics(self) -> dict[str, int]:
        """Return `telemetry/sink_failures`, the calls that failed since the last step; nothing without sinks."""
        return {"telemetry/sink_failures": sum(relay.take_failures() for relay in self._relays)} if self._relays else {}

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        is_requeued = isinstance(error, Preempted) and error.status == REQUEUE
        for relay in self._relays:
            relay.end(COMPLETE if kind is None else REQUEUE if is_requeued else FAILED)
        deadline = time.monotonic() + (CLOSE_S if kind is None else HURRY_S)
        for relay in self._relays:
            relay.wait(max(0.0, deadline - time.monotonic()))


def open_sinks(recipe: Recipe, run: Path, done: int) -> Sinks:
    """Open the recipe's sinks to continue after step `done`. Import their libraries here, because an import in a thread
    would slow down the first steps."""
    content = recipe.model_dump(mode="json")
    relays = []
    for number, section in enumerate(recipe.telemetry.sinks):
        sink_class, library, environment = SINKS[section.kind]
        os.environ.update(environment)
        importlib.import_module(library)
        memory = Memory(run / "sinks" / f"{section.kind}.json", new=done == 0)
        start = SinkStart(run, recipe.run.name, content, done, memory)
        relays.append(Relay(f"telemetry.sinks.{number}", section.kind, memory, partial(sink_class, section, start)))
    return Sinks(relays)
