"""Computes flows: what a learner rank sends to a set of rollout ranks with equal needs.

A set of one rank is served directly. In a larger set, members take turns in receiving a chunk and relaying it
to the others: every byte leaves the learners once per set, and the members share the relaying.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.columns import IntArray
from paceline.weights.geometry.cover import Cover, Need, assign_sources
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.geometry.sharding import Sharding

SMALLEST_SHARE: Final = 0.02
"""Sets that share less than this fraction of all bytes get no separate messages."""

Members = tuple[int, ...]
"""Rollout ranks, ascending"""

Group = list[tuple[int, TensorSlice]]
"""Classes of rollout ranks that need the same box, ascending, each with its slice"""


class Flow(NamedTuple):
    """The elements that learner rank `source` sends to `members`, in the tensors' order.

    Attributes:
        volume: number of elements, each counted once for any number of receivers.
        longest_row: elements of the longest row of any of its boxes.
        content: the source and the indices of the sets of needs; equal for flows of equal boxes.
    """

    source: int
    members: Members
    volume: int
    longest_row: int
    content: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """The needs of rollout ranks, and the learner ranks that supply them.

    Identical servers and layers are counted, not repeated, so the cost is that of one server.

    Attributes:
        cover: which source supplies which need.
        groups: for each need, the classes of rollout ranks that have it, each with its slice.
        class_of: the class of each rollout rank; ranks of a class have equal slices.
        sets: indices of needs, by the exact set of classes that have them.
        order: index of each need's tensor.
    """

    cover: Cover
    groups: list[Group]
    class_of: Sequence[int]
    sets: dict[tuple[int, ...], list[int]]
    order: IntArray

    @classmethod
    def of(cls, sharding: Sharding, destinations: Sequence[RankLayout], apart: Sequence[int]) -> Demand:
        """Computes the demand of rollout ranks.

        Args:
            destinations: layouts of the rollout ranks; those of the general path must have been expanded.
            apart: a number for each rollout rank; ranks with different numbers may have different sources.

        Raises:
            WeightSyncError: no source holds a needed part.
        """
        numbers: dict[tuple[int, int], int] = {}
        class_of = [
            numbers.setdefault((id(layout.slices), number), len(numbers))
            for layout, number in zip(destinations, apart, strict=True)
        ]
        examples = [class_of.index(number) for number in numbers.values()]
        groups = _group_needs([destinations[rank] for rank in examples], [apart[rank] for rank in examples])
        ranks = Counter(class_of)
        nodes: dict[int, set[str]] = {}
        for number, layout in zip(class_of, destinations, strict=True):
            nodes.setdefault(number, set()).add(layout.place.node)
        sets: dict[tuple[int, ...], list[int]] = {}
        needs: list[Need] = []
        for group in groups:
            sets.setdefault(tuple(number for number, _ in group), []).append(len(needs))
            number, part = group[0]
            around = set().union(*(nodes[several] for several, _ in group))
            needs.append(
                Need(
                    name=part.name,
                    global_shape=part.global_shape,
                    box=part.box,
                    label=f"rollout rank {examples[number]}",
                    copies=sum(ranks[several] for several, _ in group),
                    node=around.pop() if len(around) == 1 else "",
                )
            )
        order = {name: index for index, name in enumerate(sharding.tensors)}
        return cls(
            cover=assign_sources(sharding, needs),
            groups=groups,
            class_of=class_of,
            sets=sets,
            order=np.array([order[need.name] for need in needs], dtype=np.int64),
        )

    def flows(self, *, together: Sequence[int], smallest_share: float = 0.0) -> Flows:
        """Splits the needs of rollout ranks into flows, ordered by (source, members).

        Args:
            together: a number for each rollout rank; ranks that need the same box and have the same number
                form one set.
            smallest_share: sets that share less than this fraction of all bytes are split into single ranks.
        """
        sets = list(self.sets.values())
        volumes = [sum(self.groups[need][0][1].box.volume for need in needs) for needs in sets]
        members = _members(list(self.sets), self.class_of, together)
        members = _split_small(members, volumes, smallest_share)
        flows = _flows(self.cover, sets, members)
        return Flows(demand=self, sets=sets, flows=flows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Flows:
    """All flows of a plan, ordered by (source, members).

    The content of a flow is looked up only for a rank's own flows, because there are many others.

    Attributes:
        sets: groups of needs (indices) that the same classes have.
    """

    demand: Demand
    sets: list[list[int]]
    flows: list[Flow]
    _sorted_needs: dict[tuple[int, ...], IntArray] = field(default_factory=dict, init=False)

    @property
    def cover(self) -> Cover:
        """Says which learner rank supplies which part of each need."""
        return self.demand.cover

    def cargo(self, flow: Flow) -> tuple[IntArray, IntArray]:
        """Returns the needs and the cover's rows of which a flow consists, in the tensors' order."""
        needs = self._needs(flow.content[1:])
        item, row = self.cover.rows_of(needs, flow.source)
        return needs[item], row

    def _needs(self, sets: tuple[int, ...]) -> IntArray:
        """Returns the needs of some sets, in the tensors' order."""
        if sets not in self._sorted_needs:
            needs = np.sort(np.concatenate([self.sets[number] for number in sets]))
            self._sorted_needs[sets] = needs[np.argsort(self.demand.order[needs], kind="stable")]
        return self._sorted_needs[sets]

    def slice_of(self, need: int, rank: int) -> TensorSlice:
        """Returns the slice in which a rollout rank stores a need."""
        own = self.demand.class_of[rank]
        for number, part in self.demand.groups[need]:
            if number == own:
                return part
        raise KeyError(f"rollout rank {rank} does not have need {need}")


