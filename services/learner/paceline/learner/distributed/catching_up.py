"""Lets a rank that failed in the middle of a pass go on, and catch up with the others' collectives.

The ranks of a sharded network run the same collectives in the same order. If a rank runs out of memory after
the first k collectives of a pass, the others wait for it in the next one. That rank runs the pass again on
two masked tokens and does not communicate in the first k collectives, whose results it does not need.

Gathers and reductions are counted separately. If weights stay gathered from one pass to the next, only the
first pass gathers. A rank that failed in a later pass has lost these weights, and none of its gathers
communicates.

Ranks that share rows also exchange tokens and sums, whose sizes depend on the micro-batch. So the pass is run
again with the micro-batch's loss; the network still computes two masked tokens, and sends zeros of the sizes
that the others expect (`CountedGroup`). The same holds for the tokens that they gather and add up where
they divide matrices.

Ranks that divide experts announce how many tokens they send. After the failure this rank announces none, and
for what it announced before it sends zeros. It computes no tokens of other ranks: they get zeros back
(`CountedExperts`). A recomputed layer announces nothing, because it repeats the routes of its forward pass.

If the mesh has replicas, FSDP averages a module's shards over them with an all-reduce of its own. That one
can only be switched off, which is done for modules whose shards were averaged before the failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from paceline.learner.distributed.mesh import RankGroup, Route, all_gather, reduce_scatter, room_for
from paceline.learner.distributed.ranks import Ranks


class PassCollectives:
    """The collectives of a network's passes, counted.

    Args:
        network: sharded over several ranks; from now on it communicates through this object.
        has_replicas: whether several ranks hold the same shards.
    """

    def __init__(self, network: Any, *, has_replicas: bool) -> None:
        self._gathers, self._scatters = _Gather(), _Scatter()
        self._exchanges, self._tokens = Exchanges(), TokenExchanges()
        if (group := network.context) is not None:
            network.context = CountedGroup(
                rank=group.rank,
                size=group.size,
                process_group=group.process_group,
                exchanges=self._exchanges,
            )
        self._averaged: list[FSDPModule] = []
        for module in network.modules():
            if getattr(module, "tensor_group", None) is not None:
                module.tensor_group = network.context
            if (experts := getattr(module, "expert_group", None)) is not None:
                module.expert_group = CountedExperts(
                    rank=experts.rank,
                    size=experts.size,
                    process_group=experts.process_group,
                    exchanges=self._tokens,
                )
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(self._gathers)  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(self._scatters)  # type: ignore[arg-type]
                if has_replicas:
                    module.set_all_reduce_hook(partial(self._note_averaged, module))

    def begin(self, *, again: bool, still_gathered: bool) -> None:
        """Begins to count the collectives of a pass.

        Args:
            again: this pass repeats the one that failed last, with all weights sharded. Its gradient is
                unusable, and FSDP may keep a part of it, which `forget_broken_pass` drops.
            still_gathered: weights that earlier passes have gathered are still there.
        """
        self._scatters.begin(again=again, goes_on=False)
        self._gathers.begin(again=again, goes_on=still_gathered)
        self._exchanges.begin(again=again, goes_on=False)
        self._tokens.begin(again=again, goes_on=False)
        averaged, self._averaged = self._averaged, []
        for module in averaged if again else ():
            module.set_requires_all_reduce(False, recurse=False)

    @contextmanager
    def without_tokens(self) -> Iterator[None]:
        """Leaves this rank's tokens of the shared micro-batch, and all tokens of experts, out of passes."""
        self._exchanges.is_absent = self._tokens.is_absent = True
        try:
            yield
        finally:
            self._exchanges.is_absent = self._tokens.is_absent = False

    def _note_averaged(self, module: FSDPModule, shards: Tensor) -> None:
        self._averaged.append(module)


def count_collectives(network: nn.Module, ranks: Ranks) -> PassCollectives | None:
    """Counts the network's collectives, if there are other ranks."""
    if ranks.world.size == 1:
        return None
    return PassCollectives(network, has_replicas=ranks.fsdp.ndim > 1)


def forget_broken_pass(network: nn.Module) -> None:
    """Drops FSDP's state of a pass that an exception has ended, and its gradient; shards all weights.

    Args:
        network: the module to which `fully_shard` was applied last.
    """
    if hasattr(network, "reset_iter_state"):  # torch 2.13
        network.reset_iter_state()  # type: ignore[operator]
        return
    state: Any = network._get_fsdp_state()  # type: ignore[operator]
    comm, stream = state._comm_ctx, state._device_handle.current_stream()
    for waiting in (comm.all_gather_state, comm.reduce_scatter_state):
        if waiting is not None and waiting.event is not None:
            stream.wait_event(waiting.event)
    _put(comm, all_gather_state=None, reduce_scatter_state=None)
    comm.post_forward_order.clear()
    for part in state._state_ctx.all_states:
        part._modules_to_run_forward.clear()
        _put(part, _training_state=TrainingState.IDLE)
        if part._fsdp_param_group is not None:
            _forget_in_group(part._fsdp_param_group)
    _put(state._state_ctx, iter_forward_root=None, post_backward_final_callback_queued=False)


def _forget_in_group(group: Any) -> None:
    group.finalize_backward()  # waits for collectives under way, and drops them
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
    _put(
        group,
        _reshard_after_forward_event=None,
        _partial_reduce_output=None,
        _training_state=TrainingState.IDLE,
    )
    group._to_sharded()


