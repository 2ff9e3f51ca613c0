"""The learner's part of the memory plan: counted by hand, and measured peaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core.cards import CARDS
from paceline.core.errors import ConfigError
from paceline.engines.memory import CONTEXT, GIB
from paceline.models.model_shape import ModelShape
from paceline.sizing.memory.learner_memory import LearnerMemory, longest_row
from support.cli_configs import SEVEN
from support.memory_plans import HALF, TEN_WITH_EXPERTS, plan_for, run_of, shape_of
from support.timed_steps import KEPT, ON_HOST, SHAPES


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


def test_ranks_that_share_rows_hold_their_part_of_them() -> None:
    """A budget below a row's 1,536 tokens is enough for a half of it."""
    config = run_of(
        learner={"world_size": 8, "context_parallel": 2}, actor={"ppo_max_token_len_per_gpu": 800}
    )
    assert longest_row(config, shape_of(SEVEN)) == 768
    assert config.micro_batch_tokens == 1600
    assert config.learner.num_data_ranks == 4
    assert LearnerMemory.of(config, shape_of(SEVEN)).num_tokens == 800
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
    order = 8 * gathered.num_tokens * 8  # of the rows of each of 16 recomputed layers
    for phase, kept_orders in (("update", 16 * order), ("scoring", 0)):
        parts = getattr(gathered, phase)["activations"], getattr(divided, phase)["activations"]
        assert parts[1] - parts[0] == exchanged + kept_orders
    kept = [plan.changed(accumulates=True, keeps_gathered=True) for plan in (gathered, divided)]
    everywhere = 16 * shape.experts * 3 // 4
    for part, size in (("gathered", 2), ("gradients", kept[0].bytes_per_gradient)):
        assert kept[0].update[part] - kept[1].update[part] == size * everywhere
    run_of(learner={"world_size": 8, "expert_parallel": 2}, actor={"router_replay": True})


def test_ranks_that_divide_matrices_gather_their_part_of_them() -> None:
    shape = shape_of(SEVEN)
    assert shape.divided(2) == 3584 * (2 * (3584 + 512) + 3 * 18_944)
    # 28 ranks have a head each, but there are four heads of keys; they cannot divide the MLP's width.
    assert shape.divided(28) == 3584 * 2 * 3584
    # Latent attention stays whole.
    latent = SEVEN | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "q_lora_rank": 1536}
    latent |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert shape_of(latent).latent is not None
    assert shape_of(latent).divided(2) == 3584 * 3 * 18_944
    memory = {"recompute": "full", "accumulate": False, "keep_gathered": False, "offload": False}
    shared, divided = (
        LearnerMemory.of(run_of(learner={"world_size": 8, name: 2}, actor={"memory": memory}), shape)
        for name in ("context_parallel", "tensor_parallel")
    )
    assert divided.num_tokens == shared.num_tokens
    assert divided.resident == shared.resident
    elsewhere = shape.divided(2) // 2
    assert shared.update["gathered"] - divided.update["gathered"] == 2 * 2 * elsewhere
    # One layer at a time keeps the states of the other rank's tokens, in attention and MLP.
    for phase in ("scoring", "update"):
        parts = getattr(shared, phase)["activations"], getattr(divided, phase)["activations"]
        assert parts[1] - parts[0] == 2 * shared.layer_input
    kept = [plan.changed(accumulates=True, keeps_gathered=True) for plan in (shared, divided)]
    for part, size in (("gathered", 2), ("gradients", kept[0].bytes_per_gradient)):
        assert kept[0].update[part] - kept[1].update[part] == size * 28 * elsewhere


def test_the_compiler_drops_nothing_of_divided_experts_and_matrices() -> None:
    """A token keeps four numbers of an expert's width, and its states twice, for each of eight experts."""
    memory = {"recompute": 0.5, "accumulate": False, "keep_gathered": False, "offload": False}
    actor = {"compile": True, "memory": memory}

    def layers(tree: dict[str, Any], **learner: int) -> float:
        plan = LearnerMemory.of(run_of(learner={"world_size": 8, **learner}, actor=actor), shape_of(tree))
        return plan._activations / plan.num_tokens / plan.shape.num_layers / 2

    alone, divided = layers(TEN_WITH_EXPERTS), layers(TEN_WITH_EXPERTS, expert_parallel=2)
    experts, copies = 8 * 768, 8 * 2 * 2048
    exchanged = copies / shape_of(TEN_WITH_EXPERTS).num_layers
    assert divided - exchanged == pytest.approx(alone + 4 * experts - 0.55 * 3 * experts + 0.45 * copies)
    everything = shape_of(SEVEN).activations(compiled=True)
    assert layers(SEVEN, context_parallel=2) == pytest.approx(0.55 * everything)
    assert layers(SEVEN, tensor_parallel=2) == pytest.approx(
        everything + 2 * 3584
    )  # states of the other rank


def test_divided_matrices_go_with_adamw() -> None:
    learner = {"world_size": 8, "tensor_parallel": 2}
    for kind in ("muon", "adamw_8bit"):
        with pytest.raises(ConfigError, match=rf"actor\.optim\.type={kind} needs whole rows of matrices"):
            run_of(learner=learner, actor={"optim": {"type": kind}})
        critic, gae = {"optim": {"type": kind}}, {"adv_estimator": "gae"}
        with pytest.raises(ConfigError, match=rf"critic\.optim\.type={kind} needs whole rows"):
            run_of(learner=learner, critic=critic, algorithm=gae)
    settled = run_of(learner=learner).with_context().learner
    assert (settled.context_parallel, settled.num_data_ranks) == (2, 4)


def test_experts_are_divided_evenly_or_not_at_all() -> None:
    learner = run_of(learner={"world_size": 8, "expert_parallel": 8}).learner
    learner.require_experts("a-model", 64)
    with pytest.raises(ConfigError, match="a-model has no experts: leave it out"):
        learner.require_experts("a-model", 0)
    with pytest.raises(ConfigError, match="the 60 experts of a-model .* 8 ranks; set .* to a divisor of 60"):
        learner.require_experts("a-model", 60)
    run_of().learner.require_experts("a-model", 0)
