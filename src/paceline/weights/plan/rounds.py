"""Chooses chunk sizes: as many rounds as staging requires, all about equally full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.weights.plan.flows import Flow

_LEAST_ROUNDS: Final = 4
"""Several rounds let packing, sending and scattering overlap"""

_WORTH_A_ROUND: Final = 16 << 20
"""Elements per round of the busiest rank below which another round costs more time than it saves."""

_ALIGNED: Final = 8
"""Chunk sizes are multiples of this, so that parts begin at addresses that kernels copy at full speed"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """One member's share of a flow, in elements.

    Attributes:
        limit: most elements per round.
        least: fewest elements per chunk, even if fewer would be enough.
        slack: how much shorter a chunk may be, because it ends at the end of a row and at an aligned size.
    """

    volume: int
    limit: int
    least: int
    slack: int

    @property
    def num_rounds(self) -> int:
        """An upper bound on the number of rounds."""
        sure = self.limit - self.slack if self.limit > 2 * self.slack else self.limit
        return -(-self.volume // sure)

    def chunk_size(self, num_rounds: int) -> int:
        """Returns the chunk size with which the flow ends after about this many rounds."""
        size = min(self.limit, max(self.least, -(-self.volume // num_rounds) + self.slack))
        return max(size // _ALIGNED * _ALIGNED, min(size, _ALIGNED))


def chunk_sizes(flows: Sequence[Flow], capacity: int) -> list[int]:
    """Returns the size of each flow's chunks, in elements.

    Every flow is spread over all rounds, so that rounds are about equal and keep all links busy. In a round a
    rank packs at most `capacity` elements, and receives at most as many from learners and relays together.
    Its flows share a sixteenth of that equally, so that small flows are not cut into tiny chunks, and the
    rest in proportion to their volumes. Every member of a shared flow receives one chunk per round.
    """
    loads = _loads(flows)
    keys = [
        (flow.volume, flow.longest_row, len(flow.members), *load)
        for flow, load in zip(flows, loads, strict=True)
    ]
    # Identical servers have equal shares.
    shares = {key: _share(*key, capacity) for key in dict.fromkeys(keys)}
    busiest = max((volume for _, volume in loads), default=0)
    num_rounds = max(
        [1, min(_LEAST_ROUNDS, busiest // _WORTH_A_ROUND), *(share.num_rounds for share in shares.values())]
    )
    sizes = {key: share.chunk_size(num_rounds) for key, share in shares.items()}
    return [sizes[key] for key in keys]


def _share(volume: int, longest_row: int, count: int, num_flows: int, load: int, capacity: int) -> _Share:
    """Returns each member's share of a flow, given the flows and elements at its busiest end."""
    evenly = capacity // 16
    least = evenly // num_flows
    by_volume = (capacity - evenly) * volume // load
    return _Share(
        volume=-(-volume // count),
        limit=max(1, (least + by_volume) // count),
        least=least // count,
        slack=longest_row + _ALIGNED,
    )


def _loads(flows: Sequence[Flow]) -> list[tuple[int, int]]:
    """Returns for each flow the most flows and the most elements that any of its ends packs or receives.

    Flows with the same cargo, to replicas that are served separately, are packed once.
    """
    packed = {flow.content: flow for flow in flows}.values()
    of_source = _counts_and_volumes((flow.source, 1, flow.volume) for flow in packed)
    of_set = _counts_and_volumes((flow.members, 1, flow.volume) for flow in flows)
    of_rank = _counts_and_volumes((rank, *sums) for ranks, sums in of_set.items() for rank in ranks)
    most = {
        ranks: (max(of_rank[rank][0] for rank in ranks), max(of_rank[rank][1] for rank in ranks))
        for ranks in of_set
    }
    ends = ((of_source[flow.source], most[flow.members]) for flow in flows)
    return [(max(one[0], other[0]), max(one[1], other[1])) for one, other in ends]


def _counts_and_volumes(rows: Iterable[tuple[Any, int, int]]) -> dict[Any, tuple[int, int]]:
    """Adds up counts and volumes by key."""
    sums: dict[Any, tuple[int, int]] = {}
    for key, count, volume in rows:
        before = sums.get(key, (0, 0))
        sums[key] = before[0] + count, before[1] + volume
    return sums
