"""Runs of `paceline train` on a tiny model: inputs, configuration, the process, and the files it writes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from paceline.controller.verify.check import verify
from support import forked as forks
from support.forked import Forked

ROOT = Path(__file__).parents[2]
PACELINE = Path(sys.executable).with_name("paceline")
ENGINE = ("support.imported_engine",)
REWARDS = Path(__file__).with_name("training_rewards.py")
MARK = "PACELINE_TEST_RUN"
DEADLINE_S = 900.0
"""For what happens in a run; beside other work five steps have taken more than three minutes."""
# Metrics that count how often things were sent, not what was trained on: they may differ after a fault.
TRANSPORT = (
    "barrier/duplicates",
    "barrier/rejected",
    "weights/bytes",
    "weights/relayed_bytes",
    "weights/peak_extra_bytes",
)

ENGINE_TOLERANCE = 1e-5
"""Of the engine's log-probs: how float32 rounds depends on how many sequences it computes at once."""

Row = dict[str, Any]


def prepare_inputs(folder: Path, *, num_train: int, num_val: int) -> Path:
    """Writes the arithmetic example's data and random model, in small; returns the folder."""
    command = [str(ROOT / "examples/arithmetic/prepare.py"), "--out", str(folder / "data")]
    command += ["--model-out", str(folder / "model")]
    command += ["--num-train", str(num_train), "--num-val", str(num_val), "--num-sft", "1"]
    prepared = forks.run(command, timeout=600)
    assert prepared.returncode == 0, prepared.stderr
    return folder


def with_layers(inputs: Path, count: int) -> Path:
    """Cuts the model of `prepare_inputs` down to its first layers, so that a step costs less."""
    from safetensors.numpy import load_file, save_file

    file = inputs / "model" / "config.json"
    shape = json.loads(file.read_text())
    types = shape["layer_types"][:count]
    file.write_text(json.dumps(shape | {"num_hidden_layers": count, "layer_types": types}))
    weights = inputs / "model" / "model.safetensors"
    kept = {
        name: tensor
        for name, tensor in load_file(weights).items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < count
    }
    save_file(kept, weights, metadata={"format": "pt"})
    return inputs


