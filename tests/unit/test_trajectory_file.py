"""The file of a step's trajectories."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from paceline.controller.run.records.trajectories import TrajectoryFile, save_trajectories
from paceline.controller.verify.files.trajectory_files import read_rows, trajectory_of
from paceline.core.samples.expert_choices import ExpertChoices
from paceline.core.samples.trajectory import Float32Array, SamplingSpec, ScoredHeader, Trajectory
from paceline.wire import blob_digest, encode_trajectory
from tests.support.headers import scored
from tests.support.sequencer_run import prompts


class Store:
    """Texts and arrays of all samples; those of the last sample are gone."""

    text = b"text"

    async def text_blobs(self, headers: Sequence[ScoredHeader]) -> list[bytes]:
        return [self.text] * len(headers)

    async def trajectories(self, headers: Sequence[ScoredHeader]) -> list[Trajectory | None]:
        stored = Trajectory(
            run_id="r",
            trajectory_id=headers[0].trajectory_id,
            policy=headers[0].policy,
            prompt_token_ids=np.array([5, 6], dtype=np.int32),
            response_token_ids=np.array([7, 8, 9], dtype=np.int32),
            response_log_probs=np.array([-0.5, -1.0, -2.0], dtype=np.float32),
            response_mask=np.ones(3, dtype=np.uint8),
            finish_reason=headers[0].finish_reason,
            sampling=SamplingSpec(max_tokens=3, temperature=1.0, stop_token_ids=(0,)),
            seed=0,
        )
        return [*[stored] * (len(headers) - 1), None]

    async def learner_log_probs(self, headers: Sequence[ScoredHeader]) -> list[Float32Array | None]:
        log_probs = np.array([-0.5, -1.0, -2.5], dtype=np.float32)
        return [*[log_probs] * (len(headers) - 1), None]


@pytest.mark.parametrize("with_tokens", [True, False])
async def test_tokens_and_log_probs_are_written(tmp_path: Path, with_tokens: bool) -> None:
    path = tmp_path / "step_000001.parquet"
    file = TrajectoryFile(path, step=1, prompts=prompts(1).prompts, with_tokens=with_tokens)
    await file.write([scored(0), scored(0)], Store())
    first, last = pyarrow.parquet.read_table(path).to_pylist()
    assert (first["response"], last["response"]) == ("text", "text")
    assert ("response_token_ids" in first) is with_tokens
    if with_tokens:
        assert (first["prompt_token_ids"], first["response_token_ids"]) == ([5, 6], [7, 8, 9])
        assert first["response_log_probs"] == [-0.5, -1.0, -2.0]
        assert first["learner_log_probs"] == [-0.5, -1.0, -2.5]
        assert last["response_token_ids"] is last["response_log_probs"] is last["learner_log_probs"] is None


async def test_a_mask_is_left_out_if_the_policy_sampled_every_token(tmp_path: Path) -> None:
    masks = [np.array(mask, dtype=np.uint8) for mask in ([1, 1, 1], [0, 1, 1])]

    class Masked(Store):
        async def trajectories(self, headers: Sequence[ScoredHeader]) -> list[Trajectory | None]:
            stored, *_ = await super().trajectories(headers)
            assert stored is not None
            return [dataclasses.replace(stored, response_mask=mask) for mask in masks]

    store: Any = Masked()
    path, headers = tmp_path / "step_000001.parquet", [scored(0), scored(0)]
    await TrajectoryFile(path, step=1, prompts=prompts(1).prompts).write(headers, store)
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [row["response_mask"] for row in rows] == [None, [0, 1, 1]]
    read = [arrays["response_mask"] for _, arrays in read_rows(path, {headers[0].trajectory_id.prompt_id})]
    assert [(mask.dtype, mask.tolist()) for mask in read] == [(m.dtype, m.tolist()) for m in masks]


async def test_a_text_that_is_not_utf_8_is_written_with_replacement_characters(tmp_path: Path) -> None:
    store: Any = Store()
    store.text = b"te\xffxt"
    path = tmp_path / "step_000001.parquet"
    await TrajectoryFile(path, step=1, prompts=prompts(1).prompts).write([scored(0), scored(0)], store)
    assert pyarrow.parquet.read_table(path)["response"].to_pylist() == ["te\ufffdxt"] * 2


async def test_only_the_digest_of_choices_of_experts_is_written(tmp_path: Path) -> None:
    """Their bytes would be most of the file; from the digest `paceline verify` rebuilds the blob's."""
    choices = ExpertChoices.of(np.arange(5 * 2 * 2, dtype=np.uint8).reshape(5, 2, 2))

    class WithChoices(Store):
        async def trajectories(self, headers: Sequence[ScoredHeader]) -> list[Trajectory | None]:
            stored, *others = await super().trajectories(headers)
            assert stored is not None
            return [dataclasses.replace(stored, expert_choices=choices), *others]

    path, store = tmp_path / "step_000001.parquet", WithChoices()
    file = TrajectoryFile(path, step=1, prompts=prompts(1).prompts, with_choices=True)
    headers = [scored(0), scored(0)]
    await file.write(headers, store)  # type: ignore[arg-type]
    first, last = pyarrow.parquet.read_table(path).to_pylist()
    assert last["expert_choices"] is None
    stored, _ = await store.trajectories(headers)
    assert stored is not None
    (plain, arrays), *_ = read_rows(path, {headers[0].trajectory_id.prompt_id})
    rebuilt = trajectory_of("r", stored.trajectory_id, stored.policy, (), plain, arrays)
    assert rebuilt.expert_choices is not None
    assert rebuilt.expert_choices.array is None
    assert blob_digest(encode_trajectory(rebuilt)) == blob_digest(encode_trajectory(stored))
    assert json.loads(first["expert_choices"])["num_layers"] == 2


