"""Context parallelism as in DeepSpeed-Ulysses (arXiv:2309.14509): ranks share the tokens of each row.

Outside of attention a rank computes T/n of the T tokens of a micro-batch, with all heads; in attention all
tokens, with 1/n of the heads. An all-to-all converts between the two:

    (T/n, H, D) --heads_of_all_tokens--> (T, H/n, D) --attention--> (T, H/n, E) --tokens_of_all_heads-->
    (T/n, H, E)

The ranks combine the results for their tokens, so every rank computes the loss of complete rows. Each rank
gets the gradient of its own tokens, so a parameter's gradient is the sum over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.learner.distributed.mesh import RankGroup


def heads_of_all_tokens(tokens: Tensor, group: RankGroup) -> Tensor:
    """Gives each rank all tokens of its heads; differentiable.

    If the number of heads is no multiple of the number of ranks (keys and values of grouped queries), the
    heads are repeated until it is. Query heads still share their key head.

    Args:
        tokens: (T/n, H, D), this rank's part of the T tokens; parts are in the order of ranks.
        group: group of n ranks.

    Returns:
        (T, H'/n, D), H' being H or the least common multiple of H and n.
    """
    num_heads = tokens.shape[1]
    repeats = math.lcm(num_heads, group.size) // num_heads
    if repeats > 1:
        tokens = tokens.repeat_interleave(repeats, dim=1)
    blocks = tokens.reshape(len(tokens), group.size, -1, tokens.shape[2]).transpose(0, 1)
    return _exchange(blocks, group).flatten(0, 1)


def tokens_of_all_heads(heads: Tensor, group: RankGroup) -> Tensor:
    """Gives each rank all heads of its tokens, the inverse of `heads_of_all_tokens`; differentiable.

    Args:
        heads: (T, H/n, D), this rank's heads.
        group: group of n ranks.

    Returns:
        (T/n, H, D).
    """
    blocks = heads.reshape(group.size, -1, *heads.shape[1:])
    return _exchange(blocks, group).transpose(0, 1).flatten(1, 2)


def put_together(own: Tensor, places: Tensor, length: int, group: RankGroup) -> Tensor:
    """Puts the numbers of all ranks at their places, on every rank; differentiable.

    All ranks must compute the same loss from the result: `own` gets the gradient of its places on this rank.

    Args:
        own: (m, ...), this rank's numbers.
        places: (m,) int64, the numbers' places in the result; each of 0..length-1 belongs to one rank, and
            `length` means nowhere.

    Returns:
        (length, ...); exact, because each place is one number and zeros.
    """
    everywhere = own.new_zeros(length + 1, *own.shape[1:]).index_copy(0, places, own)
    return added_up(everywhere[:length], group)


def added_up(own: Tensor, group: RankGroup) -> Tensor:
    """Returns the sum of the ranks' numbers, on every rank; differentiable.

    All ranks must compute the same loss from the result: `own` gets the gradient of the sum on this rank.
    """
    return differentiable(own, group.all_sum, _unchanged)


def copied(parameter: Tensor, group: RankGroup) -> Tensor:
    """Returns a parameter of which each rank uses a copy; its gradient is the sum over the ranks."""
    return differentiable(parameter, _unchanged, group.all_sum)


def differentiable(
    values: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns `there(values)`, a collective; its gradient goes through `back`, another one."""
    result: Tensor = _Collective.apply(values, there, back)  # type: ignore[no-untyped-call]
    return result


def _exchange(blocks: Tensor, group: RankGroup) -> Tensor:
    """Sends block i of (n, ...) to rank i; block i of the result is from rank i."""
    return differentiable(blocks, group.all_to_all, group.all_to_all)  # its own transpose


def _unchanged(values: Tensor) -> Tensor:
    return values.view_as(values)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None
