"""The description of a weight group and of what learners hold: their bytes, and what readers refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from paceline.core.errors import InvalidMessageError
from paceline.weights.digest.agreement import (
    DigestReport,
)
from paceline.weights.geometry.layout import (
    RankLayout,
    RankPlace,
    same_slices,
)
from paceline.weights.geometry.sharding import Sharding
from paceline.weights.plan.plan import build_plan
from paceline.weights.plan.spec import WeightGroupSpec
from support.weight_layouts import fsdp_layout, full, model_of


def make_spec(**changes: object) -> WeightGroupSpec:
    fields = {
        "epoch": 3,
        "backend": "gloo",
        "store_host": "127.0.0.1",
        "store_port": 4711,
        "learner_layouts": (full("w", (4, 2)),),
        "rollout_layouts": (full("w", (4, 2)), RankLayout(dtype="float32", slices=(), full_tensors=True)),
        "wire_dtype": "float32",
        "timeout_s": 5,
    }
    return WeightGroupSpec(**{**fields, **changes})


def test_the_group_spec_survives_the_wire() -> None:
    spec = make_spec()
    assert WeightGroupSpec.from_bytes(spec.to_bytes()) == spec
    assert [str(spec.rank_ref(r)) for r in range(spec.world_size)] == [
        "learner rank 0",
        "rollout rank 0",
        "rollout rank 1",
    ]
    assert [len(layout.slices) for layout in spec.expanded_rollout_layouts()] == [1, 1]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("backend", "mpi", "none of gloo, nccl"),
        ("wire_dtype", "int8", "none of float32"),
        ("wire_dtype", "bfloat16", "keeps float32 parameters"),
        ("store_port", 0, "must be positive"),
        ("rollout_layouts", (), "at least one"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(field: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_spec(**{field: value})


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: plain.update(schema=1),
        lambda plain: plain.update(dtype="int4"),
        lambda plain: plain.update(slices=None),
        lambda plain: plain["slices"][0].pop(),
        lambda plain: plain["slices"][0].__setitem__(0, ""),
        lambda plain: plain["slices"][0].__setitem__(2, 1),
        lambda plain: plain["slices"][0].__setitem__(2, -1),
        lambda plain: plain["boxes"][0].__setitem__(2, [5, 2]),
        lambda plain: plain["boxes"][0].__setitem__(1, [-1, 0]),
        lambda plain: plain["boxes"][0].__setitem__(0, [4.0, 2]),
        lambda plain: plain["boxes"][0].__setitem__(3, [0]),
        lambda plain: plain["boxes"][0].pop(),
    ],
)
def test_a_damaged_layout_is_a_typed_rejection(damage: object) -> None:
    plain = full("w", (4, 2)).to_dict()
    assert RankLayout.from_dict(msgpack.unpackb(msgpack.packb(plain))) == full("w", (4, 2))
    damage(plain)
    with pytest.raises(InvalidMessageError) as caught:
        RankLayout.from_dict(plain)
    assert caught.value.reason == "bad_layout"


def test_bytes_that_are_no_message_are_rejected() -> None:
    for read in (
        RankLayout.from_bytes,
        Sharding.from_bytes,
        WeightGroupSpec.from_bytes,
        DigestReport.from_bytes,
    ):
        for data in (b"", b"\xc1", msgpack.packb(7), msgpack.packb({"schema": 1})):
            with pytest.raises(InvalidMessageError):
                read(data)


def test_plans_differ_where_the_rounds_do() -> None:
    layouts = [full("w", (7, 4))]
    plans = [build_plan(layouts, layouts, item_bytes=4, round_bytes=size) for size in (40, 44, 64)]
    assert plans[0].fingerprint == plans[1].fingerprint != plans[2].fingerprint
    assert dataclasses.replace(plans[0]).fingerprint == plans[0].fingerprint


def test_a_place_travels_with_the_layout_and_in_the_spec() -> None:
    shared = full("w", (4, 2))
    places = [RankPlace(node="n1", gpu="GPU-1"), RankPlace(node="n2"), RankPlace()]
    layouts = tuple(shared.at(place) for place in places)
    read = [RankLayout.from_bytes(layout.to_bytes()) for layout in layouts]
    assert read == list(layouts)
    assert read[0].slices is read[1].slices
    spec = WeightGroupSpec(
        epoch=1,
        backend="gloo",
        store_host="h",
        store_port=1,
        learner_layouts=layouts[:1],
        rollout_layouts=layouts[1:],
        wire_dtype="float32",
    )
    assert WeightGroupSpec.from_bytes(spec.to_bytes()) == spec
    for fields in (["n"], ["n", "g", 7], ["n", 1, b""]):
        with pytest.raises(InvalidMessageError, match="node, GPU and slices"):
            RankLayout.from_bytes(msgpack.packb(fields))


def test_a_layout_is_the_known_one_whatever_the_order_of_its_slices() -> None:
    layout = fsdp_layout({"a": (4, 2), "b": (4,)}, rank=0, world_size=2, dtype="float32")
    assert same_slices(layout, dataclasses.replace(layout, slices=layout.slices[::-1]))
    for change in ({"slices": layout.slices[:1]}, {"dtype": "float16"}, {"place": RankPlace(node="other")}):
        assert not same_slices(layout, dataclasses.replace(layout, **change))


def test_a_sharding_gives_every_rank_its_layout() -> None:
    shapes = model_of(3).shapes() | {"small": (3, 2)}
    places = [RankPlace(node="n1", gpu=f"GPU-{rank}") for rank in range(5)]
    layouts = [
        fsdp_layout(shapes, rank=rank, world_size=5, dtype="bfloat16").at(place)
        for rank, place in enumerate(places)
    ]
    renamed = dataclasses.replace(layouts[4].slices[0], param="own.name")
    layouts[4] = dataclasses.replace(layouts[4], slices=(renamed, *layouts[4].slices[1:]))
    sharding = Sharding.of(layouts)
    read = Sharding.from_bytes(sharding.to_bytes())
    assert read == sharding
    for some in (sharding, read):
        assert list(some) == layouts
        assert some.places == tuple(places)
        assert some.shapes == shapes
    # Layers are alike: three of them add nothing to two.
    assert len(sharding.kinds) == len(Sharding.of(list(layouts_of(2, 5))).kinds) + 2
    with pytest.raises(ValueError, match=r"one dtype, got \['bfloat16', 'float32'\]"):
        Sharding.of([layouts[0], *layouts_of(1, 1)])
    with pytest.raises(ValueError, match=r"w: rank 1 gives shape \(4, 3\), another rank \(4, 2\)"):
        Sharding.of([full("w", (4, 2)), full("w", (4, 3))])


def layouts_of(layers: int, world_size: int) -> Iterator[RankLayout]:
    for rank in range(world_size):
        yield fsdp_layout(model_of(layers).shapes(), rank=rank, world_size=world_size, dtype="float32")


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: plain.update(schema=0),
        lambda plain: plain.update(dtype="int4"),
        lambda plain: plain.update(tensors=None),
        lambda plain: plain["tensors"][0].__setitem__(0, ""),
        lambda plain: plain["tensors"][0].__setitem__(1, 1),
        lambda plain: plain["tensors"][0].__setitem__(1, -1),
        lambda plain: plain["kinds"][0].pop(),
        lambda plain: plain["kinds"][0].__setitem__(0, [4, 1]),
        lambda plain: plain["kinds"][0][1][0].__setitem__(0, 1),
        lambda plain: plain["kinds"][0][1][0].__setitem__(0, -1),
        lambda plain: plain["kinds"][0][1][0].__setitem__(2, [4]),
        lambda plain: plain["kinds"][0][1][0].__setitem__(4, 7),
        lambda plain: plain["kinds"][0][1][0].pop(),
    ],
)
def test_a_damaged_sharding_is_a_typed_rejection(damage: Callable[[Any], None]) -> None:
    places, slices = msgpack.unpackb(Sharding.of([full("w", (4, 2))]).to_bytes())
    plain = msgpack.unpackb(slices)
    damage(plain)
    with pytest.raises(InvalidMessageError) as caught:
        Sharding.from_bytes(msgpack.packb([places, msgpack.packb(plain)]))
    assert caught.value.reason == "bad_layout"


def test_a_spec_has_the_layouts_that_servers_share_once() -> None:
    source, ranks = full("w", (512, 8)), [full(f"w{n}", (512, 8)) for n in range(3)]
    sizes = []
    for servers in (1, 200):
        spec = WeightGroupSpec(
            epoch=1,
            backend="nccl",
            store_host="h",
            store_port=1,
            learner_layouts=(source,),
            # Not the same objects: as they come from different servers.
            rollout_layouts=tuple(
                RankLayout.from_dict(rank.to_dict()) for _ in range(servers) for rank in ranks
            ),
            wire_dtype="float32",
        )
        packed = spec.to_bytes()
        sizes.append(len(packed))
        read = WeightGroupSpec.from_bytes(packed)
        assert read == spec
        assert len({id(layout) for layout in read.rollout_layouts}) == 3
    assert sizes[1] < sizes[0] + 200


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_a_spec_that_is_cut_off_is_refused(cut: int) -> None:
    spec = WeightGroupSpec(
        epoch=1,
        backend="nccl",
        store_host="h",
        store_port=1,
        learner_layouts=(full("w", (4,)),),
        rollout_layouts=(full("w", (4,)),),
        wire_dtype="float32",
    )
    with pytest.raises(InvalidMessageError, match="weight group spec"):
        WeightGroupSpec.from_bytes(spec.to_bytes()[:cut])
