"""Runs Gated DeltaNets over packed rows with flash-linear-attention's kernels, on GPUs.

projections -> short convolution -> gated delta rule -> norm and gate -> output

Nothing is padded, and a shared prompt is computed once: its answers start from its last state. This module
adds what the kernels lack: the convolution of a sequence's first tokens, and the sequence's initial state.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.learner.batch.chained import ChainedSequences
from paceline.learner.batch.types import PackedSequences
from paceline.learner.model.decoder.rows import take_rows

log = logging.getLogger(__name__)

Rule = Callable[..., tuple[Tensor, Tensor | None]]
"""flash-linear-attention's `chunk_gated_delta_rule`"""

TOLERANCE = 0.03
"""Largest relative difference in a trial: bfloat16 gives 0.01, a state that crosses sequences gives 3."""

_TRIED_OFFSETS = (0, 70, 73, 201)
_TRIED_HEADS, _TRIED_WIDTH = 2, 128


def rule_for(device: torch.device) -> Rule | None:
    """Returns the kernel for a device, tried once.

    None on a CPU, without flash-linear-attention, or if the trial fails. On Hopper GPUs it fails with torch
    2.11 and its Triton 3.6: fla-core refuses the backward pass there, because its numbers are wrong.
    """
    return _tried(device) if device.type == "cuda" else None


@cache
def _tried(device: torch.device) -> Rule | None:
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    except ImportError:
        return None
    rule: Rule = chunk_gated_delta_rule
    return rule if works(rule, torch.bfloat16, device) else None


def works(rule: Rule, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether a kernel's outputs and gradients match transformers' code on random numbers."""
    try:
        difference = _difference(rule, dtype, device)
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a library says
        reason = f"{type(error).__name__}: {error}"
    else:
        if difference <= TOLERANCE:
            return True
        reason = f"its numbers differ from those of transformers' code by {difference:.3g}, relative"
    log.warning("flash-linear-attention does not work here (%s); rows of such layers are padded", reason)
    return False


@torch.enable_grad()
def _difference(rule: Rule, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the largest relative difference of outputs, last states and gradients of three sequences."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    plain = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    rows = (1, _TRIED_OFFSETS[-1], _TRIED_HEADS)
    size = (len(_TRIED_OFFSETS) - 1, _TRIED_HEADS, _TRIED_WIDTH, _TRIED_WIDTH)
    drawn = [*(draw(*rows, _TRIED_WIDTH).to(dtype) for _ in range(3)), -F.softplus(draw(*rows))]
    inputs = [each.requires_grad_() for each in (*drawn, draw(*rows).sigmoid().to(dtype), 0.1 * draw(*size))]
    weights = draw(*rows, _TRIED_WIDTH), draw(*size)

    def by_sequence(*given: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for index, (start, stop) in enumerate(pairwise(_TRIED_OFFSETS)):
            *own, decay, beta = (part[:, start:stop] for part in given[:-1])
            state = given[-1][index : index + 1]
            parts.append(plain(*own, g=decay, beta=beta, initial_state=state, **options))
        out, last = zip(*parts, strict=True)
        return torch.cat(out, 1), torch.cat(last)

    def by_kernel(*given: Tensor) -> tuple[Tensor, Tensor | None]:
        lengths = {"cu_seqlens": offsets, "cu_seqlens_cpu": offsets.cpu()}
        return rule(*given[:-1], initial_state=given[-1], **lengths, **options)

    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    offsets = torch.tensor(_TRIED_OFFSETS, device=device)
    results = []
    # Recomputing layers count the tensors saved for their backward pass; these must not be counted.
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        for call in (by_kernel, by_sequence):
            out, last = call(*inputs)
            assert last is not None
            total = (out.float() * weights[0]).sum() + (last.float() * weights[1]).sum()
            results.append([out.detach(), last.detach(), *torch.autograd.grad(total, inputs)])
    return max(
        float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        for mine, theirs in zip(*results, strict=True)
    )


def run_layer(layer: Any, hidden: Tensor, packed: PackedSequences, rule: Rule) -> Tensor:
    """Runs a layer of transformers on each sequence by itself; returns (1, T, H)."""
    chained = packed.chained(layer.conv_kernel_size)
    mixed, z, b, a = _projected(layer, hidden)
    mixed = _convolved(layer, mixed, chained)
    query, key, value = torch.split(mixed, [layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    query, key = (part.reshape(len(part), -1, layer.head_k_dim) for part in (query, key))
    value = value.reshape(len(value), -1, layer.head_v_dim)
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias)
    out = _recurrent((query, key, value, decay, b.sigmoid()), chained, rule)
    gated: Tensor = layer.norm(out.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    projected: Tensor = layer.out_proj(gated.reshape(1, len(out), -1))
    return projected


def _projected(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns queries, keys and values concatenated, (T, C), the gate, and the two numbers of each head."""
    if hasattr(layer, "in_proj_qkv"):
        parts = [layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a]
        mixed, z, b, a = (projection(hidden)[0] for projection in parts)
        return mixed, z, b, a
    *qkv, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    return torch.cat([part[0].flatten(1) for part in qkv], dim=-1), z[0], b[0], a[0]


def _convolved(layer: Any, mixed: Tensor, chained: ChainedSequences) -> Tensor:
    """Convolves the whole row, then corrects the first tokens of each sequence; (T, C)."""
    weight, (num_tokens, width) = layer.conv1d.weight, mixed.shape
    taps = weight.shape[-1]
    row = F.conv1d(mixed.T.unsqueeze(0), weight, padding=taps - 1, groups=width)
    seen = take_rows(F.pad(mixed, (0, 0, 0, 1)), chained.looked_at).view(-1, taps, width)
    begun = (seen.float() * weight.squeeze(1).T.float()).sum(1).to(row.dtype)
    return F.silu(row[0, :, :num_tokens].T.index_copy(0, chained.begins, begun))


def _recurrent(inputs: tuple[Tensor, ...], chained: ChainedSequences, rule: Rule) -> Tensor:
    """Runs the recurrence from an empty state or a prefix's last state; returns (T, heads, size)."""
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    first, then = chained.first, chained.then
    if then is None:
        out, _ = rule(*(part.unsqueeze(0) for part in inputs), **_offsets(first), **options)
        return out[0]
    prompts, states = rule(
        *(part[first.tokens].unsqueeze(0) for part in inputs),
        **_offsets(first),
        **options,
        output_final_state=True,
    )
    assert states is not None
    assert chained.prefixes is not None
    answers, _ = rule(
        *(part[then.tokens].unsqueeze(0) for part in inputs),
        **_offsets(then),
        **options,
        initial_state=take_rows(states, chained.prefixes),
    )
    return torch.cat([prompts[0], answers[0]])[chained.order]


def _offsets(run: Any) -> dict[str, Tensor]:
    return {"cu_seqlens": run.cu_seqlens, "cu_seqlens_cpu": run.cu_seqlens_on_host}
