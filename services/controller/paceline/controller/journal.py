"""The journal: the events of a run in order, each written before it takes effect.

Every event is one JSON line of events.jsonl in the run directory:
`{"n": 17, "time": 1763690000.1, "event": "trajectory", "step": 3, ...}`. `n` counts without gaps within one
file. The writer holds a lock on the file: there is one controller per run directory. The events:

run {run_id, term, step, data_digest, settings, pid}   a controller began; `step` is the last finished one;
                                           verify: settings that `paceline verify` reads;
                                           code: [reference, file's digest] of the user's own functions
resume {step, phase}                         the run goes on in the step: the step's trajectories, refills and
                                             drops so far are void, and come again from the log
rewind {to_step, reason, cursor, guard}      steps after `to_step` are void
recollect {step, reason}                     the step's trajectories, refills and drops so far are void
lost {step, reason}                          the broker has no data of the run: a step that was trained, and
                                             is not finished by this controller, has to be trained again
phase {step, source, to}                     the sequencer enters a phase
epoch {number, members}                      a weight group was formed
dispatch {step, policy, prompts, samples?}   the prompts of a step, once per step and rewind; `samples` by
                                             purpose, where they are not rollout.n for training alone
                                             (older journals: greedy: true, for one greedy answer)
redispatch {step, prompts}                   the prompts that were sent again: missing at the
                                             broker, or lost with a blob store (verdict lost)
sampling {step, number, policy, prompts, samples, digest}   a dataflow's further sampling, each time that it
                                             begins; `digest` covers all that it asks for, to the token
waiting {step}                               a script has not said for a minute what to do
trajectory {id, verdict, server, ...}        the barrier's verdict; policy, digest (of the blob), reward,
                                             error; token_rewards, normalized: parts of the reward;
                                             teacher: digest of a served teacher's tokens
refusal {step, prompt, reason, message, server}   a server gives up a prompt group
refill, group_dropped, batch_short           why a prompt of the step is not trained
batch {step, policy, digest, num_rows, rows?}   the batch is complete; `digest` is that of its rows; `rows`
                                             are those that a dataflow chose: [id, reward or null, baseline]
trained {step, digest}                       the learner has answered
rollback {step, to_step, folder, reason}     the learner takes the weights of a checkpoint
commit {version, digest, servers}            a policy version is served from now on
newcomers {version, servers}                 further servers have the committed version
validate {step, policy, sets}                what a validation asks for, each time that it begins: by the
                                             set's name, "" for data.val_files, its prompts, num_samples,
                                             right_above (older journals: prompts, num_samples; one set);
                                             beside: true, if validation servers answer it beside training.
                                             Its trajectories have `beside`: its step
validated {step, policy, metrics}            the result of a validation beside training came in; `metrics` is
                                             the digest of its line. Takes effect with the next `step`
validation_skipped {step, reason}            a validation beside training is given up
val_group_dropped {step, prompt, reason}     why one of its prompts has no answers
saved {step, file, digest, num_rows}         a file of trajectories is written
checkpoint {step, folder, good, manifest}    a checkpoint is complete; `manifest` is its manifest's digest
checkpoint_removed {folder}
step {step, log_position, cursor, guard, metrics}   the step is finished; `metrics` is the digest of its line
end {ok, message, step}                      the run is over
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.controller.standing import Standing
from paceline.core.clock import Clock
from paceline.core.errors import CheckpointError, ConfigError
from paceline.service.disk import writing

Event = Mapping[str, Any]

_TO_DISK = frozenset({"run", "dispatch", "batch", "commit", "step", "checkpoint", "rewind", "end"})
"""Events that are synced to disk before the run continues."""

_TRAJECTORY = b'"event":"trajectory"'


class Journal:
    """Appends events to the file, with one unbuffered write per call.

    A killed process therefore loses no event whose effect was seen. A last line that a crash has cut off is
    removed when the file is opened.

    Attributes:
        standing: where the run stands after all events so far.
        term: the number of this controller among those of the run, from 1.

    Raises:
        ConfigError: another process writes this journal.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock, self._path = clock, path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            _lock(self._file, path)
            _cut_off_torn_line(self._file, path)
        except BaseException:
            os.close(self._file)
            raise
        self._next = 0
        self.standing = Standing()
        for event in read(path):
            self._next = max(self._next, int(event["n"]) + 1)
            self.standing.note(event)
        self.term = self.standing.term + 1

    def record(self, event: str, **fields: object) -> None:
        """Appends one event to the journal."""
        self.record_all([{"event": event, **fields}])

    def record_all(self, events: Iterable[Event]) -> None:
        """Appends several events in one write.

        Raises:
            EnvironmentLackError: the disk is full.
        """
        lines, to_disk = [], False
        for event in events:
            stamped = {"n": self._next, "time": round(self._clock.wall(), 6), **event}
            lines.append(json.dumps(stamped, separators=(",", ":"), default=str) + "\n")
            self._next += 1
            to_disk = to_disk or event["event"] in _TO_DISK
            self.standing.note(event)
        with writing(self._path.parent):
            if lines:
                _write_all(self._file, "".join(lines).encode())
            if to_disk:
                os.fsync(self._file)

    def close(self) -> None:
        """Closes the file and gives up the lock."""
        os.close(self._file)


def read(path: Path) -> Iterator[Event]:
    """Yields the events that say where the run stands: all except trajectories, and always the last one."""
    with path.open("rb") as lines:
        line, skipped, number = b"", False, 0
        for number, line in enumerate(lines, 1):
            skipped = _TRAJECTORY in line
            if not skipped and line.endswith(b"\n"):
                yield _event(path, number, line)
        if skipped and line.endswith(b"\n"):
            yield _event(path, number, line)


def _event(path: Path, number: int, line: bytes) -> Event:
    try:
        event: Event = json.loads(line)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged at line {number}: {error}; no run can go on from it. Restore the file, or "
            "set trainer.resume: never to begin again"
        ) from error
    return event


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = next((event["pid"] for event in reversed(list(read(path))) if "pid" in event), None)
        who = f"process {pid}" if pid else "another process"
        raise ConfigError(
            f"{path.parent} is in use: {who} is the controller of this run; wait for it, stop it, or choose "
            "another trainer.run_dir"
        ) from None


def _cut_off_torn_line(file: int, path: Path) -> None:
    """Truncates the file after its last complete line."""
    size = end = os.fstat(file).st_size
    with path.open("rb") as lines:
        while end > 0:
            start = max(0, end - 65536)
            lines.seek(start)
            newline = lines.read(end - start).rfind(b"\n")
            end = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
    if end < size:
        os.ftruncate(file, end)
