"""A run directory as a sound run leaves it, made by hand: what tests of `paceline verify` spoil."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from paceline.controller.verify.digests import digest_of
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.run_record.manifest import manifest_text
from paceline.core.training import BatchRow, batch_digest

Event = dict[str, Any]
NUM_SAMPLES = 2


@dataclass
class RecordedRun:
    """Events and files of a run; `events` get their numbers and times when they are written."""

    events: list[Event] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    parquet: dict[str, list[Event]] = field(default_factory=dict)
    manifests: dict[int, Event] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    torn: str = ""

    def add(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    # --- what a run writes

    def phases(self, step: int, *words: str) -> None:
        for word in words:
            self.add("phase", step=step, to=word)

    def start(self, term: int, step: int) -> None:
        self.add("run", run_id="r", term=term, step=step, data_digest="d")

    def push(self, version: int) -> None:
        self.phases(version, "publish")
        self.add("commit", version=version, digest=weights(version), servers=["rollout-0"])
        self.phases(version, "commit")

    def admit(self, step: int, *prompts: int) -> None:
        for name in (name for prompt in prompts for name in names(step, prompt)):
            self.add("trajectory", **admission(step, name))

    def batch(self, step: int, *prompts: int) -> None:
        rows = tuple(row(step, name) for prompt in prompts for name in names(step, prompt)[:-1])
        tag = PolicyTag(version=step - 1, digest=weights(step - 1))
        digest = batch_digest(tag, rows)
        self.phases(step, "learn")
        self.add("batch", step=step, policy=str(tag), digest=digest, num_rows=len(rows))
        self.add("trained", step=step, digest=digest)
        self.parquet[f"step_{step:06d}"] = [
            {
                "step": step,
                "prompt_id": row.trajectory_id.prompt_id,
                "sample_index": row.trajectory_id.sample_index,
                "reward": row.reward,
                "policy_version": step - 1,
            }
            for row in rows
        ]

    def dispatch(self, step: int, *prompts: int) -> None:
        policy = f"v{step - 1}@{weights(step - 1)}"
        self.add("dispatch", step=step, policy=policy, prompts=list(prompts), greedy=True)
        self.phases(step, "dispatch", "collect")

    def checkpoint(self, step: int) -> None:
        self.phases(step, "checkpoint")
        self.add("checkpoint", step=step, folder=f"/runs/r/checkpoints/step_{step:06d}", good=True)
        self.manifests[step] = {
            "step": step,
            "controller_state": {"step": step, "run_id": "r"},
            "files": {"weights": {"size": len(shards(step)), "blake2b": digest_of(shards(step))}},
        }

    def finish(self, step: int) -> None:
        self.metrics.append(json.dumps({"step": step}))
        self.add("step", step=step, log_position=f"{step}-0", cursor={}, guard={})

    # --- on disk

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        stamped = [{"n": n, "time": 100.0 + n, **event} for n, event in enumerate(self.events)]
        text = "".join(json.dumps(event) + "\n" for event in stamped) + self.torn
        (folder / "events.jsonl").write_text(text)
        (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in self.metrics))
        (folder / "config.resolved.yaml").write_text(json.dumps(CONFIG | self.config))
        (folder / "trajectories").mkdir(exist_ok=True)
        for name, rows in self.parquet.items():
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, folder / "trajectories" / f"{name}.parquet")
        for step, manifest in self.manifests.items():
            path = folder / "checkpoints" / f"step_{step:06d}" / "manifest.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(manifest_text(manifest))
            (path.parent / "weights").write_bytes(shards(step))
        return folder

    # --- what tests spoil

    def find(self, event: str, wanted: Callable[[Event], bool] = lambda _: True) -> Event:
        """The first such event."""
        return next(e for e in self.events if e["event"] == event and wanted(e))

    def last(self, event: str) -> Event:
        """The last such event."""
        return [e for e in self.events if e["event"] == event][-1]

    def trajectory(self, name: str) -> Event:
        """The first event of a trajectory."""
        return self.find("trajectory", lambda e: e["id"] == name)

    def insert_after(self, event: Event, *others: Event) -> None:
        """Puts events behind another."""
        place = next(i for i, e in enumerate(self.events) if e is event) + 1
        self.events[place:place] = others

    def remove(self, event: Event) -> None:
        """Takes one event out; equal ones stay."""
        self.events = [e for e in self.events if e is not event]


CONFIG: dict[str, Any] = {
    "data": {"train_files": "t.jsonl"},
    "model": {"path": "m"},
    "rollout": {"n": NUM_SAMPLES},
    "learner": {"device": "cpu"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 3},
}


def shards(step: int) -> bytes:
    """The content of a checkpoint's file."""
    return f"shards {step:03}".encode()


