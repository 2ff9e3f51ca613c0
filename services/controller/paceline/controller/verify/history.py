"""Follows the journal through terms, phases and steps, and checks each event against those before it.

    run -> { dispatch -> trajectories, refills, drops -> batch -> trained -> commit -> step } -> end

`resume` makes the step's collection begin again, from the same log: each trajectory must come out as before.
`recollect` makes the step's trajectories void, `rewind` every step after the one it goes back to; a step that
is dispatched again must ask for the same prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline.controller.phases import Phase, move
from paceline.controller.verify.collection import Collection, Wanted
from paceline.controller.verify.findings import Entry, Findings, Invariant
from paceline.controller.verify.versions import Versions
from paceline.core.errors import IllegalTransitionError
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.training import BatchRow, batch_digest

_COUNTED = {
    "batch": "batches",
    "commit": "commits",
    "rollback": "rollbacks",
    "rewind": "rewinds",
    "recollect": "re-collections",
    "newcomers": "pushes to newcomers",
    "checkpoint": "checkpoints",
    "refusal": "prompt groups refused",
}


class TrainedRows:
    """(prompt id, sample index, reward) of each row of a batch; a long run has millions."""

    def __init__(self, rows: Iterable[BatchRow] = ()) -> None:
        self._prompt_ids, self._sample_indices, self._rewards = array("q"), array("q"), array("d")
        for row in rows:
            self._prompt_ids.append(row.trajectory_id.prompt_id)
            self._sample_indices.append(row.trajectory_id.sample_index)
            self._rewards.append(row.reward)

    def __len__(self) -> int:
        return len(self._prompt_ids)

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        return zip(self._prompt_ids, self._sample_indices, self._rewards, strict=True)


@dataclass(kw_only=True, slots=True)
class StepHistory:
    """What the journal says of one step.

    Attributes:
        before: the admissions before the controller was started again, by trajectory.
        rows: those of the last batch.
        num_dropped: prompts that the last collection dropped.
    """

    wanted: Wanted | None = None
    collection: Collection | None = None
    before: Mapping[TrajectoryId, Entry] | None = None
    batch: Entry | None = None
    trained: Entry | None = None
    commit: Entry | None = None
    rows: TrainedRows = field(default_factory=TrainedRows)
    num_dropped: int = 0

    @property
    def number(self) -> int:
        """The step; -1 before its dispatch."""
        return self.wanted.step if self.wanted is not None else -1


class History:
    """The state of a run after the events so far.

    Args:
        num_samples: rollout.n.
        repeatable: whether the same batch gives the same weights to the bit.

    Attributes:
        versions: the committed ones.
        steps: the finished steps that no rewind made void, and what they consist of.
        checkpoints: `checkpoint` events by step, but for void ones and those that were removed.
        in_progress: the step that is not finished; None between steps.
        ended: the last event, if it is the end of the run.
    """

    def __init__(self, findings: Findings, *, num_samples: int, repeatable: bool) -> None:
        self.findings, self._num_samples = findings, num_samples
        self.versions = Versions(findings, repeatable=repeatable)
        self.steps: dict[int, StepHistory] = {}
        self.checkpoints: dict[int, Entry] = {}
        self.in_progress: StepHistory | None = None
        self.ended: Entry | None = None
        self._run: Entry | None = None
        self._phase = Phase.STARTING
        self._void_wanted: dict[int, Wanted] = {}
        self._handlers: Mapping[str, Callable[[Entry], None]] = {
            "run": self._on_run,
            "resume": self._on_resume,
            "rewind": self._on_rewind,
            "phase": self._on_phase,
            "dispatch": self._on_dispatch,
            "trajectory": self._on_trajectory,
            "refill": self._on_refill,
            "group_dropped": self._on_group_dropped,
            "recollect": self._on_recollect,
            "batch": self._on_batch,
            "trained": self._on_trained,
            "rollback": self._on_rollback,
            "commit": self._on_commit,
            "newcomers": self._on_newcomers,
            "step": self._on_step,
            "checkpoint": self._on_checkpoint,
            "checkpoint_removed": self._on_checkpoint_removed,
            "member": self._on_member,
            "end": self._on_end,
        }

    def follow(self, entries: Iterable[Entry]) -> None:
        """Takes the events in order."""
        for entry in entries:
            # Members leave when they hear of the end.
            if self.ended is not None and entry.kind not in ("run", "member"):
                self.findings.add(Invariant.RECORD, "an event follows the end of its term", self.ended, entry)
            if entry.kind in _COUNTED:
                self.findings.counts[_COUNTED[entry.kind]] += 1
            handler = self._handlers.get(entry.kind)
            if handler is not None:
                handler(entry)

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self._run["run_id"]) if self._run is not None else ""

    @property
    def finished(self) -> int:
        """The last finished step; -1 before step 0, the start."""
        return max(self.steps, default=-1)

    # --- terms

    def _on_run(self, entry: Entry) -> None:
        before, self._run = self._run, entry
        self._phase, self.ended = Phase.STARTING, None
        self.versions.restart()
        expected = 1 if before is None else int(before["term"]) + 1
        if int(entry["term"]) != expected:
            self.findings.add(
                Invariant.RECORD, f"a term {entry['term']} begins where {expected} is due", before, entry
            )
        for key in ("run_id", "data_digest"):
            if before is not None and before.get(key) != entry.get(key):
                self.findings.add(
                    Invariant.RECORD,
                    f"term {entry['term']} has another {key} than the one before",
                    before,
                    entry,
                )
        self.findings.counts["controller restarts"] += int(before is not None)

    def _on_resume(self, entry: Entry) -> None:
        step = self.in_progress
        if step is None or step.wanted is None:
            return
        admitted = step.collection.admitted if step.collection is not None else {}
        step.before = {**(step.before or {}), **admitted}
        step.collection = Collection(step.wanted, self.findings)

    def _on_rewind(self, entry: Entry) -> None:
        to_step = int(entry["to_step"])
        if not 0 <= to_step <= self.finished:
            self.findings.add(
                Invariant.I2,
                f"the run went back to step {to_step}, but only step {self.finished} is finished",
                entry,
            )
        for step in (*self.steps.values(), self.in_progress):
            if step is not None and step.wanted is not None and step.number > to_step:
                self._void_wanted[step.wanted.step] = step.wanted
        self.steps = {number: step for number, step in self.steps.items() if number <= to_step}
        self.versions.rewind(to_step)
        self.checkpoints = {number: e for number, e in self.checkpoints.items() if number <= to_step}
        self.in_progress = None

    def _on_end(self, entry: Entry) -> None:
        self.ended = entry
        if not entry["ok"]:
            return
        if self._phase is not Phase.ENDED:
            self.findings.add(
                Invariant.I5, f"the run ended well in phase {self._phase.value}", self._run, entry
            )
        if self.in_progress is not None:
            wanted = self.in_progress.wanted
            self.findings.add(
                Invariant.I2,
                "the run ended well while a step was not finished",
                wanted.entry if wanted is not None else None,
                entry,
            )

    def _on_member(self, entry: Entry) -> None:
        self.findings.counts["members lost"] += int(entry.get("what") in ("dead", "expelled"))

    # --- phases

    def _on_phase(self, entry: Entry) -> None:
        to = Phase(entry["to"])
        try:
            move(self._phase, to)
        except IllegalTransitionError as error:
            self.findings.add(Invariant.I5, str(error), entry)
        self._phase = to

    # --- a step

    def _current(self, entry: Entry) -> StepHistory | None:
        """The step in progress, if an event with a step belongs to it."""
        step, number = self.in_progress, int(entry["step"])
        if step is not None and step.number == number:
            return step
        self.findings.add(
            Invariant.I2, f"a {entry.kind} of step {number}, which was not dispatched or is finished", entry
        )
        return None

    def _on_dispatch(self, entry: Entry) -> None:
        wanted = Wanted.of(entry, self._num_samples)
        if wanted.step != self.finished + 1:
            self.findings.add(
                Invariant.I2,
                f"step {wanted.step} was dispatched after step {self.finished}",
                self._entry_of(self.finished),
                entry,
            )
        self.findings.counts["prompt groups dispatched"] += len(wanted.prompts)
        self.versions.check_policy(wanted.policy, f"step {wanted.step} was dispatched for", entry)
        if len(set(wanted.prompts)) != len(wanted.prompts):
            self.findings.add(Invariant.I2, f"step {wanted.step} asks for a prompt twice", entry)
        before = self._void_wanted.pop(wanted.step, None)
        step = self.in_progress
        if step is not None and step.wanted is not None and step.wanted.step == wanted.step:
            before = step.wanted
            if not step.collection or step.collection.admitted or step.batch:
                self.findings.add(
                    Invariant.I2, f"step {wanted.step} was dispatched twice", before.entry, entry
                )
        if before is not None and (before.prompts, before.num_greedy) != (wanted.prompts, wanted.num_greedy):
            self.findings.add(
                Invariant.I2, f"step {wanted.step} asked for other prompts at first", before.entry, entry
            )
        if step is None or step.wanted is None or step.wanted.step != wanted.step:
            self.in_progress = step = StepHistory(wanted=wanted)
        step.collection = Collection(wanted, self.findings)

    def _on_trajectory(self, entry: Entry) -> None:
        verdict = str(entry["verdict"])
        key = TrajectoryId.parse(entry["id"])
        self.findings.counts[f"trajectories {verdict.replace('_', ' ')}"] += 1
        if verdict != "admitted":
            return
        validation = key.purpose == Purpose.VALIDATE.value
        phase = Phase.VALIDATE if validation else Phase.COLLECT
        if self._phase is not phase:
            self.findings.add(
                Invariant.I1, f"{key} was admitted in phase {self._phase.value}, not {phase.value}", entry
            )
        if validation:
            self.versions.check_policy(str(entry.get("policy")), f"{key} was admitted of", entry)
            return
        step = self.in_progress
        if step is None or step.collection is None:
            self.findings.add(Invariant.I1, f"{key} was admitted, but no step is being collected", entry)
            return
        step.collection.admit(key, entry)
        before = (step.before or {}).get(key)
        if before is not None and any(before.get(f) != entry.get(f) for f in ("digest", "reward", "policy")):
            self.findings.add(
                Invariant.I3, f"{key} is another after the controller was started again", before, entry
            )

    def _on_refill(self, entry: Entry) -> None:
        self.findings.counts["prompt groups dispatched"] += len(entry["prompts"])
        self.findings.counts["prompt groups set aside"] += len(entry["set_aside"])
        step = self._current(entry)
        if step is not None and step.collection is not None:
            step.collection.refill(entry)

    def _on_group_dropped(self, entry: Entry) -> None:
        step = self._current(entry)
        if step is not None and step.collection is not None:
            step.collection.drop(entry)

    def _on_recollect(self, entry: Entry) -> None:
        step = self._current(entry)
        if step is None or step.wanted is None:
            return
        if step.trained is not None:
            self.findings.add(
                Invariant.I2,
                f"step {step.wanted.step} was collected again after it was trained",
                step.trained,
                entry,
            )
        step.collection, step.before, step.batch = Collection(step.wanted, self.findings), None, None

    def _on_batch(self, entry: Entry) -> None:
        step = self._current(entry)
        if step is None or step.wanted is None or step.collection is None:
            return
        rows = step.collection.close(entry)
        if entry.get("policy") != step.wanted.policy:
            self.findings.add(
                Invariant.I1,
                f"the batch of step {step.wanted.step} is of {entry.get('policy')}, its prompts were "
                f"dispatched for {step.wanted.policy}",
                step.wanted.entry,
                entry,
            )
        digest = batch_digest(step.wanted.tag, rows)
        if (entry["digest"], entry["num_rows"]) != (digest, len(rows)):
            self.findings.add(
                Invariant.I3,
                f"the batch of step {step.wanted.step} has {entry['num_rows']} rows and the digest "
                f"{entry['digest']}; the admitted trajectories make {len(rows)} rows and {digest}",
                step.wanted.entry,
                entry,
            )
        for earlier in (step.batch, step.trained):
            if earlier is not None and earlier["digest"] != entry["digest"]:
                self.findings.add(Invariant.I3, f"step {step.wanted.step} has two batches", earlier, entry)
        step.batch, step.rows, step.num_dropped = entry, TrainedRows(rows), step.collection.num_dropped

    def _on_trained(self, entry: Entry) -> None:
        step = self._current(entry)
        if step is None or step.wanted is None:
            return
        for earlier in (step.batch, step.trained):
            if earlier is not None and earlier["digest"] != entry["digest"]:
                self.findings.add(
                    Invariant.I3,
                    f"step {step.wanted.step} trained the batch {entry['digest']}, not {earlier['digest']}",
                    earlier,
                    entry,
                )
        if step.batch is None:
            self.findings.add(Invariant.I2, f"step {step.wanted.step} was trained without a batch", entry)
        step.trained = entry

    # --- versions

    def _on_rollback(self, entry: Entry) -> None:
        self.versions.roll_back(entry)

    def _on_commit(self, entry: Entry) -> None:
        version, step = int(entry["version"]), self.in_progress
        training = step if step is not None and step.number == version else None
        is_new = version > max(self.versions.newest, 0) and version == self.finished + 1
        if is_new and (training is None or training.trained is None):
            self.findings.add(Invariant.I2, f"version {version} was committed without training", entry)
        known = training or self.steps.get(version)
        batch = str(known.batch["digest"]) if known is not None and known.batch is not None else ""
        self.versions.commit(entry, batch=batch, due=max(0, self.finished))
        if training is not None:
            training.commit = entry

    def _on_newcomers(self, entry: Entry) -> None:
        self.versions.check_newcomers(entry)

    # --- the ends of steps

    def _on_step(self, entry: Entry) -> None:
        number, step = int(entry["step"]), self.in_progress
        if number != self.finished + 1:
            self.findings.add(
                Invariant.RECORD,
                f"step {number} was finished after step {self.finished}",
                self._entry_of(self.finished),
                entry,
            )
        if number == 0:
            step = StepHistory()
            if self.versions.newest < 0:
                self.findings.add(Invariant.I1, "step 0 was finished before version 0 was committed", entry)
        elif step is None or step.number != number:
            self.findings.add(Invariant.I2, f"step {number} was finished, but not dispatched", entry)
            step = StepHistory()
        else:
            for what, event in (("batch", step.batch), ("training", step.trained), ("commit", step.commit)):
                if event is None:
                    self.findings.add(
                        Invariant.I2,
                        f"step {number} was finished without a {what}",
                        step.wanted.entry if step.wanted else None,
                        entry,
                    )
        # Of a finished step the rows are enough: memory stays small however long the run is.
        step.collection = step.before = None
        self.steps[number], self.in_progress = step, None

    def _on_checkpoint(self, entry: Entry) -> None:
        number = int(entry["step"])
        newest = self.versions.newest
        if number > newest:
            self.findings.add(
                Invariant.I2, f"a checkpoint of step {number}, but version {newest} is committed", entry
            )
        self.checkpoints[number] = entry

    def _on_checkpoint_removed(self, entry: Entry) -> None:
        name = str(entry["folder"]).rstrip("/").rpartition("/")[2]
        # Those of void steps are named void_step_N, and left this list with the rewind.
        if name.startswith("step_"):
            self.checkpoints.pop(int(name.removeprefix("step_")), None)

    def _entry_of(self, number: int) -> Entry | None:
        step = self.steps.get(number)
        return step.wanted.entry if step is not None and step.wanted is not None else None