@pytest.mark.parametrize("router_replay", [True, False])
async def test_a_run_without_choices_has_no_column_for_them(tmp_path: Path, router_replay: bool) -> None:
    config = SimpleNamespace(
        trainer=SimpleNamespace(save_trajectories=True, save_tokens=True),
        actor=SimpleNamespace(router_replay=router_replay),
        pushes_in_flight=False,
    )
    journal = SimpleNamespace(record=lambda *_, **__: None)
    run: Any = SimpleNamespace(config=config, dir=tmp_path, journal=journal)
    batch: Any = SimpleNamespace(samples=[scored(0), scored(0)])
    await save_trajectories(run, "step", 1, batch, prompts(1).prompts, Store())  # type: ignore[arg-type]
    names = pyarrow.parquet.read_schema(tmp_path / "trajectories" / "step_000001.parquet").names
    assert ("expert_choices" in names) is router_replay


async def test_a_writer_is_not_closed_while_a_thread_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow ends the process with SIGSEGV otherwise: a step whose learner is lost is written again."""
    began, goes_on, calls = threading.Event(), threading.Event(), []

    class Writer(pyarrow.parquet.ParquetWriter):  # type: ignore[misc]
        def write_table(self, table: pyarrow.Table, *args: Any, **options: Any) -> None:
            began.set()
            goes_on.wait(120)
            super().write_table(table, *args, **options)
            calls.append("written")

        def close(self) -> None:
            calls.append("closed")
            super().close()

    monkeypatch.setattr(pyarrow.parquet, "ParquetWriter", Writer)
    file = TrajectoryFile(tmp_path / "step_000001.parquet", step=1, prompts=prompts(1).prompts)
    writing = asyncio.create_task(file.write([scored(0)], Store()))
    assert await asyncio.to_thread(began.wait, 60)
    writing.cancel()
    asyncio.get_running_loop().call_later(0.2, goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert calls[:2] == ["written", "closed"]
    assert not (tmp_path / "step_000001.parquet").exists()


async def test_only_short_columns_have_dictionaries(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.parquet"
    await TrajectoryFile(path, step=1, prompts=prompts(1).prompts).write([scored(0)] * 3, Store())
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    without = {column.path_in_schema for column in columns if not column.has_dictionary_page}
    # What hardly repeats: its dictionaries would cost more time than all the rest of the file.
    assert without == {
        "response",
        "response_token_ids.list.element",
        "response_log_probs.list.element",
        "learner_log_probs.list.element",
    }
