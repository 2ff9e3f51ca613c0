"""Layers of experts that are divided over ranks, against the same layers on one rank."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.model.architectures import stacks_of
from paceline.learner.model.decoder.divided.expert_parallel import divide_experts, spread_experts
from support.architectures import tiny_config
from support.expert_models import COMMON_KINDS

KINDS = (*COMMON_KINDS, "qwen3_next")
NUM_CHOSEN = 2


def differences(group: RankGroup) -> dict[str, float]:
    """By family, for tokens of all experts and of few ranks': the largest difference from one rank."""
    mesh = DeviceMesh.from_group(group.process_group, "cpu")
    by_case = {}
    for kind in KINDS:
        experts = experts_of(kind)
        for case in ("all", "few"):
            by_case[f"{kind}, {case}"] = difference(experts, case == "all", group, mesh)
    return by_case


def experts_of(kind: str) -> Any:
    """The experts of a layer, drawn alike on each rank."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(kind))
    experts = next(module for module in model.modules() if stacks_of(module)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return experts


def difference(undivided: Any, has_all: bool, group: RankGroup, mesh: DeviceMesh) -> float:
    """Of results and gradients; as a share of the largest number."""
    num_experts, generator = undivided.num_experts, torch.Generator().manual_seed(1)
    # If only the first ranks' experts are chosen, the others compute none.
    most = num_experts if has_all else max(NUM_CHOSEN, num_experts // group.size)
    width = getattr(undivided, "hidden_dim", None) or undivided.hidden_size
    tokens = [
        (
            torch.randn(3 + 2 * rank, width, generator=generator),
            torch.rand(3 + 2 * rank, most, generator=generator).topk(NUM_CHOSEN).indices,
            torch.rand(3 + 2 * rank, NUM_CHOSEN, generator=generator),
            torch.randn(3 + 2 * rank, width, generator=generator),
        )
        for rank in range(group.size)
    ]
    divided = deepcopy(undivided)
    layer = nn.ModuleList([divided]).to("meta")
    [divided] = divide_experts(layer, group.size)
    own = slice(group.rank * divided.num_experts, (group.rank + 1) * divided.num_experts)
    divided.to_empty(device="cpu")
    for name, parameter in divided.named_parameters():
        parameter.data.copy_(undivided.get_parameter(name)[own])
    spread_experts(divided, mesh)
    parameters = dict(divided.named_parameters())
    results = [computed(undivided, *inputs) for inputs in tokens]
    ours = computed(divided, *tokens[group.rank])
    pairs = list(zip(ours, results[group.rank], strict=True))
    pairs += [
        (parameters[name].grad.to_local(), parameter.grad[own])
        for name, parameter in undivided.named_parameters()
    ]
    undivided.zero_grad()
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in pairs)


def computed(
    experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Results, and the gradients of tokens and weights; parameters add up theirs."""
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    result = experts(hidden, indices, weights)
    (result * gradient).sum().backward()
    assert hidden.grad is not None
    assert weights.grad is not None
    return result.detach(), hidden.grad, weights.grad
