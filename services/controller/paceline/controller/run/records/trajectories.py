"""Writes trajectories/step_NNNNNN.parquet: the samples of a step with their texts and rewards, for people."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.mailboxes import Mailboxes
from paceline.controller.progress import Run
from paceline.controller.verify.files.trajectory_files import ranges_text
from paceline.core.digest import file_digest
from paceline.core.errors import CheckpointError, GuardError
from paceline.core.samples.episode import EpisodeOutcome
from paceline.core.samples.trajectory import Float32Array, ScoredHeader, Trajectory
from paceline.data.prompts import Prompt
from paceline.service.disk import writing
from paceline.service.threads import in_thread

_PORTION = 256
"""Samples that are in memory at once: 100 MB at 32,000 tokens each, with their tokens and log-probs."""

_PORTION_WITH_CHOICES = 16
"""The same with choices of experts, which take megabytes per sample. The file has only their digest."""

_LONG_COLUMNS = ("response", "response_token_ids", "response_log_probs", "learner_log_probs")
"""Columns whose values hardly repeat: dictionaries of them took most of the time of writing a file."""

_SPLIT_COLUMNS = _LONG_COLUMNS[1:]
"""Columns stored byte by byte (BYTE_STREAM_SPLIT): smaller, and several times faster to compress."""


class TrajectoryFile:
    """One step's scored samples, one row each, as parquet.

    Args:
        path: the file; replaced once it is complete.
        sets: the name of each prompt's held-out set, by prompt id.
        with_tokens: also write token ids, and the log-probs of engine and learner.
        with_choices: also write the digest of the engine's choices of experts.
        with_ranges: also write which policies sampled which tokens, where there are several.

    Attributes:
        without_tokens: prompts with a sample whose tokens were gone from the broker.
    """

    def __init__(
        self,
        path: Path,
        *,
        step: int,
        prompts: Mapping[int, Prompt],
        sets: Mapping[int, str] | None = None,
        with_tokens: bool = True,
        with_ranges: bool = False,
        with_choices: bool = False,
    ) -> None:
        self._path, self._step, self._prompts, self._sets = path, step, prompts, sets or {}
        self._with_tokens, self._with_ranges = with_tokens, with_ranges
        self._with_choices = with_choices and with_tokens
        self.without_tokens: set[int] = set()

    async def write(self, samples: Sequence[ScoredHeader], mailboxes: Mailboxes) -> str:
        """Writes the samples, portion by portion; returns the file's digest."""
        import pyarrow
        import pyarrow.parquet

        def store(rows: list[dict[str, Any]]) -> None:
            try:
                table = pyarrow.Table.from_pylist(rows, schema=schema)
            except pyarrow.ArrowInvalid:  # a text that is not UTF-8
                rows = [row | {"response": row["response"].decode(errors="replace")} for row in rows]
                table = pyarrow.Table.from_pylist(rows, schema=schema)
            writer.write_table(table)

        self._path.parent.mkdir(parents=True, exist_ok=True)
        columns = _columns(self._with_tokens)
        if self._with_ranges:
            columns.append(("policy_ranges", pyarrow.string()))
        if self._with_choices:
            columns.append(("expert_choices", pyarrow.string()))
        size = _PORTION_WITH_CHOICES if self._with_choices else _PORTION
        partial, schema = self._path.with_suffix(".partial"), pyarrow.schema(columns)
        short = [_leaf(column) for column in schema if column.name not in _LONG_COLUMNS]
        split = {_leaf(column): "BYTE_STREAM_SPLIT" for column in schema if column.name in _SPLIT_COLUMNS}
        options: dict[str, Any] = {"use_dictionary": short, "write_statistics": short}
        options["column_encoding"] = split
        with writing(self._path.parent), pyarrow.parquet.ParquetWriter(partial, schema, **options) as writer:
            for start in range(0, len(samples), size):
                portion = samples[start : start + size]
                texts = await mailboxes.text_blobs(portion)
                rows = [self._row(header, text) for header, text in zip(portion, texts, strict=True)]
                if self._with_tokens:
                    arrays = await mailboxes.trajectories(portion), await mailboxes.learner_log_probs(portion)
                    for row, trajectory, log_probs in zip(rows, *arrays, strict=True):
                        row |= _arrays(trajectory, log_probs)
                        if trajectory is None:
                            self.without_tokens.add(row["prompt_id"])
                # pyarrow crashes the process when a writer is closed while another thread writes with it.
                await in_thread(store, rows)
        partial.replace(self._path)
        return await in_thread(file_digest, self._path)

    def _row(self, header: ScoredHeader, text: bytes) -> dict[str, Any]:
        context = self._prompts[header.trajectory_id.prompt_id].context
        return {
            "step": self._step,
            "purpose": header.trajectory_id.purpose,
            "val_set": self._sets.get(header.trajectory_id.prompt_id),
            "prompt_id": header.trajectory_id.prompt_id,
            "sample_index": header.trajectory_id.sample_index,
            "prompt": context.prompt_text,
            "response": text,
            "ground_truth": context.ground_truth,
            "data_source": context.data_source,
            "reward": header.reward,
            "components": json.dumps(dict(header.components), sort_keys=True),
            "policy_version": header.policy.version,
            "num_prompt_tokens": header.num_prompt_tokens,
            "num_response_tokens": header.num_response_tokens,
            "num_sampled_tokens": header.num_sampled_tokens,
            "finish_reason": header.finish_reason.value,
            "server": header.server_id,
            **({"policy_ranges": ranges_text(header.ranges)} if self._with_ranges else {}),
            **_episode(header.episode),
        }


