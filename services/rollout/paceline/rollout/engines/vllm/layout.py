"""Rules for where each part of a checkpoint tensor lies in a vLLM model's live parameters.

The rules read only attributes of vLLM's parallel layers, by class name: so they fit several versions of vLLM
and can be tested without it. A class that is not named here, a subclass included, is not covered: its layout
may differ, and a wrong slice would be a silent error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from paceline.core.errors import ModelError
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import ITEM_SIZES, RankLayout, TensorSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows `first..first + count` of a checkpoint tensor of `total` rows, at local row `at`."""

    name: str
    first: int
    count: int
    total: int
    at: int


def describe_model(model: nn.Module, learner_names: Collection[str] = ()) -> RankLayout:
    """Which slices of the checkpoint's tensors this rank's model needs, and where they land.

    Args:
        model: vLLM's.
        learner_names: of the learner's tensors; () if unknown.

    Returns:
        The layout; without slices and with `full_tensors` set if the rules do not cover some parameter, or
        name tensors that the learner does not have (GLM-4 keeps gate and up fused).

    Raises:
        ModelError: the parameters are of mixed type, or of one that cannot be sent (quantized weights).
    """
    dtype = _common_dtype(model)
    covered, uncovered = split_parameters(model)
    strange = learner_names and any(part.name not in learner_names for part in covered)
    if uncovered or strange:
        return RankLayout(dtype=dtype, slices=(), full_tensors=True)
    return RankLayout(dtype=dtype, slices=tuple(covered))


