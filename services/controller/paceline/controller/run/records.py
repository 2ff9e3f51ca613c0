"""What a run leaves for people: metrics.jsonl and trajectories/step_NNNNNN.parquet."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.core.trajectory import ScoredHeader
from paceline.data.prompts import Prompt


class MetricsFile:
    """One JSON line a step, keys in a fixed order, so that two runs can be compared line by line.

    Args:
        path: the file; lines of steps after `last_step` (a run that went on after its last checkpoint) are dropped.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        self._path = path
        kept = (
            [line for line in _lines(path) if int(json.loads(line)["step"]) <= last_step]
            if last_step >= 0
            else []
        )
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step; a value that is not finite becomes null."""
        row: dict[str, float | int | None] = {"step": step}
        row |= {key: (value if math.isfinite(value) else None) for key, value in sorted(metrics.items())}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def write_trajectories(
    folder: Path, step: int, name: str, batch: Sequence[ScoredHeader], prompts: Mapping[int, Prompt]
) -> Path:
    """Writes a step's scored samples, one row each, as parquet; returns the file.

    Args:
        name: "step" for training, "val" for validation: first part of the file name.
    """
    import pyarrow
    import pyarrow.parquet

    contexts = {
        header.trajectory_id.prompt_id: prompts[header.trajectory_id.prompt_id].context for header in batch
    }
    rows = [
        {
            "step": step,
            "prompt_id": header.trajectory_id.prompt_id,
            "sample_index": header.trajectory_id.sample_index,
            "prompt": contexts[header.trajectory_id.prompt_id].prompt_text,
            "response": header.response_text,
            "ground_truth": contexts[header.trajectory_id.prompt_id].ground_truth,
            "reward": header.reward,
            "components": json.dumps(dict(header.components), sort_keys=True),
            "policy_version": header.policy.version,
            "num_prompt_tokens": header.num_prompt_tokens,
            "num_response_tokens": header.num_response_tokens,
            "finish_reason": header.finish_reason.value,
            "server": header.server_id,
        }
        for header in batch
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{step:06d}.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [line for line in file if line.endswith("\n")]
