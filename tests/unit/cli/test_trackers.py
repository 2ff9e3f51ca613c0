"""Trackers: what they are sent, in which order, and that one that fails costs the run nothing."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from paceline.cli.commands.results import track
from paceline.cli.main import main
from paceline.show.trackers import adapters, sink
from paceline.show.trackers.base import Row, TrackedRun
from paceline.show.trackers.sink import Sink, TrackingView
from support.cli_configs import config


class Notebook:
    """A tracker that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.threads: set[int] = set()

    def begin(self, run: TrackedRun) -> None:
        self.threads.add(threading.get_ident())
        self.told.append(("begin", run.run_id, run.name, run.config["trainer"], "broker" in run.config))

    def step(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self.told.append((step, dict(metrics), at))

    def validation(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self.told.append(("validation", step, dict(metrics), at))

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        self.told.append(("samples", step, [row["response"] for row in rows]))

    def end(self, *, ok: bool) -> None:
        self.told.append(("end", ok))


class Broken(Notebook):
    def step(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        raise ValueError("no space left")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "adder"
    (folder / "trajectories").mkdir(parents=True)
    tree = {"trainer": {"total_steps": 1}, "broker": {"url": "redis://:secret@far"}}
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump(tree))
    (folder / "run.id").write_text("adder-01\n")
    row = {"prompt": "1 + 1", "response": "2", "ground_truth": "2", "reward": 1.0, "num_response_tokens": 1}
    table = pyarrow.Table.from_pylist([row | {"finish_reason": "stop"}] * 20)
    pyarrow.parquet.write_table(table, folder / "trajectories" / "val_000001.parquet")
    return folder


def test_a_run_is_sent_in_order_from_another_thread(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book, notes = Notebook(), list[str]()
    monkeypatch.setitem(adapters.TRACKERS, "wandb", lambda: book)
    monkeypatch.setitem(adapters.TRACKERS, "mlflow", Broken)
    sending = Sink(["mlflow", "wandb"], run_dir, say=notes.append)
    sending.step(0, {"actor/lr": 1e-6, "perf/mfu": float("nan")}, 50.0)
    sending.step(1, {"timing_s/validate": 20.0}, 60.0)
    sending.end(ok=True)
    assert book.told == [
        ("begin", "adder-01", "adder", {"total_steps": 1}, False),
        (0, {"actor/lr": 1e-6}, 50.0),
        ("samples", 1, ["2"] * 16),
        (1, {"timing_s/validate": 20.0}, 60.0),
        ("end", True),
    ]
    assert threading.get_ident() not in book.threads
    assert notes == ["mlflow failed and gets nothing more: ValueError: no space left"]


def test_wandb_goes_on_with_the_run_of_the_same_id(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, object]] = []
    logged: list[tuple[object, object]] = []

    class WandbRun:
        def log(self, metrics: Mapping[str, float], *, step: int) -> None:
            logged.append((step, metrics))

        def finish(self, *, exit_code: int) -> None:
            logged.append(("finish", exit_code))

    def init(**options: object) -> WandbRun:
        opened.append(options)
        return WandbRun()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setenv("WANDB_PROJECT", "sums")
    for steps, ok in (((0, 1), False), ((2,), True)):
        sending = Sink(["wandb"], run_dir, say=pytest.fail)
        for step in steps:
            sending.step(step, {"actor/lr": 0.5}, 1.0)
        sending.end(ok=ok)
    assert [(options["project"], options["id"], options["resume"]) for options in opened] == [
        ("sums", "adder-01", "allow")
    ] * 2
    assert [step for step, _ in logged] == [0, 1, "finish", 2, "finish"]
    assert [code for step, code in logged if step == "finish"] == [1, 0]


class MlflowServer:
    """What MLflow's client does here: runs with one tag, and what is logged."""

    def __init__(self) -> None:
        self.runs: list[types.SimpleNamespace] = []
        self.logged: list[tuple[object, object]] = []

    def get_experiment_by_name(self, name: str) -> object:
        return types.SimpleNamespace(experiment_id=name) if self.runs else None

    def create_experiment(self, name: str) -> str:
        return name

    def search_runs(self, experiments: Sequence[str], *, filter_string: str) -> list[object]:
        assert experiments == ["paceline"]
        return [run for run in self.runs if f"tags.`{run.tag}` = '{run.id}'" == filter_string]

    def create_run(self, experiment: str, *, run_name: str, tags: Mapping[str, str]) -> object:
        ((tag, run_id),) = tags.items()
        info = types.SimpleNamespace(run_id=f"{experiment}-{len(self.runs)}")
        self.runs.append(types.SimpleNamespace(tag=tag, id=run_id, info=info))
        return self.runs[-1]

    def update_run(self, run_id: str, *, status: str) -> None:
        self.logged.append((run_id, status))

    def log_dict(self, run_id: str, tree: object, file: str) -> None:
        self.logged.append((run_id, file))

    def log_batch(self, run_id: str, metrics: Sequence[object]) -> None:
        self.logged += [(run_id, metric) for metric in metrics]

    set_terminated = update_run


def test_mlflow_goes_on_with_the_run_of_the_same_id(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = MlflowServer()
    client = types.SimpleNamespace(MlflowClient=lambda: server)
    entities = types.SimpleNamespace(Metric=lambda *parts: parts)
    monkeypatch.setitem(sys.modules, "mlflow", client)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    for step, ok in ((0, False), (1, True)):
        sending = Sink(["mlflow"], run_dir, say=pytest.fail)
        sending.step(step, {"actor/lr": 0.5}, 2.5)
        sending.end(ok=ok)
    parts = [
        ["RUNNING", "config.yaml", ("actor/lr", 0.5, 2500, step), end]
        for step, end in ((0, "FAILED"), (1, "FINISHED"))
    ]
    assert server.logged == [("paceline-0", item) for part in parts for item in part]


def test_a_tracker_that_hangs_is_left_after_a_while(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, notes = threading.Event(), list[str]()

    class Hanging(Notebook):
        def begin(self, run: TrackedRun) -> None:
            release.wait(120)

    monkeypatch.setitem(adapters.TRACKERS, "wandb", Hanging)
    monkeypatch.setattr(sink, "_LAST_WAIT_S", 0.05)
    sending = Sink(["wandb"], run_dir, say=notes.append)
    sending.step(0, {}, 1.0)
    sending.end(ok=True)
    release.set()
    assert notes == ["trackers: not all was sent within 0.05 s"]


def test_a_past_run_is_read_no_faster_than_it_is_sent(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or a long one would be in memory whole, and most of it unsent when the last minute is over."""
    began, release, read = threading.Event(), threading.Event(), list[int]()

    class Hanging(Notebook):
        def step(self, step: int, metrics: Mapping[str, float], at: float) -> None:
            began.set()
            release.wait(120)

    def lines(path: Path) -> Iterator[dict[str, float]]:
        for step in range(50):
            read.append(step)
            yield {"step": step, "time": 1.0}
            assert began.wait(120), "the first is not sent"

    monkeypatch.setitem(adapters.TRACKERS, "trackio", Hanging)
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(track, "read_jsonl", lines)
    monkeypatch.setattr(track, "_MAX_WAITING", 4)
    monkeypatch.setattr(sink, "_LAST_WAIT_S", 0.2)
    assert main(["track", "adder", "trackio"]) == 1
    release.set()
    assert "TRACK: no answer from the trackers (trackio) within 0.2 s" in capsys.readouterr().err
    # One is being sent, four wait, and the queue has no place for the next.
    assert read == [0, 1, 2, 3, 4, 5]


def test_a_view_shows_and_sends_and_no_tracker_starts_no_thread(run_dir: Path) -> None:
    shown: list[object] = []

    class View:
        milestone = phase = notice = pulse = close = staticmethod(lambda *_: None)

        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            shown.append(step)

    before = threading.active_count()
    view = TrackingView(View(), Sink([], run_dir, say=print))
    view.step(4, {"actor/lr": 1.0})
    assert shown == [4]
    assert threading.active_count() == before


def test_a_past_run_is_sent(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = Notebook()
    monkeypatch.setitem(adapters.TRACKERS, "trackio", lambda: book)
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda name: object())
    lines = [{"step": 0, "time": 7.5, "actor/lr": 0.5}, {"step": 1, "time": 9.5, "actor/lr": None}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["track", "adder", "trackio"]) == 0
    assert book.told[1:] == [(0, {"actor/lr": 0.5}, 7.5), (1, {}, 9.5), ("end", True)]
    assert "sent 2 steps of adder to trackio" in capsys.readouterr().out


def test_a_tracker_that_is_not_installed_is_refused_before_the_start(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", "run.yaml", "trainer.loggers=[wandb]"]) == 2
    assert (
        "the tracker wandb (trainer.loggers) is not installed; pip install wandb" in capsys.readouterr().err
    )
    assert not (project / "runs").exists()
    assert (
        config(trainer={"total_steps": 2, "loggers": ["mlflow", "trackio"]}).trainer.loggers[1] == "trackio"
    )


def test_a_validation_that_comes_late_is_sent_under_its_step(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the run, and from its record."""
    books: list[Notebook] = []
    monkeypatch.setitem(adapters.TRACKERS, "wandb", lambda: books.append(Notebook()) or books[-1])
    sending = Sink(["wandb"], run_dir, say=print)
    for step in (0, 1, 2):
        sending.step(step, {"actor/lr": 1.0}, 50.0 + step)
    late = {"timing_s/validate": 3.0, "val/reward/mean": 0.5}
    sending.validation(1, late, 60.0)
    sending.end(ok=True)
    expected = [("samples", 1, ["2"] * 16), ("validation", 1, late, 60.0), ("end", True)]
    assert books[0].told[-3:] == expected
    lines = [{"step": step, "time": 50.0 + step, "actor/lr": 1.0} for step in (0, 1, 2)]
    rows = [*lines, {"step": 1, "time": 60.0, **late}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(track, "check_installed", lambda names: None)
    assert main(["track", "adder", "wandb"]) == 0
    assert books[1].told == books[0].told
