"""Computes attention of packed sequences by kernels, on CUDA in half precision.

torch brings FlashAttention 2. FlashAttention 4 (the package flash-attn-4) is written for Hopper and
Blackwell, and takes three fifths of the time there. It compiles kernels for every kind of layer, so the first
call tries it on random sequences; if that fails or the numbers differ, torch's kernel is used. Torch has no
kernel for scores with a softcap, so there FlashAttention 4 is compared with the formula.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.training.actor import AttentionKernel
from paceline.core.errors import EnvironmentLackError
from paceline.learner.batch.padded import causal_mask

log = logging.getLogger(__name__)

PACKAGE = "flash_attn.cute"
"""The module of flash-attn-4; the older package flash-attn has `flash_attn`, but not this module."""
TOLERANCE = 0.02
"""Largest relative difference, in bfloat16, of two equivalent kernels; 0.003 was measured."""

_TRIED_LENGTHS = ((96, 96), (40, 136), (1, 97), (1000, 1000), (256, 4000))
"""Numbers of queries and keys of random sequences: one fits into a tile of the kernel, one spans many."""
_TRIED_WINDOW = 33
_MIN_CAPABILITY = 9

_chosen: list[AttentionKernel] = ["auto"]


def choose(kernel: AttentionKernel) -> None:
    """Sets the kernels that this process uses from now on.

    Raises:
        EnvironmentLackError: flash_attention_4 is configured but not installed.
    """
    if kernel == "flash_attention_4" and not _is_installed():
        raise EnvironmentLackError(
            "actor.attention_kernel is flash_attention_4, and the package flash-attn-4 is not installed; "
            "install paceline[cuda], which brings a version that fits the engine's packages, or set "
            "actor.attention_kernel: auto"
        )
    _chosen[:] = [kernel]


def prepare(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernels for a model's layers ahead of its first step.

    Args:
        dtype: type in which the model computes.
        device: device on which the model will run; nothing is done on a CPU.
    """
    for kind in kinds_of(config.get_text_config(), dtype, device):
        if device.type == "cuda" and takes(dtype, max(kind.width, kind.value_width)):
            _kernel_of(kind, _chosen[0])


_LARGEST_HEAD = 256
"""Largest head of torch's kernel; Gemma 4 has heads of 512 numbers."""


def takes(dtype: torch.dtype, width: int) -> bool:
    """Returns whether a kernel supports heads of this size."""
    return dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= _LARGEST_HEAD


def kinds_of(config: Any, dtype: torch.dtype, device: torch.device) -> list[Kind]:
    """Returns the kinds of calls of `attend` that layers with these sizes and windows make.

    The list is empty if sizes have other names or differ between layers: then kernels compile on first use.
    """
    if getattr(config, "is_heterogeneous", False):
        return []
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if not (type(heads) is type(groups) is int):
        return []
    head = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    width, value_width = (int(getattr(config, name, None) or head) for name in ("qk_head_dim", "v_head_dim"))
    types = getattr(config, "layer_types", None)
    windows = {kind == "sliding_attention" for kind in types or ()}
    return [
        Kind(
            heads=heads,
            groups=groups,
            width=width,
            value_width=value_width,
            windowed=windowed,
            softcap=getattr(config, "attn_logit_softcapping", None),
            dtype=dtype,
            device=device,
        )
        for windowed in sorted(windows or {bool(getattr(config, "sliding_window", None))})
    ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lengths:
    """The places of each sequence's queries and keys; its last query and its last key are one token.

    Attributes:
        queries: (N + 1,) int32, from 0 to the number of queries.
        keys: (N + 1,) int32, from 0 to the number of keys.
    """

    queries: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """How a layer scores the keys of a query.

    Attributes:
        scaling: factor of the scores; None is D ** -0.5.
        window: number of tokens that a token sees, itself included; None for all before it.
        softcap: c, if scores become c tanh(scores / c) (Gemma 2).
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None

    def factor(self, width: int) -> float:
        """Returns the factor of the scores for heads of this size."""
        return width**-0.5 if self.scaling is None else self.scaling


Kernel = Callable[[Tensor, Tensor, Tensor, Lengths, Scoring], Tensor]


def has_softcap(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
    """Returns whether a kernel supports this softcap; arguments as for `attend`."""
    return _kernel_of(Kind.of(q, k, v, scoring), _chosen[0]) is not None


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scoring: Scoring) -> Tensor:
    """Computes causal attention within each sequence.

    Args:
        q: (T, H, D).
        k: (K, G, D), G dividing H.
        v: (K, G, E).
        scoring: with a softcap only where `has_softcap`.

    Returns:
        (T, H, E).
    """
    kernel = _kernel_of(Kind.of(q, k, v, scoring), _chosen[0])
    assert kernel is not None
    return kernel(q, k, v, lengths, scoring)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The properties for which FlashAttention 4 compiles a kernel."""

    heads: int
    groups: int
    width: int
    value_width: int
    windowed: bool
    softcap: float | None = None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Kind:
        """Returns the kind of a call of `attend`."""
        return cls(
            heads=q.shape[1],
            groups=k.shape[1],
            width=q.shape[2],
            value_width=v.shape[2],
            windowed=scoring.window is not None,
            softcap=scoring.softcap,
            dtype=q.dtype,
            device=q.device,
        )

    def __str__(self) -> str:
        capped = "" if self.softcap is None else f", a softcap of {self.softcap:g}"
        return f"{self.heads} heads of {self.width}, {self.groups} of keys{capped}"


@lru_cache
def _kernel_of(kind: Kind, chosen: AttentionKernel) -> Kernel | None:
    """Returns the kernel to use; None for a softcap without FlashAttention 4, as torch has none for it."""
    other: Kernel | None = by_torch if kind.softcap is None else None
    instead = "torch's kernel" if other else "the formula"
    if chosen == "torch" or torch.cuda.get_device_capability(kind.device)[0] < _MIN_CAPABILITY:
        return other
    if not _is_installed():
        log.info("%s computes attention; the package flash-attn-4 takes less time here", instead)
        return other
    try:
        difference = _difference(kind)
    except Exception as error:  # noqa: BLE001 - whatever a compiler in its beta says
        reason = f"{type(error).__name__}: {error}"
    else:
        if difference <= TOLERANCE:
            return by_flash_attention_4
        reason = f"its numbers differ from those of {instead} by {difference:.3g}, relative"
    if chosen == "flash_attention_4":
        raise EnvironmentLackError(
            f"FlashAttention 4 does not work for {kind} ({reason}); set actor.attention_kernel: auto"
        )
    log.warning("FlashAttention 4 does not work for %s (%s); %s is used", kind, reason, instead)
    return other


@lru_cache(maxsize=1)
def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ImportError:  # flash_attn is missing, or does not load
        return False


@torch.enable_grad()
def _difference(kind: Kind) -> float:
    """Returns the largest relative difference of a sequence's outputs or gradients, on random numbers.

    Sequences are compared one by one, because a norm over all would hide errors in a short sequence.
    """
    queries, keys = (sum(counts) for counts in zip(*_TRIED_LENGTHS, strict=True))
    generator = torch.Generator(kind.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=generator, device=kind.device, dtype=torch.float32)
        return numbers.to(kind.dtype).requires_grad_()

    q, k = draw(queries, kind.heads, kind.width), draw(keys, kind.groups, kind.width)
    v, gradient = draw(keys, kind.groups, kind.value_width), draw(queries, kind.heads, kind.value_width)
    query_counts, key_counts = ([*counts] for counts in zip(*_TRIED_LENGTHS, strict=True))
    lengths = Lengths(
        queries=_offsets(query_counts, kind.device),
        keys=_offsets(key_counts, kind.device),
        max_queries=max(query_counts),
        max_keys=max(key_counts),
    )
    scoring = Scoring(window=_TRIED_WINDOW if kind.windowed else None, softcap=kind.softcap)
    results = []
    # Recomputing layers count the tensors saved for their backward pass; these must not be counted.
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        for kernel in (by_torch if kind.softcap is None else by_formula, by_flash_attention_4):
            out = kernel(q, k, v, lengths, scoring)
            results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), gradient.detach())))
    differences = [
        (mine.float() - theirs.float()).norm() / theirs.float().norm()
        for ours, others, counts in zip(
            *results[::-1], (query_counts, query_counts, key_counts, key_counts), strict=True
        )
        for mine, theirs in zip(ours.split(counts), others.split(counts), strict=True)
    ]
    return float(torch.stack(differences).nan_to_num(torch.inf).max())


