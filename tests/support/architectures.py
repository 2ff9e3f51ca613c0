"""Tiny configurations of the architectures that the learner trains, and of some that it refuses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from support.source import ROOT

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.0,
}

_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "tie_word_embeddings": False,
}

_INTERLEAVED: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 1.0,
    },
    "tie_word_embeddings": False,
}

_HYBRID_WITH_IMAGES: dict[str, Any] = {**_HYBRID, **_INTERLEAVED}

_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "tie_word_embeddings": False,
    },
    "qwen3_5": _HYBRID_WITH_IMAGES,
    "qwen3_5_moe": _HYBRID_WITH_IMAGES,
    "qwen3_vl": _INTERLEAVED,
    "qwen3_vl_moe": _INTERLEAVED | {"shared_expert_intermediate_size": 0, "moe_intermediate_size": 24},
}
"""Of the language model inside one that takes images, beside `_SIZES`."""

_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "initializer_range": 0.2,
}

_IMAGE_TOKENS: dict[str, Any] = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "tie_word_embeddings": False,
}

_VISION: dict[str, dict[str, Any]] = {
    "qwen3_5": _TOWER,
    "qwen3_5_moe": _TOWER,
    "qwen3_vl": _TOWER | {"deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": _TOWER | {"deepstack_visual_indexes": [0, 1]},
    "qwen2_5_vl": {
        "depth": 2,
        "fullatt_block_indexes": [1],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "initializer_range": 0.2,
    },
}

_OWN: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.25},
    "cohere2": {
        "logit_scale": 0.25,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma4_text": {
        "num_hidden_layers": 5,
        "layer_types": [
            *("sliding_attention", "full_attention"),
            *("sliding_attention", "sliding_attention", "full_attention"),
        ],
        "num_kv_shared_layers": 3,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 3.0,
        "num_experts": None,
    },
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "olmo3": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "phi3": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1},
    "smollm3": {"no_rope_layers": [1, 1, 0], "layer_types": ["full_attention"] * 3},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1},
    "qwen2": {
        "use_sliding_window": True,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "qwen2_moe": {"layer_types": ["full_attention"] * 3},
    "qwen3": {"layer_types": ["full_attention"] * 3},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "glm4_moe": {
        "head_dim": 8,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.0,
    },
    "exaone4": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "expand": 2},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
    },
    "qwen2_5_vl": _IMAGE_TOKENS,
    "qwen3_5": _IMAGE_TOKENS,
    "qwen3_5_moe": _IMAGE_TOKENS,
    "qwen3_vl": _IMAGE_TOKENS,
    "qwen3_vl_moe": _IMAGE_TOKENS,
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "llama4_text": {
        "num_hidden_layers": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 32,
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "minimax_m2": {"rotary_dim": 4},
}


def tiny_config(model_type: str, /, **changes: Any) -> Any:
    """A configuration of three layers, with what is special about the architecture switched on.

    `changes` are the language model's where there is a vision tower, too.
    """
    from transformers import AutoConfig

    kind = type(AutoConfig.for_model(model_type))
    known = {*inspect.signature(kind).parameters, *kind.attribute_map}
    if model_type in _VISION:
        text = {**_SIZES, **_TEXT[model_type], **changes}
        vision = {**_VISION[model_type], "out_hidden_size": text["hidden_size"]}
        return kind(text_config=text, vision_config=vision, **_OWN[model_type])
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    return kind(**{**sizes, **_OWN.get(model_type, {}), **changes})


def features(model_type: str) -> str:
    """What is special about an architecture, read from its tiny model: what the learner must not miss."""
    import torch

    from paceline.learner.model.architectures import logit_scale, logit_softcap, model_class
    from paceline.models.facts import MODELS_WITH_IMAGES
    from paceline.weights.corrections import BUFFER, FACTOR

    config = tiny_config(model_type)
    with torch.device("meta"):
        lm = model_class(config).from_config(config)
    windows = getattr(config.get_text_config(), "layer_types", None) or ()
    special = {
        "logit scale": logit_scale(config) != 1.0,
        "logit softcap": logit_softcap(config) is not None,
        "attention softcap": getattr(config, "attn_logit_softcapping", None) is not None,
        "factors of layers": any(name.endswith(FACTOR) for name, _ in lm.named_buffers()),
        "shared keys and values": bool(getattr(config, "num_kv_shared_layers", 0)),
        "heads of two sizes": getattr(config, "is_heterogeneous", False),
        "embeddings per layer": bool(getattr(config, "hidden_size_per_layer_input", 0)),
        "head with bias": lm.get_output_embeddings().bias is not None,
        "tied head": bool(config.tie_word_embeddings),
        "sliding windows": "sliding_attention" in windows or model_type in ("mistral", "mixtral", "phi3"),
        "attention in chunks": "chunked_attention" in windows,
        "layers without rotary embedding": 0 in (getattr(config, "no_rope_layers", None) or ()),
        "attention sinks": any(name.endswith(".sinks") for name, _ in lm.named_parameters()),
        "fused projections": any(
            name.endswith(("qkv_proj.weight", "mlp.gate_up_proj.weight")) for name, _ in lm.named_parameters()
        ),
        "latent attention": bool(getattr(config, "kv_lora_rank", None)),
        "correction of scores": any(name.endswith(BUFFER) for name, _ in lm.named_buffers()),
        "layers with a state": "linear_attention" in windows,
        "experts": any(name.endswith("experts.gate_up_proj") for name, _ in lm.named_parameters()),
        "images": model_type in MODELS_WITH_IMAGES,
        "dropout set to 0": any("drop" in name and value for name, value in vars(config).items()),
    }
    return ", ".join(name for name, holds in special.items() if holds)


def table(pushes: Mapping[str, str]) -> str:
    """The table of docs/models.md; `pushes` says how each kind is pushed into vLLM."""
    from paceline.models.facts import ARCHITECTURES

    rows = sorted((name, kind, features(kind), pushes.get(kind, "?")) for kind, name in ARCHITECTURES.items())
    head = "| family | `model_type` | what its own form has beyond the plain decoder | push |\n"
    head += "|---|---|---|---|\n"
    return head + "".join(
        f"| {name} | `{kind}` | {special} | {push} |\n" for name, kind, special, push in rows
    )


def documented_pushes() -> dict[str, str]:
    """The last column of the table in docs/models.md, by `model_type`."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| [^|]* \| (direct|general) \|$", page, flags=re.MULTILINE)
    return dict(rows)


if __name__ == "__main__":
    print(table(documented_pushes()), end="")
