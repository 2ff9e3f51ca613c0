"""Compares a file of trajectories with the journal, down to tokens and log-probs.

A trajectory's blob is rebuilt from its row, and its digest is compared with that in the journal, which is the
digest of the bytes that the learner trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.controller.verify.journal.term import Shape
from paceline.controller.verify.rows.trajectory_row import TrajectoryRow
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.policy import PolicyRange, PolicyTag, range_fault
from paceline.core.samples.expert_choices import ExpertChoices
from paceline.core.samples.images import Image
from paceline.core.samples.trajectory import FinishReason, SamplingSpec, Trajectory
from paceline.wire import blob_digest, encode_trajectory

_PORTION = 256
_ARRAYS = (
    "prompt_token_ids",
    "response_token_ids",
    "response_log_probs",
    "response_mask",
    "segment_starts",
)
_DRAWN = (*_ARRAYS, "seed", "sampling", "images", "finish_reason")
_OPTIONAL = ("policy_ranges", "expert_choices")
_COUNTED = {
    "num_prompt_tokens": "prompt_token_ids",
    "num_response_tokens": "response_token_ids",
}
_SCALARS = ("step", "purpose", "prompt_id", "sample_index", "reward", "policy_version")
# Two draws of a response this improbable are equal once in 10^26 pairs.
_LOG_CHANCE = -60.0

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(kw_only=True)
class FileCheck:
    """Checks one of the trajectory files.

    Args:
        shapes: how components make up the reward; None if not known.
        own_shapes: shapes of single prompts; empty if not known.
        recomputes: whether blobs can be rebuilt, because the messages have this version's schema.

    Attributes:
        faults: one sentence per fault.
        num_recomputed: number of rows whose digest was recomputed.
        can_recompute: whether the file has all parts of blobs.
    """

    run_id: str
    policy: PolicyTag
    shapes: Mapping[str, Shape] | None
    recomputes: bool
    own_shapes: Mapping[int, Mapping[str, Shape]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    components: list[Mapping[str, float]] = field(default_factory=list)
    num_sampled: list[int] = field(default_factory=list)
    num_recomputed: int = 0
    num_without_tokens: int = 0
    can_recompute: bool = False
    _draws: dict[bytes, TrajectoryRow] = field(default_factory=dict)

    def run(self, path: Path, rows: Sequence[TrajectoryRow]) -> int:
        """Compares a file with the rows that it should have; returns the number of its rows.

        Raises:
            OSError, pyarrow.ArrowException: the file cannot be read.
        """
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            names = set(file.schema_arrow.names)
            num_rows: int = file.metadata.num_rows
            if num_rows != len(rows):
                self.faults.append(f"has {num_rows} rows, but {len(rows)} were trained or answered")
                return num_rows
            self.can_recompute = names.issuperset(_DRAWN)
            wanted = (*_SCALARS, *_OPTIONAL, *_DRAWN, *_COUNTED, "num_sampled_tokens", "components")
            present, first = [name for name in wanted if name in names], 0
            for batch in file.iter_batches(_PORTION, columns=present, use_threads=False):
                self._check_batch(batch, rows[first : first + batch.num_rows], first)
                first += batch.num_rows
        return num_rows

    def _check_batch(self, batch: Any, rows: Sequence[TrajectoryRow], first: int) -> None:
        for place, (row, (plain, arrays)) in enumerate(zip(rows, _rows_of(batch), strict=True)):
            if fault := self._scalar_fault(plain, row, first + place):
                self.faults.append(fault)
                return
            self._check_components(plain, row)
            self.num_sampled.append(int(plain.get("num_sampled_tokens") or 0))
            if "response_mask" in arrays:
                self._check_tokens(plain, arrays, row)
            else:
                self.num_without_tokens += 1

    def _scalar_fault(self, plain: Mapping[str, Any], row: TrajectoryRow, place: int) -> str:
        expected = {
            "step": row.key.step,
            **({"purpose": row.key.purpose} if "purpose" in plain else {}),
            "prompt_id": row.key.prompt_id,
            "sample_index": row.key.sample_index,
            "reward": row.reward,
            "policy_version": (row.policy or self.policy).version,
            **({"policy_ranges": ranges_text(row.ranges)} if "policy_ranges" in plain else {}),
        }
        stated = {name: plain.get(name) for name in expected}
        return (
            "" if stated == expected else f"has {stated} in row {place}; {expected} was trained or answered"
        )

    def _check_components(self, plain: Mapping[str, Any], row: TrajectoryRow) -> None:
        text = plain.get("components")
        if text is None:
            return
        components = _parsed(text)
        self.components.append(components)
        shapes = self.own_shapes.get(row.key.prompt_id, self.shapes)
        if not shapes:
            return
        scored = {name: value for name, value in components.items() if "/" not in name}
        if not scored.keys() <= shapes.keys():
            return
        parts = [_contribution(value, shapes[name]) for name, value in scored.items()]
        size = math.fsum(map(abs, parts)) + abs(row.raw_reward)
        if abs(math.fsum(parts) - row.raw_reward) > 1e-9 * (1 + size):
            self.faults.append(
                f"has components of {row.key} that make a reward of {math.fsum(parts):.9g}; the reward is "
                f"{row.raw_reward:.9g}"
            )

    def _check_tokens(self, plain: Mapping[str, Any], arrays: Arrays, row: TrajectoryRow) -> None:
        if row.ranges and (fault := range_fault(row.ranges, len(arrays["response_mask"]))):
            self.faults.append(f"has {row.key}, and {fault}")
        ones = int(arrays["response_mask"].sum())
        if ones != plain["num_sampled_tokens"]:
            self.faults.append(
                f"has a mask of {row.key} with {ones} sampled tokens, "
                f"{plain['num_sampled_tokens']} were counted"
            )
        for counted, name in _COUNTED.items():
            if counted in plain and name in arrays and plain[counted] != len(arrays[name]):
                self.faults.append(
                    f"has {len(arrays[name])} {name} of {row.key}, {plain[counted]} were counted"
                )
        if not (self.can_recompute and self.recomputes):
            return
        self.num_recomputed += 1
        policy = row.policy or self.policy
        trajectory = trajectory_of(self.run_id, row.key, policy, row.ranges, plain, arrays)
        digest = blob_digest(encode_trajectory(trajectory), like=row.digest)
        if digest != row.digest:
            self.faults.append(
                f"has tokens, mask and log-probs of {row.key} with the digest {digest}; the journal has "
                f"{row.digest}"
            )
        self._check_draw(plain, arrays, row)

    def _check_draw(self, plain: Mapping[str, Any], arrays: Arrays, row: TrajectoryRow) -> None:
        """Notes two samples with equal tokens that are too improbable to be drawn twice."""
        chance = float(arrays["response_log_probs"].sum(dtype=np.float64))
        is_drawn = row.key.purpose != Purpose.VALIDATE and _sampling(plain["sampling"]).temperature > 0
        if not is_drawn or chance > _LOG_CHANCE:
            return
        twin = self._draws.setdefault(arrays["response_token_ids"].tobytes(), row)
        if twin is not row:
            self.faults.append(
                f"has the same {len(arrays['response_token_ids'])} tokens for {twin.key} and {row.key}, "
                f"which are drawn with a log-probability of {chance:.0f}: one draw has two ids"
            )


def trajectory_of(
    run_id: str,
    key: TrajectoryId,
    policy: PolicyTag,
    ranges: tuple[PolicyRange, ...],
    plain: Mapping[str, Any],
    arrays: Arrays,
) -> Trajectory:
    """Rebuilds a trajectory from the columns of its row."""
    return Trajectory(
        run_id=run_id,
        trajectory_id=key,
        policy=policy,
        ranges=ranges,
        prompt_token_ids=arrays["prompt_token_ids"],
        response_token_ids=arrays["response_token_ids"],
        response_log_probs=arrays["response_log_probs"],
        response_mask=arrays["response_mask"],
        finish_reason=FinishReason(plain["finish_reason"]),
        sampling=_sampling(plain["sampling"]),
        seed=plain["seed"],
        segment_starts=tuple(arrays["segment_starts"].tolist()),
        images=_images(plain["images"]),
        expert_choices=ExpertChoices.from_plain(plain.get("expert_choices")),
    )


def read_rows(path: Path, prompts: Collection[int]) -> Iterator[tuple[Mapping[str, Any], Arrays]]:
    """Reads the rows of these prompts, portion by portion: single values, and arrays by column."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
        wanted = (*_SCALARS, *_OPTIONAL, *_DRAWN)
        present = [name for name in wanted if name in file.schema_arrow.names]
        for batch in file.iter_batches(_PORTION, columns=present, use_threads=False):
            yield from ((plain, own) for plain, own in _rows_of(batch) if plain["prompt_id"] in prompts)


