"""The memory plan: parameters counted by hand, measured peaks, and the settings that it asks to change."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.cards import CARDS
from paceline.core.errors import ConfigError
from paceline.engines.memory import CONTEXT, GIB, EngineMemory
from paceline.engines.vllm import VLLM
from paceline.models.model_shape import ModelShape
from paceline.sizing.memory.learner_memory import LearnerMemory, longest_row
from paceline.sizing.memory.memory_plan import MemoryPlan
from support.cli_configs import SEVEN
from support.timed_steps import KEPT, ON_HOST, SHAPES

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


def test_heads_are_shared_by_an_engines_gpus_and_a_latent_vector_is_not() -> None:
    run = run_of(rollout={"tensor_model_parallel_size": 2})
    assert EngineMemory.of(run, shape_of(SEVEN)).bytes_per_token == 28 * 2 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("compiled", "recompute", "keep_gathered", "reduce_dtype", "sequences", "measured_gib"),
    [
        (False, "full", False, "float32", 16, 65.8),
        (False, "none", False, "float32", 8, 132.0),
        (True, "full", False, "float32", 16, 63.2),
        (True, "none", False, "float32", 8, 111.0),
        (True, "none", True, "float32", 8, 123.0),
        (True, 0.5, False, "float32", 8, 83.0),
        (True, 0.5, False, "float32", 16, 112.0),
        (True, 0.7, True, "bfloat16", 8, 88.0),
    ],
)
def test_the_peaks_of_7b_on_four_gpus_are_those_measured(
    compiled: bool,
    recompute: float | str,
    keep_gathered: bool,
    reduce_dtype: str,
    sequences: int,
    measured_gib: float,
) -> None:
    """Torch's allocated memory, so without the context."""
    num_tokens = sequences * 1536
    actor = {
        "ppo_max_token_len_per_gpu": num_tokens,
        "compile": compiled,
        "reduce_dtype": reduce_dtype,
        "memory": {"recompute": recompute, "keep_gathered": keep_gathered},
    }
    config = run_of(actor=actor)
    memory = LearnerMemory.of(config, shape_of(SEVEN))
    assert memory.num_tokens == num_tokens
    assert (sum(memory.update.values()) - CONTEXT) / GIB == pytest.approx(measured_gib, rel=0.05)


@pytest.mark.parametrize(
    ("tree", "num_tokens", "keep_gathered", "offload", "measured_gib"),
    [
        (SEVEN, 8704, True, True, 62.8),
        (SEVEN, 8704, True, False, 119.8),
        (TEN_WITH_EXPERTS, 8192, False, True, 84.5),
    ],
    ids=["7B, averages in host memory", "7B", "10B with experts, averages in host memory"],
)
def test_the_peaks_of_one_gpu_are_those_measured(
    tree: dict[str, Any], num_tokens: int, keep_gathered: bool, offload: bool, measured_gib: float
) -> None:
    """Torch's allocated memory; where averages visit, the optimizer step has the peak."""
    memory = {"recompute": "full", "keep_gathered": keep_gathered, "accumulate": True, "offload": offload}
    actor = {"ppo_max_token_len_per_gpu": num_tokens, "reduce_dtype": "bfloat16", "memory": memory}
    config = run_of(actor=actor, learner={"world_size": 1}, rollout={"n": 8})
    plan = LearnerMemory.of(config, shape_of(tree))
    assert (sum(plan.update.values()) - CONTEXT) / GIB == pytest.approx(measured_gib, rel=0.02)
    assert ("visiting" in plan.update) == offload


@pytest.mark.parametrize(
    ("name", "memory", "reduce_dtype", "measured_gib"),
    [
        ("3B", KEPT, "float32", 65.0),
        ("3B", KEPT | {"recompute": 0.9}, "bfloat16", 51.6),
        ("7B", ON_HOST | {"recompute": 0.9}, "bfloat16", 61.1),
    ],
)
def test_the_peaks_of_whole_runs_on_two_gpus_are_those_measured(
    name: str, memory: dict[str, Any], reduce_dtype: str, measured_gib: float
) -> None:
    """Two H100s of 80 GB in turns, compiled layers, logits kept; the plan errs towards more."""
    actor = {
        "compile": True,
        "reduce_dtype": reduce_dtype,
        "memory": memory,
        "ppo_max_token_len_per_gpu": 8704,
    }
    config = run_of(actor=actor, learner={"world_size": 2}, rollout={"n": 8})
    plan = LearnerMemory.of(config, shape_of(SHAPES[name]), [CARDS["H100"].num_bytes])
    planned = (sum(plan.update.values()) - CONTEXT) / GIB
    assert 0.99 * measured_gib < planned < 1.08 * measured_gib