def tiny_config(inputs: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """PPO with all its parts on the folder of `prepare_inputs`, 16 prompts of 4 samples per step.

    `sections` are merged into it.
    """
    tree: dict[str, Any] = {
        "data": {
            "train_files": str(inputs / "data/train.parquet"),
            "val_files": str(inputs / "data/val.parquet"),
            "max_prompt_length": 32,
            "max_response_length": 16,
            "train_batch_size": 16,
        },
        "model": {"path": str(inputs / "model")},
        "algorithm": {
            "adv_estimator": "gae",
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.01, "target_kl": 0.1, "horizon": 1000},
        },
        "actor": {"ppo_mini_batch_size": 8, "ppo_max_token_len_per_gpu": 2048, "optim": {"lr": 1e-3}},
        "critic": {"optim": {"lr": 1e-3}},
        "rollout": {"n": 4, "max_num_seqs": 16, "max_groups_in_flight": 2},
        "reward": {"functions": [{"name": f"{REWARDS}:letters"}]},
        "trainer": {"name": "tiny", "total_steps": 4, "save_freq": 1, "export_model": False},
        "learner": {"world_size": 2},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return tree


@dataclass
class TrainingRun:
    """One launch of `paceline train`. `mark` is in the environment of every process below it."""

    run_dir: Path
    process: subprocess.Popen[str]
    mark: str
    began: float = field(default_factory=time.monotonic)
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    # --- what it writes

    @property
    def metrics(self) -> list[Row]:
        return read_jsonl(self.run_dir / "metrics.jsonl")

    @property
    def events(self) -> list[Row]:
        return read_jsonl(self.run_dir / "events.jsonl")

    @property
    def spans(self) -> list[Row]:
        return read_jsonl(self.run_dir / "spans.jsonl")

    @property
    def note(self) -> Row:
        note: Row = json.loads((self.run_dir / "run.json").read_text())
        return note

    @property
    def output(self) -> str:
        return (self.run_dir.parent / f"{self.mark}.out").read_text()

    # --- what it does

    def wait_for(self, wanted: Callable[[Row], bool], *, timeout_s: float = DEADLINE_S) -> Row:
        """Waits for the first event of this launch for which `wanted` is true."""
        deadline = time.monotonic() + timeout_s
        path, position = self.run_dir / "events.jsonl", self._journal_start
        while time.monotonic() < deadline:
            if path.exists():
                with path.open("rb") as file:
                    file.seek(position)
                    lines = file.readlines()
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    event: Row = json.loads(line)
                    if wanted(event):
                        return event
            assert self.process.poll() is None, f"ended early:\n{self.output}"
            time.sleep(0.005)
        raise AssertionError(f"no such event within {timeout_s} s:\n{self.output}\n{self.logs()}")

    def wait_for_phase(self, phase: str, step: int) -> None:
        self.wait_for(lambda e: e["event"] == "phase" and e["to"] == phase and e["step"] == step)

    def wait_for_member(self, name: str) -> None:
        self.wait_for(lambda e: e["event"] == "member" and e["member"] == name)

    def pid_of(self, name: str) -> int:
        """The process id in the launcher's note; "launcher" is the launcher itself."""
        return int(self.note["pids"][name])

    def kill_group(self, name: str) -> None:
        """Kills a service, its process group, and its children in other groups."""
        self.look()
        leader = psutil.Process(self.pid_of(name))
        children = leader.children(recursive=True)
        os.killpg(leader.pid, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Stops a service's process, so that it does nothing until the block ends; it may be killed there."""
        process = psutil.Process(self.pid_of(name))
        process.suspend()
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    @contextlib.contextmanager
    def paused_in(self, *phases: str) -> Iterator[int]:
        """Stops the controller while its step is in one of these phases; yields the step.

        A phase that is over before its controller stands still does not count; the next step's may.
        """
        while True:
            with self.paused("controller"):
                phase = only(self.events, "phase")[-1]
                if phase["to"] in phases:
                    yield int(phase["step"])
                    return
            assert self.process.poll() is None, f"ended early:\n{self.output}"
            time.sleep(0.01)

    def interrupt(self) -> int:
        """Sends SIGINT as a terminal does, to the whole group; returns the step in progress.

        The controller stands still until the launcher has noticed. It finishes this step, or the next one if
        it hears of it when this one's end is decided.
        """
        with self.paused("controller"):
            step = max(event["step"] for event in only(self.events, "phase"))
            os.killpg(self.process.pid, signal.SIGINT)
            self.wait_for_output("the run ends after this step")
        return int(step)

    def wait_for_output(self, words: str, *, timeout_s: float = DEADLINE_S) -> None:
        """Waits until the command has printed these words."""
        deadline = time.monotonic() + timeout_s
        while words not in self.output:
            assert time.monotonic() < deadline, f"not said within {timeout_s} s: {words}\n{self.output}"
            time.sleep(0.02)

    def look(self) -> None:
        """Remembers every process that is now below the launcher."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen.setdefault(child.pid, child)

    def finish(self, *, timeout_s: float = DEADLINE_S) -> int:
        """Waits for the end, checks that no process of the run is left, and returns the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {timeout_s} s:\n{self.output}\n{self.logs()}") from None
        left = self.left()
        assert left == [], f"left behind: {left}\n{self.output}"
        return code

    def left(self) -> list[str]:
        """Processes of this launch that still exist: those that are its own, and those seen before."""
        left = {p.pid: p for p in self.seen.values() if p.is_running()}
        left |= {p.pid: p for p in psutil.process_iter() if self._is_own(p)}
        return [_describe(p) for p in left.values()]

    def _is_own(self, process: psutil.Process) -> bool:
        """Whether a process has the mark of this launch, or writes into its folder as services do."""
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            if process.pid == os.getpid():
                return False
            descriptors = Path("/proc", str(process.pid), "fd").iterdir()
            return process.environ().get(MARK) == self.mark or any(
                os.readlink(descriptor).startswith(f"{self.run_dir}/") for descriptor in descriptors
            )
        return False

    def wait_until_nothing_is_left(self, *, timeout_s: float) -> None:
        """Waits until every process of this launch has ended."""
        deadline = time.monotonic() + timeout_s
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)

    def end(self) -> None:
        """Kills what is left of the run, for a test that failed."""
        self.look()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for process in [*self.seen.values(), *psutil.process_iter()]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.pid in self.seen or self._is_own(process):
                    process.kill()

    def logs(self) -> str:
        """The ends of all logs."""
        tails = []
        for path in sorted((self.run_dir / "logs").glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            tails.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(tails)

    _journal_start: int = 0


@contextlib.contextmanager
def training(
    config: Mapping[str, Any], run_dir: Path, *overrides: str, forked: bool = False
) -> Iterator[TrainingRun]:
    """Launches `paceline train` in its own session, as a terminal does.

    `forked`: as a fork of a process that has imported what its services need, vLLM included, which saves most
    of a start.
    """
    mark = f"{run_dir.name}-{uuid.uuid4().hex[:8]}"
    path = run_dir.parent / f"{run_dir.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(config)))
    journal = run_dir / "events.jsonl"
    words = ["train", str(path), f"trainer.run_dir={run_dir}", *overrides]
    with (run_dir.parent / f"{mark}.out").open("w") as out:
        options: dict[str, Any] = {
            # Threads are the same for all runs that are compared, on any machine.
            "env": os.environ | {"OMP_NUM_THREADS": "1", MARK: mark},
            "cwd": run_dir.parent,
            "stdin": subprocess.DEVNULL,
            "stdout": out,
            "stderr": subprocess.STDOUT,
        }
        process = (
            Forked(["-m", "paceline.cli.main", *words], imports=ENGINE, **options)
            if forked
            else subprocess.Popen([str(PACELINE), *words], start_new_session=True, text=True, **options)
        )
    run = TrainingRun(run_dir=run_dir, process=process, mark=mark)
    run._journal_start = journal.stat().st_size if journal.exists() else 0
    try:
        yield run
    finally:
        run.end()


def read_jsonl(path: Path) -> list[Row]:
    """The objects of a JSONL file, without a last line that is still being written."""
    if not path.exists():
        return []
    with path.open() as lines:
        return [json.loads(line) for line in lines if line.endswith("\n")]


def only(events: list[Row], kind: str) -> list[Row]:
    """The events of one kind."""
    return [event for event in events if event["event"] == kind]


def assert_sound(run: TrainingRun) -> None:
    """`verify` has nothing to say against what the run left."""
    assert [str(breach) for breach in verify(run.run_dir).breaches] == []


def is_time(name: str) -> bool:
    """Whether a metric measures seconds, or a rate over them, or follows from them, or is the line's time."""
    return (
        name == "time"
        or name.startswith(("timing_s/", "perf/", "ahead/"))
        or name.endswith(("_ms", "wait_s"))
    )


def assert_same_metrics(
    rows: list[Row], expected: list[Row], *, without: tuple[str, ...] = (), tolerance: float = 0.0
) -> None:
    """Compares all metrics but times; those of the engine's log-probs may differ by ENGINE_TOLERANCE."""
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    differences = []
    for row, other in zip(rows, expected, strict=True):
        names = {name for name in row.keys() | other.keys() if not is_time(name)} - set(without)
        for name in sorted(names):
            value, wanted = row.get(name), other.get(name)
            limit = max(tolerance, ENGINE_TOLERANCE if name.startswith("rollout/") else 0.0)
            if value is None or wanted is None or abs(value - wanted) > limit:
                differences.append(f"step {row['step']} {name}: {value} != {wanted}")
    assert not differences, "\n".join(differences)


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:200]}"
    return f"{process.pid} (gone by now)"


def differences(rows: list[Row], expected: list[Row]) -> dict[int, list[str]]:
    """The metrics of each step that differ, but for times and transport."""
    by_step: dict[int, list[str]] = {}
    for row, other in itertools.zip_longest(rows, expected, fillvalue={}):
        names = {name for name in row.keys() | other.keys() if not is_time(name)} - set(TRANSPORT)
        for name in sorted(names):
            value, wanted = row.get(name), other.get(name)
            limit = ENGINE_TOLERANCE if name.startswith("rollout/") else 0.0
            same = value == wanted or (
                value is not None and wanted is not None and abs(value - wanted) <= limit
            )
            if not same:
                step = int(row.get("step", other.get("step", -1)))
                by_step.setdefault(step, []).append(f"{name}: {value} != {wanted}")
    return by_step
