"""Chunk sizes: as many rounds as staging requires, and every round about as full as any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.weights.plan.flows import Flow

_LEAST_ROUNDS: Final = 4
"""In a single round, packing, sending and scattering could not overlap"""

_WORTH_A_ROUND: Final = 16 << 20
"""Elements of the busiest rank from which on another round costs less than it hides"""

_ALIGNED: Final = 8
"""A chunk's size is a multiple of this: parts then begin at addresses that kernels copy at full speed"""

_End = tuple[str, int]
"""A rank's part in flows: ("source" or "member", its index)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one member takes of a flow, in elements.

    Attributes:
        volume: in all.
        limit: at most this much per round.
        least: at least this much at a time, even if less would be enough.
        slack: by so much a chunk may fall short, since it ends at a row's end and at an aligned size.
    """

    volume: int
    limit: int
    least: int
    slack: int

    @property
    def num_rounds(self) -> int:
        """Number of rounds that is certainly enough."""
        sure = self.limit - self.slack if self.limit > 2 * self.slack else self.limit
        return -(-self.volume // sure)

    def chunk_size(self, num_rounds: int) -> int:
        """Largest chunk with which the flow ends after about this many rounds."""
        size = min(self.limit, max(self.least, -(-self.volume // num_rounds) + self.slack))
        return max(size // _ALIGNED * _ALIGNED, min(size, _ALIGNED))


def chunk_sizes(flows: Sequence[Flow], capacity: int) -> list[int]:
    """Largest chunk of each flow, in elements.

    Every flow is spread over all rounds, so that each round moves about as much as any other and keeps all
    links busy. In a round a rank packs at most `capacity` elements, and receives at most as many from
    learners and relays together. Its flows share a sixteenth of that equally, so that small flows are not cut
    to bits, and the rest in proportion to their volumes. Of a shared flow every member takes one chunk per
    round.
    """
    loads = _loads(flows)
    shares = [_share(flow, [loads[end] for end in _ends(flow)], capacity) for flow in flows]
    busiest = max((sum(load.values()) for load in loads.values()), default=0)
    num_rounds = max(
        [1, min(_LEAST_ROUNDS, busiest // _WORTH_A_ROUND), *(share.num_rounds for share in shares)]
    )
    return [share.chunk_size(num_rounds) for share in shares]


def _share(flow: Flow, loads: Sequence[dict[object, int]], capacity: int) -> _Share:
    evenly, count = capacity // 16, len(flow.members)
    least = evenly // max(map(len, loads))
    by_volume = min((capacity - evenly) * flow.volume // sum(load.values()) for load in loads)
    return _Share(
        volume=-(-flow.volume // count),
        limit=max(1, (least + by_volume) // count),
        least=least // count,
        slack=flow.longest_row + _ALIGNED,
    )


def _ends(flow: Flow) -> list[_End]:
    return [("source", flow.source), *(("member", rank) for rank in flow.members)]


def _loads(flows: Sequence[Flow]) -> dict[_End, dict[object, int]]:
    """What each rank packs or receives: elements by flow.

    Flows of the same cargo, to replicas that are served one by one, are packed once.
    """
    loads: dict[_End, dict[object, int]] = {}
    for number, flow in enumerate(flows):
        for end in _ends(flow):
            loads.setdefault(end, {})[flow.content if end[0] == "source" else number] = flow.volume
    return loads
