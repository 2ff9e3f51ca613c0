"""Layouts for tests: FSDP2 shards, and a Qwen2-like model's tensor-parallel slices, without an engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice, chunk_rows, expand_full


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModel:
    """Sizes of a small dense decoder."""

    vocab_size: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    tied: bool
    bias: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face state dict: global shape by name."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, h)}
        for layer in range(self.layers):
            p = f"model.layers.{layer}."
            for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                shapes[f"{p}self_attn.{name}.weight"] = (rows, h)
                if self.bias:
                    shapes[f"{p}self_attn.{name}.bias"] = (rows,)
            shapes[f"{p}self_attn.o_proj.weight"] = (h, q)
            shapes[f"{p}mlp.gate_proj.weight"] = (self.intermediate, h)
            shapes[f"{p}mlp.up_proj.weight"] = (self.intermediate, h)
            shapes[f"{p}mlp.down_proj.weight"] = (h, self.intermediate)
            shapes[f"{p}input_layernorm.weight"] = (h,)
            shapes[f"{p}post_attention_layernorm.weight"] = (h,)
        shapes["model.norm.weight"] = (h,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, h)
        return shapes


def tp_layout(model: DenseModel, rank: int, size: int) -> tuple[RankLayout, dict[str, tuple[int, ...]]]:
    """What TP rank `rank` of `size` needs, and the shapes of its own parameters."""
    slices: list[TensorSlice] = []
    params: dict[str, tuple[int, ...]] = {}
    shapes = model.shapes()

    def rows(name: str, param: str, first: int, count: int, at: int) -> None:
        shape = shapes[name]
        tail = (0,) * (len(shape) - 1)
        box = Box((first, *tail), (first + count, *shape[1:]))
        if box.volume:
            part = TensorSlice(name=name, global_shape=shape, box=box, param=param, offset=(at, *tail))
            slices.append(part)

    def vocab(name: str) -> None:
        padded = math.ceil(model.vocab_size / 64) * 64 // size
        params[name] = (padded, model.hidden)
        first = min(rank * padded, model.vocab_size)
        rows(name, name, first, min(padded, model.vocab_size - first), 0)

    vocab("model.embed_tokens.weight")
    d = model.head_dim
    q, kv = model.heads // size * d, max(1, model.kv_heads // size) * d
    kv_index = rank // (size // model.kv_heads) if size > model.kv_heads else rank
    inter = model.intermediate // size
    for layer in range(model.layers):
        p = f"model.layers.{layer}."
        for kind in ("weight", "bias") if model.bias else ("weight",):
            tail = (model.hidden,) if kind == "weight" else ()
            param = f"{p}self_attn.qkv_proj.{kind}"
            params[param] = (q + 2 * kv, *tail)
            rows(f"{p}self_attn.q_proj.{kind}", param, rank * q, q, 0)
            rows(f"{p}self_attn.k_proj.{kind}", param, kv_index * kv, kv, q)
            rows(f"{p}self_attn.v_proj.{kind}", param, kv_index * kv, kv, q + kv)
        fused = f"{p}mlp.gate_up_proj.weight"
        params[fused] = (2 * inter, model.hidden)
        rows(f"{p}mlp.gate_proj.weight", fused, rank * inter, inter, 0)
        rows(f"{p}mlp.up_proj.weight", fused, rank * inter, inter, inter)
        for name, width in ((f"{p}self_attn.o_proj.weight", q), (f"{p}mlp.down_proj.weight", inter)):
            params[name] = (model.hidden, width)
            box = Box((0, rank * width), (model.hidden, (rank + 1) * width))
            slices.append(
                TensorSlice(name=name, global_shape=shapes[name], box=box, param=name, offset=(0, 0))
            )
        for norm in ("input_layernorm", "post_attention_layernorm"):
            params[f"{p}{norm}.weight"] = (model.hidden,)
            rows(f"{p}{norm}.weight", f"{p}{norm}.weight", 0, model.hidden, 0)
    params["model.norm.weight"] = (model.hidden,)
    rows("model.norm.weight", "model.norm.weight", 0, model.hidden, 0)
    if not model.tied:
        vocab("lm_head.weight")
    return RankLayout(dtype="float32", slices=tuple(slices)), params


def fsdp_layout(
    shapes: Mapping[str, tuple[int, ...]], *, rank: int, world_size: int, dtype: str
) -> RankLayout:
    """The layout of one FSDP2 rank: every tensor sharded along dimension 0.

    Args:
        shapes: global shape by tensor name, in the model's order.
        rank: this rank in the sharding mesh.
        world_size: size of the sharding mesh.
        dtype: element type of the shards.
    """
    slices = []
    for name, shape in shapes.items():
        first, last = chunk_rows(shape[0], rank, world_size)
        box = Box((first, *(0 for _ in shape[1:])), (last, *shape[1:]))
        if box.volume:
            offset = (0,) * len(shape)
            slices.append(TensorSlice(name=name, global_shape=shape, box=box, param=name, offset=offset))
    return RankLayout(dtype=dtype, slices=tuple(slices))


MIB = 1 << 18  # elements of float32


def full(name: str, shape: tuple[int, ...]) -> RankLayout:
    """A layout that has all of one tensor."""
    return expand_full(RankLayout(dtype="float32", slices=(), full_tensors=True), {name: shape})


def rows(count: int, rank: int, size: int) -> RankLayout:
    """One of `size` equal parts of a matrix with `count` MiB."""
    share = count // size
    box = Box((rank * share, 0), ((rank + 1) * share, MIB))
    part = TensorSlice(name="w", global_shape=(count, MIB), box=box, param="w", offset=(0, 0))
    return RankLayout(dtype="float32", slices=(part,))


def model_of(layers: int) -> DenseModel:
    """A small model with so many layers."""
    return DenseModel(
        vocab_size=512,
        hidden=64,
        heads=8,
        kv_heads=4,
        head_dim=8,
        intermediate=128,
        layers=layers,
        tied=False,
        bias=True,
    )
