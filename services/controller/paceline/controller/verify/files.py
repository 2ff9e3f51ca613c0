"""Whether the files of a run directory say what its journal says: metrics, trajectories, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.controller.verify.findings import Invariant
from paceline.controller.verify.history import History, StepHistory
from paceline.core.errors import CheckpointError
from paceline.core.manifest import MANIFEST, manifest_fields
from paceline.storage.folder import Folder

_COMPARED = ("step", "prompt_id", "sample_index", "reward", "policy_version")
"""Columns of a trajectory file."""


def check_metrics(run_dir: Path, history: History) -> None:
    """One line per finished step, in order; one more if the run ended between the line and its event."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    steps = [_step_of(line) for line in lines]
    expected = sorted(history.steps)
    if steps not in (expected, [*expected, history.finished + 1]):
        history.findings.add(Invariant.RECORD, f"metrics.jsonl {_difference(steps, expected)}")


def _step_of(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _difference(steps: Sequence[int | None], expected: Sequence[int]) -> str:
    """The first fault of the lines' steps."""
    for number, step in enumerate(steps, start=1):
        if step is None:
            return f"has a line that cannot be read: line {number}"
        if step in steps[: number - 1]:
            return f"has two lines of step {step}"
    missing = [step for step in expected if step not in steps]
    if missing:
        return f"lacks step {missing[0]}, which is finished"
    extra = [step for step in steps if step not in expected and step != len(expected)]
    if extra:
        return f"has a line of step {extra[0]}, which is not finished"
    return f"is not in the order of the steps: {', '.join(map(str, steps))}"


def check_trajectories(run_dir: Path, history: History) -> None:
    """The rows of each finished step's parquet file are the trained ones."""
    import pyarrow.parquet

    for number, step in sorted(history.steps.items()):
        if step.wanted is None:
            continue
        path = run_dir / "trajectories" / f"step_{number:06d}.parquet"
        try:
            table = pyarrow.parquet.read_table(path, columns=list(_COMPARED))
            fault = mask_fault(path)
        except (OSError, pyarrow.ArrowException) as error:
            history.findings.add(Invariant.I3, f"{path.name} of a finished step cannot be read: {error}")
            continue
        difference = _first_difference(table.to_pylist(), step, step.wanted.tag.version)
        if difference or fault:
            history.findings.add(Invariant.I3, f"{path.name} {difference or fault}", step.batch)
        history.findings.counts["rows in parquet files"] += table.num_rows


def mask_fault(path: Path) -> str:
    """Where the file has tokens: the masks have as many ones as tokens were counted as sampled."""
    import pyarrow.compute
    import pyarrow.parquet

    if "response_mask" not in pyarrow.parquet.read_schema(path).names:
        return ""
    table = pyarrow.parquet.read_table(path, columns=["response_mask", "num_sampled_tokens"])
    masked = table.filter(pyarrow.compute.is_valid(table["response_mask"]))
    ones = pyarrow.compute.sum(pyarrow.compute.list_flatten(masked["response_mask"])).as_py() or 0
    counted = pyarrow.compute.sum(masked["num_sampled_tokens"]).as_py() or 0
    return "" if ones == counted else f"has masks with {ones} sampled tokens, {counted} were counted"


def _first_difference(written: Sequence[dict[str, Any]], step: StepHistory, version: int) -> str:
    if len(written) != len(step.rows):
        return f"has {len(written)} rows, {len(step.rows)} were trained"
    for place, (plain, row) in enumerate(zip(written, step.rows, strict=True)):
        prompt_id, sample_index, reward = row
        expected = {
            "step": step.number,
            "prompt_id": prompt_id,
            "sample_index": sample_index,
            "reward": reward,
            "policy_version": version,
        }
        if plain != expected:
            return f"has {plain} in row {place}; {expected} was trained"
    return ""


def check_checkpoints(root: Folder, history: History, run_id: str) -> None:
    """Each checkpoint of the journal is there, and what is there belongs to this run and to its step."""
    findings = history.findings
    for number, entry in sorted(history.checkpoints.items()):
        if not root.child(f"step_{number:06d}").has(MANIFEST):
            findings.add(
                Invariant.I2, f"the checkpoint of step {number} is not on disk, or incomplete", entry
            )
    names = [name for name in root.folders() if name.startswith("step_") and root.child(name).has(MANIFEST)]
    for name in names:
        number = int(name.removeprefix("step_"))
        fault = _fault(root.child(name), number, run_id)
        if fault:
            findings.add(
                Invariant.RECORD,
                f"the checkpoint {name} {fault}",
                history.checkpoints.get(number),
            )
        findings.counts["checkpoints on disk"] += 1


def _fault(folder: Folder, number: int, run_id: str) -> str:
    try:
        plain = manifest_fields(folder.read(MANIFEST), origin=MANIFEST)
        state = plain["controller_state"]
        of = (int(plain["step"]), int(state["step"]), str(state["run_id"]))
        if of != (number, number, run_id):
            return f"is of step {of[0]} with the controller's state of step {of[1]} of run {of[2]}"
        faults = (_file_fault(folder, name, of) for name, of in sorted(plain["files"].items()))
        return next((fault for fault in faults if fault), "")
    except (CheckpointError, OSError) as error:
        return f"cannot be used: {error}"
    except (ValueError, KeyError, TypeError) as error:
        return f"has a manifest that cannot be read: {error!r}"


def _file_fault(folder: Folder, name: str, record: Mapping[str, Any]) -> str:
    """Compares a file with its size and digest in the manifest."""
    if not folder.has(name):
        return f"lacks {name}"
    size = folder.size(name)
    if size != record["size"]:
        return f"has {size} bytes in {name}, {record['size']} were written"
    return "" if folder.digest(name) == record["blake2b"] else f"has another {name} than was written"
