"""Gated DeltaNets over packed rows by flash-linear-attention's kernels, for GPUs that have it.

projections -> short convolution -> gated delta rule -> norm and gate -> output

Nothing is padded, and a shared prompt is computed once: its last state starts its answers. What the kernels
do not know of is done here: the convolution's first tokens of a sequence, and which state a sequence has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.learner.batch.chained import ChainedSequences
from paceline.learner.batch.types import PackedSequences
from paceline.learner.model.decoder.rows import take_rows

Rule = Callable[..., tuple[Tensor, Tensor | None]]
"""flash-linear-attention's `chunk_gated_delta_rule`"""


_WRONG_ON_HOPPER = (3, 4), (3, 7, 1)
"""From the first version of Triton to before the second, fla-core refuses the backward pass as wrong"""


def rule_for(device: torch.device) -> Rule | None:
    """The kernel for a device; None where there is none: on a CPU, or without flash-linear-attention.

    None too where it could compute no gradients: on a Hopper GPU with some versions of Triton.
    """
    if device.type != "cuda" or is_refused(torch.cuda.get_device_capability(device)[0], _triton()):
        return None
    return _installed()


def is_refused(major: int, triton: tuple[int, ...]) -> bool:
    """Whether flash-linear-attention refuses a GPU's backward pass with a version of Triton.

    Args:
        major: of the GPU's compute capability; 9 is Hopper.
        triton: the version's numbers.
    """
    first, fixed = _WRONG_ON_HOPPER
    return major == 9 and first <= triton < fixed and find_spec("tilelang") is None


@cache
def _triton() -> tuple[int, ...]:
    try:
        text = version("triton")
    except PackageNotFoundError:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


@cache
def _installed() -> Rule | None:
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    except ImportError:
        return None
    rule: Rule = chunk_gated_delta_rule
    return rule


def run_layer(layer: Any, hidden: Tensor, packed: PackedSequences, rule: Rule) -> Tensor:
    """(1, T, H) of a layer of transformers, each sequence by itself."""
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
    """Queries, keys and values side by side, (T, C), the gate, and the two numbers of each head."""
    if hasattr(layer, "in_proj_qkv"):
        parts = [layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a]
        mixed, z, b, a = (projection(hidden)[0] for projection in parts)
        return mixed, z, b, a
    *qkv, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    return torch.cat([part[0].flatten(1) for part in qkv], dim=-1), z[0], b[0], a[0]


def _convolved(layer: Any, mixed: Tensor, chained: ChainedSequences) -> Tensor:
    """(T, C): the whole row at once, and then what begins a sequence with what it really follows."""
    weight, (num_tokens, width) = layer.conv1d.weight, mixed.shape
    taps = weight.shape[-1]
    row = F.conv1d(mixed.T.unsqueeze(0), weight, padding=taps - 1, groups=width)
    seen = take_rows(F.pad(mixed, (0, 0, 0, 1)), chained.looked_at).view(-1, taps, width)
    begun = (seen.float() * weight.squeeze(1).T.float()).sum(1).to(row.dtype)
    return F.silu(row[0, :, :num_tokens].T.index_copy(0, chained.begins, begun))


def _recurrent(inputs: tuple[Tensor, ...], chained: ChainedSequences, rule: Rule) -> Tensor:
    """(T, heads, size), from an empty state or a prefix's last one."""
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
