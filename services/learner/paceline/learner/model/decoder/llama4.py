"""Fits Llama 4's layers to packed rows, and sends a token only to the experts that its router chose.

attention -> chunks and temperatures by positions within a sequence, applied in `packed_attention`
router    -> returns (logits, weights, indices), as those of other families
experts   -> grouped products over the chosen ones; an expert's weight multiplies its input

transformers counts positions from the packed row's first token, and runs every expert on every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.learner.batch.types import PackedSequences


@dataclass(frozen=True, kw_only=True, slots=True)
class Temperature:
    """Multiplies the query at position p by 1 + scale log(1 + floor((p + 1) / floor)) (arXiv:2501.19399).

    Attributes:
        scale: `attn_scale` of config.json.
        floor: `floor_scale`, positions up to which a query stays as it is.
    """

    scale: float
    floor: float

    def scaled(self, queries: Tensor, packed: PackedSequences) -> Tensor:
        """Returns the queries (T, H, D) of all tokens, each scaled by its position in its sequence."""
        if packed.num_positions < self.floor:
            return queries
        steps = torch.floor((packed.positions.float() + 1.0) / self.floor)
        factors = torch.log1p(steps) * self.scale + 1.0
        return (queries * factors[:, None, None]).to(queries.dtype)


def use_packed_llama4(lm: nn.Module) -> None:
    """Changes the layers of a Llama 4 in place; other models stay as they are."""
    for module in lm.modules():
        layer: Any = module
        kind: Any = type(module)
        name = kind.__name__
        if name == "Llama4ForCausalLM":
            layer.base_model_prefix = "model"  # transformers names the body of the model with images
        elif name == "Llama4TextAttention":
            _use_positions(layer)
        elif name == "Llama4Router":
            layer.__class__ = _router_kind(kind)
        elif name == "Llama4TextExperts":
            layer.__class__ = _experts_kind(kind)
        elif name == "Llama4TextMoe":
            layer.__class__ = _moe_kind(kind)


def _use_positions(layer: Any) -> None:
    config = layer.config
    is_chunked = config.layer_types[layer.layer_idx] == "chunked_attention"
    layer.chunk_size = config.attention_chunk_size if is_chunked else None
    layer.temperature = None
    if config.attn_temperature_tuning and not layer.use_rope:
        layer.temperature = Temperature(scale=config.attn_scale, floor=config.floor_scale)
    layer.attn_temperature_tuning = False  # transformers' own code for it


# One class for all layers, so that they share compiled code.
@cache
def _router_kind(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden, self.weight)
        best, indices = torch.topk(logits, self.top_k, dim=-1)
        return logits, best.sigmoid(), indices

    name = kind.__name__.replace("Router", "TopKRouter")
    return type(name, (kind,), {"forward": forward, "is_sigmoid": True})


@cache
def _experts_kind(kind: type[nn.Module]) -> type[nn.Module]:
    from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

    attributes = {
        "forward": grouped_mm_experts_forward,
        "_apply_gate": _default_apply_gate,
        "has_gate": True,
        "has_bias": False,
        "is_transposed": True,
        "_is_expert_parallel": False,
    }
    return type(kind.__name__, (kind,), attributes)


@cache
def _moe_kind(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden.reshape(-1, self.hidden_dim)
        logits, weights, indices = self.router(hidden)  # one expert per token, see `require_known`
        routed = self.experts(hidden * weights, indices, torch.ones_like(weights))
        return self.shared_expert(hidden) + routed, logits

    return type(kind.__name__, (kind,), {"forward": forward})
