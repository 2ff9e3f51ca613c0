"""The layout rules against layouts that were written down by hand."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import ModelError
from paceline.rollout.engines.vllm.layout import describe_model, split_parameters
from support.fake_vllm import fake_qwen2
from support.weight_layouts import DenseModel, tp_layout

pytestmark = pytest.mark.torch


def dense(**changes: object) -> DenseModel:
    sizes = {
        "vocab_size": 199,
        "hidden": 12,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 3,
        "intermediate": 16,
        "layers": 2,
        "tied": False,
        "bias": True,
    }
    return DenseModel(**{**sizes, **changes})


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_rules_give_the_expected_slices(size: int, kv_heads: int, tied: bool) -> None:
    model = dense(kv_heads=kv_heads, tied=tied)
    for rank in range(size):
        layout = describe_model(fake_qwen2(model, rank, size))
        expected, _ = tp_layout(model, rank, size)
        assert not layout.full_tensors
        assert layout.dtype == "float32"
        key = lambda part: (part.param, part.offset)  # noqa: E731
        assert sorted(layout.slices, key=key) == sorted(expected.slices, key=key)


def test_an_unknown_layer_sends_the_model_the_general_way() -> None:
    fake = fake_qwen2(dense(), 0, 2, moe=True)
    _, uncovered = split_parameters(fake)
    assert uncovered == ["model.layers.0.mlp.experts.weight", "model.layers.1.mlp.experts.weight"]
    layout = describe_model(fake)
    assert layout.full_tensors
    assert layout.slices == ()


def test_a_subclass_of_a_known_layer_is_unknown() -> None:
    fake = fake_qwen2(dense(), 0, 1)
    proj = fake.model.layers[0].self_attn.qkv_proj
    proj.__class__ = type("GatedQKVParallelLinear", (type(proj),), {})
    assert split_parameters(fake)[1] == [
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.qkv_proj.bias",
    ]


def test_a_repacked_weight_is_not_mistaken_for_a_live_one() -> None:
    fake = fake_qwen2(dense(), 0, 1)
    fake.model.layers[0].mlp.down_proj.weight.data = torch.empty(0)
    assert split_parameters(fake)[1] == ["model.layers.0.mlp.down_proj.weight"]


def test_mixed_types_are_refused() -> None:
    fake = fake_qwen2(dense(), 0, 1)
    fake.model.norm.weight.data = fake.model.norm.weight.data.to(torch.bfloat16)
    with pytest.raises(ModelError, match=r"bfloat16.*all have one type"):
        describe_model(fake)


def test_rules_that_name_tensors_the_learner_does_not_have_give_way_to_the_general_path() -> None:
    """GLM-4's learner has gate and up fused in one tensor; vLLM's module says they are two."""
    model = fake_qwen2(dense(), 0, 1)
    names = {part.name for part in split_parameters(model)[0]}
    assert not describe_model(model, learner_names=names).full_tensors
    fused = {name.replace("gate_proj", "gate_up_proj") for name in names if "up_proj" not in name}
    assert describe_model(model, learner_names=fused).full_tensors
