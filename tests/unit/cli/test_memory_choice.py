"""What `actor.memory: auto` becomes on GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.cards import CARDS
from paceline.core.errors import ConfigError
from paceline.engines.memory import GIB
from paceline.models.model_shape import ModelShape
from paceline.sizing.memory.learner_memory import LearnerMemory
from paceline.sizing.memory_choice import LEAST, choose_update
from support.cli_configs import SEVEN
from support.memory_plans import TEN_WITH_EXPERTS
from support.timed_steps import SHAPES


def run_of(**actor: Any) -> RunConfig:
    return parse(
        RunConfig,
        {
            "data": {"train_files": "x.jsonl", "max_prompt_length": 512, "max_response_length": 1024},
            "model": {"path": "m", "dtype": "bfloat16"},
            "actor": {"ppo_max_token_len_per_gpu": 12288, "compile": True, **actor},
            "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
            "learner": {"world_size": 4},
            "rollout": {"n": 8, "gpu_memory_utilization": 0.3},
        },
    )


def long_run(response: int, *, actor: dict[str, Any] | None = None, **learner: Any) -> RunConfig:
    """Rows of 1,024 tokens and a response, on four ranks unless said otherwise."""
    run = run_of()
    tree = run.model_dump(mode="json", exclude_unset=True)
    tree["data"] |= {"max_prompt_length": 1024, "max_response_length": response}
    return parse(RunConfig, tree | {"actor": actor or {}, "learner": {"world_size": 4, **learner}})


def shared(run: RunConfig, gib: int, tree: dict[str, Any] = SEVEN) -> tuple[int, int, bool]:
    """Ranks that share a row, tokens of a micro-batch on each, and whether it fits."""
    choice = choose_update(
        run,
        ModelShape.of(tree),
        learner_gpus=(0, 1, 2, 3),
        engine_gpus=(4,),
        totals=dict.fromkeys(range(4), gib * GIB),
    )
    settled = choice.put_into(run)
    assert settled.learner.context_parallel == choice.context
    assert settled.micro_batch_tokens >= run.max_model_len
    return choice.context, choice.num_tokens, choice.fits


@pytest.mark.parametrize(
    ("response", "gib", "expected"),
    [
        (31744, 80, (1, 32768, True)),
        (31744, 40, (2, 16384, True)),
        (64512, 40, (4, 16384, True)),
        (261120, 80, (4, 65536, True)),
        (130048, 40, (1, 131072, False)),  # nothing fits: not for want of ranks that share
    ],
)
def test_ranks_share_rows_only_as_far_as_one_rank_has_no_room(
    response: int, gib: int, expected: tuple[int, int, bool]
) -> None:
    assert shared(long_run(response), gib) == expected


def test_ranks_share_rows_that_exceed_a_budget_of_the_file_where_nothing_else_is_asked_for() -> None:
    budget = {"ppo_max_token_len_per_gpu": 10_000}
    assert shared(long_run(31744, actor=budget), 141) == (4, 10_000, True)
    assert shared(long_run(8976, actor=budget), 141) == (1, 10_000, True)
    assert shared(long_run(1024, actor=budget, context_parallel=2), 141)[0] == 2
    # Three ranks can share six heads, and four cannot.
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128}
    heads = SEVEN | sizes
    assert shared(long_run(23976, actor=budget, world_size=12), 141, heads)[0] == 3
    assert shared(long_run(31744, actor=budget, world_size=12), 141, heads)[0] == 6


def test_ranks_share_rows_and_divide_experts_of_compiled_layers_if_the_file_asks_for_them() -> None:
    for compiled in (False, True):
        assert shared(long_run(31744, actor={"compile": compiled}), 40)[::2] == (2, True)
        run = long_run(31744, actor={"compile": compiled, "ppo_max_token_len_per_gpu": 16384})
        assert run.with_context().learner.context_parallel == 2


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""DeepSeek-V3"""


