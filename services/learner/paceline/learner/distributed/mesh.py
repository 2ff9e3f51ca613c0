"""The learner's mesh: its ranks by named dimensions, and sums over the ranks along one of them.

    dimension  ranks along it have                  operations over it
    data       different rows                       sums over tokens and rows, the plan
    context    different tokens of the same rows    attention
    shard      different shards of the parameters   gathers of weights, averages of gradients
    replicate  the same shards of the parameters    averages of the shards' gradients
    expert     different experts of every layer     exchanges of tokens
    tensor     different parts of every matrix      gathers and sums of tokens

There are two views of all ranks: (data, context), and (replicate, shard) for FSDP. What ranks divide before
FSDP shards it has a view of its own: experts (replicate, shard, expert), layers' matrices (replicate, shard,
tensor). In each, the last dimension runs fastest, so that ranks which talk most are on one host. Dimensions
of different views overlap: without `replicate`, FSDP shards over data and context together. Ranks along
`tensor` are those along `context`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from paceline.core.errors import ConfigError

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch's collectives on one tensor, which newer versions of it have renamed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Route:
    """How many rows this rank exchanges with each of n ranks, which it computes for them.

    Attributes:
        sends: rows to each rank.
        receives: rows from each rank.
        counts: (n, m) int64, of the rows from each rank, how many are of each kind.
        num_sent: this rank's own rows.
        num_received: rows that this rank computes.
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]
    counts: Tensor
    num_sent: int
    num_received: int

    @classmethod
    def of(cls, sent: Tensor, received: Tensor) -> Route:
        """Makes a route of (n, m) int64 counts, by rank and kind.

        Waits for the device, and allocates nothing there.
        """
        sends, receives = (tuple(counts.cpu().sum(-1).tolist()) for counts in (sent, received))
        return cls(
            sends=sends, receives=receives, counts=received, num_sent=sum(sends), num_received=sum(receives)
        )

    @property
    def back(self) -> Route:
        """The same rows on their way back."""
        return replace(
            self,
            sends=self.receives,
            receives=self.sends,
            num_sent=self.num_received,
            num_received=self.num_sent,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """Some of the learner's ranks, including this one, and collectives over them.

    Attributes:
        process_group: for other collectives over the group.
    """

    rank: int
    size: int
    process_group: dist.ProcessGroup

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> RankGroup:
        """Wraps a process group that this rank is in."""
        assert process_group is not None
        return cls(rank=process_group.rank(), size=process_group.size(), process_group=process_group)

    def all_sum(self, values: Tensor) -> Tensor:
        """Returns the sums over the group's ranks as a new tensor of the same type."""
        total = values.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.process_group)
        return total

    def all_to_all(self, blocks: Tensor) -> Tensor:
        """Sends block i of (n, ...) to rank i; block i of the result is from rank i."""
        sent = blocks.detach().contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.process_group)
        return received

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Gathers (m, ...) of each rank as (n m, ...), in the order of ranks."""
        gathered = room_for(rows, self.size * len(rows))
        all_gather(gathered, rows.detach().contiguous(), group=self.process_group)
        return gathered

    def sum_rows(self, rows: Tensor) -> Tensor:
        """Adds up (n m, ...) of all ranks; returns this rank's (m, ...) of the sum."""
        total = room_for(rows, len(rows) // self.size)
        reduce_scatter(total, rows.detach().contiguous(), group=self.process_group)
        return total

    def route(self, counts: Tensor) -> Route:
        """Tells the ranks how many rows they will get, by kind.

        Args:
            counts: (n, m) int64, of the rows for each rank, how many are of each kind.
        """
        return Route.of(counts, self.all_to_all(counts))

    def exchange_rows(self, rows: Tensor, route: Route) -> Tensor:
        """Sends rows (num_sent, ...), in the order of ranks; returns (num_received, ...), in that order."""
        sent, received = rows.detach().contiguous(), room_for(rows, route.num_received)
        self.send_rows(received, sent, route)
        return received

    def send_rows(self, received: Tensor, sent: Tensor, route: Route) -> None:
        """Sends rows as `exchange_rows` does, into a given tensor."""
        dist.all_to_all_single(
            received, sent, list(route.receives), list(route.sends), group=self.process_group
        )

    def all_max(self, values: Tensor) -> Tensor:
        """Returns the largest values over the group's ranks as a new tensor."""
        largest = values.detach().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.process_group)
        return largest

    def all_gather(self, values: Tensor) -> Tensor:
        """Concatenates the ranks' 1-D tensors, which have equal length and type, in the order of ranks."""
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.detach().contiguous(), group=self.process_group)
        return torch.cat(parts)


def room_for(rows: Tensor, num_rows: int) -> Tensor:
    """Allocates `num_rows` rows like others."""
    return rows.new_empty(num_rows, *rows.shape[1:])


def form_rows_mesh(device_type: str, context: int, timeout: datetime.timedelta) -> DeviceMesh:
    """Forms the dimensions "data" and, if it has several ranks, "context"; every rank calls it.

    Args:
        device_type: type of device of the tensors that ranks exchange.
        context: ranks that share the tokens of each row.
        timeout: bounds every wait of one rank for another.

    Raises:
        ConfigError: `context` does not divide the number of ranks.
    """
    world_size = dist.get_world_size()
    if world_size % context:
        raise ConfigError(f"{world_size} ranks cannot share the tokens of rows in groups of {context}")
    shape = {"data": world_size // context, "context": context}
    if context == 1:
        del shape["context"]  # this reuses the group of all ranks
    return _form(device_type, shape, timeout)


def form_fsdp_mesh(
    device_type: str,
    size: int | None,
    timeout: datetime.timedelta,
    *,
    expert: int | None = None,
    tensor: int | None = None,
) -> DeviceMesh:
    """Forms the dimensions for `fully_shard`: "shard", after "replicate" if there are several copies.

    Args:
        device_type: type of device of the tensors that ranks exchange.
        size: ranks that share one copy of the parameters; None: all.
        timeout: bounds every wait of one rank for another.
        expert: forms the dimensions of experts, with "expert" as the last: that many ranks divide those of a
            layer.
        tensor: forms those of layers' matrices, with "tensor" as the last.

    Raises:
        ConfigError: `size` does not divide the number of ranks, or `expert` or `tensor` does not divide
            `size`.
    """
    world_size = dist.get_world_size()
    size = size or world_size
    if world_size % size:
        raise ConfigError(
            f"{world_size} ranks cannot shard the parameters in groups of {size}; set learner.fsdp_size to a "
            f"divisor of {world_size}"
        )
    shape = {"replicate": world_size // size, "shard": size}
    if size == world_size:
        del shape["replicate"]
    for name, number in (("expert", expert), ("tensor", tensor)):
        if number is None:
            continue
        if size % number:
            raise ConfigError(
                f"a copy on {size} ranks cannot be divided in groups of {number}; set "
                f"learner.{name}_parallel to a divisor of {size}"
            )
        shape |= {"shard": size // number, name: number}
    return _form(device_type, shape, timeout)


def _form(device_type: str, shape: dict[str, int], timeout: datetime.timedelta) -> DeviceMesh:
    mesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)  # torch's default is up to half an hour
    return mesh
