"""Divides the experts of a layer over ranks; tokens go to the ranks of their experts and come back.

    tokens (T, H) -> a row per choice (T K, H), by expert -- all-to-all --> rows for this rank's E/n experts
    -> their matrices -- all-to-all --> (T K, H) -> weighted sums (T, H)

Both exchanges are differentiable. A rank's experts see the tokens of all n ranks, so their gradients are sums
over these already.

A layer that is recomputed sends its tokens where its forward pass sent them. The ranks do not announce them
again, and messages keep their sizes if a rank runs out of memory in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar, Token
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from paceline.core.errors import ConfigError
from paceline.learner.distributed.context import differentiable
from paceline.learner.distributed.mesh import RankGroup, Route
from paceline.learner.distributed.shards import OwnPart
from paceline.learner.model.architectures import stacks_of
from paceline.learner.model.decoder.opaque import opaque


def divide_experts(layer: nn.Module, num_ranks: int) -> list[nn.Module]:
    """Leaves each rank its share of a layer's experts, before the layer has storage.

    Returns:
        The modules of experts, of which `spread_experts` makes those of a group.

    Raises:
        ConfigError: the experts cannot be divided evenly, or do not compute token by token.
    """
    divided = [module for module in layer.modules() if stacks_of(module)]
    for experts in divided:
        num_experts = getattr(experts, stacks_of(experts)[0]).shape[0]
        if num_experts % num_ranks:
            raise ConfigError(
                f"{num_experts} experts cannot be divided over {num_ranks} ranks; set "
                f"learner.expert_parallel to a divisor of {num_experts}"
            )
        if not hasattr(experts, "is_transposed"):
            raise ConfigError(
                f"{type(experts).__name__} of this model do not take tokens with the numbers of their "
                "experts, so they cannot be divided over ranks; set learner.expert_parallel: 1"
            )
        for module in experts.modules():
            for name, stack in list(module.named_parameters(recurse=False)):
                own = torch.empty_like(stack[: num_experts // num_ranks])
                setattr(module, name, nn.Parameter(own, requires_grad=stack.requires_grad))
        experts.num_experts = num_experts // num_ranks
    return divided


def spread_experts(experts: Any, mesh: DeviceMesh) -> None:
    """Makes experts compute the tokens of all ranks of a mesh, each its own experts.

    Their parameters become tensors of all experts, sharded over the mesh, so that checkpoints and pushes know
    which experts a rank has. They are this rank's part in a forward pass.

    Args:
        experts: experts of `divide_experts`, with storage.
        mesh: the ranks over which the experts are divided, in one dimension.
    """
    for module in experts.modules():
        for name, own in list(module.named_parameters(recurse=False)):
            stack = DTensor.from_local(own.data, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(stack, requires_grad=own.requires_grad))
    kind: Any = type(experts)
    experts.__class__ = _spread_kind(kind)
    experts.expert_group = RankGroup.of(mesh.get_group())


def keep_routes(layer: Any) -> None:
    """Makes the recomputation of a layer repeat the routes of its forward pass.

    Call it after recomputation was set up; without any, it changes nothing.
    """
    if (recompute := getattr(layer, "_gradient_checkpointing_func", None)) is not None:
        layer._gradient_checkpointing_func = partial(recompute, context_fn=_contexts)


_Sending = tuple[Tensor, Route]
"""The order of a layer's rows, (T K,), and their route."""


class _ForwardPass:
    """The context of a layer's forward pass, which keeps where tokens went."""

    def __init__(self) -> None:
        self.kept: list[_Sending] = []

    def __enter__(self) -> None:
        self._token: Token[Any] = _pass.set(self)

    def __exit__(self, *error: object) -> None:
        _pass.reset(self._token)


class _Recomputation:
    """The context of a layer's recomputation, in which tokens go where they went in the forward pass."""

    def __init__(self, forward: _ForwardPass) -> None:
        self._forward = forward
        self.repeated: Iterator[_Sending] = iter(())

    def __enter__(self) -> None:
        self.repeated = iter(self._forward.kept)
        self._token: Token[Any] = _pass.set(self)

    def __exit__(self, *error: object) -> None:
        _pass.reset(self._token)


_pass: ContextVar[_ForwardPass | _Recomputation | None] = ContextVar(
    "pass of a recomputed layer", default=None
)


def _contexts() -> tuple[_ForwardPass, _Recomputation]:
    """Returns the contexts of a layer's forward pass and of its recomputation, for torch's `checkpoint`."""
    forward = _ForwardPass()
    return forward, _Recomputation(forward)


def _sending(experts: Any, indices: Tensor) -> _Sending:
    """Returns where tokens go that have chosen the experts `indices`, (T, K)."""
    current = _pass.get()
    if isinstance(current, _Recomputation):
        return next(current.repeated)
    group: RankGroup = experts.expert_group
    chosen, order = indices.flatten().sort(stable=True)
    bounds = torch.arange(group.size * experts.num_experts + 1, device=chosen.device)
    counts = torch.searchsorted(chosen, bounds).diff()
    sending = order, group.route(counts.view(group.size, experts.num_experts))
    if current is not None:
        current.kept.append(sending)
    return sending


# One class for all layers, so that they share code.
@cache
def _spread_kind(kind: type[nn.Module]) -> type[nn.Module]:
    @opaque  # the sizes of messages differ from pass to pass
    def forward(self: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        group: RankGroup = self.expert_group
        num_tokens, num_chosen = indices.shape
        order, route = _sending(self, indices)
        rows = exchange(_by_expert(hidden, order, num_chosen), group, route)
        plain: Any = kind.forward
        back = exchange(_computed(self, plain, rows, route), group, route.back)
        by_token = back.index_select(0, order.argsort()).view(num_tokens, num_chosen, -1)
        return (by_token * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)

    return type(kind.__name__, (kind,), {"forward": forward})


def _computed(experts: Any, plain: Any, rows: Tensor, route: Route) -> Tensor:
    """Returns the results of rows by this rank's experts, one each."""
    num_experts = experts.num_experts
    numbers = torch.arange(num_experts, device=rows.device).repeat(len(route.counts))
    numbers = numbers.repeat_interleave(route.counts.flatten(), output_size=route.num_received)
    if not route.num_received:
        # Kernels need a row, and FSDP needs a gradient on every rank.
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        numbers = numbers.new_zeros(1)
    results: Tensor = plain(OwnPart(experts), rows, numbers.unsqueeze(1), rows.new_ones(len(rows), 1))
    return results[: route.num_received]


def exchange(rows: Tensor, group: RankGroup, route: Route) -> Tensor:
    """Sends rows along a route; differentiable.

    Args:
        rows: (num_sent, ...), in the order of the ranks that get them.

    Returns:
        (num_received, ...), in the order of the ranks that sent them.
    """
    there, back = (partial(group.exchange_rows, route=way) for way in (route, route.back))
    return differentiable(rows, there, back)


def _by_expert(hidden: Tensor, order: Tensor, num_chosen: int) -> Tensor:
    """Returns a row per choice, (T K, H), in `order`; sums the gradients of a token's rows in a fixed one."""
    rows: Tensor = _ByExpert.apply(hidden, order, num_chosen)  # type: ignore[no-untyped-call]
    return rows


class _ByExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, num_chosen: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.num_chosen = num_chosen
        return hidden.index_select(0, order // num_chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (order,) = gradients, ctx.saved_tensors
        by_token = gradient.index_select(0, order.argsort())
        return by_token.view(-1, ctx.num_chosen, gradient.shape[1]).sum(dim=1), None, None
