"""Shapes of models with random weights for benchmarks, by their usual names."""

from __future__ import annotations

from typing import Any

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def shape(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, *, tied: bool
) -> dict[str, Any]:
    """Returns a Qwen2 configuration."""
    return QWEN | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


MIXTURE: dict[str, Any] = shape(128, 512, 2, 4, 2, 1024, tied=False) | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
"""A small Mixture of Experts"""

LARGE_MIXTURE: dict[str, Any] = shape(2048, 6144, 16, 32, 4, 151936, tied=False) | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
"""Qwen3-30B-A3B with 16 of its 48 layers: 10.6 billion parameters, 1.5 billion active per token"""

WHOLE_MIXTURE = LARGE_MIXTURE | {"num_hidden_layers": 48}
"""Qwen3-30B-A3B: 30.5 billion parameters, 3.3 billion active per token"""

LATENT: dict[str, Any] = shape(1024, 2048, 4, 8, 8, 1024, tied=False) | {
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
"""A small model with DeepSeek's sizes of latent attention, one dense layer and three layers with experts"""

DEEPSEEK_V2 = LATENT | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
}

DEEPSEEK_V3 = LATENT | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}

SMALL_LLAMA: dict[str, Any] = shape(576, 1536, 30, 9, 3, 49152, tied=True) | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}
"""SmolLM2-135M's"""

SHAPES = {
    "tiny": shape(128, 512, 4, 4, 2, 1024, tied=True),
    "tiny-moe": MIXTURE,
    "10B-moe": LARGE_MIXTURE,
    "30B-moe": WHOLE_MIXTURE,
    "small-v2": DEEPSEEK_V2,
    "small-v3": DEEPSEEK_V3,
    "135M": SMALL_LLAMA,
    "0.5B": shape(896, 4864, 24, 14, 2, 151936, tied=True),
    "1.5B": shape(1536, 8960, 28, 12, 2, 151936, tied=True),
    "3B": shape(2048, 11008, 36, 16, 2, 151936, tied=True),
    "7B": shape(3584, 18944, 28, 28, 4, 152064, tied=False),
    "32B": shape(5120, 27648, 64, 40, 8, 152064, tied=False),
}
