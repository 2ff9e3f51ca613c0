"""Chooses how weights travel (NCCL, gloo, or shared memory), and which ranks stand in for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.weights.geometry.layout import RankLayout, RankPlace
from paceline.weights.geometry.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Wire:
    """The transport of a group's weights.

    Attributes:
        backend: backend between ranks that exchange messages.
        shared: whether rollout ranks get their weights from a learner rank on the same GPU (on a CPU: the
            same host) through shared memory.
    """

    backend: Literal["gloo", "nccl"]
    shared: bool


def choose_wire(
    configured: Literal["auto", "gloo", "nccl", "shared"],
    learners: Sequence[RankLayout],
    rollouts: Sequence[RankLayout],
) -> Wire:
    """Chooses the wire of a group of ranks.

    NCCL refuses two ranks on one GPU. Then either a learner rank stands in for the rollout ranks there, or
    everything goes over gloo. GPUs are compared by their unique ids, because an index names different GPUs on
    different machines and in different containers.

    Args:
        configured: weights.backend.
    """
    places = Sharding.of(learners).places
    behind = stand_ins(places, [layout.place for layout in rollouts])
    apart = [layout.place for rank, layout in enumerate(rollouts) if rank not in behind]
    if configured == "shared":
        if _all_apart([*places, *apart]):
            return Wire("nccl", shared=True)
        # gloo works in host memory: it cannot fill memory that two ranks share on a GPU.
        return Wire("gloo", shared=not any(place.gpu for place in [*places, *apart]))
    if configured == "auto":
        everywhere = [*places, *(layout.place for layout in rollouts)]
        return Wire("nccl" if _all_apart(everywhere) else "gloo", shared=False)
    return Wire(configured, shared=False)


def _all_apart(places: Sequence[RankPlace]) -> bool:
    """Returns whether every rank has its own GPU."""
    gpus = [place.gpu for place in places]
    return all(gpus) and len(set(gpus)) == len(gpus)


def stand_ins(learners: Sequence[RankPlace], rollouts: Sequence[RankPlace]) -> Mapping[int, int]:
    """Returns the learner rank that stands in for each rollout rank, by the number of the rollout rank.

    A rollout rank without a learner rank at its place has none. Several learner ranks at one place, as on a
    CPU, share the rollout ranks there.
    """
    taken: Counter[RankPlace] = Counter()
    chosen: dict[int, int] = {}
    for rank, place in enumerate(rollouts):
        here = [number for number, other in enumerate(learners) if other == place]
        if here:
            chosen[rank] = here[taken[place] % len(here)]
            taken[place] += 1
    return chosen
