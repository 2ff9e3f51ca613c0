"""Describes the shards of all learner ranks; tensors with the same sharding, as in layers, only once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, overload

import msgpack
import numpy as np

from paceline.core.errors import InvalidMessageError
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.columns import IntArray
from paceline.weights.geometry.layout import (
    ITEM_SIZES,
    RankLayout,
    RankPlace,
    TensorSlice,
    read_ints,
    unpack_layout,
)

SHARDING_SCHEMA: Final = 1
_OWN_NAME: Final = ""


class HeldPart(NamedTuple):
    """What rank `source` holds of a tensor: the box, its index in the parameter, and the parameter's name.

    The name is "" if it equals the tensor's.
    """

    source: int
    box: Box
    offset: tuple[int, ...]
    param: str

    def of_tensor(self, name: str, shape: tuple[int, ...]) -> TensorSlice:
        """Returns the part as a slice of a tensor; raises ValueError if shape, box and offset do not fit."""
        param = self.param or name
        return TensorSlice(name=name, global_shape=shape, box=self.box, param=param, offset=self.offset)


@dataclass(frozen=True, slots=True)
class TensorKind:
    """How tensors of a shape are spread over the ranks: parts by source."""

    shape: tuple[int, ...]
    parts: tuple[HeldPart, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            part.of_tensor("tensor", self.shape)  # checks that they fit together


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The distinct, non-overlapping boxes of a kind, each with the numbers of its parts.

    Attributes:
        starts, stops: start and stop indices of the boxes, (boxes, dims) int64.
    """

    starts: IntArray
    stops: IntArray
    owners: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, kind: TensorKind) -> Grid | None:
        """Returns the grid of a kind; None if unequal parts overlap."""
        owners: dict[Box, list[int]] = {}
        for number, part in enumerate(kind.parts):
            owners.setdefault(part.box, []).append(number)
        starts = np.array([box.start for box in owners], dtype=np.int64)
        stops = np.array([box.stop for box in owners], dtype=np.int64)
        common = np.minimum(stops[:, None], stops[None]) > np.maximum(starts[:, None], starts[None])
        if np.count_nonzero(common.all(axis=2)) > len(owners):
            return None
        return cls(starts, stops, tuple(map(tuple, owners.values())))

    def cut(self, box: Box) -> list[tuple[Box, tuple[int, ...]]] | None:
        """Cuts a box along the grid, with the owners of each part; None if the grid does not cover it."""
        starts = np.maximum(self.starts, np.array(box.start, dtype=np.int64))
        stops = np.minimum(self.stops, np.array(box.stop, dtype=np.int64))
        (inside,) = np.nonzero((starts < stops).all(axis=1))
        if (stops[inside] - starts[inside]).prod(axis=1).sum() != box.volume:
            return None
        rows = zip(inside.tolist(), starts[inside].tolist(), stops[inside].tolist(), strict=True)
        return [(Box(tuple(low), tuple(high)), self.owners[number]) for number, low, high in rows]