def _put(part_of_torch: Any, **values: object) -> None:
    for name, value in values.items():
        setattr(part_of_torch, name, value)


class _Comm:
    """Counts collectives of one kind, and skips those in which this rank took part before it failed."""

    def __init__(self) -> None:
        self._num_taken, self._num_skipped = 0, 0

    def begin(self, *, again: bool, goes_on: bool) -> None:
        """Begins a pass: `again` repeats the failed one; with `goes_on` the count continues."""
        if again:
            self._num_taken, self._num_skipped = 0, self._num_taken
        elif not goes_on:
            self._num_taken, self._num_skipped = 0, 0

    def take_part(self) -> bool:
        """Returns whether this rank takes part in the next collective."""
        self._num_taken += 1
        return self._num_taken > self._num_skipped

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    """Stands in for torch.distributed.fsdp's `AllGather`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if self.take_part():
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return None


class _Scatter(_Comm):
    """Stands in for torch.distributed.fsdp's `ReduceScatter`."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if self.take_part():
            return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return None


class Exchanges(_Comm):
    """Collectives among ranks that share rows.

    Attributes:
        is_absent: whether this rank computes none of its tokens, and sends zeros in their place.
        num_tokens: number of this rank's tokens; set by each pass in which it is absent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_absent, self.num_tokens = False, 0


class TokenExchanges(_Comm):
    """Exchanges of tokens among ranks that divide experts.

    Attributes:
        is_absent: whether this rank computes no tokens of experts, and sends zeros in the place of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_absent = False
        self._routes: list[Route] = []
        self._earlier: list[Route] = []

    def begin(self, *, again: bool, goes_on: bool) -> None:
        """Begins a pass; `again`: routes that the failed pass announced are those of this one."""
        super().begin(again=again, goes_on=goes_on)
        self._routes, self._earlier = [], self._routes if again else []

    def note(self, route: Route | None) -> Route:
        """Keeps the next route; None: the one that the failed pass announced at this place."""
        self._routes.append(route or self._earlier[len(self._routes)])
        return self._routes[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedExperts(RankGroup):
    """Ranks that divide experts, whose exchanges are counted, and in which this one may be absent."""

    exchanges: TokenExchanges

    def route(self, counts: Tensor) -> Route:
        """Announces rows; if absent, this rank announces none, and computes none."""
        is_absent, zeros = self.exchanges.is_absent, torch.zeros_like(counts)
        announced, received = zeros if is_absent else counts, torch.empty_like(counts)
        route = None
        if self.exchanges.take_part():
            dist.all_to_all_single(received, announced, group=self.process_group)
            route = Route.of(announced, received)
        route = self.exchanges.note(route)
        if not is_absent:
            return route
        return replace(route, counts=zeros, num_sent=int(counts.sum().item()), num_received=0)

    def exchange_rows(self, rows: Tensor, route: Route) -> Tensor:
        """Exchanges rows; if absent, the others get zeros, and so does this rank."""
        is_absent = self.exchanges.is_absent
        sent = room_for(rows, sum(route.sends)).zero_() if is_absent else rows.detach().contiguous()
        received = room_for(rows, sum(route.receives))  # before this rank counts as having taken part
        if self.exchanges.take_part():
            self.send_rows(received, sent, route)
        return room_for(rows, route.num_received).zero_() if is_absent else received


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedGroup(RankGroup):
    """Ranks that share rows, whose collectives are counted, and in which this one may be absent."""

    exchanges: Exchanges

    def all_to_all(self, blocks: Tensor) -> Tensor:
        """Exchanges blocks; if absent, this rank keeps its own, and the others get zeros."""
        is_absent = self.exchanges.is_absent
        sent = blocks.detach().contiguous()
        if is_absent:
            sent = blocks.new_zeros(self.size, self.exchanges.num_tokens, *blocks.shape[2:])
        received = torch.empty_like(sent)
        if self.exchanges.take_part():
            dist.all_to_all_single(received, sent, group=self.process_group)
        return blocks.detach().clone() if is_absent else received

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Gathers rows; if absent, this rank repeats its own, and the others get zeros."""
        is_absent = self.exchanges.is_absent
        sent = rows.detach().contiguous()
        if is_absent:
            sent = room_for(rows, self.exchanges.num_tokens).zero_()
        gathered = room_for(rows, self.size * len(sent))
        if self.exchanges.take_part():
            all_gather(gathered, sent, group=self.process_group)
        return rows.detach().repeat(self.size, *[1] * (rows.ndim - 1)) if is_absent else gathered

    def sum_rows(self, rows: Tensor) -> Tensor:
        """Adds up rows; if absent, this rank keeps its own, and adds zeros to the others'."""
        is_absent, number = self.exchanges.is_absent, len(rows) // self.size
        sent = rows.detach().contiguous()
        if is_absent:
            sent = room_for(rows, self.size * self.exchanges.num_tokens).zero_()
        total = room_for(rows, len(sent) // self.size)
        if self.exchanges.take_part():
            reduce_scatter(total, sent, group=self.process_group)
        return rows.detach()[:number].clone() if is_absent else total

    def all_sum(self, values: Tensor) -> Tensor:
        """Sums over the ranks; skips a sum that this rank took part in before its pass failed."""
        total = values.detach().clone()
        if self.exchanges.take_part():
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.process_group)
        return total
