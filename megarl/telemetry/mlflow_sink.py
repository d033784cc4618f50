"""A run of MLflow (mlflow-skinny 3.17): of a tracking server, or in a directory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

# Before the import, which starts it: MLflow reports its use to its makers unless told not to.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
# A directory is what the recipe asks for; without this 3.17 refuses it and points to a database.
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from megarl.recipe.telemetry_section import MlflowSinkSection
from megarl.telemetry.sink import Row, Start, flat, numbers
from megarl.telemetry.starts import COMPLETE, FAILED, REQUEUED

FOLDER = "mlflow"
# What a server takes in one call, and of one value (3.17).
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000


def open_sink(section: MlflowSinkSection, start: Start) -> MlflowSink:
    """The run of an earlier start, if there is one, else a new one."""
    return MlflowSink(section, start)


class MlflowSink:
    """Figures are metrics, the recipe's values parameters, samples an artifact of each step in `samples/`."""

    def __init__(self, section: MlflowSinkSection, start: Start) -> None:
        uri = str((start.run / FOLDER).resolve()) if section.uri is None else section.uri
        self._client = MlflowClient(tracking_uri=uri)
        if start.memory.id is None:
            run = self._client.create_run(self._experiment(section.experiment), run_name=start.name)
            start.memory.keep(id=run.info.run_id)
            parameters = [Param(key, value[:LONGEST_PARAM]) for key, value in flat(start.recipe).items()]
            for first in range(0, len(parameters), MOST_PARAMS):
                self._client.log_batch(run.info.run_id, params=parameters[first : first + MOST_PARAMS])
        assert start.memory.id is not None
        self._id: str = start.memory.id
        self._client.update_run(self._id, status="RUNNING")
        # Under a name of this start: a run that goes on may do so with another recipe.
        self._client.log_dict(self._id, start.recipe, f"recipe-from-step-{start.done + 1:06d}.yaml")

    def _experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if known is None else known.experiment_id

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, step) for key, value in numbers(figures).items()]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MOST_METRICS])

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        # The form of MLflow's own tables, which it shows as such.
        columns = list(rows[0])
        table = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
        self._client.log_text(self._id, json.dumps(table), f"samples/step-{step:06d}.json")

    def close(self, end: str) -> None:
        self._client.set_terminated(self._id, status={COMPLETE: "FINISHED", REQUEUED: "KILLED", FAILED: "FAILED"}[end])
