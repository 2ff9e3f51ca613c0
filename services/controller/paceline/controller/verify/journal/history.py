"""Follows the journal through terms, phases and steps, and checks each event against those before it.

    run -> { dispatch -> trajectories, refills, drops -> batch -> trained -> commit -> step } -> end

With a bound (`barrier.max_staleness`) steps are dispatched and collected while an earlier one is trained;
`withdrawn` makes the trajectories of such a step void.

After `resume` the step's collection begins again from the same log, and each trajectory must get the same
verdict as before. `recollect` makes the step's trajectories void, and `rewind` makes every step after its
target void. A step that is dispatched again must have the same prompts. Validations on servers of their own
go on beside the steps (`beside`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from paceline.config.run import RunConfig
from paceline.controller.phases import Phase, move
from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.checkpoints import WrittenCheckpoints
from paceline.controller.verify.journal.prompt_order import PromptOrder
from paceline.controller.verify.journal.steps.collection import Collection, Wanted
from paceline.controller.verify.journal.steps.open_steps import OpenSteps
from paceline.controller.verify.journal.steps.step import Finished, StepHistory
from paceline.controller.verify.journal.term import Term, check_start
from paceline.controller.verify.journal.validation import ValidationCheck
from paceline.controller.verify.journal.validations import Validations
from paceline.controller.verify.journal.versions import Versions
from paceline.controller.verify.rows.replays import Replays
from paceline.core.errors import IllegalTransitionError
from paceline.core.ids import Purpose, TrajectoryId

_VALIDATE = Purpose.VALIDATE.value
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


OnValidated = Callable[["History", ValidationCheck, JournalEntry], None]
"""Takes a validation beside training that is over, with its event `validated`."""

OnFinished = Callable[["History", StepHistory, int, JournalEntry], None]
"""Takes a step that is finished, with its number and its event `step`."""


class History:
    """The state of a run after the events so far.

    Args:
        config: the settings of terms whose event `run` does not record them.
        on_finished: called with each step that is finished, its number and its event `step`.
        on_validated: called with each validation beside training that is over.

    Attributes:
        steps: the finished steps that no rewind made void.
        finished: the last finished step; -1 before step 0, the start.
        validations: the validations between steps and beside training.
        ended: the last event, if it is the end of the run.
    """

    def __init__(
        self,
        findings: Findings,
        config: RunConfig,
        on_finished: OnFinished | None = None,
        on_validated: OnValidated | None = None,
    ) -> None:
        self._on_validation_over: OnValidated = on_validated or (lambda history, check, entry: None)
        self.findings, self._config = findings, config
        self._on_finished: OnFinished = on_finished or (lambda history, step, number, entry: None)
        self.versions = Versions(findings)
        self.steps: dict[int, Finished] = {}
        self.finished = -1
        self.ended: JournalEntry | None = None
        self._run: JournalEntry | None = None
        self._term: Term | None = None
        self._phase = Phase.STARTING
        self._open = OpenSteps(findings)
        self._order = PromptOrder(findings)
        self._replays = Replays(findings)
        self.validations = Validations(findings, self.versions, self._open)
        self.checkpoints = WrittenCheckpoints(findings)
        self._handlers: Mapping[str, Callable[[JournalEntry], None]] = {
            "run": self._on_run,
            "resume": self._on_resume,
            "rewind": self._on_rewind,
            "phase": self._on_phase,
            "dispatch": self._on_dispatch,
            "sampling": self._on_sampling,
            "withdrawn": self._open.withdraw,
            "lost": lambda entry: self._open.void_ahead(),
            "trajectory": self._on_trajectory,
            "refill": self._on_refill,
            "group_dropped": self._on_group_dropped,
            "recollect": self._on_recollect,
            "batch": self._on_batch,
            "trained": self._on_trained,
            "rollback": self.versions.roll_back,
            "commit": self._on_commit,
            "newcomers": self.versions.check_newcomers,
            "validate": lambda entry: self.validations.begin(entry, self.term),
            "val_group_dropped": self.validations.drop,
            "validated": self.validations.beside.validated,
            "validation_skipped": self.validations.beside.skipped,
            "saved": self.validations.note_saved,
            "step": self._on_step,
            "checkpoint": lambda entry: self.checkpoints.write(entry, self.versions.newest),
            "checkpoint_removed": self.checkpoints.remove,
            "member": self._on_member,
            "end": self._on_end,
        }

    def follow(self, entries: Iterable[JournalEntry]) -> None:
        """Takes the events in order."""
        for entry in entries:
            # Members leave after they hear of the end.
            if self.ended is not None and entry.kind not in ("run", "member"):
                self.findings.record("an event follows the end of its term", self.ended, entry)
            kind = entry.kind
            if kind in _COUNTED:
                self.findings.counts[_COUNTED[kind]] += 1
            handler = self._handlers.get(kind)
            if handler is not None:
                handler(entry)

    @property
    def term(self) -> Term:
        """The settings of the term."""
        assert self._term is not None, "a journal begins with a term"
        return self._term

    @property
    def run_id(self) -> str:
        """The id of the run; "" before its first term."""
        return str(self._run["run_id"]) if self._run is not None else ""

    # --- terms

    def _on_run(self, entry: JournalEntry) -> None:
        before, self._run = self._run, entry
        self._phase, self.ended = Phase.STARTING, None
        self._term = term = Term.read(entry, self._config)
        self.versions.restart()
        self.validations.beside.restart()
        self.versions.repeatable = self.versions.repeatable and term.on_cpu
        self._order.begin_term(term, in_step=self._open.current is not None)
        term.note_unseen(self.findings)
        check_start(before, entry, self.findings)
        self.findings.counts["controller restarts"] += int(before is not None)

    def _on_resume(self, entry: JournalEntry) -> None:
        for step in self._open.all:
            if step.wanted is not None:
                step.before = {**(step.before or {}), **step.admitted}
                self._collect_again(step)

    def _collect_again(self, step: StepHistory) -> None:
        assert step.wanted is not None
        step.collections = self._dispatched(step.wanted)
        if step is self._open.current:
            self._order.again(step.number)
        if self._term is not None and step.shapes != self._term.shapes:
            step.shapes = None

    def _dispatched(self, wanted: Wanted) -> list[Collection]:
        """Returns a new collection if the dispatch also samples its prompts; else none."""
        return [Collection(wanted, self.findings)] if wanted.counts else []

    def _on_rewind(self, entry: JournalEntry) -> None:
        to_step = int(entry["to_step"])
        if not 0 <= to_step <= self.finished:
            self.findings.i2(
                f"the run went back to step {to_step}, but only step {self.finished} is finished", entry
            )
        self._open.rewind(to_step, self.steps)
        self.validations.beside.rewind(to_step)
        self.steps = {number: step for number, step in self.steps.items() if number <= to_step}
        self.finished = min(self.finished, to_step)
        known = self.steps.get(to_step)
        self._order.rewind(entry, known.cursor if known is not None else None)
        self.versions.rewind(to_step)
        self.checkpoints.rewind(to_step)

    def _on_end(self, entry: JournalEntry) -> None:
        self.ended = entry
        if not entry["ok"]:
            return
        num_steps = self._config.trainer.total_steps
        if num_steps is not None and self.finished >= num_steps:
            self.validations.beside.end(entry)
        if self._phase is not Phase.ENDED:
            self.findings.i5(f"the run ended well in phase {self._phase.value}", self._run, entry)
        if self._open.current is not None:
            wanted = self._open.current.wanted
            self.findings.i2(
                "the run ended well while a step was not finished",
                wanted.entry if wanted is not None else None,
                entry,
            )

    def _on_member(self, entry: JournalEntry) -> None:
        self.findings.counts["members lost"] += int(entry.get("what") in ("dead", "expelled"))

    # --- phases

    def _on_phase(self, entry: JournalEntry) -> None:
        to = Phase(entry["to"])
        try:
            move(self._phase, to)
        except IllegalTransitionError as error:
            self.findings.i5(str(error), entry)
        self._phase = to

    # --- a step

    def _current(self, entry: JournalEntry) -> StepHistory | None:
        """Returns the step in progress if the event belongs to it; else notes a breach."""
        step, number = self._open.current, int(entry["step"])
        if step is not None and step.number == number:
            return step
        self.findings.i2(f"a {entry.kind} of step {number}, which was not dispatched or is finished", entry)
        return None

    def _on_dispatch(self, entry: JournalEntry) -> None:
        term = self._term or Term.read(entry, self._config)
        wanted = Wanted.of(entry, term.num_samples)
        # A dispatch that is too early shows at its batch: the step would train tokens that are too old.
        is_ahead = (
            self._open.current is not None and wanted.step > self.finished + 1 and term.max_staleness > 0
        )
        if wanted.step != self.finished + 1 and not is_ahead:
            self.findings.i2(
                f"step {wanted.step} was dispatched after step {self.finished}",
                self._entry_of(self.finished),
                entry,
            )
        self.findings.counts["prompt groups dispatched"] += len(wanted.prompts)
        self.versions.check_policy(wanted.policy, f"step {wanted.step} was dispatched for", entry)
        if len(set(wanted.prompts)) != len(wanted.prompts):
            self.findings.i2(f"step {wanted.step} asks for a prompt twice", entry)
        step = self._open.dispatch(wanted, is_ahead=is_ahead)
        self._order.dispatch(wanted.step, wanted.prompts, entry)
        step.collections, step.shapes = self._dispatched(wanted), term.shapes

    def _on_sampling(self, entry: JournalEntry) -> None:
        step = self._current(entry)
        if step is None or step.wanted is None:
            return
        self.findings.counts["prompt groups dispatched"] += len(entry["prompts"])
        step.begin_sampling(entry, self.findings)

    def _on_trajectory(self, entry: JournalEntry) -> None:
        verdict = str(entry["verdict"])
        key = TrajectoryId.parse(entry["id"])
        self.findings.counts[f"trajectories {verdict.replace('_', ' ')}"] += 1
        if "beside" in entry.event:
            if verdict == "admitted":
                self.validations.beside.admit(key, entry)
            return
        is_ahead = "ahead" in entry.event
        step = self._open.ahead.get(int(entry["ahead"])) if is_ahead else self._open.current
        is_collected = self._phase is Phase.COLLECT or (is_ahead and self._phase is Phase.LEARN)
        if step is not None and step.collection is not None and is_collected:
            step.collection.verdicts[verdict] += 1
        if verdict != "admitted":
            return
        is_answer = key.purpose == _VALIDATE
        phase = Phase.VALIDATE if is_answer else Phase.COLLECT
        if self._phase is not phase and not (is_collected and not is_answer):
            self.findings.i1(f"{key} was admitted in phase {self._phase.value}, not {phase.value}", entry)
        if is_answer:
            self.validations.admit(key, entry, self._term)
            return
        if step is None or step.collection is None:
            self.findings.i1(f"{key} was admitted, but no step is being collected", entry)
            return
        step.admit(key, entry, self.term, self.versions, self.findings)

    # --- the rest of a step

    def _on_refill(self, entry: JournalEntry) -> None:
        self.findings.counts["prompt groups dispatched"] += len(entry["prompts"])
        self.findings.counts["prompt groups set aside"] += len(entry["set_aside"])
        step = self._current(entry)
        if step is not None and step.collection is not None:
            self._order.refill(entry["prompts"], step.collection.prompts, entry)
            step.collection.refill(entry)

    def _on_group_dropped(self, entry: JournalEntry) -> None:
        step = self._current(entry)
        if step is not None and step.collection is not None:
            step.collection.drop(entry)

    def _on_recollect(self, entry: JournalEntry) -> None:
        step = self._current(entry)
        if step is None or step.wanted is None:
            return
        step.recollect(entry, self.findings)
        self._collect_again(step)
        self._open.void_ahead()

    def _on_batch(self, entry: JournalEntry) -> None:
        step = self._current(entry)
        if step is None or step.wanted is None or step.collection is None:
            return
        step.take_batch(entry, self._replays, self.term, self.findings)

    def _on_trained(self, entry: JournalEntry) -> None:
        step = self._current(entry)
        if step is not None and step.wanted is not None:
            step.train(entry, self.findings)

    # --- versions

    def _on_commit(self, entry: JournalEntry) -> None:
        version, step = int(entry["version"]), self._open.current
        training = step if step is not None and step.number == version else None
        is_new = version > max(self.versions.newest, 0) and version == self.finished + 1
        if is_new and (training is None or training.trained is None):
            self.findings.i2(f"version {version} was committed without training", entry)
        known = self.steps.get(version)
        batch = known.batch if known is not None else ""
        if training is not None:
            batch = str(training.batch["digest"]) if training.batch is not None else ""
        self.versions.commit(entry, batch=batch, due=max(0, self.finished))
        if training is not None:
            training.commit = entry

    # --- the ends of steps

    def _on_step(self, entry: JournalEntry) -> None:
        number, step = int(entry["step"]), self._open.current
        if number != self.finished + 1:
            self.findings.record(
                f"step {number} was finished after step {self.finished}", self._entry_of(self.finished), entry
            )
        if number == 0:
            step = step or StepHistory()
            if self.versions.newest < 0:
                self.findings.i1("step 0 was finished before version 0 was committed", entry)
        elif step is None or step.number != number:
            self.findings.i2(f"step {number} was finished, but not dispatched", entry)
            step = StepHistory()
        else:
            step.check_complete(entry, self.findings)
        if step.validation is not None:
            step.validation.close(entry)
        self._order.finish(entry)
        self._on_finished(self, step, number, entry)
        for check, validated in self.validations.beside.finish(number):
            self._on_validation_over(self, check, validated)
        rule = step.term.replay_rule if step.term is not None else self.term.replay_rule
        self._replays.finish(number, step.kept_rows(), rule, self.checkpoints.by_step)
        # This keeps memory small even for long runs.
        self.steps[number], self.finished = step.finished(entry), max(self.finished, number)
        self._open.finish(number)

    def _entry_of(self, number: int) -> JournalEntry | None:
        step = self.steps.get(number)
        return step.entry(number) if step is not None else None
