"""Parameters of models: counted by hand, and as published."""

from __future__ import annotations

from paceline.engines.memory import EngineMemory
from paceline.models.model_shape import ModelShape
from support.cli_configs import SEVEN
from support.memory_plans import EIGHT_VL, HALF, SEVEN_VL, THREE_VL, run_of, shape_of


def test_parameters_are_those_of_the_published_models() -> None:
    assert shape_of(SEVEN).num_parameters == 7_615_616_512
    assert shape_of(HALF).num_parameters == 494_032_768
    # Eight experts of 3 x 8 x 4, a router of 8 x 8, two norms; q and o 8 x 8, k and v 8 x 4.
    moe = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    moe |= {"num_experts": 8, "moe_intermediate_size": 4, "intermediate_size": 99, "vocab_size": 10}
    assert shape_of(moe).layer == 8 * 96 + 64 + 16 + 2 * 64 + 2 * 32
    assert ModelShape.of({"model_type": "gpt2", "n_embd": 8}) is None
    assert ModelShape.of(SEVEN_VL | {"model_type": "llava"}) is None
    seven, three = shape_of(SEVEN_VL), shape_of(THREE_VL)
    assert seven.num_parameters == 7_615_616_512
    assert (seven.num_parameters + seven.num_in_tower, seven.num_in_tower) == (8_292_166_656, 676_550_144)
    assert three.num_parameters + three.num_in_tower == 3_754_622_976
    eight = shape_of(EIGHT_VL)
    assert eight.num_parameters + eight.num_in_tower == 8_767_123_696
    # As transformers writes them since its version 5.
    text = {
        name: value
        for name, value in THREE_VL.items()
        if name not in ("tie_word_embeddings", "vision_config")
    }
    outer = {name: value for name, value in THREE_VL.items() if name not in text}
    nested = outer | {"model_type": "qwen2_5_vl", "text_config": text | {"model_type": "qwen2_5_vl_text"}}
    assert shape_of(nested) == three
    assert ModelShape.of(SEVEN | {"model_type": "deepseek_v2", "kv_lora_rank": 512}) is None  # no more sizes


def test_deepseek_v3_and_v2_lite_by_hand_and_as_published() -> None:
    v3 = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "vocab_size": 129280}
    v3 |= {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
    }
    v3 |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    v3 |= {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1}
    v3 |= {"num_experts_per_tok": 8, "first_k_dense_replace": 3}
    attention = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    shape = shape_of(v3)
    assert shape.layer == attention + 3 * 7168 * 2048 * 257 + 7168 * 256 + 2 * 7168
    assert shape.num_parameters == 671_026_404_352  # without the routers' corrections, which do not train
    # The paper (arXiv:2405.04434): (512 + 64) numbers per token and layer, on each GPU.
    run = run_of(rollout={"tensor_model_parallel_size": 8})
    engine = EngineMemory.of(run, shape)
    assert engine.bytes_per_token == 61 * 576 * 2
    absorbed = 61 * 512 * 128 * 256  # vLLM's own form of kv_b_proj, beside it
    assert engine.weights == -(-2 * (shape.num_parameters + absorbed) // 8)
    # Eight experts and the shared one, two copies of the states for each; queries, keys, values, latents.
    experts, heads = 4 * 9 * 2048 + 2 * 8 * 7168, 2 * 128 * (192 + 128) + 3 * (1536 + 512)
    assert shape.activations(compiled=False) == experts + 10 * 7168 + heads

    lite = v3 | {"hidden_size": 2048, "intermediate_size": 10944, "vocab_size": 102400, "q_lora_rank": None}
    lite |= {"num_hidden_layers": 27, "num_attention_heads": 16, "moe_intermediate_size": 1408}
    lite |= {"n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 1}
    assert shape_of(lite).num_parameters == 15_706_484_224
    adapted = shape_of(lite).num_adapted(["q_proj", "kv_b_proj"])
    assert adapted == 27 * (2048 * 16 * 192 + 512 * 16 * 256)
