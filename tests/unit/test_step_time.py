"""The estimate of a step, held against steps that were timed on GPUs, and what it must say of a change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.cards import CARDS
from paceline.models.model_shape import ModelShape
from paceline.sizing.step_time import StepTime, _Batch
from support.timed_steps import BOUNDED, KEPT, SHAPES, TIMED, Timed

MIXTURE = SHAPES["3B"] | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


@pytest.mark.parametrize("name", TIMED)
def test_timed_steps_are_estimated_to_a_fifth(name: str) -> None:
    timed = TIMED[name]
    estimate = timed.estimate
    phases = (estimate.generation, estimate.update, estimate.seconds)
    assert phases == pytest.approx(timed.seconds, rel=0.2)
    rows = timed.prompts * timed.samples
    prompt, response = timed.mean or (timed.prompt, timed.response)
    assert estimate.num_tokens == rows * (prompt + response)
    assert estimate.num_gpus == timed.gpus
    assert estimate.tokens_per_s == pytest.approx(estimate.num_tokens / estimate.seconds / timed.gpus)


@pytest.mark.parametrize("name", BOUNDED)
def test_steps_with_a_bound_are_estimated_to_a_fifth(name: str) -> None:
    timed = BOUNDED[name]
    waited, update, step = timed.seconds
    estimate = timed.estimate
    assert (estimate.update, estimate.seconds) == pytest.approx((update, step), rel=0.2)
    # Seconds that the learner waits for are the small difference of two large numbers.
    assert estimate.waited == pytest.approx(waited, rel=0.2, abs=2.0)


def test_a_larger_bound_gains_until_the_learner_never_waits() -> None:
    in_flight = [
        replace(BOUNDED["1, in flight"], bound=bound, num_seqs=512).estimate for bound in (1, 2, 4, 8)
    ]
    assert [time.seconds for time in in_flight] == sorted((time.seconds for time in in_flight), reverse=True)
    assert in_flight[-1].waited == 0.0
    # An engine without free slots samples no faster for having more batches to sample.
    few = replace(BOUNDED["4, in flight"], num_seqs=32)
    alone = replace(few, bound=0, in_flight="wait").estimate.generation
    assert few.estimate.generation == pytest.approx(alone, rel=0.2)
    # A push that waits for answers lets the learner wait for whole batches, whatever the bound is.
    waiting = [replace(BOUNDED["1"], bound=bound).estimate.seconds for bound in (1, 4)]
    assert waiting[0] == waiting[1] > in_flight[0].seconds - 0.5


def test_two_updates_of_one_run_are_told_apart() -> None:
    """Measured one beside the other: 14.08 s, and 14.97 s for the one that had been chosen."""
    most, quarter = TIMED["7B, two H100s, most kept"], TIMED["7B, two H100s, a quarter kept"]
    assert most.estimate.update < quarter.estimate.update


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        # Of one GPU and of two, of all that is kept and of a part: what orders of turns and the pause took.
        ("1.5B in turns", 0.20 + 0.075),
        ("3B with FlashAttention 4", 0.555 + 0.089),
        ("7B, two H100s, most kept", 0.60 + 0.144),
        ("7B, four H100s, averages kept", 1.10 + 0.189),
    ],
)
def test_turns_cost_more_where_ranks_give_back_more(name: str, seconds: float) -> None:
    assert TIMED[name].estimate.weights == pytest.approx(seconds, rel=0.25)


def test_a_kv_cache_that_holds_fewer_sequences_makes_rounds() -> None:
    timed = TIMED["3B"]
    # 64 of 128 sequences of 1,024 tokens, with an eighth of their prompt's 512: 36 KiB a token.
    cache = 64 * (1024 + 64) * 36 * 1024
    rounds = changed(timed, rollout={"max_num_seqs": 64}).generation
    for share, expected in ((1, rounds), (2, changed(timed).generation)):
        given = {"kv_cache_memory_bytes": share * cache, "distributed_executor_backend": "uni"}
        generation = changed(timed, rollout={"engine_kwargs": given}).generation
        assert generation == pytest.approx(expected)


def test_a_group_that_is_cut_computes_its_prompt_twice() -> None:
    """Eight samples of 1,024 tokens behind 512: 8,704 tokens hold all, 8,192 only seven."""
    uncut, cut = (changed(TIMED["3B"], actor={"ppo_max_token_len_per_gpu": most}) for most in (8704, 8192))
    assert cut.scoring / uncut.scoring == pytest.approx((512 / 4 + 1024) / (512 / 8 + 1024), rel=0.02)
    assert cut.update > 1.04 * uncut.update


def changed(timed: Timed, **sections: dict[str, Any]) -> StepTime:
    tree = timed.config.model_dump(mode="json", exclude_unset=True)
    for name, section in sections.items():
        tree[name] = tree[name] | section
    shape = ModelShape.of(SHAPES[timed.shape])
    assert shape is not None
    return StepTime.of(parse(RunConfig, tree), shape, CARDS[timed.card])


@pytest.mark.parametrize(
    ("card", "length", "exchange", "compiled", "seconds"),
    [
        ("H100", 32_768, {}, False, 12.24),
        ("H200", 32_768, {}, False, 11.91),
        ("H100", 32_768, {"context_parallel": 2}, False, 12.94),
        ("H200", 32_768, {"context_parallel": 2}, False, 12.30),
        ("H200", 32_768, {"context_parallel": 2}, True, 11.22),
        ("H200", 32_768, {"tensor_parallel": 2}, False, 12.74),
        ("H200", 32_768, {"tensor_parallel": 2}, True, 11.77),
        ("H100", 65_536, {"context_parallel": 2}, False, 2 * 8.78),
        ("H100", 131_072, {"context_parallel": 2}, False, 2 * 26.75),
    ],
)
def test_updates_of_long_rows_are_estimated_to_a_fifth(
    card: str, length: int, exchange: dict[str, int], compiled: bool, seconds: float
) -> None:
    """3B on two GPUs, everything recomputed: eight rows; of the longer ones four, twice what was timed."""
    timed = Timed(
        shape="3B",
        card=card,
        gpus=2,
        prompts=2,
        samples=4 if length == 32_768 else 2,
        prompt=1024,
        response=length - 1024,
        micro_batch=length // 2 if exchange else length,
        compiled=compiled,
        memory=KEPT | {"recompute": "full"},
        seconds=(0.0, seconds, 0.0),
    )
    update = changed(timed, actor={"ppo_mini_batch_size": 2}, learner=exchange).update
    assert update == pytest.approx(seconds, rel=0.2)


def test_what_a_setting_costs() -> None:
    timed = TIMED["3B"]
    base = changed(timed)
    # Nothing is shared: each of eight samples has its own 512 tokens of prompt.
    alone = changed(timed, actor={"shared_prompts": "off"})
    assert alone.update / base.update == pytest.approx(1536 / 1088, rel=0.1)
    assert alone.generation == base.generation
    for recompute, more in (("full", 1.26), (0.5, 1.1), (0.25, 1.15), (0.9, 1.012)):
        slower = changed(timed, actor={"memory": KEPT | {"recompute": recompute}})
        assert slower.update / base.update == pytest.approx(more, rel=0.01)
    twice = changed(timed, actor={"ppo_epochs": 2})
    assert twice.update == pytest.approx(2 * base.update)
    # Averages visit the GPU in both optimizer steps: 1.54 billion per rank, 16 bytes each.
    visited = changed(timed, actor={"memory": KEPT | {"offload": True}})
    assert visited.update - base.update == pytest.approx(2 * 1.543e9 * 16 / 64e9, rel=0.01)
    # On two ranks with a copy each, all averages visit both.
    own, own_visited = (
        changed(timed, learner={"fsdp_size": 1}, actor={"memory": memory})
        for memory in (KEPT, KEPT | {"offload": True})
    )
    assert own_visited.update - own.update == pytest.approx(2 * (visited.update - base.update))
    # An all-reduce moves as much as a gather and a reduction; the optimizer goes through all of a copy.
    assert own.update - base.update == pytest.approx(2 * 1.543e9 * 30 / CARDS["H100"].bandwidth, rel=0.01)
    critic = changed(timed, algorithm={"adv_estimator": "gae"})
    assert critic.update == pytest.approx(2 * base.update)
    # All rows are scored and have values, where half of them were scored.
    assert critic.scoring == pytest.approx(4 * base.scoring)
    reference = changed(timed, actor={"use_kl_loss": True})
    assert reference.scoring == pytest.approx(4 * base.scoring)
    rounds = changed(timed, rollout={"max_num_seqs": 64})
    assert 1.3 < rounds.generation / base.generation < 2.0
    one_engine = changed(timed, rollout={"replicas": 1, "tensor_model_parallel_size": 2})
    assert one_engine.generation != base.generation
    assert changed(timed, rollout={"enforce_eager": True}).generation > 2 * base.generation
    assert changed(timed, rollout={"sleep": "always"}).weights > base.weights + 0.25
    slow = changed(timed, model={"dtype": "float32"})
    assert slow.update > 1.8 * base.update
    short = TIMED["3B"]
    half = StepTime.of(short.config, ModelShape.of(SHAPES["3B"]), CARDS["H100"], response_tokens=512)  # type: ignore[arg-type]
    # The longest answer may still be as long as before, so that generation lasts nearly as long.
    assert half.update < 0.6 * base.update
    assert 0.75 * base.generation < half.generation < base.generation


def test_copies_of_layers_inputs_cost_what_computation_does_not_hide() -> None:
    timed = TIMED["3B"]
    full, host = (
        changed(timed, actor={"memory": KEPT | {"recompute": recompute}})
        for recompute in ("full", "from_host")
    )
    assert host == full
    # The same work behind a bus on which copies take twice as long as computation.
    tree, shape = timed.config.model_dump(mode="json", exclude_unset=True), ModelShape.of(SHAPES["3B"])
    tree["actor"] |= {"memory": KEPT | {"recompute": "from_host"}}
    assert shape is not None
    tokens = 16 * 8 * (512 / 8 + 1024)  # of a rank
    num_bytes = tokens * shape.num_layers * shape.hidden * 2
    base = StepTime.of(parse(RunConfig, tree), shape, CARDS["H100"])
    slow = replace(CARDS["H100"], bus=num_bytes / 0.8 / 10.0)
    exposed = StepTime.of(parse(RunConfig, tree), shape, slow).update - base.update
    assert 2 * 10.0 - base.update < exposed < 2 * 10.0 - 0.8 * base.update
    assert StepTime.of(parse(RunConfig, tree), shape, slow).scoring == base.scoring


def test_divided_matrices_save_gathers_and_cost_exchanges_of_tokens() -> None:
    timed = replace(TIMED["7B, four GPUs"], compiled=False)
    often = {"keep_gathered": False, "accumulate": False}
    for memory, is_faster in (({}, False), (often, True)):
        actor = {"memory": KEPT | memory, "ppo_max_token_len_per_gpu": 2048 if is_faster else 8192}
        shared, divided = (
            changed(timed, actor=actor, learner={name: 2}).update
            for name in ("context_parallel", "tensor_parallel")
        )
        assert (divided < shared) == is_faster


def test_a_small_model_that_runs_apart_waits_less_for_its_host() -> None:
    together = replace(TIMED["1.5B, model apart"], apart=False).estimate.generation
    assert TIMED["1.5B, model apart"].estimate.generation < 0.9 * together
    # A large model, and one without graphs, run within the engine's process.
    for timed in (TIMED["7B, two GPUs"], replace(TIMED["1.5B, model apart"], eager=True)):
        alone = replace(timed, apart=False).estimate.generation
        assert replace(timed, apart=True).estimate.generation == alone


def test_experts_that_no_token_meets_cost_no_arithmetic() -> None:
    tree = MIXTURE | {
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "tie_word_embeddings": False,
    }
    shape = ModelShape.of(tree)
    assert shape is not None
    assert shape.num_parameters / 1e9 == pytest.approx(30.5, abs=0.1)
    assert (shape.active_parameters + shape.vocab * shape.hidden) / 1e9 == pytest.approx(3.35, abs=0.05)
    assert (
        shape.active_parameters + shape.idle_parameters
        == shape.num_parameters - shape.vocab * shape.hidden - shape.hidden
    )


def test_few_sequences_read_few_experts() -> None:
    """One alone reads 8 of 128 experts a step; 128 at once nearly all."""
    shape = ModelShape.of(MIXTURE)
    assert shape is not None
    tree = TIMED["3B"].config.model_dump(mode="json", exclude_unset=True)
    tree["data"]["train_batch_size"] = tree["actor"]["ppo_mini_batch_size"] = 2
    tree["rollout"]["n"] = 1
    alone = StepTime.of(
        parse(RunConfig, tree | {"algorithm": {"adv_estimator": "remax"}}), shape, CARDS["H100"]
    )
    read = 2 * (shape.active_parameters + 8 / 128 * shape.idle_parameters)
    assert alone.generation == pytest.approx(1024 * (read / (0.95 * 3.35e12) + 1.9e-3), rel=0.03)


@pytest.mark.parametrize("compiled", [True, False])
def test_divided_experts_move_what_uncompiled_ones_do(compiled: bool) -> None:
    shape = ModelShape.of(MIXTURE)
    assert shape is not None
    settings = TIMED["3B"].config.model_dump(mode="json", exclude_unset=True)
    settings["actor"]["compile"] = compiled
    gathered, divided = (
        _Batch.of(
            parse(RunConfig, settings | {"learner": settings["learner"] | {"expert_parallel": size}}),
            shape,
            CARDS["H100"],
            512,
            1024,
        )._moved_by_token
        for size in (1, 2)
    )
    kept = 36 * 8 * (768 * 4 + 2 * 2048)  # of 36 layers, by eight experts, in an uncompiled layer
    less = 36 * 8 * (768 * 3 + 2 * 2048)
    assert divided - gathered == pytest.approx(32 * kept - 20 * less if compiled else 0)