def test_logits_are_in_the_plan_where_they_are_kept() -> None:
    """As measured on four H200s: 90.0 GiB of tensors."""
    memory = {"recompute": "none", "keep_gathered": True, "accumulate": True}
    actor = {"compile": True, "reduce_dtype": "bfloat16", "memory": memory}

    def most(num_tokens: int, totals: Sequence[int]) -> int:
        config = run_of(actor={**actor, "ppo_max_token_len_per_gpu": num_tokens}, rollout={"n": 8})
        return LearnerMemory.of(config, shape_of(SEVEN), totals).most

    h200 = 143_771 << 20
    assert (most(8704, [h200]) - CONTEXT) / GIB == pytest.approx(90.0, rel=0.05)
    assert most(8704, [h200, h200 // 2]) - most(8704, []) == 8704 * 152064 * 2
    assert most(17408, [h200]) == most(17408, [])  # they are made again
    assert most(8704, [h200 // 2]) == most(8704, [])


def test_0_5b_by_hand_with_critic_and_reference() -> None:
    config = run_of(
        algorithm={"adv_estimator": "gae", "use_kl_in_reward": True},
        learner={"world_size": 1},
        actor={"ppo_mini_batch_size": 2, "ppo_max_token_len_per_gpu": 16384},
        rollout={"n": 4},
    )
    memory, number = LearnerMemory.of(config, shape_of(HALF)), 494_032_768
    assert memory.num_tokens == 2 * 4 * 1536  # less than the budget
    assert memory.resident == {"context": CONTEXT, "weights": (4 + 4 + 2) * number, "optimizer": 16 * number}
    update = memory.update
    assert update["gradients"] == 4 * number
    layer = 2 * (896 * 896 + 896 * 128) + 896 + 256 + 3 * 896 * 4864 + 2 * 896
    assert update["gathered"] == 2 * (151936 * 896 + 896 + 2 * layer)
    assert update["activations"] == 24 * 12288 * 2 * (4 * 4864 + 13 * 896) + GIB
    assert memory.scoring["activations"] == 12288 * 2 * (4 * 4864 + 13 * 896) + GIB


def test_an_offloaded_reference_is_on_the_gpu_while_it_scores() -> None:
    def of(**memory: Any) -> LearnerMemory:
        actor = {"use_kl_loss": True, "memory": {"recompute": "full", **memory}}
        return LearnerMemory.of(run_of(actor=actor), shape_of(SEVEN))

    stays, waits = of(), of(offload_reference=True)
    share = 2 * 7_615_616_512 // 4
    for phase in ("resident", "update", "push"):
        assert sum(getattr(stays, phase).values()) - sum(getattr(waits, phase).values()) == share
    assert waits.scoring["reference"] == share
    assert sum(waits.scoring.values()) == sum(stays.scoring.values())
    assert stays.most - waits.most == share


def test_frozen_networks_of_other_shapes_by_hand(tmp_path: Path) -> None:
    """A policy of 0.5B with a reference and a teacher of 7B."""
    (tmp_path / "config.json").write_text(json.dumps(SEVEN))

    def of(**memory: Any) -> LearnerMemory:
        algorithm = {"adv_estimator": "my.py:f", "networks": {"teacher": str(tmp_path)}}
        actor = {"use_kl_loss": True, "memory": {"recompute": "full", **memory}}
        return LearnerMemory.of(run_of(algorithm=algorithm, actor=actor), shape_of(HALF))

    stays, waits = of(), of(offload_reference=True)
    small, large, bare = 494_032_768, 7_615_616_512, LearnerMemory.of(run_of(), shape_of(HALF))
    shares = 2 * small // 4 + 2 * large // 4
    assert sum(stays.resident.values()) - sum(bare.resident.values()) == shares
    assert sum(waits.resident.values()) == sum(bare.resident.values())
    # One after the other is on the GPU: the larger one at most.
    assert "reference" not in waits.scoring
    assert waits.scoring["teacher"] == 2 * large // 4
    layer = (large - 2 * 152064 * 3584 - 3584) // 28
    assert stays.scoring["gathered"] == 2 * (2 * 152064 * 3584 + 3584 + 2 * layer)
    assert stays.scoring["activations"] == stays.num_tokens * 2 * (4 * 18944 + 13 * 3584) + GIB
    assert stays.update["gathered"] == bare.update["gathered"]
    # Where its config.json is not here, it counts as the policy.
    (tmp_path / "config.json").unlink()
    assert of(offload_reference=True).scoring["reference"] == 2 * small // 4


def test_adapters_by_hand() -> None:
    lora = {"rank": 16, "targets": ["q_proj", "down_proj"]}
    config = run_of(model={"lora": lora}, actor={"use_kl_loss": True, "memory": {"recompute": "full"}})
    assert config.needs_reference
    memory, base = LearnerMemory.of(config, shape_of(SEVEN)), 7_615_616_512
    adapters = 28 * 16 * ((3584 + 3584) + (18944 + 3584))
    assert memory.resident == {
        "context": CONTEXT,
        "weights": 2 * base // 4 + 4 * adapters // 4,
        "optimizer": 8 * adapters // 4,
    }
    assert memory.update["gradients"] == 4 * adapters
    summed = memory.changed(accumulates=False).update["gradients"]
    assert summed == 4 * adapters // 4 + 4 * 2 * adapters // 28
    assert memory.push["merged"] == 2 * 28 * (3584 * 3584 + 18944 * 3584) // 4
    with_critic = memory.changed(has_critic=True)
    assert with_critic.resident["optimizer"] == 8 * (adapters + base) // 4
    assert with_critic.update["gradients"] == 4 * base
    fused = shape_of(SEVEN).num_adapted(["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
    assert fused == shape_of(SEVEN).num_adapted(["all"])
    assert "merged" in plan_for(config).lines()[2]
    assert "merged" not in plan_for(run_of(actor={"memory": {"recompute": "full"}})).lines()[2]


def test_muon_by_hand() -> None:
    """The layers' matrices have one average in place of two; a rank has one whole at a time."""
    attention = 2 * 896 * (896 + 128)
    matrices = 24 * (attention + 3 * 896 * 4864)
    shape = ModelShape.of(HALF)
    assert shape is not None
    assert shape.num_in_matrices == matrices
    plain, muon = (
        LearnerMemory.of(run_of(learner={"world_size": 2}, actor={"optim": {"type": name}}), shape)
        for name in ("adamw", "muon")
    )
    assert plain.resident["optimizer"] == 8 * -(-shape.num_parameters // 2)
    assert plain.resident["optimizer"] - muon.resident["optimizer"] == 4 * matrices // 2
    assert muon._optimizer_step["matrix"] == 28 * 896 * 4864
    experts = ModelShape.of(TEN_WITH_EXPERTS)
    assert experts is not None
    assert experts.num_in_matrices == 16 * 2048 * (2 * (4096 + 512) + 128)


def test_averages_in_8_bits_by_hand() -> None:
    """Two bytes a number, and two scales of four for 256; of the critic by its own setting."""
    shape = ModelShape.of(HALF)
    assert shape is not None
    plans = [
        LearnerMemory.of(
            run_of(learner={"world_size": 1}, algorithm={"adv_estimator": "gae"}, **sections), shape
        )
        for sections in (
            {},
            {"actor": {"optim": {"type": "adamw_8bit"}}},
            {"critic": {"optim": {"type": "adamw_8bit"}}},
        )
    ]
    numbers = shape.num_parameters
    assert plans[0].resident["optimizer"] == 16 * numbers
    for plan in plans[1:]:
        assert plan.resident["optimizer"] == pytest.approx(8 * numbers + (2 + 8 / 256) * numbers, abs=1)
        assert plan._optimizer_step["slice"] == 640 << 20
    assert "slice" not in plans[0]._optimizer_step


def test_an_engine_by_hand() -> None:
    engine = EngineMemory.of(run_of(rollout={"tensor_model_parallel_size": 2}), shape_of(SEVEN))
    assert engine.weights == 7_615_616_512
    assert engine.bytes_per_token == 2 * 28 * 2 * 128 * 2
    # 256 sequences: a number and a log-probability per position, twice; four integers while numbers are made;
    # 149 slices of 1,024 tokens.
    length = run_of().max_model_len + 1
    assert engine.sampler == 256 * (2 * length * 12 + 4 * length * 8 + 149 * 12)
    assert engine.sampler < 0.025 * GIB
    assert EngineMemory.of(run_of(rollout={"sampler": "engine"}), shape_of(SEVEN)).sampler == 0
    # What vLLM's own sampler takes when it starts is within the rest, but for many sequences.
    assert engine.rest == 2 * GIB
    many = EngineMemory.of(run_of(rollout={"max_num_seqs": 1024}), shape_of(SEVEN))
    assert many.rest == GIB // 2 + 1024 * (2 + 4 * 4) * 152064
    assert many.generation(100 * GIB)["graphs"] == many.rest
    parts = engine.generation(100 * GIB)
    assert sum(parts.values()) == 100 * GIB
    assert engine.generation(engine.budget_for(5000))["kv cache"] == 5000 * engine.bytes_per_token


def test_the_plan_has_a_line_for_every_phase() -> None:
    config = run_of(actor={"memory": {"recompute": "full"}})
    lines = plan_for(config).lines()
    assert [line.split(":")[0] for line in lines] == [
        "learner GPU 0, 1, 2, 3, scoring",
        "learner GPU 0, 1, 2, 3, update",
        "learner GPU 0, 1, 2, 3, push",
        "rollout GPU 4, 5, 6, 7, generation",
        "rollout GPU 4, 5, 6, 7, push",
    ]
    assert "gradients 28.4 GiB" in lines[1]
    assert "weights 14.2 GiB" in lines[3]


def on_host(num_tokens: int, *, host_bytes: int = 0, gib: int = 192, **memory: Any) -> MemoryPlan:
    """The plan of 7B on one rank whose layers' inputs wait in host memory; `host_bytes` in GiB."""
    memory = {"recompute": "from_host"} | memory
    actor = {"ppo_max_token_len_per_gpu": num_tokens, "memory": memory}
    return MemoryPlan.of(
        run_of(learner={"world_size": 1}, actor=actor),
        shape_of(SEVEN),
        learner_gpus=(0,),
        engine_gpus=(1,),
        totals=dict.fromkeys(range(2), gib * GIB),
        host_bytes=host_bytes * GIB,
    )


def test_inputs_of_layers_on_the_host_leave_those_of_two_layers_on_the_gpu() -> None:
    num_bytes = 24_576 * 3584 * 2
    full, away = on_host(24_576, recompute="full").learner, on_host(24_576).learner
    assert full.update["activations"] - away.update["activations"] == 26 * num_bytes
    assert (full.host_inputs, away.host_inputs) == (0, 28 * num_bytes)
    part = on_host(24_576, host_gib=5.5 * num_bytes / GIB).learner
    assert part.host_inputs == 5 * num_bytes
    assert full.update["activations"] - part.update["activations"] == 3 * num_bytes
    assert on_host(24_576, host_gib=1.5 * num_bytes / GIB).learner.update == full.update


def test_the_plan_names_the_hosts_memory_and_refuses_more_than_it_has() -> None:
    assert on_host(24_576, host_bytes=10).lines()[-1] == (
        "host memory, update: inputs of layers 4.6 GiB per rank"
    )
    with pytest.raises(ConfigError, match=r"9.0 GiB of free memory, and 1 learner ranks would pin 4.6 GiB"):
        on_host(24_576, host_bytes=9).lines()
    assert on_host(24_576, host_bytes=5, host_gib=5).lines()
    with pytest.raises(ConfigError, match=r"actor\.memory\.host_gib to at most 4, a lower"):
        on_host(24_576, host_bytes=4, host_gib=5).lines()
    # The plan advises it if the host has room.
    long = {"data": {"train_files": "x.jsonl", "max_prompt_length": 512, "max_response_length": 65_024}}
    config = run_of(learner={"world_size": 1}, actor={"ppo_max_token_len_per_gpu": 65_536}, **long)
    full = LearnerMemory.of(config, shape_of(SEVEN)).changed(kept_share=0.0, keeps_gathered=False)
    for host, advice in ((64, "{recompute: from_host, accumulate: false}"), (16, "offload: true}")):
        plan = MemoryPlan.of(
            config,
            shape_of(SEVEN),
            learner_gpus=(0,),
            engine_gpus=(1,),
            totals={0: full.most - GIB},
            host_bytes=host * GIB,
        )
        with pytest.raises(ConfigError, match=advice):
            plan.lines()


@pytest.mark.parametrize(
    ("sections", "gib", "advice"),
    [
        ({}, 141, "set actor.ppo_max_token_len_per_gpu to at most 12"),
        (
            {"actor": {"ppo_max_token_len_per_gpu": 1536}, "learner": {"world_size": 4}},
            60,
            "set actor.memory.recompute: full",
        ),
        (
            {"learner": {"world_size": 4}},
            60,
            "set actor.memory.recompute: full and actor.ppo_max_token_len_per_gpu to at most",
        ),
        (
            {"learner": {"world_size": 1}},
            80,
            "set actor.memory to {recompute: full, accumulate: false, offload: true} and actor.ppo_max",
        ),
        (
            {"learner": {"world_size": 1}},
            60,
            "set learner.world_size to 2, actor.memory to {recompute: full, ",
        ),
        ({}, 50, "set actor.memory to {recompute: full, accumulate: false} and actor.ppo_max"),
        (
            {"actor": {"use_kl_loss": True}},
            42,
            "set actor.memory to {recompute: full, accumulate: false, offload_reference: true} and",
        ),
        (
            {"actor": {"use_kl_loss": True}},
            35,
            "accumulate: false, offload: true, offload_reference: true} and actor.ppo_max",
        ),
        ({}, 10, "do not fit on 32 such GPUs either"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_setting_to_change(
    sections: dict[str, dict[str, Any]], gib: int, advice: str
) -> None:
    config = run_of(**sections)
    plan = plan_for(config, gib=gib)
    with pytest.raises(ConfigError) as caught:
        plan.lines()
    assert advice in str(caught.value)


def test_the_advice_fits() -> None:
    plan = plan_for(run_of())
    with pytest.raises(ConfigError, match="at most") as caught:
        plan.lines()
    tokens = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert plan_for(run_of(actor={"ppo_max_token_len_per_gpu": tokens})).lines()
    with pytest.raises(ConfigError, match="at most"):
        plan_for(run_of(actor={"ppo_max_token_len_per_gpu": tokens + 1})).lines()


def test_an_engine_beside_the_learner_gets_what_it_leaves() -> None:
    config = run_of(actor={"memory": {"recompute": "full"}})
    with pytest.raises(ConfigError, match=r"set rollout\.gpu_memory_utilization to at most 0\.5\d") as caught:
        plan_for(config, shared=True).lines()
    share = float(str(caught.value).split("at most ")[1].split(",")[0])
    fitting = run_of(
        actor={"memory": {"recompute": "full"}}, rollout={"gpu_memory_utilization": share - 0.01}
    )
    assert plan_for(fitting, shared=True).lines()


def test_an_engine_without_room_for_a_sequence_is_refused() -> None:
    config = run_of(rollout={"gpu_memory_utilization": 0.12}, actor={"memory": {"recompute": "full"}})
    with pytest.raises(
        ConfigError, match=r"0\.0 GiB for its KV cache.*raise rollout\.gpu_memory_utilization"
    ):
        plan_for(config).lines()


def test_engines_that_sleep_leave_the_gpu_to_the_update_and_what_stays_of_the_learner_to_them() -> None:
    rollout: dict[str, Any] = {"sleep": "always", "gpu_memory_utilization": 0.75}
    config = run_of(actor={"memory": {"recompute": "full"}}, rollout=rollout)
    lines = plan_for(config, shared=True).lines()
    assert [line.split(":")[0] for line in lines[-3:]] == [
        "together GPU 0, 1, 2, 3, start",
        "together GPU 0, 1, 2, 3, generation",
        "together GPU 0, 1, 2, 3, training",
    ]
    assert lines[-1].endswith("engine 2.0 GiB")
    awake = run_of(
        actor={"memory": {"recompute": "full"}},
        rollout={"gpu_memory_utilization": 0.75},
    )
    with pytest.raises(ConfigError, match="rollout.sleep: always, or give them"):
        plan_for(awake, shared=True).lines()
    greedy = run_of(
        actor={"memory": {"recompute": "full"}}, rollout=rollout | {"gpu_memory_utilization": 0.9}
    )
    with pytest.raises(ConfigError, match=r"the learner keeps .* while the engine takes .* at most 0\.8"):
        plan_for(greedy, shared=True).lines()
    too_much = run_of(
        actor={"memory": {"recompute": "none"}}, rollout={**rollout, "gpu_memory_utilization": 0.5}
    )
    with pytest.raises(ConfigError, match=r"needs 211.9 GiB beside 2.0 GiB of a sleeping engine: set actor"):
        plan_for(too_much, shared=True).lines()


def test_compiling_at_the_start_was_measured_and_bounds_the_engine_beside_it() -> None:
    """Two H100s, 7B, compiled layers: 21.3 GiB of tensors while they were compiled, before the averages."""
    memory = {"recompute": "full", "keep_gathered": False, "accumulate": True, "offload": False}
    actor = {"ppo_max_token_len_per_gpu": 8704, "reduce_dtype": "bfloat16", "memory": memory, "compile": True}
    rollout: dict[str, Any] = {"n": 8, "sleep": "always", "gpu_memory_utilization": 0.3}
    config = run_of(actor=actor, rollout=rollout, learner={"world_size": 2})
    learner = LearnerMemory.of(config, shape_of(SEVEN))
    assert 21.3 * GIB <= sum(learner.start.values()) - CONTEXT <= 1.3 * 21.3 * GIB
    staging = 2 * (config.weights.staging_mib << 20)
    assert learner.kept_beside(config) == sum(learner.resident.values()) + staging
    lean = learner.changed(offloads=True)
    assert lean.kept_beside(config) == sum(lean.start.values()) > sum(lean.resident.values()) + staging
    eager = lean.changed(compiled=False)
    assert eager.start == eager.resident
    offloading = actor | {"memory": memory | {"offload": True}}
    late = run_of(
        actor=offloading, rollout=rollout | {"gpu_memory_utilization": 0.7}, learner={"world_size": 2}
    )
    with pytest.raises(ConfigError, match=r"the learner keeps 28\.3 GiB while the engine takes 56\.0 GiB"):
        plan_for(late, gib=80, shared=True).lines()


IMAGES = {
    "image_key": "images",
    "train_files": "x.jsonl",
    "max_prompt_length": 512,
    "max_response_length": 1024,
}


@pytest.mark.parametrize("part", ["projector", "all"])
def test_what_trains_of_a_tower_has_averages_gradients_and_activations(part: str) -> None:
    shape = shape_of(SEVEN_VL)
    frozen, trained = (
        LearnerMemory.of(
            run_of(data=IMAGES, model={"path": "m", "dtype": "bfloat16", "vision": {"train": train}}), shape
        )
        for train in ("none", part)
    )
    assert shape.tower is not None
    number = shape.num_in_tower if part == "all" else 5120 * 5121 + 5121 * 3584 + 1280
    assert trained.resident["weights"] == frozen.resident["weights"]
    assert trained.resident["optimizer"] - frozen.resident["optimizer"] == 8 * number // 4
    compact = [plan.changed(compact=True).resident["optimizer"] for plan in (frozen, trained)]
    assert compact[1] - compact[0] == pytest.approx(65 / 32 * number / 4, abs=4)
    summed = [plan.changed(accumulates=True).update["gradients"] for plan in (frozen, trained)]
    assert summed[1] - summed[0] == 4 * number
    parts = [plan.changed(accumulates=False).update["gradients"] for plan in (frozen, trained)]
    assert parts[1] - parts[0] == 4 * number // 4 + 4 * number
    patches = trained.num_tokens * 4 // 5
    kept = [plan.update["activations"] for plan in (frozen, trained)]
    assert kept[1] - kept[0] == shape.tower.kept(patches, 2, part, trained.kept_share) > 0
    lean = shape.tower.kept(patches, 2, "all", 0.0)
    assert lean < shape.tower.kept(patches, 2, "all", 0.5) < shape.tower.kept(patches, 2, "all")


def test_a_vision_tower_is_counted_where_it_is_and_does_not_train_by_default() -> None:
    config = run_of(data=IMAGES)
    text, both = (LearnerMemory.of(config, shape_of(tree)) for tree in (SEVEN, SEVEN_VL))
    tower = shape_of(SEVEN_VL).num_in_tower
    # Float32 shards like the weights around it, gathered as it computes, without averages or gradients.
    assert both.resident["weights"] - text.resident["weights"] == 4 * tower // 4
    assert both.resident["optimizer"] == text.resident["optimizer"]
    for phase in ("scoring", "update"):
        ours, theirs = getattr(both, phase), getattr(text, phase)
        assert ours["gathered"] - theirs["gathered"] == 2 * tower
        assert ours.get("gradients") == theirs.get("gradients")
    adapted = run_of(data=IMAGES, model={"path": "m", "dtype": "bfloat16", "lora": {"rank": 8}})
    text, both = (LearnerMemory.of(adapted, shape_of(tree)) for tree in (SEVEN, SEVEN_VL))
    assert both.resident["weights"] - text.resident["weights"] == 2 * tower // 4
    assert both.update["gradients"] == text.update["gradients"]
    engines = [EngineMemory.of(config, shape_of(tree)) for tree in (SEVEN, SEVEN_VL)]
    assert engines[1].weights - engines[0].weights == 2 * tower
    assert engines[1].rest > engines[0].rest
    assert (
        engines[1].rest
        == EngineMemory.of(run_of(), shape_of(SEVEN_VL)).rest + engines[1].rest - engines[0].rest
    )


def test_an_engine_keeps_the_towers_states_for_decoder_layers_twice() -> None:
    plain = EIGHT_VL | {"vision_config": EIGHT_VL["vision_config"] | {"deepstack_visual_indexes": []}}
    config = run_of(data=IMAGES)
    with_states, without = (EngineMemory.of(config, shape_of(tree)) for tree in (EIGHT_VL, plain))
    tokens = VLLM.prefill_tokens  # more than the longest prompt
    shape = shape_of(EIGHT_VL)
    assert shape.tower is not None
    per_image = 3 * 4096 * 2 // 4 * 4 * tokens  # as the tower computes them
    assert with_states.rest - without.rest == per_image + 2 * 3 * 4096 * 2 * tokens


def test_the_towers_activations_count_where_they_are_more_than_the_layers() -> None:
    small = SEVEN_VL | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    actor = {"memory": {"recompute": "full"}, "ppo_max_token_len_per_gpu": 65_536}
    shape = shape_of(small)
    with_images, without = (LearnerMemory.of(run_of(data=data, actor=actor), shape) for data in (IMAGES, {}))
    # Four fifths of the budget are patches, the rest their tokens.
    assert shape.tower is not None
    expected = shape.tower.activations(65_536 * 4 // 5, 2)
    assert with_images.update["activations"] == with_images.scoring["activations"] == expected
    assert without.update["activations"] < expected
    # Ranks that share rows have each the images of all of them.
    both = with_images.changed(context=2, num_tokens=32_768)
    assert both.update["activations"] == both.scoring["activations"] == expected
    shared = {"learner": {"world_size": 8, "context_parallel": 2}}
    assert LearnerMemory.of(run_of(data=IMAGES, **shared), shape).context == 2
    large = LearnerMemory.of(run_of(data=IMAGES), shape_of(SEVEN_VL))
    assert large.update["activations"] == LearnerMemory.of(run_of(), shape_of(SEVEN)).update["activations"]


def test_the_least_budget_that_the_plan_advises_holds_a_row_with_its_images() -> None:
    config = run_of(data=IMAGES)
    with pytest.raises(ConfigError, match=f"ppo_max_token_len_per_gpu: {512 + 1024 + 4 * 512}"):
        plan_for(config, SEVEN_VL, gib=47).lines()


def test_ranks_that_share_rows_hold_their_part_of_them() -> None:
    """A budget below a row's 1,536 tokens is enough for a half of it."""
    config = run_of(
        learner={"world_size": 8, "context_parallel": 2}, actor={"ppo_max_token_len_per_gpu": 800}
    )
    assert longest_row(config, shape_of(SEVEN)) == 768
    assert config.micro_batch_tokens == 1600
    assert config.learner.num_data_ranks == 4
    assert LearnerMemory.of(config, shape_of(SEVEN)).num_tokens == 800
    with pytest.raises(ConfigError, match=r"learner\.context_parallel has no compiled form"):
        run_of(learner={"world_size": 8, "context_parallel": 2}, actor={"compile": True})
    few = run_of(
        learner={"world_size": 8, "context_parallel": 2},
        actor={"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 65536},
        rollout={"n": 8},
    )
    # 4 x 8 rows of a mini-batch over four pairs of ranks.
    assert LearnerMemory.of(few, shape_of(SEVEN)).num_tokens == 8 * 768


def test_ranks_that_divide_experts_gather_their_part_of_them() -> None:
    shape = shape_of(TEN_WITH_EXPERTS)
    assert shape.experts == 128 * 3 * 2048 * 768
    lean = {
        "compile": False,
        "memory": {"recompute": "full", "accumulate": False, "keep_gathered": False, "offload": False},
    }
    gathered, divided = (
        LearnerMemory.of(run_of(learner={"world_size": 8, "expert_parallel": size}, actor=lean), shape)
        for size in (1, 4)
    )
    assert divided.resident == gathered.resident
    not_gathered = 2 * 2 * shape.experts * 3 // 4  # of two layers, two bytes each
    assert gathered.update["gathered"] - divided.update["gathered"] == not_gathered
    # A row per choice on its way there, and one on its way back.
    exchanged = 2 * gathered.num_tokens * 8 * 2048 * 2
    for phase in ("update", "scoring"):
        parts = getattr(gathered, phase)["activations"], getattr(divided, phase)["activations"]
        assert parts[1] - parts[0] == exchanged
    kept = [plan.changed(accumulates=True, keeps_gathered=True) for plan in (gathered, divided)]
    everywhere = 16 * shape.experts * 3 // 4
    for part, size in (("gathered", 2), ("gradients", kept[0].bytes_per_gradient)):
        assert kept[0].update[part] - kept[1].update[part] == size * everywhere
    with pytest.raises(ConfigError, match=r"learner\.expert_parallel has no compiled form"):
        run_of(learner={"world_size": 8, "expert_parallel": 2}, actor={"compile": True})
    with pytest.raises(ConfigError, match=r"router_replay does not go with learner\.expert_parallel"):
        run_of(learner={"world_size": 8, "expert_parallel": 2}, actor={"router_replay": True})
    assert (
        not run_of(learner={"world_size": 8, "expert_parallel": 2}).with_compile(on_gpu=True).actor.compiles
    )


def test_experts_are_divided_evenly_or_not_at_all() -> None:
    learner = run_of(learner={"world_size": 8, "expert_parallel": 8}).learner
    learner.require_experts("a-model", 64)
    with pytest.raises(ConfigError, match="a-model has no experts: leave it out"):
        learner.require_experts("a-model", 0)
    with pytest.raises(ConfigError, match="the 60 experts of a-model .* 8 ranks; set .* to a divisor of 60"):
        learner.require_experts("a-model", 60)
    run_of().learner.require_experts("a-model", 0)


def test_ranks_of_one_copy_share_its_weights_and_the_plan_says_when_a_copy_needs_more_ranks() -> None:
    halved = run_of(learner={"world_size": 8, "fsdp_size": 4})
    copies, shared = (
        LearnerMemory.of(config, shape_of(SEVEN)) for config in (halved, run_of(learner={"world_size": 8}))
    )
    for part in ("weights", "optimizer"):
        assert copies.resident[part] == pytest.approx(2 * shared.resident[part], rel=1e-6)
    assert copies.num_tokens == shared.num_tokens
    with pytest.raises(ConfigError, match=r"leave learner\.fsdp_size=4 out, so that all 8 ranks share"):
        plan_for(halved, SEVEN, gib=copies.most // GIB).lines()
    plan_for(run_of(learner={"world_size": 8}), SEVEN, gib=copies.most // GIB).lines()
    with pytest.raises(ConfigError, match=r"set learner\.world_size and fsdp_size to 16, actor\.memory to"):
        plan_for(halved, SEVEN, gib=18).lines()


def test_the_plan_says_how_many_ranks_have_to_share_a_row_that_fits_none() -> None:
    long = {"data": {"train_files": "x.jsonl", "max_prompt_length": 512, "max_response_length": 65_024}}
    budget = {"ppo_max_token_len_per_gpu": 65_536}
    config = run_of(learner={"world_size": 8}, actor=budget, **long)
    words = r"set learner\.context_parallel to (\d), actor\.memory to {recompute: full, accumulate: false, "
    with pytest.raises(ConfigError, match=words) as refused:
        plan_for(config, SEVEN, gib=30).lines()
    context = int(re.search(words, str(refused.value))[1])  # type: ignore[index]
    assert f"ppo_max_token_len_per_gpu: {65_536 // context}" in str(refused.value)
    lean = {"memory": {"recompute": "full", "accumulate": False, "keep_gathered": False, "offload": True}}
    for size, fits in ((context, True), (context // 2, False)):
        actor = lean | {"ppo_max_token_len_per_gpu": 65_536 // size}
        learner = {"world_size": 8, "context_parallel": size}
        plan = plan_for(run_of(learner=learner, actor=actor, **long), SEVEN, gib=30)
        assert (plan.learner.most <= 30 * GIB) == fits
    # Compiled layers have no such form.
    with pytest.raises(ConfigError, match="set learner.world_size to|do not fit"):
        plan_for(run_of(learner={"world_size": 8}, actor=budget | {"compile": True}, **long), gib=30).lines()


def test_rows_are_prompt_and_response_together() -> None:
    """A prompt has 512 tokens and a response 1,024; a plan of prompts alone would be too small."""
    config = run_of(actor={"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 65536}, rollout={"n": 8})
    assert longest_row(config, shape_of(SEVEN)) == 1536
    # 4 x 8 rows of a mini-batch over four ranks.
    assert LearnerMemory.of(config, shape_of(SEVEN)).num_tokens == 8 * 1536
    rows = (2 * (8 + 4) + 4 * 8) * (1536 + 1)
    slices = (4 + 8) * 149  # of 152,064 tokens, 1,024 each
    batched = run_of(rollout={"sampler": "batched", "max_num_seqs": 128})
    assert EngineMemory.of(batched, shape_of(SEVEN)).sampler == 128 * (rows + slices)
    longer = run_of(data={"max_response_length": 4096}, actor={"ppo_max_token_len_per_gpu": 65536})
    shape = shape_of(SEVEN)
    assert LearnerMemory.of(longer, shape).num_tokens == min(65536, 8 * longer.rollout.n * 4608)
    plan = plan_for(config)
    plan._check_cache(0, plan.engine.budget_for(1536))
    with pytest.raises(ConfigError, match="one sequence of 1536 tokens takes"):
        plan._check_cache(0, plan.engine.budget_for(1535))
