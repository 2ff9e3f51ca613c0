"""Writes trajectories/step_NNNNNN.parquet: the samples of a step with their texts and rewards, for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.core.trajectory import ScoredHeader
from paceline.data.prompts import Prompt


def write_trajectories(
    folder: Path, step: int, name: str, samples: Sequence[ScoredHeader], prompts: Mapping[int, Prompt]
) -> Path:
    """Writes a step's scored samples, one row each, as parquet; returns the file.

    Args:
        name: "step" for training, "val" for validation: first part of the file name.
    """
    import pyarrow
    import pyarrow.parquet

    contexts = {
        header.trajectory_id.prompt_id: prompts[header.trajectory_id.prompt_id].context for header in samples
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
        for header in samples
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{step:06d}.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path
