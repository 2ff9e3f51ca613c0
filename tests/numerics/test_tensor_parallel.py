"""Which matrices of a layer ranks divide, and what each rank keeps of them; without other ranks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.decoder.divided.tensor_parallel import divide_matrices, own_key_heads

pytestmark = pytest.mark.torch


def attention(heads: int = 4, keys: int = 2, head_dim: int = 8, **parts: Any) -> nn.Module:
    """An attention module of width 32; `parts` are set on it."""
    module = nn.Module()
    sizes = {"q_proj": (32, heads), "k_proj": (32, keys), "v_proj": (32, keys)}
    for name, (inputs, number) in sizes.items():
        module.add_module(name, nn.Linear(inputs, number * head_dim))
    module.add_module("o_proj", nn.Linear(heads * head_dim, 32))
    module.head_dim = head_dim  # type: ignore[assignment]
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def mlp(width: int = 48) -> nn.Module:
    module = nn.Module()
    for name in ("gate_proj", "up_proj"):
        module.add_module(name, nn.Linear(32, width, bias=False))
    module.add_module("down_proj", nn.Linear(width, 32))
    return module


def layer(**parts: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def shapes(divided: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in divided.named_parameters()}


def test_a_rank_keeps_its_columns_and_rows() -> None:
    divided = layer(self_attn=attention(), mlp=mlp())
    divided.mlp.up_proj.requires_grad_(False)
    parts = divide_matrices(divided, 2)
    assert [len(part.matrices) for part in parts] == [4, 3]
    assert [part.rows for part in parts] == [divided.self_attn.o_proj, divided.mlp.down_proj]
    assert shapes(divided.self_attn) == {
        "q_proj.weight": (16, 32),
        "q_proj.bias": (16,),
        "k_proj.weight": (8, 32),
        "k_proj.bias": (8,),
        "v_proj.weight": (8, 32),
        "v_proj.bias": (8,),
        "o_proj.weight": (32, 16),
        "o_proj.bias": (32,),  # added once, to what the ranks have added up
    }
    assert shapes(divided.mlp) == {
        "gate_proj.weight": (24, 32),
        "up_proj.weight": (24, 32),
        "down_proj.weight": (32, 24),
        "down_proj.bias": (32,),
    }
    trained = {name for name, parameter in divided.mlp.named_parameters() if parameter.requires_grad}
    assert trained == {"gate_proj.weight", "down_proj.weight", "down_proj.bias"}


def test_keys_of_fewer_heads_than_ranks_stay_whole() -> None:
    few = layer(self_attn=attention(keys=2))
    [part] = divide_matrices(few, 4)
    assert part.columns == (few.self_attn.q_proj,)
    assert shapes(few.self_attn)["k_proj.weight"] == (16, 32)


@pytest.mark.parametrize(
    "parts",
    [
        {"self_attn": attention(heads=3)},
        {"self_attn": attention(q_norm=nn.LayerNorm(32))},
        {"self_attn": attention(chunk_size=8)},
        {"self_attn": attention(temperature=None)},
        {"mlp": mlp(width=47)},
        {"experts": nn.ModuleList([mlp()])},
        {"norm": nn.LayerNorm(32)},
    ],
    ids=["heads", "norms over all heads", "chunks", "temperature", "width", "experts", "nothing"],
)
def test_what_cannot_be_divided_stays_whole(parts: dict[str, nn.Module]) -> None:
    odd = layer(**parts)
    before = shapes(odd)
    with pytest.raises(
        ConfigError, match=r"Module has no matrices .* over 2 ranks; set learner\.tensor_para"
    ):
        divide_matrices(odd, 2)
    assert shapes(odd) == before
    both = layer(**parts, dense=mlp())
    [part] = divide_matrices(both, 2)
    assert part.module is both.dense
    assert {name: shape for name, shape in shapes(both).items() if not name.startswith("dense")} == before


def test_norms_of_single_heads_do_not_matter() -> None:
    [part] = divide_matrices(layer(self_attn=attention(q_norm=nn.LayerNorm(8), k_norm=nn.Identity())), 2)
    assert len(part.columns) == 3


@pytest.mark.parametrize(
    ("num_keys", "size", "expected"), [(2, 4, [0, 0, 1, 1]), (1, 2, [0, 0]), (3, 2, [[0, 0, 1], [1, 2, 2]])]
)
def test_each_rank_selects_the_keys_of_its_queries(
    num_keys: int, size: int, expected: list[Any], ranks: Ranks
) -> None:
    keys = torch.arange(num_keys).view(1, -1, 1).expand(5, -1, 2)
    for rank in range(size):
        group = RankGroup(rank=rank, size=size, process_group=ranks.world.process_group)
        own = own_key_heads(keys, group)[0, :, 0].tolist()
        assert own == (expected[rank] if isinstance(expected[rank], list) else [expected[rank]])