def ranges_text(ranges: Sequence[PolicyRange]) -> str | None:
    """Returns the column `policy_ranges` of a row; None if one policy sampled all of it."""
    return json.dumps([part.to_plain() for part in ranges]) if ranges else None


def _contribution(value: float, shape: Shape) -> float:
    weight, minimum, maximum = shape
    if minimum is not None:
        value = max(value, minimum)
    return weight * (value if maximum is None else min(value, maximum))


def _rows_of(batch: Any) -> Iterator[tuple[dict[str, Any], Arrays]]:
    """Yields the rows of a portion: single values, and those arrays that are not null, by column.

    A mask that is null has a 1 for each response token.
    """
    columns = {n: batch.column(n).to_pylist() for n in batch.schema.names if n not in _ARRAYS}
    arrays = {n: list(_arrays(batch.column(n))) for n in batch.schema.names if n in _ARRAYS}
    for place in range(batch.num_rows):
        own = {name: array for name, of in arrays.items() if (array := of[place]) is not None}
        if "response_mask" in arrays and "response_token_ids" in own:
            own.setdefault("response_mask", np.ones(len(own["response_token_ids"]), np.uint8))
        yield {name: values[place] for name, values in columns.items()}, own


def _arrays(column: Any) -> Iterator[npt.NDArray[Any] | None]:
    """Yields the lists of a column; None for a null."""
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    valid = column.is_valid().to_pylist()
    for place, is_valid in enumerate(valid):
        yield values[offsets[place] : offsets[place + 1]] if is_valid else None


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Mapping[str, float]:
    components = json.loads(text)
    return components if isinstance(components, dict) else {}


@lru_cache(maxsize=64)
def _sampling(text: str) -> SamplingSpec:
    plain = json.loads(text)
    return SamplingSpec(**{**plain, "stop_token_ids": tuple(plain["stop_token_ids"])})


@lru_cache(maxsize=1024)
def _images(text: str | None) -> tuple[Image, ...]:
    plain = json.loads(text) if text else []
    return tuple(Image(hash=image["hash"], grid=tuple(image["grid"])) for image in plain)
