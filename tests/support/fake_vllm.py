"""A stand-in for a tensor-parallel rank of vLLM's Qwen2: parameters, and a loader that slices as it does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paceline.rollout.engines.weights.trace import traced
from support.weight_layouts import DenseModel, tp_layout

_FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "gate"),
    "up_proj": ("gate_up_proj", "up"),
}


def add_parameter(model: nn.Module, name: str, values: Tensor) -> None:
    """Adds a parameter under a name with dots, and the modules on the way to it."""
    *path, kind = name.split(".")
    for part in path:
        if part not in dict(model.named_children()):
            model.add_module(part, nn.Module())
        model = model.get_submodule(part)
    model.register_parameter(kind, nn.Parameter(values, requires_grad=False))


class FakeQwen2(nn.Module):
    """One rank's model, every parameter NaN; `moe` adds parameters that its loader does not know."""

    def __init__(self, model: DenseModel, rank: int, size: int, *, moe: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes, self.rank, self.num_ranks = model, rank, size
        _, shapes = tp_layout(model, rank, size)
        if moe:
            width = model.hidden
            shapes |= {f"model.layers.{i}.mlp.experts.weight": (2, width, width) for i in range(model.layers)}
        for name, shape in shapes.items():
            add_parameter(self, name, torch.full(shape, float("nan"), dtype=dtype))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Slices every tensor for this rank and copies it to its place."""
        loaded = set()
        for name, tensor in weights:
            *path, leaf, kind = name.split(".")
            fused, shard = _FUSED.get(leaf, (leaf, ""))
            target = ".".join([*path, fused, kind])
            self._load(self.get_parameter(target), tensor, leaf, shard)
            loaded.add(target)
        return loaded

    def _load(self, param: nn.Parameter, tensor: Tensor, leaf: str, shard: str) -> None:
        if leaf in ("embed_tokens", "lm_head"):
            first = min(self.rank * param.shape[0], tensor.shape[0])
            part = tensor[first : first + param.shape[0]]
            param[: part.shape[0]].data.copy_(part)
            param[part.shape[0] :].data.fill_(0)
        elif shard:
            at, rows, index = self._place(shard)
            param.data.narrow(0, at, rows).copy_(tensor.narrow(0, index * rows, rows))
        elif leaf in ("o_proj", "down_proj"):
            width = param.shape[1]
            param.data.copy_(tensor.narrow(1, self.rank * width, width))
        else:
            param.data.copy_(tensor)

    def _place(self, shard: str) -> tuple[int, int, int]:
        """Row in the fused parameter, rows, and which share of the tensor's rows."""
        model, size = self.sizes, self.num_ranks
        inter = model.intermediate // size
        query = model.heads // size * model.head_dim
        kv = max(1, model.kv_heads // size) * model.head_dim
        replicas = max(1, size // model.kv_heads)
        return {
            "gate": (0, inter, self.rank),
            "up": (inter, inter, self.rank),
            "q": (0, query, self.rank),
            "k": (query, kv, self.rank // replicas),
            "v": (query + kv, kv, self.rank // replicas),
        }[shard]


def fake_qwen2(
    model: DenseModel, rank: int, size: int, *, moe: bool = False, dtype: torch.dtype = torch.float32
) -> FakeQwen2:
    """A rank's model whose loading has been traced."""
    fake = FakeQwen2(model, rank, size, moe=moe, dtype=dtype)
    with traced(fake, model.shapes(), model_type="qwen2"):
        pass
    return fake
