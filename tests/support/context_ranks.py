"""What ranks that share the tokens of rows exchange around attention, against one rank; in each of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.learner.batch.types import PackedSequences
from paceline.learner.distributed.context import heads_of_all_tokens, put_together, tokens_of_all_heads
from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.model.decoder.attention import packed_attention
from support.mesh_steps import share

NUM_HEADS = 12
KEY_HEADS = (1, 2, 3, 4, 6, 12)
ATTENTION: dict[str, dict[str, Any]] = {
    "float64 plain": {},
    "float64 window": {"sliding_window": 3},
    "float64 softcap": {"softcap": 2.0},
    "float64 sinks": {},
}


def collectives(group: RankGroup) -> dict[str, float]:
    """The largest difference of outputs and gradients from one rank's, by type and number of key heads."""
    return {
        f"{dtype} {num_keys}": _difference(group, num_keys, dtype)
        for dtype in (torch.float32, torch.float64)
        for num_keys in KEY_HEADS
    } | {name: _of_attention(group, name) for name in ATTENTION}


def _difference(group: RankGroup, num_keys: int, dtype: torch.dtype) -> float:
    generator, length = torch.Generator().manual_seed(num_keys), 3 * group.size
    shapes = ((NUM_HEADS, 4), (num_keys, 4), (num_keys, 5))
    q, k, v = (torch.randn(length, *shape, generator=generator, dtype=dtype) for shape in shapes)
    weights = torch.randn(length, NUM_HEADS, 5, generator=generator, dtype=dtype)
    places = torch.randperm(length, generator=generator)
    own = slice(3 * group.rank, 3 * group.rank + 3)

    alone = [x.clone().requires_grad_() for x in (q, k, v)]
    numbers = (_attend(*alone) * weights).sum((1, 2))
    flat = torch.zeros(length, dtype=dtype).index_copy(0, places, numbers)
    flat.square().sum().backward()

    parts = [x[own].clone().requires_grad_() for x in (q, k, v)]
    out = tokens_of_all_heads(_attend(*(heads_of_all_tokens(x, group) for x in parts)), group)
    ours = put_together((out * weights[own]).sum((1, 2)), places[own], length, group)
    ours.square().sum().backward()

    pairs = [(ours, flat), *((a.grad, b.grad[own]) for a, b in zip(parts, alone, strict=True))]
    return max(share(a.detach(), b.detach()) for a, b in pairs)


def _of_attention(group: RankGroup, name: str) -> float:
    """Of the attention call of the learner's layers, over sequences of which two follow the first."""
    generator, lengths = torch.Generator().manual_seed(0), [4, 2 * group.size, 3, 2 * group.size - 3]
    shapes = ((NUM_HEADS, 4), (3, 4), (3, 5))
    q, k, v = (
        torch.randn(1, heads, sum(lengths), width, generator=generator, dtype=torch.float64)
        for heads, width in shapes
    )
    sinks = torch.randn(NUM_HEADS, generator=generator, dtype=torch.float64)
    weights = torch.randn(1, sum(lengths), NUM_HEADS, 5, generator=generator, dtype=torch.float64)
    packed = PackedSequences.of(lengths, q.device, [None, 0, 0, None])
    length = sum(lengths) // group.size
    own = slice(length * group.rank, length * (group.rank + 1))
    results = []
    for inputs, part in (((q, k, v), None), ((q[:, :, own], k[:, :, own], v[:, :, own]), group)):
        leaves = [x.clone().requires_grad_() for x in (*inputs, sinks)]
        options = {**ATTENTION[name], **({"s_aux": leaves[3]} if name.endswith("sinks") else {})}
        place = packed.for_pass(part)
        out, _ = packed_attention(torch.nn.Module(), *leaves[:3], None, packed=place, **options)
        ((out * (weights if part is None else weights[:, own])).sum()).backward()
        results.append((out.detach(), *(x.grad for x in leaves[:3]), leaves[3].grad))
    (out, *grads, of_sinks), (ours, *own_grads, own_sinks) = results
    pairs = [(ours, out[:, own]), *((a, b[:, :, own]) for a, b in zip(own_grads, grads, strict=True))]
    if of_sinks is not None:  # a parameter: the ranks' gradients add up
        pairs.append((group.all_sum(own_sinks), of_sinks))
    return max(share(a, b) for a, b in pairs)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