def weights(version: int) -> str:
    """The digest of a version."""
    return f"{version:016x}"


def names(step: int, prompt: int) -> tuple[str, ...]:
    """The trajectories of a prompt: its samples, then its greedy answer."""
    return (*(f"train:{step}:{prompt}:{i}" for i in range(NUM_SAMPLES)), f"greedy:{step}:{prompt}:0")


def reward_of(name: str) -> float:
    """Some reward: the sample's index, or 0.5 for the greedy answer."""
    return 0.5 if name.startswith("greedy") else float(name[-1])


def admission(step: int, name: str) -> Event:
    """The fields of an admitted trajectory's event."""
    policy = f"v{step - 1}@{weights(step - 1)}"
    return {
        "id": name,
        "verdict": "admitted",
        "policy": policy,
        "digest": f"blob of {name}",
        "reward": reward_of(name),
        "server": "rollout-0",
    }


def row(step: int, name: str) -> BatchRow:
    """The row of a sample."""
    return BatchRow(
        trajectory_id=TrajectoryId.parse(name),
        blob_key="",
        blob_digest=f"blob of {name}",
        reward=reward_of(name),
        num_prompt_tokens=1,
        num_response_tokens=1,
        num_sampled_tokens=1,
        greedy_score=0.5,
    )


def sound_run() -> RecordedRun:
    """Three steps with all that may happen to a run."""
    run = RecordedRun()
    run.start(1, 0)
    run.phases(0, "forming")
    run.push(0)
    run.phases(0, "validate")
    run.add("trajectory", **admission(1, "validate:0:9:0"))
    run.finish(0)
    _step_with_a_replaced_and_a_dropped_prompt(run)
    _step_in_which_the_controller_is_started_again(run)
    _step_before_which_the_run_goes_back(run)
    run.phases(3, "ended")
    run.add("end", ok=True, message="3 steps done", step=3)
    return run


def _step_with_a_replaced_and_a_dropped_prompt(run: RecordedRun) -> None:
    """Step 1: prompt 3 replaces 1, which was set aside; 2 is dropped."""
    run.dispatch(1, 1, 2)
    run.admit(1, 1)
    run.add("refill", step=1, reason="degenerate", set_aside=[[1, 0.0]], prompts=[3])
    run.add(
        "trajectory", id="train:1:2:0", verdict="reward_error", policy="", server="", error="timeout: slow"
    )
    run.admit(1, 3)
    run.add("group_dropped", step=1, prompt=2, reason="reward:timeout", message="slow")
    run.batch(1, 3)
    run.push(1)
    run.checkpoint(1)
    run.finish(1)


def _step_in_which_the_controller_is_started_again(run: RecordedRun) -> None:
    """Step 2: during the collection."""
    run.dispatch(2, 4, 5)
    run.admit(2, 4)
    run.start(2, 1)
    run.add("resume", step=2, phase="collect")
    run.phases(2, "forming")
    run.push(1)
    run.phases(2, "dispatch", "collect")
    run.admit(2, 4, 5)
    run.add("trajectory", **{**admission(2, "train:2:4:0"), "verdict": "duplicate"})
    run.batch(2, 4, 5)
    run.push(2)
    run.checkpoint(2)
    run.finish(2)


def _step_before_which_the_run_goes_back(run: RecordedRun) -> None:
    """Step 3: the learner is lost, so the run goes back to step 2; then the broker loses its data."""
    run.dispatch(3, 6, 7)
    run.admit(3, 6, 7)
    run.batch(3, 6, 7)
    run.push(3)
    run.finish(3)
    run.metrics.pop()
    run.add("rewind", to_step=2, reason="the learner was lost", cursor={}, guard={})
    run.phases(2, "forming")
    run.push(2)
    run.dispatch(3, 6, 7)
    run.admit(3, 6)
    run.add("newcomers", version=2, servers=["rollout-1"])
    run.add("recollect", step=3, reason="the broker lost its data")
    run.admit(3, 6, 7)
    run.batch(3, 6, 7)
    run.push(3)
    run.finish(3)


def admit_twice(run: RecordedRun, name: str, **changes: object) -> None:
    event = run.trajectory(name)
    run.insert_after(event, {**event, **changes})
