"""Describes the boxes of global tensors that a rank holds or needs, and where they lie in its memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import gt
from typing import Any, Final

import msgpack

from paceline.core.errors import InvalidMessageError, WeightSyncError
from paceline.weights.geometry.boxes import Box

LAYOUT_SCHEMA: Final = 4
ITEM_SIZES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the types that can be sent, by the name that torch uses after `torch.`"""

_MAX_DIMS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """One box of a global tensor, and its place in one parameter of the rank.

    Attributes:
        name: the tensor's name in the Hugging Face state dict.
        box: the part that a learner rank holds or a rollout rank needs, in global indices.
        param: the rank's own name of the parameter that contains the part (`...qkv_proj.weight`); the suffix
            `parameters.TRANSPOSED` says that its last two dimensions are swapped.
        offset: index in that parameter at which the box begins; it has as many dimensions as the tensor.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    param: str
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        dims = len(self.global_shape)
        if not 1 <= dims <= _MAX_DIMS or len(self.box.start) != dims or len(self.offset) != dims:
            raise ValueError(
                f"{self.name}: shape {self.global_shape}, box {self.box} and offset {self.offset} must have "
                f"the same number of dimensions, 1 to {_MAX_DIMS}"
            )
        if any(map(gt, self.box.stop, self.global_shape)) or min(self.offset) < 0:
            raise ValueError(
                f"{self.name}: box {self.box} must lie within shape {self.global_shape} and offset "
                f"{self.offset} must not be negative"
            )

    @property
    def local_box(self) -> Box:
        """Where the box lies in the rank's parameter."""
        return self.to_local(self.box)

    def to_local(self, part: Box) -> Box:
        """Returns where a part of the box (in global indices) lies in the rank's parameter."""
        return part.relative_to(self.box.start).translate(self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Says on which machine and GPU a rank runs.

    Attributes:
        node: id of its machine; ranks of equal ids reach each other without the network. "": unknown.
        gpu: id of its GPU, unique over all machines; "" without one.
    """

    node: str = ""
    gpu: str = ""


NOWHERE: Final = RankPlace()
"""The place of a rank whose machine and GPU are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """All slices that one rank holds or needs, and where it runs.

    Attributes:
        dtype: element type of the rank's parameters, as torch names it ("float32"). Some parameters of a
            rollout rank may still be float32; they receive numbers rounded to this type.
        slices: the slices; no two of them overlap in the rank's memory.
        full_tensors: whether the rank takes the general path: it needs every tensor in full, in checkpoint
            form, and loads it through the inference engine. `slices` is then empty; `expand_full` fills it.
    """

    dtype: str
    slices: tuple[TensorSlice, ...]
    full_tensors: bool = False
    place: RankPlace = NOWHERE

    def at(self, place: RankPlace) -> RankLayout:
        """Returns the same slices in another place; the tuple of slices is shared."""
        return self if place == self.place else replace(self, place=place)

    def to_dict(self) -> dict[str, Any]:
        """Returns the layout without its place, as plain lists, numbers and strings, for msgpack.

        Layers repeat, so each shape with its box and offset is stored once.
        """
        numbers: dict[tuple[tuple[int, ...], ...], int] = {}
        slices = []
        for part in self.slices:
            geometry = (part.global_shape, part.box.start, part.box.stop, part.offset)
            slices.append([part.name, part.param, numbers.setdefault(geometry, len(numbers))])
        return {
            "schema": LAYOUT_SCHEMA,
            "dtype": self.dtype,
            "full_tensors": self.full_tensors,
            "boxes": [[list(indices) for indices in geometry] for geometry in numbers],
            "slices": slices,
        }

    @classmethod
    def from_dict(cls, data: object) -> RankLayout:
        """Reads what `to_dict` wrote; raises InvalidMessageError if anything is malformed."""
        try:
            return _read_layout(data)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidMessageError(f"weight layout: {error}", reason="bad_layout") from error

    def slices_to_bytes(self) -> bytes:
        """Returns the layout without its place, as one msgpack message."""
        packed: bytes = msgpack.packb(self.to_dict())
        return packed

    def to_bytes(self) -> bytes:
        """Returns the layout with its place, as one msgpack message."""
        packed: bytes = msgpack.packb([self.place.node, self.place.gpu, self.slices_to_bytes()])
        return packed

    @staticmethod
    @lru_cache(maxsize=64)
    def slices_from_bytes(data: bytes) -> RankLayout:
        """Reads what `slices_to_bytes` wrote; raises InvalidMessageError if anything is malformed.

        The same bytes give the same object, so identical servers share their slices.
        """
        return RankLayout.from_dict(unpack_layout(data))

    @staticmethod
    def from_bytes(data: bytes) -> RankLayout:
        """Reads what `to_bytes` wrote; raises InvalidMessageError if anything is malformed."""
        fields = unpack_layout(data)
        if not isinstance(fields, list) or [type(field) for field in fields] != [str, str, bytes]:
            raise InvalidMessageError(
                f"weight layout: need node, GPU and slices, got {type(fields).__name__}", reason="bad_layout"
            )
        node, gpu, slices = fields
        return RankLayout.slices_from_bytes(slices).at(RankPlace(node=node, gpu=gpu))


def unpack_layout(data: bytes) -> Any:
    """Unpacks an untrusted message; raises InvalidMessageError if it is not msgpack."""
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidMessageError(f"weight layout: not msgpack: {error}", reason="bad_layout") from error


def same_slices(layout: RankLayout, other: RankLayout) -> bool:
    """Returns whether two layouts are equal except for the order of their slices."""
    if (layout.dtype, layout.full_tensors, layout.place) != (other.dtype, other.full_tensors, other.place):
        return False
    return layout.slices == other.slices or set(layout.slices) == set(other.slices)


def chunk_rows(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the rows [start, stop) of `rank` as `torch.chunk` cuts them; last chunks are short or empty."""
    size = math.ceil(num_rows / world_size)
    return min(rank * size, num_rows), min((rank + 1) * size, num_rows)


def tensor_shapes(layouts: Iterable[RankLayout]) -> dict[str, tuple[int, ...]]:
    """Returns shapes by tensor name, in order of first mention; raises WeightSyncError if ranks differ."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, layout in enumerate(layouts):
        for part in layout.slices:
            known = shapes.setdefault(part.name, part.global_shape)
            if known != part.global_shape:
                raise WeightSyncError(
                    f"{part.name}: rank {rank} gives shape {part.global_shape}, another rank {known}; "
                    "the two sides do not run the same model"
                )
    return shapes


def expand_full(layout: RankLayout, shapes: Mapping[str, tuple[int, ...]]) -> RankLayout:
    """Returns the layout itself, or a layout of all full tensors if the rank takes the general path."""
    if not layout.full_tensors:
        return layout
    slices = tuple(
        TensorSlice(name=name, global_shape=shape, box=Box.full(shape), param=name, offset=(0,) * len(shape))
        for name, shape in shapes.items()
    )
    return RankLayout(dtype=layout.dtype, slices=slices, full_tensors=True)


def expand_all(
    layouts: Iterable[RankLayout], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[RankLayout, ...]:
    """Returns `expand_full` of each layout, without places; equal results share an object."""
    full: dict[str, RankLayout] = {}
    expanded: list[RankLayout] = []
    for layout in layouts:
        if layout.full_tensors and layout.dtype not in full:
            full[layout.dtype] = expand_full(layout, shapes)
        expanded.append(full[layout.dtype] if layout.full_tensors else layout)
    return tuple(expanded)


def _read_layout(data: object) -> RankLayout:
    if not isinstance(data, dict) or data.get("schema") != LAYOUT_SCHEMA:
        raise ValueError(f"need a map of schema {LAYOUT_SCHEMA}")
    if data["dtype"] not in ITEM_SIZES:
        raise ValueError(f"dtype {data['dtype']!r} is none of {', '.join(ITEM_SIZES)}")
    if not isinstance(data["full_tensors"], bool) or not isinstance(data["slices"], list):
        raise TypeError("`full_tensors` must be a bool and `slices` a list")
    boxes = [_read_geometry(fields) for fields in data["boxes"]]
    return RankLayout(
        dtype=data["dtype"],
        slices=tuple(_read_slice(fields, boxes) for fields in data["slices"]),
        full_tensors=data["full_tensors"],
    )


_Geometry = tuple[tuple[int, ...], Box, tuple[int, ...]]


def _read_geometry(fields: object) -> _Geometry:
    if not isinstance(fields, list) or len(fields) != 4:
        raise TypeError("a box is a list of shape, start, stop and offset")
    shape, start, stop, offset = map(read_ints, fields)
    return shape, Box(start, stop), offset


def _read_slice(fields: object, boxes: list[_Geometry]) -> TensorSlice:
    if not isinstance(fields, list) or len(fields) != 3:
        raise TypeError("a slice is a list of three fields")
    name, param, number = fields
    if not isinstance(name, str) or not isinstance(param, str) or not name or not param:
        raise TypeError("a slice's names must be non-empty strings")
    if type(number) is not int or not 0 <= number < len(boxes):
        raise ValueError(f"need the number of one of {len(boxes)} boxes, got {number!r}")
    shape, box, offset = boxes[number]
    return TensorSlice(name=name, global_shape=shape, box=box, param=param, offset=offset)


def read_ints(values: object) -> tuple[int, ...]:
    """Reads an untrusted list of plain integers; raises TypeError if it is anything else."""
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise TypeError(f"need a list of integers, got {values!r}")
    return tuple(values)
