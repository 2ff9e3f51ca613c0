"""Digest reports of the two sides of a push, the verdict over them, and the digest of a whole policy."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgpack

from paceline.core.errors import InvalidMessageError, WeightSyncError
from paceline.reshard.boxes import Box
from paceline.reshard.digest import MASK
from paceline.reshard.layout import RankLayout, read_ints

REPORT_SCHEMA = 2

Place = tuple[str, tuple[int, ...], Box]
"""A tensor's name, its global shape, and a box of it"""


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
    _places: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def places(self) -> bytes:
        """Everything of the slices but the values, packed: the same in every push of a weight group."""
        if not self._places:
            packed = msgpack.packb([[s.name, s.global_shape, s.box.start, s.box.stop] for s in self.slices])
            self._places.append(packed)
        return self._places[0]

    def to_bytes(self) -> bytes:
        """The report as one msgpack message; the values as packed little-endian numbers of 64 bits."""
        values = struct.pack(f"<{len(self.slices)}Q", *(s.value for s in self.slices))
        packed: bytes = msgpack.packb([REPORT_SCHEMA, self.rank, self.version, self.places, values])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> DigestReport:
        """Reads what `to_bytes` wrote; raises InvalidMessageError where anything is off."""
        try:
            schema, rank, version, packed, raw = msgpack.unpackb(data)
            if schema != REPORT_SCHEMA or type(rank) is not str or type(version) is not int:
                raise ValueError(f"need schema {REPORT_SCHEMA}, a rank's name and a version")
            places = _read_places(packed)
            values = struct.unpack(f"<{len(places)}Q", raw)
            slices = tuple(
                SliceDigest(name=name, global_shape=shape, box=box, value=value)
                for (name, shape, box), value in zip(places, values, strict=True)
            )
            report = cls(rank=rank, version=version, slices=slices)
            report._places.append(packed)
            return report
        except (TypeError, ValueError, msgpack.UnpackException, struct.error) as error:
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
    for report in rollout:
        if report.version != learner.version:
            raise WeightSyncError(
                f"{report.rank} received version {report.version}, the learner sent {learner.version}"
            )
        inside = _atoms_inside(learner.places, report.places)
        for part, atoms in zip(report.slices, inside, strict=True):
            _check_slice(part, [learner.slices[atom] for atom in atoms], report.rank, learner.version)


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
    if not atoms:
        raise WeightSyncError(
            f"{part.name}: the learner reported no digest for all of {part.box.start}..{part.box.stop}, "
            f"which {rank} holds"
        )
    expected = sum(atom.value for atom in atoms) & MASK
    if expected != part.value:
        raise WeightSyncError(
            f"{part.name}: {rank} holds {part.box.start}..{part.box.stop} with digest {format_digest(part.value)}, "
            f"the learner sent {format_digest(expected)} (version {version}); the server must not serve it"
        )


# Places stay the same from push to push, while every push waits for its verdict: what depends on them alone is kept.


@lru_cache(maxsize=64)
def _read_places(packed: bytes) -> tuple[Place, ...]:
    places = msgpack.unpackb(packed)
    if not isinstance(places, list):
        raise TypeError("the places of a report are a list")
    return tuple(map(_read_place, places))


def _read_place(fields: object) -> Place:
    if not isinstance(fields, list) or len(fields) != 4:
        raise TypeError("a slice's place is a list of four fields")
    name, shape, start, stop = fields
    if type(name) is not str:
        raise ValueError("a slice's place needs a name")
    return name, read_ints(shape), Box(read_ints(start), read_ints(stop))


@lru_cache(maxsize=64)
def _atoms_inside(atoms: bytes, parts: bytes) -> tuple[tuple[int, ...], ...]:
    """For each part the indices of the atoms that make it up; none where they do not cover it."""
    by_name: dict[str, list[tuple[int, Box]]] = {}
    for index, (name, _, box) in enumerate(_read_places(atoms)):
        by_name.setdefault(name, []).append((index, box))
    found = []
    for name, _, whole in _read_places(parts):
        inside = [(index, box) for index, box in by_name.get(name, []) if whole.contains(box)]
        covered = sum(box.volume for _, box in inside) == whole.volume
        found.append(tuple(index for index, _ in inside) if covered else ())
    return tuple(found)
