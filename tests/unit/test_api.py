"""Training as a loop, and run directories as tables."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import pytest

from paceline.api import Callback, EarlyStop, Step, Training, load_run, process, train
from paceline.api import run as run_tables
from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.runs import run_dir as run_dirs
from support import source
from support.fake_controller import FakeController, serve
from support.notebook import code_cells, run_notebook

FAKE = Path(__file__).parents[1] / "support" / "fake_train.py"
CONFIG: dict[str, Any] = {
    "data": {"train_files": "t.jsonl"},
    "model": {"path": "m"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 5},
}


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "_COMMAND", (sys.executable, str(FAKE)))


def children() -> list[psutil.Process]:
    """The runs of this process: other tests' servers may be its children too, and end at any time."""
    runs = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            runs += [child] if str(FAKE) in child.cmdline() else []
    return runs


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background process ignores SIGINT, and so would the tests that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_loop_over_the_steps(tmp_path: Path) -> None:
    said: list[str] = []
    steps = list(train(CONFIG, "trainer.total_steps=2", "trainer.name=mine", say=said.append))
    assert [(step.number, step.metrics["critic/score/mean"]) for step in steps] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
    ]
    assert steps[0].metrics["odd"] is None
    assert (steps[0].run_dir, said) == (tmp_path / "runs" / "mine", ["starting"])
    assert steps[1].samples == []
    folder = tmp_path / "runs" / "mine" / "trajectories"
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"reward": [1.0]}), folder / "step_000001.parquet")
    assert steps[1].samples == [{"reward": 1.0}]


class Recorder(Callback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def before_step(self, number: int, training: Training) -> None:
        self.calls.append(("before", number))

    def after_step(self, step: Step, training: Training) -> None:
        self.calls.append(("after", step.number))


def test_callbacks_are_called_around_each_step() -> None:
    recorder, seen = Recorder(), list[int]()
    for step in train(CONFIG, "trainer.total_steps=2", callbacks=[recorder], say=None):
        assert recorder.calls[-1] == ("after", step.number), "before the loop gets it"
        seen.append(step.number)
    assert seen == [0, 1, 2]
    assert recorder.calls == [(when, number) for number in seen for when in ("before", "after")]


@pytest.mark.parametrize(
    ("stop", "last"),
    [
        (EarlyStop(metric="critic/score/mean", target=1.5), 3),
        (EarlyStop(metric="critic/score/mean", patience=2, minimize=True), 2),
        (EarlyStop(metric="critic/score/mean", patience=2, min_delta=5.0), 2),
        (EarlyStop(metric="odd", patience=1, target=0.0), None),
    ],
)
def test_a_run_stops_early(stop: EarlyStop, last: int | None) -> None:
    said, numbers = list[str](), list[int]()
    for step in train(CONFIG, "trainer.name=steady", callbacks=[stop], say=said.append):
        numbers.append(step.number)
        if last is None and step.number == 5:
            break
    assert numbers[-1] >= (last or 0)
    if last is None:
        assert numbers == [0, 1, 2, 3, 4, 5], "a metric that no step has stops nothing"
    else:
        assert last <= numbers[-1] <= last + 5, "the run does not wait for callbacks"
        assert said[-1] == f"stopped after step {numbers[-1]}"


async def test_rates_are_changed_through_the_controller(tmp_path: Path) -> None:
    controller = FakeController()
    server = await serve(controller, token="t")
    training = Training(tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not running"):
        training.scale_rates(0.5)
    note = run_dirs.new_note(tmp_path, "t")
    note.controller, note.state = server.address, "running"
    run_dirs.write_note(tmp_path, note)
    assert await asyncio.to_thread(training.scale_rates, 0.5) == 4
    assert controller.lr_scales == [0.5]
    await server.stop(0)


def test_leaving_the_loop_ends_the_run_after_its_step() -> None:
    said: list[str] = []
    for step in train(CONFIG, say=said.append):
        if step.number == 3:
            # Enough that the pipe is full, were nobody to read on.
            time.sleep(0.5)
            break
    assert said[-1].startswith("stopped after step")
    assert not children()


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_passed_on_and_a_second_one_too() -> None:
    said: list[str] = []

    def press() -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
        while "a long step" not in said:  # it has heard the first
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        for step in train(CONFIG, "trainer.name=slow", say=said.append):
            if step.number == 0:
                pressing.start()
    pressing.join()
    assert said[-1] == "stopping at once"
    assert time.monotonic() - began < 200  # and not the ten minutes of its step
    assert not children()


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("bad", PacelineError, "the learner is gone,\nfor good"),
        ("refused", ConfigError, "there are no GPUs"),
    ],
)
def test_errors_of_a_run_are_raised(name: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        list(train(CONFIG, f"trainer.name={name}", say=None))
    assert (type(caught.value), str(caught.value)) == (kind, message)


def test_a_wrong_configuration_starts_nothing() -> None:
    with pytest.raises(ConfigError, match="total_stepz"):
        next(train(CONFIG, "trainer.total_stepz=2"))


def test_a_run_as_tables(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    with pytest.raises(DataError, match="holds no run"):
        load_run("mine")
    (run_dir / "config.resolved.yaml").write_text("trainer: {total_steps: 2}\n")
    (run_dir / "events.jsonl").write_text('{"event": "run"}\n')
    rows: list[dict[str, float]] = [
        {"step": 0, "val/reward/mean": 0.5},
        {"step": 1, "critic/score/mean": 0.25},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = load_run("mine")
    assert run.metrics.to_pydict() == {
        "step": [0, 1],
        "val/reward/mean": [0.5, None],
        "critic/score/mean": [None, 0.25],
    }
    assert run.config["trainer"]["total_steps"] == 2
    assert list(run.events) == [{"event": "run"}]
    (run_dir / "trajectories").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"reward": [1.0]}), run_dir / "trajectories/val_000001.parquet")
    assert run.samples(1, validation=True).to_pydict() == {"reward": [1.0]}
    with pytest.raises(DataError, match=r"no step_000001\.parquet"):
        run.samples(1)