def split_parameters(model: nn.Module) -> tuple[list[TensorSlice], list[str]]:
    """The slices of all parameters that the rules cover, and the names of the others."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {}) or {}
    slices: list[TensorSlice] = []
    uncovered: list[str] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        for kind, param in module.named_parameters(recurse=False):
            if id(param) in seen:
                continue  # tied: one transfer serves both
            seen.add(id(param))
            rule = _RULES.get(type(module).__name__)
            parts = list(rule(module, path, kind, param, packed)) if rule else []
            if parts and _fills(parts, module, param):
                slices += [part for part in parts if part.box.volume]
            else:
                uncovered.append(f"{path}.{kind}" if path else kind)
    return slices, uncovered


_Rule = Callable[[Any, str, str, torch.Tensor, dict[str, list[str]]], Iterator[TensorSlice]]


def _qkv(
    module: Any, path: str, kind: str, param: torch.Tensor, packed: dict[str, list[str]]
) -> Iterator[TensorSlice]:
    """[q | k | v]; with more ranks than KV heads, several ranks have the same head."""
    prefix, _, leaf = path.rpartition(".")
    head, v_head = module.head_size, getattr(module, "v_head_size", module.head_size)
    query, kv, kv_rank = module.num_heads, module.num_kv_heads, module.tp_rank // module.num_kv_head_replicas
    at = 0
    sizes = (
        (query * head, module.tp_rank, module.total_num_heads * head),
        (kv * head, kv_rank, module.total_num_kv_heads * head),
        (kv * v_head, kv_rank, module.total_num_kv_heads * v_head),
    )
    for name, (count, index, total) in zip(packed.get(leaf, ()), sizes, strict=False):
        rows = _Rows(name=_join(prefix, name, kind), first=index * count, count=count, total=total, at=at)
        yield _row_slice(rows, path, kind, param)
        at += count


def _merged_columns(
    module: Any, path: str, kind: str, param: torch.Tensor, packed: dict[str, list[str]]
) -> Iterator[TensorSlice]:
    """[gate | up], each split by rows over the ranks."""
    prefix, _, leaf = path.rpartition(".")
    names = packed.get(leaf, ())
    if len(names) != len(module.output_sizes):
        return
    at = 0
    for name, total in zip(names, module.output_sizes, strict=True):
        count = total // module.tp_size
        first = module.tp_rank * count
        rows = _Rows(name=_join(prefix, name, kind), first=first, count=count, total=total, at=at)
        yield _row_slice(rows, path, kind, param)
        at += count


def _columns(
    module: Any, path: str, kind: str, param: torch.Tensor, packed: dict[str, list[str]]
) -> Iterator[TensorSlice]:
    """One matrix split by rows (vLLM calls the output features columns)."""
    count = module.output_size // module.tp_size
    first, total = module.tp_rank * count, module.output_size
    rows = _Rows(name=_join("", path, kind), first=first, count=count, total=total, at=0)
    yield _row_slice(rows, path, kind, param)


def _row_parallel(
    module: Any, path: str, kind: str, param: torch.Tensor, packed: dict[str, list[str]]
) -> Iterator[TensorSlice]:
    """Split along the input features; the bias is on every rank (vLLM adds it on rank 0 only)."""
    if kind != "weight":
        yield from _replicated(module, path, kind, param, packed)
        return
    width = module.input_size // module.tp_size
    first = module.tp_rank * width
    name = _join("", path, kind)
    shape = (module.output_size, module.input_size)
    box = Box((0, first), (module.output_size, first + width))
    yield TensorSlice(name=name, global_shape=shape, box=box, param=name, offset=(0, 0))


def _replicated(
    module: Any, path: str, kind: str, param: torch.Tensor, packed: dict[str, list[str]]
) -> Iterator[TensorSlice]:
    shape, name = tuple(param.shape), _join("", path, kind)
    yield TensorSlice(
        name=name, global_shape=shape, box=Box.full(shape), param=name, offset=(0,) * len(shape)
    )


def _vocabulary(
    module: Any, path: str, kind: str, param: torch.Tensor, packed: dict[str, list[str]]
) -> Iterator[TensorSlice]:
    """Rows by token id. The vocabulary is padded before it is split; no checkpoint row fills the padding."""
    if module.num_embeddings != module.org_vocab_size:
        return  # rows that the checkpoint does not have
    shard = module.shard_indices
    first, last = shard.org_vocab_start_index, shard.org_vocab_end_index
    name, total = _join("", path, kind), module.org_vocab_size
    yield _row_slice(_Rows(name=name, first=first, count=last - first, total=total, at=0), path, kind, param)


_RULES: Final[dict[str, _Rule]] = {
    "QKVParallelLinear": _qkv,
    "MergedColumnParallelLinear": _merged_columns,
    "ColumnParallelLinear": _columns,
    "RowParallelLinear": _row_parallel,
    "ReplicatedLinear": _replicated,
    "VocabParallelEmbedding": _vocabulary,
    "ParallelLMHead": _vocabulary,
    "RMSNorm": _replicated,
    "GemmaRMSNorm": _replicated,
    "LayerNorm": _replicated,
}


def _row_slice(rows: _Rows, path: str, kind: str, param: torch.Tensor) -> TensorSlice:
    tail = tuple(param.shape[1:])
    zeros = (0,) * len(tail)
    return TensorSlice(
        name=rows.name,
        global_shape=(rows.total, *tail),
        box=Box((rows.first, *zeros), (rows.first + rows.count, *tail)),
        param=_join("", path, kind),
        offset=(rows.at, *zeros),
    )


def _fills(slices: list[TensorSlice], module: nn.Module, param: torch.Tensor) -> bool:
    """Whether the slices fill the live parameter, so that no part of it keeps old values.

    A parameter that a kernel has repacked, or of a layer with an unexpected shape, does not pass.
    """
    full_box = Box.full(tuple(param.shape))
    if any(len(part.offset) != param.ndim or not full_box.contains(part.local_box) for part in slices):
        return False
    if type(module).__name__ in ("VocabParallelEmbedding", "ParallelLMHead"):
        return True
    return sum(part.box.volume for part in slices) == param.numel()


def _common_dtype(model: nn.Module) -> str:
    examples = {str(param.dtype).removeprefix("torch."): name for name, param in model.named_parameters()}
    if len(examples) == 1 and next(iter(examples)) in ITEM_SIZES:
        return next(iter(examples))
    raise ModelError(
        f"the engine keeps parameters of types {examples} (type: an example); weights are pushed only "
        f"into a model whose parameters all have one type out of {', '.join(ITEM_SIZES)}: "
        "choose it with `dtype`, without quantization"
    )


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
