"""Writes trajectories/step_NNNNNN.parquet: the samples of a step with their texts and rewards, for people."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.controller.batch.collect import Batch
from paceline.controller.progress import Run
from paceline.core.trajectory import ScoredHeader
from paceline.data.prompts import Prompt, PromptSet
from paceline.service.threads import in_thread

ReadTexts = Callable[[Sequence[ScoredHeader]], Awaitable[Sequence[str]]]

_PORTION = 1024
"""Samples whose texts are in memory at once: 130 MB at 32,000 tokens each."""


class TrajectoryFile:
    """One step's scored samples, one row each, as parquet.

    Args:
        path: the file; replaced once it is complete.
        prompts: by id, for the prompts' texts.
    """

    def __init__(self, path: Path, *, step: int, prompts: Mapping[int, Prompt]) -> None:
        self._path, self._step, self._prompts = path, step, prompts

    async def write(self, samples: Sequence[ScoredHeader], read_texts: ReadTexts) -> None:
        """Writes the samples; `read_texts` gives the responses' texts, portion by portion."""
        import pyarrow
        import pyarrow.parquet

        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial, schema = self._path.with_suffix(".partial"), pyarrow.schema(_columns())
        with pyarrow.parquet.ParquetWriter(partial, schema) as writer:
            for start in range(0, len(samples), _PORTION):
                portion = samples[start : start + _PORTION]
                texts = await read_texts(portion)
                rows = [self._row(header, text) for header, text in zip(portion, texts, strict=True)]
                table = pyarrow.Table.from_pylist(rows, schema=schema)
                # pyarrow crashes the process when a writer is closed while another thread writes with it.
                await in_thread(writer.write_table, table)
        partial.replace(self._path)

    def _row(self, header: ScoredHeader, text: str) -> dict[str, Any]:
        context = self._prompts[header.trajectory_id.prompt_id].context
        return {
            "step": self._step,
            "prompt_id": header.trajectory_id.prompt_id,
            "sample_index": header.trajectory_id.sample_index,
            "prompt": context.prompt_text,
            "response": text,
            "ground_truth": context.ground_truth,
            "reward": header.reward,
            "components": json.dumps(dict(header.components), sort_keys=True),
            "policy_version": header.policy.version,
            "num_prompt_tokens": header.num_prompt_tokens,
            "num_response_tokens": header.num_response_tokens,
            "finish_reason": header.finish_reason.value,
            "server": header.server_id,
        }


def _columns() -> list[tuple[str, Any]]:
    import pyarrow

    text, number = pyarrow.string(), pyarrow.int64()
    return [
        ("step", number),
        ("prompt_id", number),
        ("sample_index", number),
        ("prompt", text),
        ("response", text),
        ("ground_truth", text),
        ("reward", pyarrow.float64()),
        ("components", text),
        ("policy_version", number),
        ("num_prompt_tokens", number),
        ("num_response_tokens", number),
        ("finish_reason", text),
        ("server", text),
    ]


async def save_trajectories(
    run: Run, name: str, step: int, batch: Batch, prompts: PromptSet, read_texts: ReadTexts
) -> None:
    """Writes a batch's samples to the run directory, unless trainer.save_trajectories is off.

    Args:
        name: "step" for training, "val" for validation: first part of the file name.
    """
    if run.config.trainer.save_trajectories:
        path = run.dir / "trajectories" / f"{name}_{step:06d}.parquet"
        await TrajectoryFile(path, step=step, prompts=prompts.prompts).write(batch.samples, read_texts)