def _flows(cover: Cover, sets: Sequence[Sequence[int]], members: Sequence[Sequence[Members]]) -> list[Flow]:
    """Adds up volumes by set and source, and makes the flows."""
    num_regions, num_sources = cover.volumes.shape
    volumes = np.zeros((len(sets), num_sources), dtype=np.int64)
    longest = np.zeros((len(sets), num_sources), dtype=np.int64)
    for number, needs in enumerate(sets):
        counts = np.bincount(cover.region[needs], minlength=num_regions)
        volumes[number] = counts @ cover.volumes
        longest[number] = cover.longest_rows[counts > 0].max(axis=0)
    sets_of: dict[Members, list[int]] = {}
    for number, several in enumerate(members):
        for ranks in several:
            sets_of.setdefault(ranks, []).append(number)
    contents: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    flows = []
    for ranks in sorted(sets_of):
        own = tuple(sets_of[ranks])
        if own not in contents:
            sums, rows = volumes[list(own)].sum(axis=0), longest[list(own)].max(axis=0)
            contents[own] = list(zip(sums.tolist(), rows.tolist(), strict=True))
        flows += [
            Flow(source=source, members=ranks, volume=volume, longest_row=row, content=(source, *own))
            for source, (volume, row) in enumerate(contents[own])
            if volume
        ]
    return sorted(flows, key=lambda flow: flow.source)


def _group_needs(classes: Sequence[RankLayout], apart: Sequence[int]) -> list[Group]:
    """Returns every needed box with the classes that need it, separately for each number in `apart`."""
    groups: dict[tuple[object, ...], Group] = {}
    for number, layout in enumerate(classes):
        times: dict[tuple[str, Box], int] = {}
        for part in layout.slices:
            # A rank may need the same box in two places.
            again = times[part.name, part.box] = times.get((part.name, part.box), 0) + 1
            key = (part.name, part.global_shape, part.box, again, apart[number])
            groups.setdefault(key, []).append((number, part))
    return list(groups.values())


def _members(
    sets: Sequence[tuple[int, ...]], class_of: Sequence[int], together: Sequence[int]
) -> list[list[Members]]:
    """Returns the ranks of each set of classes, grouped by their number in `together`."""
    members: list[list[Members]] = []
    for classes in sets:
        ranks: dict[int, list[int]] = {}
        for rank, number in enumerate(class_of):
            if number in classes:
                ranks.setdefault(together[rank], []).append(rank)
        members.append([tuple(several) for several in ranks.values()])
    return members


def _split_small(
    members: list[list[Members]], volumes: Sequence[int], smallest_share: float
) -> list[list[Members]]:
    """Returns the ranks of each set; sets that share too few bytes are split into single ranks."""
    common: dict[Members, int] = {}
    for several, volume in zip(members, volumes, strict=True):
        for ranks in several:
            common[ranks] = common.get(ranks, 0) + volume
    least = smallest_share * sum(common.values())
    return [
        [
            part
            for ranks in several
            for part in ([ranks] if common[ranks] >= least else [(rank,) for rank in ranks])
        ]
        for several in members
    ]
