"""The sizes that the memory plan reads from config.json, against the models that the learner builds of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config.model import LoraConfig
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import Precision, empty_lm, load_policy
from paceline.learner.model.lora import add_adapters, is_adapter
from paceline.learner.model.networks import body_of, decoder_layers
from paceline.models.model_shape import ModelShape
from support.architectures import tiny_config

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

KINDS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "olmoe",
    "gpt_oss",
    "minimax_m2",
    "llama4_text",
    "qwen3_vl_moe",
)
LENGTH = 16
"""What padded batches of short sequences have room for without a free place"""


def shape_of(config: Any) -> ModelShape:
    shape = ModelShape.of(config.to_dict())
    assert shape is not None
    return shape


def kept_per_token(config: Any, folder: Path, ranks: Ranks) -> float:
    """Numbers that the layers keep per token for the backward pass, in float32."""
    config.save_pretrained(folder)
    network = load_policy(folder, ranks, Precision(compute=torch.float32), random_seed=0)

    def kept(num_rows: int) -> int:
        storages: dict[int, tuple[torch.UntypedStorage, int]] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, (storage, storage.nbytes()))
            return tensor

        rng = np.random.default_rng(0)
        rows = [
            PackedRow(
                index=index,
                prompt_token_ids=rng.integers(2, 90, LENGTH - 2).astype(np.int32),
                response_token_ids=np.array([3, 4], np.int32),
                response_mask=np.ones(2, np.uint8),
                response_log_probs=np.zeros(2, np.float32),
            )
            for index in range(num_rows)
        ]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            network(pack(rows, torch.device("cpu")))
        return sum(num_bytes for _, num_bytes in storages.values())

    return (kept(32) - kept(16)) / (4 * 16 * LENGTH)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_that_train(kind: str) -> None:
    config = tiny_config(kind)
    trained = sum(p.numel() for p in empty_lm(config).parameters() if p.requires_grad)
    assert shape_of(config).num_parameters == trained


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", [("all",), ("o_proj", "down_proj")])
def test_adapters_are_those_that_the_learner_adds(kind: str, targets: tuple[str, ...]) -> None:
    config, lora = tiny_config(kind), LoraConfig(rank=2, targets=targets)
    lm = empty_lm(config)
    add_adapters(lm, decoder_layers(body_of(lm)), lora)
    added = sum(p.numel() for name, p in lm.named_parameters() if is_adapter(name))
    of_experts = sum(p.numel() for name, p in lm.named_parameters() if is_adapter(name) and p.ndim == 3)
    shape = shape_of(config)
    assert shape.num_adapters(targets, 2) == added
    assert of_experts == sum(part.num_adapters(2) for part in shape.matrices(targets) if part.is_expert)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {"intermediate_size": 512}),
        ("qwen3_moe", {"num_experts_per_tok": 4}),
        ("qwen3_moe", {"moe_intermediate_size": 128}),
        ("deepseek_v3", {"num_experts_per_tok": 4}),
        ("deepseek_v3", {"v_head_dim": 64}),
        ("deepseek_v3", {"qk_nope_head_dim": 64}),
        ("deepseek_v3", {"kv_lora_rank": 256}),
        ("deepseek_v3", {"n_shared_experts": 2}),
        ("gpt_oss", {"intermediate_size": 160}),
        ("llama4_text", {"intermediate_size": 160}),
    ],
)
def test_what_a_layer_keeps_grows_as_the_plan_says(
    kind: str, changes: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    """By the tensors that autograd saves, of two models that differ in one size."""
    measured, planned = [], []
    # Experts in all layers.
    sparse = {
        "deepseek_v3": {"first_k_dense_replace": 0},
        "llama4_text": {"interleave_moe_layer_step": 1},
    }.get(kind, {})
    for index, more in enumerate(({}, changes)):
        config = tiny_config(kind, **sparse, **more)
        measured.append(kept_per_token(config, tmp_path / str(index), ranks))
        planned.append(config.num_hidden_layers * shape_of(config).activations(compiled=False))
    assert measured[1] - measured[0] == pytest.approx(planned[1] - planned[0], rel=0.1)
