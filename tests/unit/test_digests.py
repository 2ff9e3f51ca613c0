"""Digests of blobs and files name their kind; those of earlier builds are checked as before."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from paceline.controller.batch.replay import ReplayBuffer
from paceline.controller.run.records import trajectories
from paceline.controller.verify.files.trajectory_files import FileCheck
from paceline.controller.verify.rows.trajectory_row import TrajectoryRow
from paceline.core.digest import DIGEST, content_digest, file_digest
from paceline.core.errors import LostDataError
from paceline.learner.batch.blobs import fetch_rows
from paceline.wire import blob_digest, decode_trajectory
from support.learner_fakes import POLICY, DictBlobs, make_batch

SHA_256 = "sha-256-128:ba7816bf8f01cfea414140de5dae2223"
BLAKE2B = "cf4ab791c62b8d2b2109c90275287816"


@pytest.mark.parametrize(
    ("like", "digest"), [({}, SHA_256), ({"like": SHA_256}, SHA_256), ({"like": BLAKE2B}, BLAKE2B)]
)
def test_a_digest_is_of_the_kind_that_it_is_compared_with(
    like: dict[str, str], digest: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert content_digest(b"abc", **like) == file_digest(tmp_path / "file", **like) == digest


@pytest.mark.parametrize(
    ("text", "is_digest"),
    [
        (SHA_256, True),
        (BLAKE2B, True),
        (SHA_256[:-1], False),
        (f"crc32:{BLAKE2B}", False),
        (SHA_256 + "00", False),
    ],
)
def test_only_the_two_kinds_are_digests(text: str, is_digest: bool) -> None:
    assert bool(DIGEST.fullmatch(text)) is is_digest


@pytest.mark.parametrize("like", [SHA_256, BLAKE2B])
def test_the_learner_checks_digests_of_both_kinds(like: str) -> None:
    rows, blobs = make_batch(num_prompts=1, num_samples=2)
    first = dataclasses.replace(rows[0], blob_digest=blob_digest(blobs[rows[0].blob_key], like=like))
    other = dataclasses.replace(rows[0], blob_digest=blob_digest(blobs[rows[1].blob_key], like=like))
    assert list(fetch_rows(DictBlobs(blobs), {0: first}, [0], policy=POLICY, vocab_size=48)) == [0]
    with pytest.raises(LostDataError, match="holds another sample than the one that was scored"):
        fetch_rows(DictBlobs(blobs), {0: other}, [0], policy=POLICY, vocab_size=48)


@pytest.mark.parametrize("like", [SHA_256, BLAKE2B])
def test_verify_recomputes_digests_of_both_kinds(like: str, tmp_path: Path) -> None:
    batch, blobs = make_batch(num_prompts=1, num_samples=2)
    table, rows = [], []
    for row in batch:
        key, blob = row.trajectory_id, blobs[row.blob_key]
        rows.append(TrajectoryRow(key=key, digest=blob_digest(blob, like=like), reward=1.0, raw_reward=1.0))
        plain: dict[str, Any] = {"step": key.step, "prompt_id": key.prompt_id, "reward": 1.0}
        plain |= {"sample_index": key.sample_index, "policy_version": POLICY.version}
        drawn = decode_trajectory(blob)
        plain |= {
            "num_sampled_tokens": int(drawn.response_mask.sum()),
            "finish_reason": drawn.finish_reason.value,
        }
        table.append(plain | trajectories._arrays(drawn, None))
    schema = pyarrow.schema([(n, t) for n, t in trajectories._columns(True) if n in table[0]])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table, schema=schema), tmp_path / "step.parquet")

    def faults(rows: list[TrajectoryRow]) -> list[str]:
        run_id = decode_trajectory(next(iter(blobs.values()))).run_id
        check = FileCheck(run_id=run_id, policy=POLICY, shapes=None, recomputes=True)
        assert check.run(tmp_path / "step.parquet", rows) == check.num_recomputed == 2
        return check.faults

    assert faults(rows) == []
    assert len(faults([rows[0]._replace(digest=rows[1].digest), rows[1]])) == 1


@pytest.mark.parametrize("like", [SHA_256, BLAKE2B])
def test_a_replayed_row_has_a_digest_of_the_kind_of_its_file(like: str) -> None:
    """`paceline verify` compares it with the digest with which the row was admitted."""
    rows, blobs = make_batch(num_prompts=1, num_samples=1)
    drawn = decode_trajectory(blobs[rows[0].blob_key])
    run: Any = SimpleNamespace(config=SimpleNamespace(replay_rule=None), journal=None, id=drawn.run_id)
    saved: Any = SimpleNamespace(file=SimpleNamespace(digest=like))
    buffer = ReplayBuffer(run)
    buffer._steps = {drawn.trajectory_id.step: saved}
    (replayed,) = buffer._replay(2, [(drawn, 1.0)], 1, 1).rows
    assert replayed.blob_digest == blob_digest(blobs[rows[0].blob_key], like=like)
