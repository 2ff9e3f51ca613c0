"""Configurations of published models, and memory plans for them."""

from __future__ import annotations

import json
from typing import Any

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.engines.memory import GIB
from paceline.models.model_shape import ModelShape
from paceline.sizing.memory.memory_plan import MemoryPlan
from support.cli_configs import SEVEN

HALF = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""config.json of Qwen 2.5 0.5B, as far as sizes go."""

TEN_WITH_EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}

TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}

SEVEN_VL = SEVEN | {"model_type": "qwen2_5_vl", "vision_config": TOWER | {"out_hidden_size": 3584}}

THREE_VL = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "vision_config": TOWER | {"out_hidden_size": 2048},
}

EIGHT_VL = {
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "in_channels": 3,
        "patch_size": 16,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}

IMAGES = {
    "image_key": "images",
    "train_files": "x.jsonl",
    "max_prompt_length": 512,
    "max_response_length": 1024,
}


def shape_of(tree: dict[str, Any]) -> ModelShape:
    shape = ModelShape.of(tree)
    assert shape is not None
    return shape


def run_of(**sections: dict[str, Any]) -> RunConfig:
    tree: dict[str, Any] = {
        "data": {"train_files": "x.jsonl", "max_prompt_length": 512, "max_response_length": 1024},
        "model": {"path": "m", "dtype": "bfloat16"},
        "actor": {"ppo_mini_batch_size": 32, "ppo_max_token_len_per_gpu": 24576, "compile": False},
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 1},
        "learner": {"world_size": 4},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return parse(RunConfig, json.loads(json.dumps(tree)))


def plan_for(
    config: RunConfig, tree: dict[str, Any] = SEVEN, gib: int = 141, shared: bool = False
) -> MemoryPlan:
    gpus = tuple(range(config.learner.world_size))
    engines = gpus if shared else tuple(gpu + len(gpus) for gpu in gpus)
    totals = dict.fromkeys({*gpus, *engines}, gib * GIB)
    return MemoryPlan.of(config, shape_of(tree), learner_gpus=gpus, engine_gpus=engines, totals=totals)
