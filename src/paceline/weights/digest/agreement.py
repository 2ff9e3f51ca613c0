"""Reports and compares the digests of both sides of a push; computes the digest of a complete policy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgpack
import numpy as np
import numpy.typing as npt

from paceline.core.errors import InvalidMessageError, WeightSyncError
from paceline.weights.digest.definition import MASK
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice, read_ints

REPORT_SCHEMA = 2
_NONE = np.zeros(0, dtype=np.uint64)

Place = tuple[str, tuple[int, ...], Box]
"""A tensor's name, its global shape, and a box of it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """A part of a tensor that every rollout rank holds completely or not at all."""

    name: str
    global_shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDigest:
    """The digest of one box of one tensor, 0 <= value < 2^64."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    value: int


def pack_places(parts: Iterable[Atom | SliceDigest | TensorSlice]) -> bytes:
    """Packs names, shapes and boxes of a report's slices, which are the same in every push of a group."""
    packed: bytes = msgpack.packb(
        [[part.name, part.global_shape, part.box.start, part.box.stop] for part in parts]
    )
    return packed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DigestReport:
    """Holds the digests of a rank's parameters after the push of `version`, or of what the learner sent.

    Attributes:
        rank: the rank's name in errors ("rollout rank 1").
        places: `pack_places` of the slices.
        values: (number of slices,) uint64, the slices' digests.
    """

    rank: str
    version: int
    places: bytes
    values: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, *, rank: str, version: int, slices: Sequence[SliceDigest]) -> DigestReport:
        """Returns the report of these slices."""
        values = np.array([part.value for part in slices], dtype=np.uint64)
        return cls(rank=rank, version=version, places=pack_places(slices), values=values)

    @property
    def slices(self) -> tuple[SliceDigest, ...]:
        """The slices one by one."""
        return tuple(
            SliceDigest(name=name, global_shape=shape, box=box, value=value)
            for (name, shape, box), value in zip(_read_places(self.places), self.values.tolist(), strict=True)
        )

    def to_bytes(self) -> bytes:
        """Encodes the report as msgpack, with the values as packed little-endian 64-bit integers."""
        values = self.values.astype("<u8").tobytes()
        packed: bytes = msgpack.packb([REPORT_SCHEMA, self.rank, self.version, self.places, values])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> DigestReport:
        """Reads what `to_bytes` wrote; raises InvalidMessageError if anything is malformed."""
        try:
            schema, rank, version, packed, raw = msgpack.unpackb(data)
            if schema != REPORT_SCHEMA or type(rank) is not str or type(version) is not int:
                raise ValueError(f"need schema {REPORT_SCHEMA}, a rank's name and a version")
            places, values = _read_places(packed), np.frombuffer(raw, dtype="<u8").astype(np.uint64)
            if len(places) != len(values):
                raise ValueError(f"{len(places)} slices have {len(values)} digests")
            return cls(rank=rank, version=version, places=packed, values=values)
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise InvalidMessageError(f"digest report: {error}", reason="bad_digests") from error


