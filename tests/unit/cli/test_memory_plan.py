"""The memory plan: engines, host memory, phases, and the settings that it asks to change."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.engines.memory import CONTEXT, GIB, EngineMemory
from paceline.sizing.memory.learner_memory import LearnerMemory, longest_row
from paceline.sizing.memory.memory_plan import MemoryPlan
from support.cli_configs import SEVEN
from support.memory_plans import plan_for, run_of, shape_of


def test_heads_are_shared_by_an_engines_gpus_and_a_latent_vector_is_not() -> None:
    run = run_of(rollout={"tensor_model_parallel_size": 2})
    assert EngineMemory.of(run, shape_of(SEVEN)).bytes_per_token == 28 * 2 * 2 * 128 * 2


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
    # Compiled layers, which are recomputed as a whole then, keep less in the one that is in progress.
    compiled = run_of(learner={"world_size": 8}, actor=budget | {"compile": True}, **long)
    with pytest.raises(ConfigError, match=words) as refused:
        plan_for(compiled, SEVEN, gib=30).lines()
    assert int(re.search(words, str(refused.value))[1]) <= context  # type: ignore[index]


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