class Sharding(Sequence[RankLayout]):
    """The layouts of all learner ranks; each is made on request.

    Attributes:
        dtype: element type of the parameters.
        places: where each rank runs.
        kinds: the distinct ways in which tensors are sharded.
        tensors: number of each tensor's kind, by name.
    """

    def __init__(
        self, dtype: str, places: Sequence[RankPlace], kinds: Sequence[TensorKind], tensors: Mapping[str, int]
    ) -> None:
        if dtype not in ITEM_SIZES:
            raise ValueError(f"dtype {dtype!r} is none of {', '.join(ITEM_SIZES)}")
        sources = {part.source for kind in kinds for part in kind.parts}
        if any(not 0 <= source < len(places) for source in sources):
            raise ValueError(f"tensors lie on ranks {sorted(sources)}, there are {len(places)}")
        if any(not 0 <= number < len(kinds) for number in tensors.values()):
            raise ValueError(f"a tensor's kind is none of {len(kinds)}")
        self.dtype, self.places = dtype, tuple(places)
        self.kinds, self.tensors = tuple(kinds), dict(tensors)

    @classmethod
    def of(cls, layouts: Sequence[RankLayout]) -> Sharding:
        """Returns the sharding that these layouts describe; raises ValueError if dtypes or shapes differ."""
        if isinstance(layouts, Sharding):
            return layouts
        dtypes = {layout.dtype for layout in layouts}
        if len(dtypes) != 1:
            raise ValueError(f"learner ranks must share one dtype, got {sorted(dtypes)}")
        shapes: dict[str, tuple[int, ...]] = {}
        parts: dict[str, list[HeldPart]] = {}
        for rank, layout in enumerate(layouts):
            for part in layout.slices:
                if shapes.setdefault(part.name, part.global_shape) != part.global_shape:
                    raise ValueError(
                        f"{part.name}: rank {rank} gives shape {part.global_shape}, another rank "
                        f"{shapes[part.name]}; the two sides do not run the same model"
                    )
                param = _OWN_NAME if part.param == part.name else part.param
                parts.setdefault(part.name, []).append(HeldPart(rank, part.box, part.offset, param))
        numbers: dict[tuple[object, ...], int] = {}
        kinds: list[TensorKind] = []
        tensors: dict[str, int] = {}
        for name, own in parts.items():
            key = (shapes[name], *own)
            tensors[name] = numbers.setdefault(key, len(kinds))
            if tensors[name] == len(kinds):
                kinds.append(TensorKind(shapes[name], tuple(own)))
        return cls(dtypes.pop(), [layout.place for layout in layouts], kinds, tensors)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, rank: int) -> RankLayout: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[RankLayout, ...]: ...
    def __getitem__(self, rank: int | slice) -> RankLayout | tuple[RankLayout, ...]:
        if isinstance(rank, slice):
            return tuple(self[number] for number in range(len(self))[rank])
        number = range(len(self))[rank]
        slices = tuple(
            part.of_tensor(name, self.kinds[kind].shape)
            for name, kind in self.tensors.items()
            for part in self._parts_of(number)[kind]
        )
        return RankLayout(dtype=self.dtype, slices=slices, place=self.places[number])

    def _parts_of(self, rank: int) -> list[list[HeldPart]]:
        return [[part for part in kind.parts if part.source == rank] for kind in self.kinds]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sharding) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash((self.dtype, self.places))

    def _fields(self) -> tuple[object, ...]:
        return self.dtype, self.places, self.kinds, self.tensors

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape by tensor name."""
        return {name: self.kinds[kind].shape for name, kind in self.tensors.items()}

    @property
    def num_dims(self) -> int:
        """The largest number of dimensions of a tensor."""
        return max((len(kind.shape) for kind in self.kinds), default=1)

    @cached_property
    def grids(self) -> tuple[Grid | None, ...]:
        """The grid of each kind; None if its boxes overlap."""
        return tuple(map(Grid.of, self.kinds))

    def to_bytes(self) -> bytes:
        """Returns the sharding as one msgpack message."""
        places = [[place.node, place.gpu] for place in self.places]
        packed: bytes = msgpack.packb([places, self.slices_to_bytes()])
        return packed

    @cached_property
    def has_copies(self) -> bool:
        """Whether ranks of several nodes hold the same box, so that receivers may find one on their node."""
        return any(
            len({self.places[kind.parts[owner].source].node for owner in owners}) > 1
            for kind, grid in zip(self.kinds, self.grids, strict=True)
            for owners in (grid.owners if grid is not None else [range(len(kind.parts))])
        )

    def slices_to_bytes(self) -> bytes:
        """Returns the sharding without the ranks' places."""
        packed: bytes = msgpack.packb(
            {
                "schema": SHARDING_SCHEMA,
                "dtype": self.dtype,
                "kinds": [
                    [kind.shape, [[p.source, p.box.start, p.box.stop, p.offset, p.param] for p in kind.parts]]
                    for kind in self.kinds
                ],
                "tensors": list(self.tensors.items()),
            }
        )
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> Sharding:
        """Reads what `to_bytes` wrote; raises InvalidMessageError if anything is malformed."""
        fields = unpack_layout(data)
        try:
            if not isinstance(fields, list) or len(fields) != 2 or type(fields[1]) is not bytes:
                raise TypeError("need places and slices")
            places = [read_place(place) for place in fields[0]]
            plain = unpack_layout(fields[1])
            if not isinstance(plain, dict) or plain.get("schema") != SHARDING_SCHEMA:
                raise ValueError(f"need a map of schema {SHARDING_SCHEMA}")
            tensors = [_read_tensor(tensor) for tensor in plain["tensors"]]
            return cls(plain["dtype"], places, [_read_kind(kind) for kind in plain["kinds"]], dict(tensors))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidMessageError(f"weight sharding: {error}", reason="bad_layout") from error


def read_place(fields: object) -> RankPlace:
    """Reads node and GPU of an untrusted message; raises TypeError unless they are two strings."""
    if not isinstance(fields, list) or [type(field) for field in fields] != [str, str]:
        raise TypeError(f"a place is two strings, got {fields!r}")
    return RankPlace(node=fields[0], gpu=fields[1])


def _read_tensor(fields: object) -> tuple[str, int]:
    if not isinstance(fields, list) or [type(field) for field in fields] != [str, int] or not fields[0]:
        raise TypeError(f"a tensor is a name and the number of its kind, got {fields!r}")
    return fields[0], fields[1]


def _read_kind(fields: object) -> TensorKind:
    if not isinstance(fields, list) or len(fields) != 2 or not isinstance(fields[1], list):
        raise TypeError("a kind is a shape and a list of parts")
    return TensorKind(read_ints(fields[0]), tuple(map(_read_part, fields[1])))


def _read_part(fields: object) -> HeldPart:
    if not isinstance(fields, list) or len(fields) != 5:
        raise TypeError("a part is a list of five fields")
    source, start, stop, offset, param = fields
    if type(source) is not int or type(param) is not str:
        raise TypeError(f"a part's rank is an integer and its parameter a string, got {source!r}, {param!r}")
    return HeldPart(source, Box(read_ints(start), read_ints(stop)), read_ints(offset), param)