def digest_atoms(destinations: Iterable[RankLayout]) -> list[Atom]:
    """Cuts every needed tensor along all borders of all rollout ranks' boxes, in order of first mention.

    Layouts of the general path must have been expanded. The atoms of a tensor are disjoint and cover it.
    """
    cuts: dict[str, list[set[int]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for layout in {id(layout.slices): layout for layout in destinations}.values():
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


def disagreement(learner: DigestReport, reports: Sequence[DigestReport]) -> str | None:
    """Checks every box that a rollout server's ranks report against the learner's atoms.

    Args:
        learner: the digests of all atoms, as they were sent.
        reports: reports of one server, one per TP rank.

    Returns:
        None if the server has what the learner sent; otherwise a sentence that says what differs: the
        version, a digest, or a box that the learner has not reported in full.
    """
    if not reports:
        return f"the server reported no digests of version {learner.version}"
    return next(filter(None, (_difference(learner, report) for report in reports)), None)


def _difference(learner: DigestReport, report: DigestReport) -> str | None:
    if report.version != learner.version:
        return f"{report.rank} received version {report.version}, the learner sent {learner.version}"
    inside = _atoms_inside(learner.places, report.places)
    if inside.uncovered is not None:
        name, _, box = inside.uncovered
        return (
            f"{name}: the learner reported no digest for all of {box.start}..{box.stop}, "
            f"which {report.rank} holds"
        )
    expected = np.add.reduceat(learner.values[inside.atoms], inside.begins) if len(inside.begins) else _NONE
    wrong = np.flatnonzero(expected != report.values)
    if not len(wrong):
        return None
    name, _, box = _read_places(report.places)[wrong[0]]
    received, sent = (format_digest(int(values[wrong[0]])) for values in (report.values, expected))
    return (
        f"{name}: {report.rank} holds {box.start}..{box.stop} with digest {received}, "
        f"the learner sent {sent} (version {learner.version}); the server must not serve it"
    )


def model_digest(reports: Iterable[DigestReport]) -> int:
    """Computes a policy's 64-bit digest from the learner's report or those of one server's TP ranks.

    A box that several ranks hold counts once.

    Raises:
        WeightSyncError: two ranks report different digests of a box, boxes overlap, or a tensor is
            incomplete.
    """
    reports = list(reports)
    union = _unite(tuple(report.places for report in reports))
    values = np.concatenate([_NONE, *(report.values for report in reports)])
    wrong = np.flatnonzero(values != values[union.first])
    if len(wrong):
        borders = np.cumsum([len(report.values) for report in reports])
        report = reports[int(np.searchsorted(borders, wrong[0], side="right"))]
        name, _, box = union.places[wrong[0]]
        raise WeightSyncError(
            f"{name}: {report.rank} and another rank hold different values of {box.start}..{box.stop}"
        )
    return int(values[union.unique].sum(dtype=np.uint64))


def format_digest(value: int) -> str:
    """Returns the digest as trajectories carry it: 16 hexadecimal digits."""
    return f"{value & MASK:016x}"


# A server waits for the comparison before it serves. Places are equal in all pushes of a group, so results
# that depend only on places are cached.


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


@dataclass(frozen=True, slots=True, eq=False)
class _Inside:
    """Says which atoms lie in which part.

    Attributes:
        atoms: the atoms' indices, part after part.
        begins: index in `atoms` at which each part's atoms begin.
        uncovered: the first part that its atoms do not cover; None if there is none.
    """

    atoms: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    uncovered: Place | None


@lru_cache(maxsize=64)
def _atoms_inside(atoms: bytes, parts: bytes) -> _Inside:
    by_name: dict[str, list[tuple[int, Box]]] = {}
    for index, (name, _, box) in enumerate(_read_places(atoms)):
        by_name.setdefault(name, []).append((index, box))
    indices, begins = list[int](), list[int]()
    uncovered = None
    for place in _read_places(parts):
        name, _, part = place
        inside = [(index, box) for index, box in by_name.get(name, []) if part.contains(box)]
        if uncovered is None and (not inside or sum(box.volume for _, box in inside) != part.volume):
            uncovered = place
        begins.append(len(indices))
        indices += [index for index, _ in inside]
    return _Inside(np.array(indices, dtype=np.int64), np.array(begins, dtype=np.int64), uncovered)


@dataclass(frozen=True, slots=True, eq=False)
class _Union:
    """Joins the places of several reports.

    Attributes:
        places: places of all reports, one after another.
        first: for each place, the index of the first equal place.
        unique: indices of the places that equal no earlier place.
    """

    places: tuple[Place, ...]
    first: npt.NDArray[np.int64]
    unique: npt.NDArray[np.int64]


@lru_cache(maxsize=16)
def _unite(packed: tuple[bytes, ...]) -> _Union:
    """Raises WeightSyncError unless the unique places are disjoint and cover every tensor."""
    places = tuple(place for report in packed for place in _read_places(report))
    known: dict[tuple[str, Box], int] = {}
    first = [known.setdefault((name, box), index) for index, (name, _, box) in enumerate(places)]
    covered: dict[str, list[Box]] = {}
    missing: dict[str, int] = {}
    for name, index in ((name, index) for (name, _), index in known.items()):
        _, shape, box = places[index]
        boxes = covered.setdefault(name, [])
        if any(other.intersect(box) is not None for other in boxes):
            raise WeightSyncError(f"{name}: reported boxes overlap at {box.start}..{box.stop}")
        boxes.append(box)
        missing[name] = missing.get(name, math.prod(shape)) - box.volume
    for name, number in missing.items():
        if number:
            raise WeightSyncError(f"{name}: {number} elements are on no rank, so the policy has no digest")
    unique = np.array(list(known.values()), dtype=np.int64)
    return _Union(places, np.array(first, dtype=np.int64), unique)