def divided(run: RunConfig, gib: int, tree: dict[str, Any] = DEEPSEEK) -> tuple[int, int, bool]:
    """Ranks that share a row, ranks that divide experts, and whether it fits; on GPUs without engines."""
    gpus = range(run.learner.world_size)
    totals = dict.fromkeys(gpus, gib * GIB)
    shape = ModelShape.of(tree)
    choice = choose_update(run, shape, learner_gpus=gpus, engine_gpus=(), totals=totals)
    settled = choice.put_into(run)
    assert settled.learner.num_expert_ranks == choice.experts
    assert shape is not None
    if choice.fits and choice.experts > 1:
        assert settled.with_compile(on_gpu=True).actor.compiles
        gathered = settled.changed(learner={"expert_parallel": choice.experts // 2})
        if "expert_parallel" not in run.learner.model_fields_set:
            assert LearnerMemory.of(gathered, shape).most > 0.9 * gib * GIB
    return choice.context, choice.experts, choice.fits


def test_ranks_divide_experts_only_as_far_as_the_update_does_not_fit() -> None:
    run = long_run(7168, world_size=128)
    assert divided(run, 80) == (1, 8, True)
    assert divided(run, 141) == (1, 2, True)
    assert divided(run, 400) == (1, 1, True)
    assert divided(long_run(7168, world_size=128, expert_parallel=4), 400)[1] == 4
    assert divided(long_run(7168, world_size=128, expert_parallel=1), 80)[1] == 1
    # Not by ranks of another copy, nor where an expert would be cut.
    copies = long_run(1024, world_size=8, fsdp_size=2)
    assert divided(copies, 56, TEN_WITH_EXPERTS) == (1, 2, True)
    assert divided(copies, 48, TEN_WITH_EXPERTS) == (1, 1, False)
    assert divided(long_run(7168, world_size=128, actor={"compile": True}), 80) == (1, 8, True)
    assert divided(run, 80, DEEPSEEK | {"n_routed_experts": 257})[1] == 1
    assert divided(run, 80, DEEPSEEK | {"model_type": "llama4_text"})[1:] == (1, False)
    assert divided(long_run(1024, world_size=6), 28, TEN_WITH_EXPERTS) == (1, 2, True)
    assert divided(long_run(1024, world_size=6), 24, TEN_WITH_EXPERTS) == (1, 1, False), "4 of 6 ranks"


def test_ranks_share_rows_of_models_whose_experts_cannot_be_divided() -> None:
    shapes = [ModelShape.of(DEEPSEEK | {"model_type": kind}) for kind in ("deepseek_v3", "llama4_text")]
    assert [shape.divides_experts for shape in shapes if shape is not None] == [True, False]
    dense = ModelShape.of(SEVEN)
    assert dense is not None
    assert not dense.divides_experts


def test_without_gpus_a_budget_that_the_file_leaves_out_holds_a_row() -> None:
    settled = long_run(31744).with_context()
    assert (settled.learner.context_parallel, settled.micro_batch_tokens) == (1, 32768)
    settled = long_run(1024).with_context()
    assert (settled.learner.context_parallel, settled.micro_batch_tokens) == (1, 16384)
    settled = long_run(31744, context_parallel=4).with_context()
    assert (settled.learner.context_parallel, settled.micro_batch_tokens) == (4, 65536)
    settled = long_run(31744, actor={"ppo_max_token_len_per_gpu": 16384}).with_context()
    assert (settled.learner.context_parallel, settled.micro_batch_tokens) == (2, 32768)
    # How many ranks there are may come from the machine.
    open_run = long_run(31744, actor={"ppo_max_token_len_per_gpu": 16384}).model_dump(
        mode="json", exclude_unset=True
    )
    del open_run["learner"]
    with pytest.raises(ConfigError, match="ppo_max_token_len_per_gpu=16384 cannot hold one sequence"):
        parse(RunConfig, open_run).with_context()


def chosen(gib: int | None, *, shared: bool = False, **actor: Any) -> tuple[Any, ...]:
    memory = choose_update(
        run_of(**actor),
        ModelShape.of(SEVEN),
        learner_gpus=(0, 1, 2, 3),
        engine_gpus=(0, 1, 2, 3) if shared else (4, 5, 6, 7),
        totals={} if gib is None else dict.fromkeys(range(8), gib * GIB),
    ).memory
    assert not memory.is_open
    return memory.recompute, memory.keep_gathered, memory.accumulate


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        (144, ("none", True, True)),
        (130, (0.9, True, True)),
        (111, (0.9, True, False)),
        (90, (0.9, False, False)),
        (80, (0.5, False, False)),
        (67, (0.25, False, False)),
        (30, ("full", False, False)),
        (None, ("full", False, True)),
    ],
)
def test_the_fastest_form_that_fits_is_taken(gib: int | None, expected: tuple[Any, ...]) -> None:
    assert chosen(gib) == expected


