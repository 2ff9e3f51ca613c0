"""The memory plan of a model with a vision tower, against what torch counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from paceline.core.policy import TrainedVision
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.distributed.shards import own_part
from paceline.learner.model.image_states import train_tower, vision_tower
from paceline.learner.model.loading import as_fsdp
from paceline.learner.model.networks import body_of
from paceline.models.model_shape import ModelShape
from paceline.models.tower_shape import TowerShape
from paceline.sizing.memory.learner_memory import LearnerMemory
from support.image_ranks import build, take_image_step
from support.image_rows import write_tiny_vl
from support.live_bytes import LiveBytes

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]


@pytest.mark.parametrize(
    "trained",
    [{}, {"lora": {"rank": 2}}, {"vision": {"train": "projector"}}, {"vision": {"train": "all"}}],
    ids=["language model", "adapters", "projector", "tower"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_the_memory_plan_counts_what_the_learner_keeps(
    tmp_path: Path, ranks: Ranks, kind: str, dtype: str, trained: dict[str, Any]
) -> None:
    if "vision" in trained and dtype == "bfloat16":
        pytest.skip("as in float32: weights and averages of what trains do not depend on the type")
    folder = write_tiny_vl(tmp_path / "model", kind=kind, num_experts=0, num_local_experts=0)
    learner = build(ranks, folder, model={"path": str(folder), "dtype": dtype, **trained})
    take_image_step(learner, 1)
    shape = ModelShape.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    assert shape is not None
    plan, network = LearnerMemory.of(learner.config, shape), learner.actor.network
    as_fsdp(network).reshard()
    parameters = list(network.parameters())
    assert plan.resident["weights"] == sum(own_part(parameter)[0].nbytes for parameter in parameters)
    averages = [
        tensor for name, tensor in learner.actor.optimizer.state().items() if not name.endswith("step")
    ]
    assert plan.resident["optimizer"] == sum(own_part(tensor)[0].nbytes for tensor in averages)
    tower = vision_tower(body_of(network.lm))
    assert tower is not None
    assert shape.num_in_tower == sum(parameter.numel() for parameter in tower.parameters())


TOWERS = pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen2_5_vl", {"intermediate_size": 684, "fullatt_block_indexes": [1]}),
        ("qwen3_vl", {"intermediate_size": 956, "depth": 4, "deepstack_visual_indexes": [0, 1, 2]}),
    ],
)


def large_tower(kind: str, sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    """With sizes in the proportion of the published models'."""
    common = {"depth": 2, "hidden_size": 256, "out_hidden_size": 512, "num_heads": 4}
    config: Any = AutoConfig.for_model(kind, vision_config=common | sizes).vision_config
    return AutoModel.from_config(config, dtype=dtype)


def patches(config: Any, height: int) -> dict[str, Tensor]:
    """An image of 16 patches in width."""
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return {
        "hidden_states": torch.zeros(height * 16, width),
        "grid_thw": torch.tensor([[1, height, 16]]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@TOWERS
@pytest.mark.parametrize("part", ["projector", "all"])
def test_the_memory_plan_bounds_what_a_trained_tower_keeps(
    kind: str, sizes: dict[str, Any], dtype: torch.dtype, part: TrainedVision
) -> None:
    body = torch.nn.Module()
    body.visual = tower = large_tower(kind, sizes, dtype)
    train_tower(body, part)

    def kept(height: int) -> int:
        image = patches(tower.config, height)
        with LiveBytes() as live:
            output = tower(**image)
            states = (output.pooler_output, *getattr(output, "deepstack_features", ()))
            del output
        return live.now - sum(state.nbytes for state in states)

    measured = (kept(48) - kept(16)) / (32 * 16)
    assert measured < TowerShape.of(tower.config.to_dict()).kept(1, dtype.itemsize, part) < 2 * measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@TOWERS
def test_the_memory_plan_bounds_the_towers_activations(
    kind: str, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    """By torch's own count."""
    tower = large_tower(kind, sizes, dtype)

    @torch.no_grad()
    def most(height: int) -> int:
        image = patches(tower.config, height)
        with LiveBytes() as live:
            tower(**image)
        return live.most

    # Of two sizes, since some memory does not depend on the number of patches.
    measured = (most(48) - most(16)) / (32 * 16)
    width = patches(tower.config, 2)["hidden_states"].shape[1]
    bound = TowerShape.of(tower.config.to_dict()).activations(1, dtype.itemsize) - 4 * width
    assert measured < bound < 2.5 * measured