def _leaf(column: Any) -> str:
    """Returns the path by which parquet knows a column's values."""
    import pyarrow

    return f"{column.name}.list.element" if pyarrow.types.is_list(column.type) else str(column.name)


def _episode(episode: EpisodeOutcome | None) -> dict[str, Any]:
    """Returns the columns of an episode; null for a single answer."""
    if episode is None:
        return {}
    return {
        "stop_reason": episode.stop_reason,
        "num_turns": episode.num_turns,
        "num_tool_calls": episode.num_tool_calls,
        "tool_s": episode.tool_s,
    }


def _arrays(trajectory: Trajectory | None, learner_log_probs: Float32Array | None) -> dict[str, Any]:
    if trajectory is None:
        return {}
    choices, mask = trajectory.expert_choices, trajectory.response_mask
    return {
        **({} if choices is None else {"expert_choices": json.dumps(choices.to_plain())}),
        "prompt_token_ids": trajectory.prompt_token_ids,
        "response_token_ids": trajectory.response_token_ids,
        "response_log_probs": trajectory.response_log_probs,
        "learner_log_probs": learner_log_probs,
        "response_mask": None if mask.all() else mask,
        "segment_starts": trajectory.segment_starts,
        "seed": trajectory.seed,
        "sampling": json.dumps(asdict(trajectory.sampling)),
        "images": json.dumps([asdict(image) for image in trajectory.images]) if trajectory.images else None,
    }


def _columns(with_tokens: bool) -> list[tuple[str, Any]]:
    import pyarrow

    text, number = pyarrow.string(), pyarrow.int64()
    ids = pyarrow.list_(pyarrow.int32())
    arrays = [
        ("prompt_token_ids", ids),
        ("response_token_ids", ids),
        ("response_log_probs", pyarrow.list_(pyarrow.float32())),
        ("learner_log_probs", pyarrow.list_(pyarrow.float32())),
        ("response_mask", pyarrow.list_(pyarrow.uint8())),
        ("segment_starts", ids),
        ("seed", number),
        ("sampling", text),
        ("images", text),
    ]
    return [
        ("step", number),
        ("purpose", text),
        ("val_set", text),
        ("prompt_id", number),
        ("sample_index", number),
        ("prompt", text),
        ("response", text),
        ("ground_truth", text),
        ("data_source", text),
        ("reward", pyarrow.float64()),
        ("components", text),
        ("policy_version", number),
        ("num_prompt_tokens", number),
        ("num_response_tokens", number),
        ("num_sampled_tokens", number),
        ("finish_reason", text),
        ("server", text),
        ("stop_reason", text),
        ("num_turns", number),
        ("num_tool_calls", number),
        ("tool_s", pyarrow.float64()),
        *(arrays if with_tokens else []),
    ]


async def save_trajectories(
    run: Run,
    name: str,
    step: int,
    batch: Batch,
    prompts: Mapping[int, Prompt],
    mailboxes: Mailboxes,
    sets: Mapping[int, str] | None = None,
) -> None:
    """Writes a batch's samples to the run directory and journals it, unless trainer.save_trajectories is off.

    Args:
        name: "step" for training, "val" for validation: first part of the file name.
        sets: the name of each prompt's held-out set, by prompt id.
    """
    if run.config.trainer.save_trajectories:
        path = run.dir / "trajectories" / f"{name}_{step:06d}.parquet"
        with_tokens = run.config.trainer.save_tokens
        file = TrajectoryFile(
            path,
            step=step,
            prompts=prompts,
            sets=sets,
            with_tokens=with_tokens,
            with_ranges=run.config.pushes_in_flight,
            with_choices=run.config.actor.router_replay,
        )
        digest = await file.write(batch.samples, mailboxes)
        gone = {"without_tokens": sorted(file.without_tokens)} if file.without_tokens else {}
        run.journal.record(
            "saved", step=step, file=path.name, digest=digest, num_rows=len(batch.samples), **gone
        )


@asynccontextmanager
async def saving_trajectories(
    run: Run, step: int, batch: Batch, prompts: Mapping[int, Prompt], mailboxes: Mailboxes
) -> AsyncIterator[None]:
    """Writes a trained batch's samples while the block runs; the file is complete after it.

    They are also written when the guard ends the run, because the last samples show why.
    """
    saving = asyncio.create_task(
        save_trajectories(run, "step", step, batch, prompts, mailboxes), name="save trajectories"
    )
    try:
        try:
            yield
        except (GuardError, CheckpointError):
            await saving
            raise
        await saving
    finally:
        saving.cancel()
        await asyncio.wait([saving])
