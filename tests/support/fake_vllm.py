"""A stand-in for vLLM's Qwen2 model: parallel layers with vLLM's class names, attributes and parameters."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn

from support.weight_layouts import DenseModel


class _Layer(nn.Module):
    def __init__(self, shape: tuple[int, ...], bias: int = 0, **attributes: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, float("nan")), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.full((bias,), float("nan")), requires_grad=False)
        for name, value in attributes.items():
            setattr(self, name, value)


class QKVParallelLinear(_Layer): ...


class MergedColumnParallelLinear(_Layer): ...


class RowParallelLinear(_Layer): ...


class VocabParallelEmbedding(_Layer): ...


class ParallelLMHead(_Layer): ...


class RMSNorm(_Layer): ...


class FusedMoE(_Layer): ...


def fake_qwen2(model: DenseModel, rank: int, size: int, *, moe: bool = False) -> nn.Module:
    """One TP rank's model, every parameter NaN; `moe` adds a layer that the layout rules do not cover."""
    d, h = model.head_dim, model.hidden
    heads, kv = model.heads // size, max(1, model.kv_heads // size)
    replicas = max(1, size // model.kv_heads)

    def vocabulary(kind: type[_Layer]) -> _Layer:
        padded = math.ceil(model.vocab_size / 64) * 64 // size
        first = min(rank * padded, model.vocab_size)
        indices = SimpleNamespace(
            org_vocab_start_index=first, org_vocab_end_index=min(first + padded, model.vocab_size)
        )
        sizes = {"org_vocab_size": model.vocab_size, "num_embeddings": model.vocab_size}
        return kind((padded, h), shard_indices=indices, **sizes)

    def layer() -> nn.Module:
        rows = (heads + 2 * kv) * d
        inter = model.intermediate // size
        tp = {"tp_rank": rank, "tp_size": size}
        block = nn.Module()
        block.self_attn, block.mlp = nn.Module(), nn.Module()
        block.self_attn.qkv_proj = QKVParallelLinear(
            (rows, h),
            bias=rows if model.bias else 0,
            head_size=d,
            num_heads=heads,
            num_kv_heads=kv,
            num_kv_head_replicas=replicas,
            total_num_heads=model.heads,
            total_num_kv_heads=model.kv_heads,
            **tp,
        )
        width = heads * d
        block.self_attn.o_proj = RowParallelLinear((h, width), input_size=width * size, output_size=h, **tp)
        block.mlp.gate_up_proj = MergedColumnParallelLinear(
            (2 * inter, h), output_sizes=[model.intermediate, model.intermediate], **tp
        )
        block.mlp.down_proj = RowParallelLinear(
            (h, inter), input_size=model.intermediate, output_size=h, **tp
        )
        block.input_layernorm, block.post_attention_layernorm = RMSNorm((h,)), RMSNorm((h,))
        if moe:
            block.mlp.experts = FusedMoE((2, h, h))
        return block

    root = nn.Module()
    root.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    root.model = nn.Module()
    root.model.embed_tokens = vocabulary(VocabParallelEmbedding)
    root.model.layers = nn.ModuleList([layer() for _ in range(model.layers)])
    root.model.norm = RMSNorm((h,))
    if model.tied:
        root.lm_head = ParallelLMHead((1, 1))
        root.lm_head.weight = root.model.embed_tokens.weight
    else:
        root.lm_head = vocabulary(ParallelLMHead)
    return root
