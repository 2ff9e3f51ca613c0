"""Recomputed layers with divided experts: tokens go where they went in the forward pass."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import ConfigError
from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.decoder.divided.expert_parallel import divide_experts, keep_routes, spread_experts
from paceline.learner.model.decoder.host_inputs import HostInputs
from paceline.models.facts import family_of
from support.expert_ranks import KINDS, experts_of

pytestmark = pytest.mark.torch

FIRST = [[0, 1], [0, 1], [3, 0]]
OTHERS = [[2, 3], [3, 1], [0, 2]]


class Layer(nn.Module):
    """Two modules of experts, to which tokens go by given choices, one per pass and module."""

    def __init__(self, mesh: DeviceMesh, *choices: list[list[int]]) -> None:
        super().__init__()
        self.experts = nn.ModuleList([experts_of("qwen3_moe"), experts_of("qwen3_moe")])
        self.choices = iter(choices)
        for experts in self.experts:
            spread_experts(experts, mesh)

    def forward(self, hidden: Tensor) -> Tensor:
        for experts in self.experts:
            hidden = hidden + experts(hidden, torch.tensor(next(self.choices)), torch.full((3, 2), 0.5))
        return hidden


def gradients(layer: Layer, compute: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    width = layer.experts[0].hidden_dim
    hidden = torch.randn(3, width, generator=generator).requires_grad_()
    (compute(hidden) * torch.randn(3, width, generator=generator)).sum().backward()
    of_experts = [parameter.grad.to_local() for parameter in layer.parameters()]  # type: ignore[union-attr, operator]
    assert hidden.grad is not None
    return [hidden.grad, *of_experts]


@pytest.mark.parametrize("kind", ["llama4_text", *KINDS])
def test_the_families_whose_experts_can_be_divided_are_known_to_the_plan(kind: str) -> None:
    holder = nn.ModuleList([experts_of(kind)])
    if family_of(kind).joins_experts:
        with pytest.raises(ConfigError, match="cannot be divided over ranks; set learner"):
            divide_experts(holder, 2)
    else:
        assert divide_experts(holder, 2) == [holder[0]]


@pytest.mark.parametrize("on_host", [False, True], ids=["on the device", "inputs in host memory"])
def test_a_recomputed_layer_repeats_the_routes_of_its_forward_pass(ranks: Ranks, on_host: bool) -> None:
    """Also if its routers would choose otherwise by then, since a rank sends zeros in the place of tokens."""
    mesh = DeviceMesh.from_group(ranks.world.process_group, "cpu")
    plain = Layer(mesh, FIRST, OTHERS)
    expected = gradients(plain, plain)
    layer: Any = Layer(mesh, FIRST, OTHERS, OTHERS, FIRST)
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    if on_host:
        HostInputs(num_tokens=3, limit=1 << 20).keep_for([layer])
    keep_routes(layer)
    with mock.patch.object(RankGroup, "route", autospec=True, side_effect=RankGroup.route) as route:
        own = gradients(layer, partial(layer._gradient_checkpointing_func, layer))
    assert route.call_count == 2
    assert all(map(torch.equal, own, expected))
    assert next(layer.choices, None) is None  # it was recomputed


def test_layers_that_are_not_recomputed_stay_as_they_are(ranks: Ranks) -> None:
    mesh = DeviceMesh.from_group(ranks.world.process_group, "cpu")
    layer = Layer(mesh, FIRST, OTHERS)
    keep_routes(layer)
    assert not hasattr(layer, "_gradient_checkpointing_func")
    with mock.patch.object(RankGroup, "route", autospec=True, side_effect=RankGroup.route) as route:
        gradients(layer, layer)
    assert route.call_count == 2