def test_an_engine_on_the_same_gpu_keeps_its_share() -> None:
    assert chosen(160, shared=True) == chosen(112) == (0.9, True, False) != chosen(160)


def test_what_is_given_stays() -> None:
    assert chosen(141, memory={"recompute": "full"}) == ("full", True, True)
    assert chosen(141, memory={"keep_gathered": False, "accumulate": False}) == ("none", False, False)
    given = {"recompute": 0.5, "keep_gathered": True, "accumulate": True}
    assert chosen(10, memory=given) == (0.5, True, True)
    assert chosen(None, memory="auto") == (LEAST.recompute, LEAST.keep_gathered, LEAST.accumulate)


def test_a_rank_of_32b_needs_82_gib_less_where_gradients_are_reduced_every_time() -> None:
    shape = ModelShape.of(
        SEVEN
        | {
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
        }
    )
    assert shape is not None
    needed = {
        accumulate: LearnerMemory.of(
            run_of(memory={"recompute": "full", "accumulate": accumulate}), shape
        ).most
        / GIB
        for accumulate in (True, False)
    }
    assert needed == {True: pytest.approx(231.3, abs=0.1), False: pytest.approx(149.2, abs=0.1)}


def test_averages_go_to_host_memory_where_nothing_else_makes_the_update_fit() -> None:
    sizes = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
    heads = {"num_attention_heads": 40, "num_key_value_heads": 8}
    shape = ModelShape.of(SEVEN | sizes | heads)  # 32B
    assert shape is not None
    offloads = {}
    for gib in (192, 141):
        memory = choose_update(
            run_of(),
            shape,
            learner_gpus=(0, 1, 2, 3),
            engine_gpus=(4, 5, 6, 7),
            totals=dict.fromkeys(range(8), gib * GIB),
        ).memory
        offloads[gib] = memory.offload
        config = run_of(memory=memory.model_dump())
        assert LearnerMemory.of(config, shape).most <= gib * GIB
    assert offloads == {192: False, 141: True}


@pytest.mark.parametrize(
    ("prompts", "host_gib", "expected"),
    [
        (16, 200, (0.9, False, True, True)),
        (16, 140, ("full", False, True, False)),  # too little for averages and a checkpoint's copy: 142 GiB
        (8, 200, ("full", False, True, False)),  # half the tokens per visit of the averages
        (64, 200, (0.9, False, True, True)),
    ],
)
def test_averages_go_to_a_host_with_room_where_their_visits_cost_less_than_recomputing(
    prompts: int, host_gib: int, expected: tuple[Any, ...]
) -> None:
    """Two H100s, 7B in turns with engines: an update with averages in the host's memory was 9 % faster."""
    tree = run_of(ppo_mini_batch_size=prompts, ppo_max_token_len_per_gpu=8704, reduce_dtype="bfloat16")
    config = tree.model_copy(
        update={
            "learner": tree.learner.model_copy(update={"world_size": 2}),
            "rollout": tree.rollout.model_copy(update={"sleep": "always"}),
        }
    )
    memory = choose_update(
        config,
        ModelShape.of(SEVEN),
        learner_gpus=(0, 1),
        engine_gpus=(0, 1),
        totals=dict.fromkeys((0, 1), 79 * GIB),
        host_bytes=host_gib * GIB,
    ).memory
    assert (memory.recompute, memory.keep_gathered, memory.accumulate, memory.offload) == expected


