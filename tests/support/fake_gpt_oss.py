"""A stand-in for a rank of vLLM 0.24's gpt-oss on a GPU: parameters, and a loader that copies as its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paceline.rollout.engines.weights.trace import traced
from support.fake_vllm import add_parameter

HIDDEN, INTERMEDIATE, NUM_EXPERTS = 6, 4, 3
EXPERTS = "model.layers.0.mlp.experts."
ROUTER = "model.layers.0.mlp.gate.weight"
_OWN = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}


class LearnersTensors:
    """The learner's tensors: experts that multiply from the right, and a router's gate."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            EXPERTS + "gate_up_proj": (NUM_EXPERTS, HIDDEN, 2 * INTERMEDIATE),
            EXPERTS + "gate_up_proj_bias": (NUM_EXPERTS, 2 * INTERMEDIATE),
            EXPERTS + "down_proj": (NUM_EXPERTS, INTERMEDIATE, HIDDEN),
            EXPERTS + "down_proj_bias": (NUM_EXPERTS, HIDDEN),
            ROUTER: (NUM_EXPERTS, HIDDEN),
        }


class FakeGptOss(nn.Module):
    """Every parameter is NaN, in bfloat16; but the gate is float32, as vLLM keeps those of GLM-4.5."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.width = rank, INTERMEDIATE // size
        own = {
            EXPERTS + "routed_experts.w13_weight": (NUM_EXPERTS, 2 * self.width, HIDDEN),
            EXPERTS + "routed_experts.w13_bias": (NUM_EXPERTS, 2 * self.width),
            EXPERTS + "routed_experts.w2_weight": (NUM_EXPERTS, HIDDEN, self.width),
            EXPERTS + "routed_experts.w2_bias": (NUM_EXPERTS, HIDDEN),
            ROUTER: (NUM_EXPERTS, HIDDEN),
        }
        for name, shape in own.items():
            kind = torch.float32 if name == ROUTER else torch.bfloat16
            add_parameter(self, name, torch.full(shape, float("nan"), dtype=kind))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copies whole stacks, transposed; the first rank alone adds the bias of what all ranks sum up."""
        params, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            prefix, _, kind = name.rpartition(".")
            target = f"{prefix}.{_OWN.get(kind, kind)}"
            param, at = params[target], slice(self.rank * self.width, (self.rank + 1) * self.width)
            pairs = slice(2 * at.start, 2 * at.stop)
            if kind == "gate_up_proj":
                param.copy_(weight[:, :, pairs].permute(0, 2, 1).contiguous())
            elif kind == "down_proj":
                param.copy_(weight[:, at, :].permute(0, 2, 1).contiguous())
            elif kind == "gate_up_proj_bias":
                param.copy_(weight[:, pairs])
            else:
                if kind == "down_proj_bias" and self.rank:
                    weight.zero_()
                param.data.copy_(weight)
            loaded.add(target)
        return loaded


def fake_gpt_oss(rank: int, size: int) -> FakeGptOss:
    """A rank's model whose loading was traced."""
    model = FakeGptOss(rank, size)
    with traced(model, LearnersTensors().shapes(), model_type="gpt_oss"):
        pass
    return model
