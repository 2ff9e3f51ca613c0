"""Specifies a weight group in one message that tells every member of an epoch how to join."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgpack

from paceline.core.errors import InvalidMessageError
from paceline.core.members import MemberKind, RankRef
from paceline.weights.geometry.layout import ITEM_SIZES, RankLayout, expand_all
from paceline.weights.geometry.sharding import Sharding, read_place
from paceline.weights.plan.backend import stand_ins
from paceline.weights.plan.plan import RELAY_MODES, TransferPlan, build_plan

SPEC_SCHEMA: Final = 5
_FAST: Final = 1
_MOST_BYTES: Final = 1 << 30
BACKENDS: Final = ("gloo", "nccl")


@dataclass(frozen=True, kw_only=True)
class WeightGroupSpec:
    """The weight group of one membership epoch.

    Ranks 0..L-1 are the learner's; the rollout servers' TP ranks follow, server by server.

    Attributes:
        epoch: membership epoch; never used twice with one store.
        backend: "gloo" or "nccl".
        store_host, store_port: where learner rank 0 listens for the rendezvous.
        learner_layouts: layouts of the learner ranks, kept as a `Sharding`.
        wire_dtype: element type on the wire; must be that of the rollout ranks' parameters.
        round_bytes: most bytes that a rank packs or receives in a round; each side stages two rounds.
        shared: whether learner ranks stand in for the rollout ranks at their places.
        relay: whether rollout ranks relay common needs to each other; see `build_plan`.
        timeout_s: deadline of forming the group, and of pushes without their own deadline.
    """

    epoch: int
    backend: str
    store_host: str
    store_port: int
    learner_layouts: Sequence[RankLayout]
    rollout_layouts: tuple[RankLayout, ...]
    wire_dtype: str
    round_bytes: int = 512 << 20
    relay: str = "never"
    shared: bool = False
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend {self.backend!r} is none of {', '.join(BACKENDS)}")
        if self.relay not in RELAY_MODES:
            raise ValueError(f"relay {self.relay!r} is none of {', '.join(RELAY_MODES)}")
        if self.wire_dtype not in ITEM_SIZES:
            raise ValueError(f"wire dtype {self.wire_dtype!r} is none of {', '.join(ITEM_SIZES)}")
        if not self.learner_layouts or not self.rollout_layouts:
            raise ValueError("a weight group needs at least one learner and one rollout rank")
        object.__setattr__(self, "learner_layouts", Sharding.of(self.learner_layouts))
        if not 0 < self.store_port < 1 << 16 or self.round_bytes < 1 or not self.timeout_s > 0:
            raise ValueError(
                f"store port {self.store_port}, round_bytes {self.round_bytes} and "
                f"timeout_s {self.timeout_s} must be positive"
            )
        for rank, layout in enumerate(self.rollout_layouts):
            if layout.dtype != self.wire_dtype:
                raise ValueError(
                    f"rollout rank {rank} keeps {layout.dtype} parameters, the wire carries "
                    f"{self.wire_dtype}; they must be equal, since digests are compared"
                )

    @property
    def sharding(self) -> Sharding:
        """The layouts of all learner ranks."""
        return Sharding.of(self.learner_layouts)

    def layout(self, rank: int) -> RankLayout:
        """Returns the layout of a group rank."""
        first = self.num_learners
        return self.learner_layouts[rank] if rank < first else self.rollout_layouts[rank - first]

    @property
    def num_learners(self) -> int:
        """Number of learner ranks; also the group rank of the first rollout rank."""
        return len(self.learner_layouts)

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return len(self.learner_layouts) + len(self.rollout_layouts)

    def expanded_rollout_layouts(self) -> tuple[RankLayout, ...]:
        """Returns the rollout ranks' layouts; expands those of the general path to every learner tensor."""
        return expand_all(self.rollout_layouts, self.sharding.shapes)

    def build_plan(self) -> TransferPlan:
        """Builds the group's transfer plan; raises WeightSyncError as `plan.build_plan` does."""
        return build_plan(
            self.learner_layouts,
            self.rollout_layouts,
            item_bytes=ITEM_SIZES[self.wire_dtype],
            round_bytes=self.round_bytes,
            relay="never" if self.shared else self.relay,
        )

    @cached_property
    def stand_ins(self) -> Mapping[int, int]:
        """The learner rank that stands in for a rollout rank, by group rank; {} unless memory is shared."""
        if not self.shared:
            return {}
        chosen = stand_ins(self.sharding.places, [layout.place for layout in self.rollout_layouts])
        return {self.num_learners + rank: learner for rank, learner in chosen.items()}

    @cached_property
    def wire_ranks(self) -> tuple[int, ...]:
        """The group ranks that exchange messages: those without a stand-in."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.stand_ins)

    def rank_ref(self, rank: int) -> RankRef:
        """Returns a group rank's kind and its number within that kind."""
        first = self.num_learners
        if rank < first:
            return RankRef(MemberKind.LEARNER, rank)
        return RankRef(MemberKind.ROLLOUT, rank - first)

    def to_bytes(self) -> bytes:
        """Encodes the spec as one compressed msgpack message, which holds shared layouts once."""
        different = {_identity(layout): layout for layout in self.rollout_layouts}
        packed = {key: layout.slices_to_bytes() for key, layout in different.items()}
        numbers = {data: number for number, data in enumerate(dict.fromkeys(packed.values()))}
        plain: dict[str, Any] = {
            "schema": SPEC_SCHEMA,
            "epoch": self.epoch,
            "backend": self.backend,
            "store_host": self.store_host,
            "store_port": self.store_port,
            "sharding": self.sharding.to_bytes(),
            "rollout_layouts": [numbers[packed[_identity(layout)]] for layout in self.rollout_layouts],
            "layouts": list(numbers),
            "places": [[layout.place.node, layout.place.gpu] for layout in self.rollout_layouts],
            "wire_dtype": self.wire_dtype,
            "round_bytes": self.round_bytes,
            "relay": self.relay,
            "shared": self.shared,
            "timeout_s": float(self.timeout_s),
        }
        # Layouts repeat names, so compression leaves a few percent of the size.
        return zlib.compress(msgpack.packb(plain), _FAST)

    @classmethod
    def from_bytes(cls, data: bytes) -> WeightGroupSpec:
        """Reads what `to_bytes` wrote; raises InvalidMessageError if anything is malformed."""
        try:
            plain = msgpack.unpackb(_decompress(data))
            if not isinstance(plain, dict) or plain.pop("schema", None) != SPEC_SCHEMA:
                raise ValueError(f"need a map of schema {SPEC_SCHEMA}")
            for key, kind in _KINDS.items():
                if type(plain[key]) is not kind:
                    raise TypeError(f"{key} must be {kind.__name__}, got {plain[key]!r}")
            layouts = tuple(map(RankLayout.slices_from_bytes, plain.pop("layouts")))
            plain["learner_layouts"] = Sharding.from_bytes(plain.pop("sharding"))
            plain["rollout_layouts"] = tuple(
                layouts[_index(number, len(layouts))].at(read_place(place))
                for number, place in zip(plain["rollout_layouts"], plain.pop("places"), strict=True)
            )
            return cls(**plain)
        except (KeyError, TypeError, ValueError, zlib.error, msgpack.UnpackException) as error:
            raise InvalidMessageError(f"weight group spec: {error}", reason="bad_weight_group") from error


def _identity(layout: RankLayout) -> tuple[int, str, bool]:
    """Returns a key that layouts with the same tuple of slices share, so that these are packed once."""
    return id(layout.slices), layout.dtype, layout.full_tensors


def _decompress(data: bytes) -> bytes:
    """Decompresses a message; raises ValueError if it is cut off or larger than any spec."""
    inflater = zlib.decompressobj()
    message = inflater.decompress(data, _MOST_BYTES)
    if not inflater.eof:
        raise ValueError(f"the spec is cut off or larger than {_MOST_BYTES >> 20} MiB")
    return message


def _index(number: object, count: int) -> int:
    if type(number) is not int or not 0 <= number < count:
        raise ValueError(f"need the number of one of {count} layouts, got {number!r}")
    return number


_KINDS: Final[dict[str, type]] = {
    "epoch": int,
    "backend": str,
    "store_host": str,
    "store_port": int,
    "sharding": bytes,
    "rollout_layouts": list,
    "layouts": list,
    "places": list,
    "wire_dtype": str,
    "round_bytes": int,
    "relay": str,
    "shared": bool,
    "timeout_s": float,
}
