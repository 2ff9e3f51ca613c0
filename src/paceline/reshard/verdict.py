"""Digest reports of the two sides of a push, the verdict over them, and the digest of a whole policy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgpack

from paceline.core.errors import InvalidMessageError, WeightSyncError
from paceline.reshard.boxes import Box
from paceline.reshard.digest import MASK
from paceline.reshard.layout import RankLayout, read_ints

REPORT_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDigest:
    """The digest of one box of one tensor, 0 <= value < 2^64."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestReport:
    """What one party holds after the push of `version`; `rank` names it in errors ("rollout rank 1")."""

    rank: str
    version: int
    slices: tuple[SliceDigest, ...]

    def to_bytes(self) -> bytes:
        """The report as one msgpack message."""
        slices = [[s.name, s.global_shape, s.box.start, s.box.stop, s.value] for s in self.slices]
        packed: bytes = msgpack.packb([REPORT_SCHEMA, self.rank, self.version, slices])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> DigestReport:
        """Reads what `to_bytes` wrote; raises InvalidMessageError where anything is off."""
        try:
            schema, rank, version, slices = msgpack.unpackb(data)
            if schema != REPORT_SCHEMA or type(rank) is not str or type(version) is not int:
                raise ValueError(f"need schema {REPORT_SCHEMA}, a rank's name and a version")
            return cls(rank=rank, version=version, slices=tuple(map(_read_slice, slices)))
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise InvalidMessageError(f"digest report: {error}", reason="bad_digests") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """A part of a tensor that every rollout rank holds in full or not at all."""

    name: str
    global_shape: tuple[int, ...]
    box: Box


def digest_atoms(destinations: Iterable[RankLayout]) -> list[Atom]:
    """Every needed tensor, cut along all borders of all rollout ranks' boxes; in order of first mention.

    `whole` layouts must have been expanded before. The atoms of a tensor are disjoint and cover it.
    """
    cuts: dict[str, list[set[int]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for layout in destinations:
        for part in layout.slices:
            shapes.setdefault(part.name, part.global_shape)
            borders = cuts.setdefault(part.name, [{0, extent} for extent in part.global_shape])
            for dim, border in enumerate(borders):
                border.update((part.box.start[dim], part.box.stop[dim]))
    atoms: list[Atom] = []
    for name, borders in cuts.items():
        ranges = [list(itertools.pairwise(sorted(border))) for border in borders]
        for corner in itertools.product(*ranges):
            box = Box(tuple(low for low, _ in corner), tuple(high for _, high in corner))
            atoms.append(Atom(name=name, global_shape=shapes[name], box=box))
    return atoms


def digests_agree(learner: DigestReport, rollout: Sequence[DigestReport]) -> None:
    """Checks every box of every rollout rank against the learner's atoms.

    Raises:
        WeightSyncError: naming tensor and rank, where a version differs, a digest differs, or the learner
            has not reported all of a box.
    """
    by_name: dict[str, list[SliceDigest]] = {}
    for atom in learner.slices:
        by_name.setdefault(atom.name, []).append(atom)
    for report in rollout:
        if report.version != learner.version:
            raise WeightSyncError(
                f"{report.rank} received version {report.version}, the learner sent {learner.version}"
            )
        for part in report.slices:
            _check_slice(part, by_name.get(part.name, []), report.rank, learner.version)


def model_digest(reports: Iterable[DigestReport]) -> int:
    """The 64-bit digest of a whole policy, from the learner's report or from those of one server's TP ranks.

    A box that several ranks hold enters once.

    Raises:
        WeightSyncError: two ranks differ on the same box, boxes overlap in part, or a tensor is incomplete.
    """
    unique: dict[tuple[str, Box], SliceDigest] = {}
    for report in reports:
        for part in report.slices:
            known = unique.setdefault((part.name, part.box), part)
            if known.value != part.value:
                raise WeightSyncError(
                    f"{part.name}: {report.rank} and another rank hold different values of "
                    f"{part.box.start}..{part.box.stop}"
                )
    covered: dict[str, list[SliceDigest]] = {}
    for part in unique.values():
        parts = covered.setdefault(part.name, [])
        if any(other.box.intersect(part.box) is not None for other in parts):
            raise WeightSyncError(f"{part.name}: reported boxes overlap at {part.box.start}..{part.box.stop}")
        parts.append(part)
    for name, parts in covered.items():
        missing = math.prod(parts[0].global_shape) - sum(part.box.volume for part in parts)
        if missing:
            raise WeightSyncError(f"{name}: {missing} elements are on no rank, so the policy has no digest")
    return sum(part.value for part in unique.values()) & MASK


def format_digest(value: int) -> str:
    """The form that is stamped on trajectories: 16 hexadecimal digits."""
    return f"{value & MASK:016x}"


def _check_slice(part: SliceDigest, atoms: Sequence[SliceDigest], rank: str, version: int) -> None:
    inside = [atom for atom in atoms if part.box.contains(atom.box)]
    if sum(atom.box.volume for atom in inside) != part.box.volume:
        raise WeightSyncError(
            f"{part.name}: the learner reported no digest for all of {part.box.start}..{part.box.stop}, "
            f"which {rank} holds"
        )
    expected = sum(atom.value for atom in inside) & MASK
    if expected != part.value:
        raise WeightSyncError(
            f"{part.name}: {rank} holds {part.box.start}..{part.box.stop} with digest {format_digest(part.value)}, "
            f"the learner sent {format_digest(expected)} (version {version}); the server must not serve it"
        )


def _read_slice(fields: object) -> SliceDigest:
    if not isinstance(fields, list) or len(fields) != 5:
        raise TypeError("a slice's digest is a list of five fields")
    name, shape, start, stop, value = fields
    if type(name) is not str or type(value) is not int or not 0 <= value <= MASK:
        raise ValueError("a slice's digest needs a name and a value of 64 bits")
    box = Box(read_ints(start), read_ints(stop))
    return SliceDigest(name=name, global_shape=read_ints(shape), box=box, value=value)