def waiting(response: int, gpus: int, host_gib: int, tree: dict[str, Any], **actor: Any) -> tuple[Any, ...]:
    """What is chosen on GPUs of 80 GB, whether it fits, and the GiB of inputs of layers on the host."""
    run, shape = long_run(response, world_size=gpus, actor=actor), ModelShape.of(tree)
    assert shape is not None
    choice = choose_update(
        run,
        shape,
        learner_gpus=tuple(range(gpus)),
        engine_gpus=(gpus,),
        totals=dict.fromkeys(range(gpus), CARDS["H100"].num_bytes),
        host_bytes=host_gib * GIB,
    )
    inputs = LearnerMemory.of(choice.put_into(run), shape).host_inputs / GIB
    return choice.memory.recompute, choice.context, choice.fits, inputs


@pytest.mark.parametrize(
    ("response", "gpus", "host_gib", "tree", "actor", "expected"),
    [
        (130_048, 1, 1000, SHAPES["3B"], {}, ("full", 1, True, 0)),
        (195_584, 1, 1000, SHAPES["3B"], {}, ("from_host", 1, True, 27)),
        (195_584, 1, 53, SHAPES["3B"], {}, ("full", 1, False, 0)),  # more than half of the host's memory
        (195_584, 1, 53, SHAPES["3B"], {"memory": {"host_gib": 30}}, ("from_host", 1, True, 27)),
        # The inputs of 24 of 36 layers.
        (195_584, 1, 1000, SHAPES["3B"], {"memory": {"host_gib": 18}}, ("from_host", 1, True, 18)),
        (195_584, 1, 1000, SHAPES["3B"], {"memory": {"host_gib": 3}}, ("full", 1, False, 0)),
        (130_048, 4, 1000, SEVEN, {}, ("from_host", 1, True, 24.5)),
        (130_048, 4, 190, SEVEN, {}, ("full", 2, True, 0)),  # 98 GiB of four ranks are too much
    ],
)
def test_inputs_of_layers_wait_on_a_host_with_room_where_nothing_else_fits_on_a_rank(
    response: int,
    gpus: int,
    host_gib: int,
    tree: dict[str, Any],
    actor: dict[str, Any],
    expected: tuple[Any, ...],
) -> None:
    assert waiting(response, gpus, host_gib, tree, **actor) == expected


def test_where_the_reference_waits_is_kept_as_given() -> None:
    for offload in (True, False):
        memory = choose_update(
            run_of(use_kl_loss=True, memory={"offload_reference": offload}),
            ModelShape.of(SEVEN),
            learner_gpus=(0, 1, 2, 3),
            engine_gpus=(4, 5, 6, 7),
            totals=dict.fromkeys(range(8), 141 * GIB),
        ).memory
        assert not memory.is_open
        assert memory.model_dump()["offload_reference"] is offload


def test_a_reference_that_does_not_exist_cannot_be_offloaded() -> None:
    memory = {"offload_reference": True}
    with pytest.raises(ConfigError, match=r"actor\.memory\.offload_reference: this run has no reference"):
        run_of(memory=memory)
    config = run_of(memory=memory, use_kl_loss=True, compile=False)
    tree = config.model_dump(mode="json")
    tree["model"]["lora"] = {"rank": 4}
    with pytest.raises(ConfigError, match=r"actor\.memory\.offload_reference: this run has no reference"):
        parse(RunConfig, tree)