def by_formula(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scoring: Scoring) -> Tensor:
    """Computes `attend` in float32, sequence by sequence; memory grows with queries x keys."""
    starts, ends = (bounds.tolist() for bounds in (lengths.queries, lengths.keys))
    outputs = []
    for i in range(len(starts) - 1):
        queries = q[starts[i] : starts[i + 1]].float().transpose(0, 1)
        own = (x[ends[i] : ends[i + 1]].float().transpose(0, 1) for x in (k, v))
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[0], dim=0) for x in own)
        scores = queries @ keys.transpose(1, 2) * scoring.factor(q.shape[-1])
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        seen = causal_mask(queries.shape[1], keys.shape[1], scoring.window, q.device)
        outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs).to(q.dtype)


def _offsets(counts: list[int], device: torch.device) -> Tensor:
    return F.pad(torch.tensor(counts).cumsum(0), (1, 0)).to(device, torch.int32)


def by_flash_attention_4(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scoring: Scoring) -> Tensor:
    """Computes `attend` with the package flash-attn-4."""
    window = scoring.window
    out, _ = _flash_attention_4()(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens_q=lengths.queries,
        cu_seqlens_k=lengths.keys,
        max_seqlen_q=lengths.max_queries,
        max_seqlen_k=lengths.max_keys,
        softmax_scale=scoring.scaling,
        causal=window is None,
        window_size=(None, None) if window is None else (window - 1, 0),
        softcap=scoring.softcap or 0.0,
    )
    assert isinstance(out, Tensor)
    return out


@lru_cache(maxsize=1)
def _flash_attention_4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

    return flash_attn_varlen_func  # type: ignore[no-any-return,unused-ignore]


def by_torch(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scoring: Scoring) -> Tensor:
    """Computes `attend` with `torch.nn.attention.varlen`, which has no softcap."""
    from torch.nn.attention.varlen import varlen_attn

    assert scoring.softcap is None
    scaling, window = scoring.factor(q.shape[-1]), scoring.window
    width, widest = v.shape[-1], max(q.shape[-1], v.shape[-1])
    if q.shape[-1] != width:  # latent attention: the kernel needs equal head sizes
        q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    # torch 2.11 accepts fewer key heads without this argument.
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _has_grouped_queries() else {}
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        lengths.queries,
        lengths.keys,
        lengths.max_queries,
        lengths.max_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,  # type: ignore[arg-type]
    )
    assert isinstance(out, Tensor)
    return out if out.shape[-1] == width else out[..., :width]


@lru_cache(maxsize=1)
def _has_grouped_queries() -> bool:
    """Returns whether torch's kernel takes grouped queries, as it does from 2.12."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