def test_a_long_run_is_read_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics become Arrow numbers a portion at a time; the journal is read as it is gone through."""
    monkeypatch.setattr(run_tables, "_PORTION", 2)
    (tmp_path / "config.resolved.yaml").write_text("{}\n")
    rows: list[dict[str, float | None]] = [
        {"step": 0, "a": 1},
        {"step": 1, "a": 2},
        {"step": 2, "a": 0.5, "b": None},
        {"step": 3, "b": None},
        {"step": 4, "c": 7.0, "b": 3},
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 5, "to'
    )
    (tmp_path / "events.jsonl").write_text('{"n": 0}\n[]\n')
    run = load_run(tmp_path)
    names = ("step", "a", "b", "c")
    assert run.metrics.to_pylist() == [{name: row.get(name) for name in names} for row in rows]
    assert run.metrics.column("a").num_chunks == 1
    passing = iter(run.events)
    assert next(passing) == {"n": 0}
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"n": 1}\n')
    assert list(passing) == [{"n": 1}]
    assert list(run.events) == list(run.events) == [{"n": 0}, {"n": 1}]
    (tmp_path / "metrics.jsonl").unlink()
    assert load_run(tmp_path).metrics.num_rows == 0


def test_the_notebook_of_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["trainer.name=left", f"trainer.run_dir={tmp_path / 'run'}"]
    notebook = source.ROOT / "docs" / "first-run.ipynb"
    monkeypatch.chdir(notebook.parent)
    parameters = {"config": CONFIG, "overrides": overrides}
    _, left, went_on, last, curve, samples = run_notebook(notebook, parameters)
    assert Path.cwd() == source.ROOT
    assert "step 3: reward 1.500\nstep 4: reward 2.000\n" in left.text
    assert "stopped after step" in left.text
    assert went_on.text.split() == ["5", "6", "7"]
    assert last.value["step"] == 7
    assert curve.value._repr_svg_().count("<polyline") == 1
    assert "in step 1, " in curve.value.title
    assert samples.text.count("  learner [-0.1, -0.25, -3.0, -0.1]") == 3
    assert samples.value == pytest.approx(0.05)


def test_the_notebook_is_stored_as_executed_from_the_first_cell_to_the_last() -> None:
    cells = code_cells(source.ROOT / "docs" / "first-run.ipynb")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [{output["output_type"] for output in cell["outputs"]} for cell in cells]
    assert "error" not in set().union(*kinds)
    for cell, stored in zip(cells, kinds, strict=True):
        *_, last = "".join(cell["source"]).splitlines()
        assert ("stream" in stored) == ("print(" in "".join(cell["source"])), cell["source"]
        assert ("execute_result" in stored) == (last.startswith(("run.", "Curve(", "max("))), cell["source"]
