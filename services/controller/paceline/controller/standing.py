"""Where a run stands, from the events of its journal. Pure.

    events -> finished step (cursor, guard, log position) + step in progress (prompts, batch digest, phase)
              + steps dispatched ahead of it

A `rewind` makes every step after its `to_step` void; a `recollect` makes the trajectories of the step in
progress void, `withdrawn` those of a step that was dispatched ahead. `rewind`, `recollect` and `lost` also
make all steps ahead void. After `lost` only the controller that wrote it can still finish the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.broker.log import LOG_START
from paceline.core.policy import PolicyTag


@dataclass(kw_only=True, slots=True)
class StepInProgress:
    """The journal's record of a step that is not finished.

    Attributes:
        phase: the last phase that the step reached.
        policy: the policy that its prompts were dispatched for, as text; "" before the dispatch.
        samplings: digests of the requests of further samplings, by number.
        digest: digest of the batch, once the batch is complete.
        num_recollects: how often the step's trajectories were collected again.
        is_lost: whether the broker has lost the step's trajectories, so that new ones are needed to repeat
            it.
    """

    step: int
    phase: str = ""
    policy: str = ""
    prompts: tuple[int, ...] = ()
    purposes: tuple[str, ...] = ()
    samplings: dict[int, str] = field(default_factory=dict)
    digest: str = ""
    trained: bool = False
    num_recollects: int = 0
    is_lost: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFile:
    """A file of trajectories: its digest, and the prompts of which it lacks tokens."""

    digest: str
    without_tokens: frozenset[int]


@dataclass(kw_only=True, slots=True)
class Standing:
    """The state from which a restarted controller continues.

    Attributes:
        finished: the last finished step; -1 before step 0, the start, is finished.
        log_position: last entry of the `scored` stream that belongs to finished steps.
        cursor, guard: their states at the end of the finished step; {} before the first.
        settings: values of the configuration that must not change, by key.
        code: reference and file digest of the user's own functions and classes, by key.
        commits: the digest of every version that was committed and is not void.
        current: the step in progress, or the next step if it was dispatched ahead; None if there is neither.
        ahead: the steps after `current` that were dispatched, by number (`barrier.mode`: bounded).
        ended: whether the controller of the last term ended in order.
        after_end: whether the controller of the term before that one ended in order.
        saved: the file of each step's trajectories, by step.
        turn: who may use the memory of shared GPUs (`fleet/turns`); "" before the first turn.
        validations: the validations beside training that have begun and are not over: policy by step. One
            is over with the end of the step in which its result came in.
    """

    run_id: str = ""
    data_digest: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    term: int = 0
    finished: int = -1
    log_position: str = LOG_START
    cursor: Mapping[str, Any] = field(default_factory=dict)
    guard: Mapping[str, Any] = field(default_factory=dict)
    commits: dict[int, str] = field(default_factory=dict)
    current: StepInProgress | None = None
    ahead: dict[int, StepInProgress] = field(default_factory=dict)
    ended: bool = False
    after_end: bool = False
    saved: dict[int, SavedFile] = field(default_factory=dict)
    turn: str = ""
    validations: dict[int, str] = field(default_factory=dict)
    _validated_in: dict[int, int] = field(default_factory=dict)
    _over: list[int] = field(default_factory=list)

    @property
    def committed(self) -> PolicyTag | None:
        """The policy that was committed last and is not void."""
        if not self.commits:
            return None
        version = max(self.commits)
        return PolicyTag(version=version, digest=self.commits[version])

    def __str__(self) -> str:
        current = self.current
        doing = f"in {current.phase} of step {current.step}" if current else "between steps"
        again = f", collected again {current.num_recollects} times" if current else ""
        done = f"step {self.finished} finished at {self.log_position}, {self.committed} committed"
        return f"{done}, {doing}{again}"

    def note(self, event: Mapping[str, Any]) -> None:
        """Takes one event into account, in the order of the journal."""
        handler = _HANDLERS.get(event["event"])
        if handler is not None:
            handler(self, event)

    def in_progress(self, step: int) -> StepInProgress:
        """Returns the record of `step`, the step in progress; a new one if the journal has none yet."""
        if self.current is None or self.current.step != step:
            self.current = self.ahead.pop(step, None) or StepInProgress(step=step)
        return self.current

    def dispatched(self, step: int) -> StepInProgress | None:
        """Returns the record of `step`, in progress or ahead; None if the journal has none."""
        is_current = self.current is not None and self.current.step == step
        return self.current if is_current else self.ahead.get(step)

    def dispatched_after(self, step: int) -> list[int]:
        """Returns the later steps whose prompts were sent out, ascending."""
        of_current = [self.current.step] if self.current is not None and self.current.prompts else []
        return sorted(other for other in (*of_current, *self.ahead) if other > step)

    def _on_run(self, event: Mapping[str, Any]) -> None:
        self.run_id, self.after_end, self.ended = str(event["run_id"]), self.ended, False
        self._over.clear()
        self.term = int(event.get("term", self.term + 1))
        self.data_digest = str(event.get("data_digest", self.data_digest))
        self.settings = event.get("settings", self.settings)
        self.code = event.get("code", {})

    def _on_phase(self, event: Mapping[str, Any]) -> None:
        if int(event["step"]) > self.finished:
            self.in_progress(int(event["step"])).phase = str(event["to"])

    def _on_dispatch(self, event: Mapping[str, Any]) -> None:
        step = int(event["step"])
        is_ahead = step > self.finished + 1
        its = self.ahead.setdefault(step, StepInProgress(step=step)) if is_ahead else self.in_progress(step)
        its.policy, its.prompts = str(event["policy"]), tuple(event["prompts"])
        older = ("train", "greedy") if event.get("greedy") else ("train",)
        its.purposes = tuple(event["samples"]) if "samples" in event else older

    def _on_withdrawn(self, event: Mapping[str, Any]) -> None:
        step = int(event["step"])
        self.ahead.pop(step, None)
        if self.current is not None and self.current.step == step:
            self.current = None

    def _on_sampling(self, event: Mapping[str, Any]) -> None:
        current = self.in_progress(int(event["step"]))
        current.samplings[int(event["number"])] = str(event["digest"])

    def _on_recollect(self, event: Mapping[str, Any]) -> None:
        current = self.in_progress(int(event["step"]))
        current.num_recollects += 1
        current.samplings.clear()
        if current.policy != str(self.committed):
            # The step is now sampled from the committed policy, so it is dispatched again.
            current.policy = ""
        self.log_position = LOG_START
        self.ahead.clear()

    def _on_lost(self, event: Mapping[str, Any]) -> None:
        self.log_position = LOG_START
        self.ahead.clear()
        if self.current is not None:
            self.current.is_lost = bool(self.current.prompts)
            self.current.samplings.clear()

    def _on_batch(self, event: Mapping[str, Any]) -> None:
        current = self.in_progress(int(event["step"]))
        current.digest, current.is_lost = str(event["digest"]), False

    def _on_trained(self, event: Mapping[str, Any]) -> None:
        self.in_progress(int(event["step"])).trained = True

    def _on_commit(self, event: Mapping[str, Any]) -> None:
        self.commits[int(event["version"])] = str(event["digest"])

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self.finished = int(event["step"])
        self.current = self.ahead.pop(self.finished + 1, None)
        self.log_position = str(event["log_position"])
        self.cursor, self.guard = event["cursor"], event["guard"]
        for validated in self._over:
            self.validations.pop(validated, None)
            self._validated_in[validated] = self.finished
        self._over.clear()

    def _on_rewind(self, event: Mapping[str, Any]) -> None:
        self.finished, self.current = int(event["to_step"]), None
        self.log_position = LOG_START
        self.ahead.clear()
        self.cursor, self.guard = event["cursor"], event["guard"]
        self.commits = {v: digest for v, digest in self.commits.items() if v <= self.finished}
        self._rewind_validations(self.finished)

    def _rewind_validations(self, to_step: int) -> None:
        """Makes validations of later steps void; one of `to_step` whose result came in later is repeated."""
        self._over.clear()
        self.validations = {step: policy for step, policy in self.validations.items() if step <= to_step}
        if self._validated_in.get(to_step, to_step) > to_step and to_step in self.commits:
            policy = PolicyTag(version=to_step, digest=self.commits[to_step])
            self.validations[to_step] = str(policy)
        known = self._validated_in.items()
        self._validated_in = {s: end for s, end in known if s <= to_step and s not in self.validations}

    def _on_validate(self, event: Mapping[str, Any]) -> None:
        if event.get("beside"):
            self.validations[int(event["step"])] = str(event["policy"])
        else:
            self.validations.pop(int(event["step"]), None)

    def _on_validated(self, event: Mapping[str, Any]) -> None:
        self._over.append(int(event["step"]))

    def _on_validation_skipped(self, event: Mapping[str, Any]) -> None:
        step = int(event["step"])
        if self.validations.pop(step, None) is not None:
            self._validated_in[step] = self.finished + 1

    def _on_saved(self, event: Mapping[str, Any]) -> None:
        if str(event["file"]).startswith("step_"):
            gone = frozenset(event.get("without_tokens", ()))
            self.saved[int(event["step"])] = SavedFile(digest=str(event["digest"]), without_tokens=gone)

    def _on_turn(self, event: Mapping[str, Any]) -> None:
        self.turn = str(event["holder"])

    def _on_end(self, event: Mapping[str, Any]) -> None:
        self.ended = True


_HANDLERS: Mapping[str, Callable[[Standing, Mapping[str, Any]], None]] = {
    "run": Standing._on_run,
    "phase": Standing._on_phase,
    "dispatch": Standing._on_dispatch,
    "sampling": Standing._on_sampling,
    "withdrawn": Standing._on_withdrawn,
    "recollect": Standing._on_recollect,
    "lost": Standing._on_lost,
    "batch": Standing._on_batch,
    "trained": Standing._on_trained,
    "commit": Standing._on_commit,
    "step": Standing._on_step,
    "rewind": Standing._on_rewind,
    "validate": Standing._on_validate,
    "validated": Standing._on_validated,
    "validation_skipped": Standing._on_validation_skipped,
    "saved": Standing._on_saved,
    "turn": Standing._on_turn,
    "end": Standing._on_end,
}
