"""The trackers that `trainer.loggers` names. Each imports its package when it begins."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.core.errors import EnvironmentLackError
from paceline.show.trackers.base import PROJECT, Row, TrackedRun, Tracker


class Wandb:
    """Weights & Biases; WANDB_MODE=offline writes to RUN_DIR/wandb."""

    def begin(self, run: TrackedRun) -> None:
        """Opens the run, or continues it."""
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.run_id,
            name=run.name,
            dir=str(run.run_dir),
            config=dict(run.config),
            resume="allow",
        )

    def step(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Logs the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def validation(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Logs the metrics over a separate axis, because W&B accepts no earlier step."""
        self._run.define_metric("val/*", step_metric="val/step")
        self._run.log({**metrics, "val/step": step})

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Logs a table under the step's number, or a later one's, before the metrics."""
        columns = list(rows[0])
        table = self._wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({"val/samples": table}, step=max(step, self._run.step))

    def end(self, *, ok: bool) -> None:
        """Finishes the run at the tracker."""
        self._run.finish(exit_code=0 if ok else 1)


class Tensorboard(Tracker):
    """Writes event files in RUN_DIR/tensorboard."""

    def begin(self, run: TrackedRun) -> None:
        """Opens a new event file; TensorBoard joins those of one folder."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"))

    def step(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Writes a scalar for each metric."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step, Summary(value=values), at)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Writes the samples as one text."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        value = Summary.Value(
            tag="val/samples",
            metadata=create_summary_metadata(display_name="", description=""),
            tensor=TensorProto(dtype=DT_STRING, string_val=[as_markdown(rows).encode()]),
        )
        self._write(step, Summary(value=[value]), time.time())

    def end(self, *, ok: bool) -> None:
        """Closes the file of the events."""
        self._writer.close()

    def _write(self, step: int, summary: Any, at: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=at, step=step, summary=summary))
        self._writer.flush()


class Mlflow(Tracker):
    """MLflow at MLFLOW_TRACKING_URI, or at MLflow's default place."""

    _TAG = "paceline.run_id"

    def begin(self, run: TrackedRun) -> None:
        """Opens the run, or continues the one that has its id as a tag."""
        from mlflow import MlflowClient

        self._client = client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        wanted = f"tags.`{self._TAG}` = '{run.run_id}'"
        earlier = client.search_runs([experiment], filter_string=wanted)
        tags = {self._TAG: run.run_id}
        self._run = earlier[0] if earlier else client.create_run(experiment, run_name=run.name, tags=tags)
        self._id = self._run.info.run_id
        client.update_run(self._id, status="RUNNING")
        client.log_dict(self._id, dict(run.config), "config.yaml")

    def step(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Logs the metrics in one call."""
        from mlflow.entities import Metric

        at_ms = int(at * 1000)
        self._client.log_batch(self._id, [Metric(key, value, at_ms, step) for key, value in metrics.items()])

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Writes the samples as an artifact."""
        self._client.log_dict(self._id, {"samples": [dict(row) for row in rows]}, f"samples/{step:06d}.json")

    def end(self, *, ok: bool) -> None:
        """Marks the run as finished or failed."""
        self._client.set_terminated(self._id, status="FINISHED" if ok else "FAILED")


class Trackio(Tracker):
    """Writes to Trackio's database in TRACKIO_DIR."""

    def begin(self, run: TrackedRun) -> None:
        """Opens the run, or continues it."""
        import trackio

        self._trackio = trackio
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        trackio.init(project=project, name=run.run_id, config=dict(run.config), resume="allow")

    def step(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Logs the metrics of a step."""
        self._trackio.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Logs the samples as one text."""
        self._trackio.log({"val/samples": self._trackio.Markdown(as_markdown(rows))}, step=step)

    def end(self, *, ok: bool) -> None:
        """Finishes the run at the tracker."""
        self._trackio.finish()


TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "wandb": Wandb,
    "tensorboard": Tensorboard,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def as_markdown(rows: Sequence[Row]) -> str:
    """Formats samples as one text, for trackers with poor tables."""
    return "\n\n---\n\n".join("\n".join(f"**{key}** {value}  " for key, value in row.items()) for row in rows)


def check_installed(names: Iterable[str]) -> None:
    """Raises EnvironmentLackError for the first tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise EnvironmentLackError(
                f"the tracker {name} (trainer.loggers) is not installed; pip install {name}, or leave it out"
            )
