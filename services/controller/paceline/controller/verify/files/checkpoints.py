"""Compares the checkpoints on disk with the journal: files, policy, cursor, guard and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.controller.verify.digests import digest_of
from paceline.controller.verify.files.metrics_lines import MetricsLines
from paceline.controller.verify.findings import JournalEntry
from paceline.controller.verify.journal.history import History
from paceline.controller.verify.journal.steps.step import plain_digest
from paceline.core.errors import CheckpointError
from paceline.core.run_record.manifest import MANIFEST, manifest_fields
from paceline.storage.folder import Folder

_METADATA = ".metadata"


def check_checkpoints(root: Folder, history: History, metrics: MetricsLines) -> None:
    """Checks that each checkpoint of the journal exists, with the content that this run wrote at its step."""
    findings = history.findings
    for number, entry in sorted(history.checkpoints.by_step.items()):
        if not root.child(f"step_{number:06d}").has(MANIFEST):
            findings.i2(f"the checkpoint of step {number} is not on disk, or incomplete", entry)
    stored: dict[tuple[str, ...], int] = {}
    names = [name for name in root.folders() if name.startswith("step_") and root.child(name).has(MANIFEST)]
    for name in names:
        number = int(name.removeprefix("step_"))
        written = history.checkpoints.by_step.get(number)
        fault, files = _fault(root.child(name), number, history, metrics, written)
        twin = stored.setdefault(files, number) if files else number
        if not fault and history.versions.digest(twin) != history.versions.digest(number):
            fault = f"holds the weights of step {twin}: the files are the same, but their versions differ"
        if fault:
            findings.record(f"the checkpoint {name} {fault}", written)
        findings.counts["checkpoints on disk"] += 1


def _fault(
    folder: Folder, number: int, history: History, metrics: MetricsLines, entry: JournalEntry | None
) -> tuple[str, tuple[str, ...]]:
    """Returns a checkpoint's fault, or "", and the digests of its shards."""
    try:
        text = folder.read(MANIFEST)
        plain = manifest_fields(text, origin=MANIFEST)
        state = plain["controller_state"]
        of = (int(plain["step"]), int(state["step"]), str(state["run_id"]))
        if of != (number, number, history.run_id):
            return f"is of step {of[0]}, but has the controller's state of step {of[1]} of run {of[2]}", ()
        records = sorted(plain["files"].items())
        faults = [
            *(_file_fault(folder, name, of) for name, of in records),
            _state_fault(state, number, history, metrics),
        ]
        if entry is not None and entry.get("manifest") not in (None, "", digest_of(text)):
            faults.append("has a manifest that was changed after it was written")
        shards = tuple(str(record["blake2b"]) for name, record in records if name != _METADATA)
        return next((fault for fault in faults if fault), ""), shards
    except (CheckpointError, OSError) as error:
        return f"cannot be used: {error}", ()
    except (ValueError, KeyError, TypeError) as error:
        return f"has a manifest that cannot be read: {error!r}", ()


def _state_fault(state: Mapping[str, Any], number: int, history: History, metrics: MetricsLines) -> str:
    """Compares the controller's state in a manifest with the events `commit` and `step` and the metrics."""
    committed = history.versions.digest(number)
    policy = str(state.get("policy", ""))
    if policy and committed is not None and policy != f"v{number}@{committed}":
        return f"has the weights of {policy}, but v{number}@{committed} was committed"
    step = history.steps.get(number)
    if step is None:
        return ""
    if step.cursor and state["cursor"] != step.cursor:
        return f"has the cursor {state['cursor']}, but step {number} ended at {step.cursor}"
    if policy and plain_digest(state.get("guard")) != step.guard:
        return f"has a state of the guard that differs from that at the end of step {number}"
    line = metrics.of(number)
    of_line = line[1] if line is not None else {}
    for name, value in (state.get("metrics") or {}).items():
        # This value is known only once the checkpoint is written.
        is_known = name in of_line and math.isfinite(value) and name != "timing_s/checkpoint"
        if is_known and of_line[name] != value:
            return f"has {name} = {value}, but metrics.jsonl has {of_line[name]}"
    return ""


def _file_fault(folder: Folder, name: str, record: Mapping[str, Any]) -> str:
    """Compares a file with its size and digest in the manifest."""
    if not folder.has(name):
        return f"lacks {name}"
    size = folder.size(name)
    if size != record["size"]:
        return f"has {size} bytes in {name}, but {record['size']} were written"
    return "" if folder.digest(name) == record["blake2b"] else f"has a changed file {name}"
