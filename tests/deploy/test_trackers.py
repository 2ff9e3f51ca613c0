"""Each tracker's own package: a run that is sent, goes on, and is read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("PACELINE_TEST_TRACKERS", sys.executable)
RATES = {0: 0.5, 1: 0.25, 2: 0.125}
SEND = """
import sys
from pathlib import Path
from paceline.show.trackers.sink import Sink

name, run_dir, steps = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(",")
for part in steps:
    notes = []
    sink = Sink([name], run_dir, say=notes.append)
    for step in map(int, part.split("+")):
        metrics = {"actor/lr": 0.5 / 2**step, "perf/mfu": float("nan")}
        sink.step(step, metrics | ({"timing_s/validate": 2.0} if step == 1 else {}), 1000.0 + step)
    sink.end(ok=part == steps[-1])
    assert not notes, notes
"""
READ = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1] + "/tensorboard").Reload()
print(json.dumps([
    [[scalar.step, scalar.value, scalar.wall_time] for scalar in events.Scalars("actor/lr")],
    "**response** 2" in events.Tensors("val/samples")[0].tensor_proto.string_val[0].decode(),
]))
""",
    "mlflow": """
from mlflow import MlflowClient
client = MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
assert [run.info.status for run in runs] == ["FINISHED"], runs
id = runs[0].info.run_id
samples = client.download_artifacts(id, "samples/000001.json")
points = client.get_metric_history(id, "actor/lr")
print(json.dumps([
    [[point.step, point.value, point.timestamp / 1000] for point in points],
    json.load(open(samples))["samples"][0]["response"] == "2",
]))
""",
    "wandb": """
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def records(data):
    # LevelDB's log format: blocks of 32 KiB, each part with a checksum, its length and its kind
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""

points, ids, num_tables = [], set(), 0
for folder in sorted(Path(sys.argv[1], "wandb").glob("offline-run-*")):
    num_tables += len(list(folder.rglob("*.table.json")))
    for record in records(next(folder.glob("*.wandb")).read_bytes()):
        ids |= {record.run.run_id} - {""}
        items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "actor/lr" in items:
            step = int(items["_step"])
            points.append([step, json.loads(items["actor/lr"]), 1000.0 + step])
assert ids == {"adder-01"}, ids
print(json.dumps([points, num_tables == 1]))
""",
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("paceline", "adder-01")
points = [[row["step"], row["actor/lr"], 1000.0 + row["step"]] for row in rows if "actor/lr" in row]
print(json.dumps([points, any("val/samples" in row for row in rows)]))
""",
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two samples of a validation after step 1."""
    folder = tmp_path / "adder"
    (folder / "trajectories").mkdir(parents=True)
    tree = {"trainer": {"total_steps": 2}, "broker": {"url": "redis://:secret@far"}}
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump(tree))
    (folder / "run.id").write_text("adder-01\n")
    row = {"prompt": "1 + 1", "response": "2", "ground_truth": "2", "reward": 1.0, "num_response_tokens": 1}
    table = pyarrow.Table.from_pylist([row | {"finish_reason": "stop"}] * 2)
    pyarrow.parquet.write_table(table, folder / "trajectories" / "val_000001.parquet")
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(READ))
def test_what_is_sent_is_read_back_in_one_run(name: str, run_dir: Path, tmp_path: Path) -> None:
    """The run is left after step 1 and goes on with step 2, in a process of its own."""
    places = ("src", "services/controller", "services/rollout", "services/learner", "services/reward")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / place) for place in places),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }

    def python(script: str, *args: str) -> str:
        command = [PYTHON, "-c", f"import json, sys\n{script}", *args]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    imported = subprocess.run(
        [PYTHON, "-c", f"import {name}"], env=environment, capture_output=True, timeout=120, check=False
    )
    if imported.returncode:
        pytest.skip(f"needs a Python with {name}; PACELINE_TEST_TRACKERS names its interpreter")
    python(SEND, name, str(run_dir), "0+1")
    python(SEND, name, str(run_dir), "2")
    points, has_samples = json.loads(python(READ[name], str(run_dir)).splitlines()[-1])
    assert points == [[step, rate, 1000.0 + step] for step, rate in RATES.items()]
    assert has_samples
