"""Computes causal attention over packed sequences of different lengths, for transformers' models.

A micro-batch is one row of tokens, its sequences side by side without padding. `PackedSequences` says where
they begin; it is computed once and passed through the model as the keyword argument `packed`, so no layer
derives it from position ids and transformers builds no mask. On CUDA in half precision
`flash_attention` computes the attention. Elsewhere, sequences of about the same length run as padded
batches of scaled dot products. With sinks, or a softcap that no kernel supports, the scores of such a batch
are computed by their formula, in slices of queries.

Responses may share a prompt, which is then their prefix: its states, keys and values are computed once. Each
response's queries run against the prompt's keys and its own, side by side. With fewer queries than keys, the
last query belongs to the last key, in kernels and formula alike.

Llama 4's layers with chunks see the packed row cut at multiples of the chunk's size, as if each chunk were a
sequence; its layers without rotary embedding scale queries by their positions.

Where ranks share the tokens, each rank computes the attention of some heads, see
`paceline.learner.distributed.context`. Where they also divide the layer's matrices, it already has the
queries of its heads for all tokens, see `paceline.learner.model.decoder.divided.tensor_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import ModelError
from paceline.learner.batch.padded import PaddedBatch, causal_mask
from paceline.learner.batch.types import PackedSequences
from paceline.learner.distributed.context import heads_of_all_tokens, tokens_of_all_heads
from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.model.decoder import flash_attention
from paceline.learner.model.decoder.divided.tensor_parallel import own_key_heads
from paceline.learner.model.decoder.flash_attention import Scoring
from paceline.learner.model.decoder.opaque import opaque
from paceline.learner.model.decoder.rows import take_rows

PACKED_ATTENTION = "paceline_packed"
SLICE_SCORES = 1 << 26
"""Most scores computed at a time by the formula: 256 MiB in float32."""


def register() -> None:
    """Registers PACKED_ATTENTION with transformers, without a mask function, so that it builds no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def keep_out_of_graphs() -> None:
    """Makes compiled layers call attention as an opaque operation with a known output width.

    Otherwise the compiler would treat the number and size of heads as dynamic, like the number of tokens.
    """
    from torch import _dynamo
    from transformers import AttentionInterface

    def attention_of_known_size(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        out, _ = packed_attention(*args, **kwargs)
        _dynamo.mark_static(out, [2, 3])
        _dynamo.maybe_mark_dynamic(out, 1)
        return out, None

    AttentionInterface.register(PACKED_ATTENTION, opaque(attention_of_known_size))


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedSequences | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each packed sequence.

    Args:
        module: the attention layer; `chunk_size` and `temperature` are read if it has them, see
            `paceline.learner.model.decoder.llama4`.
        query: (1, H, T, D), with T the tokens of this rank; with divided matrices all tokens, of its heads.
        key: (1, G, T, D) with G dividing H (grouped-query attention).
        value: like key, but D may differ.
        attention_mask: None; `packed` replaces it.
        packed: places of the sequences among the tokens.
        scaling: scaling of the scores; None is D ** -0.5.
        dropout: must be 0; otherwise old and new log-probs could not be compared.
        sliding_window: number of tokens that a token sees, itself included.
        softcap: c, if scores become c tanh(scores / c) (Gemma 2).
        s_aux: (H,), per head the score of the sink, a token without a value (GPT-OSS).
        others: further arguments of the layer, not used.

    Returns:
        (1, T, H, D) with the D of the values, and None in place of attention weights.

    Raises:
        ModelError: the layer asks for more than plain causal attention.
    """
    if packed is None:
        raise ModelError(
            f"{type(module).__name__}'s model does not tell its layers where sequences begin; use one "
            "of the architectures of docs/models.md"
        )
    _require_plain(module, dropout, attention_mask)
    scoring = Scoring(scaling=scaling, window=sliding_window, softcap=softcap)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    group = packed.context
    if group is not None:
        q, k, v = _of_own_heads(module, group, q, k, v)
        s_aux = None if s_aux is None else s_aux.chunk(group.size)[group.rank]
    if (temperature := getattr(module, "temperature", None)) is not None:
        q = temperature.scaled(q, packed)
    if chunk_size := getattr(module, "chunk_size", None):
        packed = packed.in_chunks(chunk_size)
    out = _attended(q, k, v, packed, scoring, s_aux)
    if group is not None and not _is_divided(module):
        out = tokens_of_all_heads(out, group)
    return out.unsqueeze(0), None


def _is_divided(module: torch.nn.Module) -> bool:
    """Returns whether each rank has computed the queries of its heads for all tokens."""
    return getattr(module, "tensor_group", None) is not None


def _of_own_heads(
    module: torch.nn.Module, group: RankGroup, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values of this rank's heads for all tokens of the group."""
    if not _is_divided(module):
        q, k, v = (heads_of_all_tokens(x, group) for x in (q, k, v))
    elif not module.has_own_keys:
        k, v = (own_key_heads(x, group) for x in (k, v))
    return q, k, v


def _attended(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, scoring: Scoring, sinks: Tensor | None
) -> Tensor:
    """Returns (T, H, E), computed by a kernel if there is one, else in padded batches."""
    if sinks is None and _has_kernel(q, k, v, scoring):
        return _side_by_side(q, k, v, packed, scoring)
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    if scoring.softcap is not None or sinks is not None:
        attend = partial(_full_scores, softcap=scoring.softcap, sinks=sinks)
    return _in_batches(q, k, v, packed, scoring, attend)


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
    """Returns whether FlashAttention has a kernel for these heads, and for the softcap, if any."""
    if not q.is_cuda or not flash_attention.takes(q.dtype, max(q.shape[-1], v.shape[-1])):
        return False
    return scoring.softcap is None or flash_attention.has_softcap(q, k, v, scoring)


def _require_plain(module: torch.nn.Module, dropout: float, attention_mask: Tensor | None) -> None:
    if dropout or attention_mask is not None:
        what = "dropout" if dropout else "a mask"
        raise ModelError(
            f"{type(module).__name__} asks for attention with {what}, which packed attention does not "
            "support; "
            "use one of the architectures of docs/models.md"
        )


def _side_by_side(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, scoring: Scoring) -> Tensor:
    cu_keys, max_keys = packed.cu_seqlens, packed.max_length
    if packed.keys is not None:
        k, v = (take_rows(x, packed.keys.tokens) for x in (k, v))
        cu_keys, max_keys = packed.keys.cu_seqlens, packed.keys.max_length
    lengths = flash_attention.Lengths(
        queries=packed.cu_seqlens, keys=cu_keys, max_queries=packed.max_length, max_keys=max_keys
    )
    return flash_attention.attend(q, k, v, lengths, scoring)


def _in_batches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequences,
    scoring: Scoring,
    attend: Callable[..., Tensor],
) -> Tensor:
    padded = packed.padded
    query_counts = [batch.num_sequences * batch.num_queries for batch in padded.batches]
    key_counts = [batch.num_sequences * batch.num_keys for batch in padded.batches]
    all_queries = torch.split(take_rows(q, padded.queries), query_counts)
    all_keys, all_values = (torch.split(take_rows(x, padded.keys), key_counts) for x in (k, v))
    outputs = []
    for batch, *parts in zip(padded.batches, all_queries, all_keys, all_values, strict=True):
        qb, kb, vb = (
            x.view(batch.num_sequences, -1, *x.shape[1:]).transpose(1, 2) for x in parts
        )  # (N, heads, L, D), and twice (N, heads, K, D)
        mask = _mask_of(batch, scoring.window, q.device)
        out = attend(
            qb,
            kb,
            vb,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scoring.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return take_rows(torch.cat(outputs), padded.order)


def _mask_of(batch: PaddedBatch, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or window >= batch.num_keys:
        return batch.mask
    near = causal_mask(batch.num_queries, batch.num_keys, window, device)
    return near if batch.mask is None else near & batch.mask


def _full_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes `F.scaled_dot_product_attention` with a softcap and sinks.

    More than SLICE_SCORES scores are computed in slices of queries, and again in the backward pass, so memory
    does not grow with queries x keys.
    """
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    seen = causal_mask(num_queries, num_keys, None, q.device) if is_causal else attn_mask
    assert seen is not None
    seen = seen.expand(*seen.shape[:-2], num_queries, num_keys)
    slice_of = partial(_slice_of_scores, scale=scale, softcap=softcap, sinks=sinks)
    rows = max(1, SLICE_SCORES // (q.shape[0] * q.shape[1] * num_keys))
    if rows >= num_queries:
        return slice_of(q, k, v, seen)
    parts = [
        checkpoint(slice_of, q_part, k, v, seen_part, use_reentrant=False)
        for q_part, seen_part in zip(torch.split(q, rows, -2), torch.split(seen, rows, -2), strict=True)
    ]
    return torch.cat(parts, dim=-2)


def _slice_of_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, -torch.inf).float()
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    return torch.softmax(scores, dim=-1)[..., : k.shape[-2]].to(v.dtype) @ v
