"""Two FSDP2 learner processes push into a real vLLM engine, which then generates as the learner would."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import WeightSyncError
from paceline.weights.digest.agreement import disagreement, model_digest
from support.push_engines import NUM_TOKENS, generate, join, push, running_engine
from support.push_learners import LearnerGroup

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its dependencies'
]

PROMPTS = [[5, 17, 102, 3], [198, 0, 64]]


async def assert_policy(engine: Any, config: Any, seed: int) -> list[list[int]]:
    """The engine generates the same as a Hugging Face float32 forward of this seed's model."""
    from support.push_models import greedy, seeded_model

    reference = seeded_model(config, seed).eval()
    generated = []
    for index, prompt in enumerate(PROMPTS):
        tokens, log_probs = await generate(engine, prompt, f"seed{seed}-{index}")
        expected, expected_log_probs = greedy(reference, prompt, NUM_TOKENS)
        assert tokens == expected
        assert log_probs == pytest.approx(expected_log_probs, abs=1e-5)
        generated.append(tokens)
    return generated


async def assert_push(learners: LearnerGroup, engine: Any, config: Any, version: int) -> None:
    """A push of the model of seed `version` arrives, and the engine generates as that model does."""
    learners.call("set_seed", version)
    sent, received, _ = await push(learners, engine, version)
    assert disagreement(sent, received.reports) is None
    assert model_digest([sent]) == model_digest(received.reports)
    await assert_policy(engine, config, seed=version)


def start_learners(config: Any, **sizes: int) -> LearnerGroup:
    plain = {key: value for key, value in config.to_dict().items() if key != "architectures"}
    return LearnerGroup(plain, **({"size": 2} | sizes))


@pytest.mark.parametrize(("tp", "kv_heads", "tied"), [(1, 2, False), (2, 1, True)])
async def test_a_push_makes_the_engine_the_learners_policy(
    tp: int, kv_heads: int, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.push_models import save_config, tiny_config

    config = tiny_config(kv_heads=kv_heads, tied=tied)
    save_config(config, tmp_path)
    learners = start_learners(config)
    try:
        async with running_engine(tmp_path, tp, monkeypatch) as engine:
            spec = await join(learners, engine, epoch=1, round_bytes=20_000)
            assert spec.world_size == 2 + tp

            sent, received, answers = await push(learners, engine, version=1)
            assert disagreement(sent, received.reports) is None
            assert model_digest([sent]) == model_digest(received.reports)
            assert received.num_bytes == sum(num_bytes for _, num_bytes in answers)
            first = await assert_policy(engine, config, seed=0)

            learners.call("set_seed", 1)
            sent_2, received_2, _ = await push(learners, engine, version=2)
            assert disagreement(sent_2, received_2.reports) is None
            assert model_digest([sent_2]) != model_digest([sent])
            assert await assert_policy(engine, config, seed=1) != first

            # The check finds a flipped bit, and the next push, over a new group, repairs it.
            damaged = "model.layers.1.self_attn.qkv_proj.weight"
            await engine.call_workers("paceline_flip_bit", (tp - 1, damaged, 64 * 5 + 3), 30.0)
            reports = await engine.digest(version=2)
            difference = disagreement(sent_2, reports)
            assert difference is not None
            assert f"1.self_attn.q_proj.weight: TP rank {tp - 1} holds" in difference
            await join(learners, engine, epoch=2, round_bytes=1 << 20)
            sent_3, received_3, _ = await push(learners, engine, version=3)
            assert disagreement(sent_3, received_3.reports) is None
            assert model_digest(received_3.reports) == model_digest([sent_2])
            await engine.leave()
    finally:
        learners.close()


@pytest.mark.more
async def test_learners_that_divide_experts_push_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four experts each of four ranks has one, in the order 0, 2, 1, 3."""
    from support.push_models import save_config, tiny_moe_config

    config = tiny_moe_config()
    save_config(config, tmp_path)
    learners = start_learners(config, size=4, expert=2)
    try:
        name = "model.layers.1.mlp.experts.down_proj"
        parts = [part for layout in learners.layouts() for part in layout.slices if part.name == name]
        assert [part.box.start[0] for part in parts] == [0, 2, 1, 3]
        async with running_engine(tmp_path, 1, monkeypatch) as engine:
            await join(learners, engine, epoch=1, round_bytes=30_000)
            for version in (1, 2):
                await assert_push(learners, engine, config, version)
    finally:
        learners.close()


@pytest.mark.more
async def test_learners_that_divide_matrices_push_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the first matrices, columns of the last; two of four ranks have the same half, and halve it."""
    from support.push_models import save_config, tiny_config

    config = tiny_config(kv_heads=2, tied=False)
    save_config(config, tmp_path)
    learners = start_learners(config, size=4, tensor=2)
    try:
        parts = [part for layout in learners.layouts() for part in layout.slices]
        rows, columns = (
            [part.box.start for part in parts if part.name == f"model.layers.1.self_attn.{name}.weight"]
            for name in ("q_proj", "o_proj")
        )
        assert rows == [(0, 0), (64, 0), (32, 0), (96, 0)]
        assert columns == [(0, 0), (0, 64), (64, 0), (64, 64)]
        async with running_engine(tmp_path, 2, monkeypatch) as engine:
            await join(learners, engine, epoch=1, round_bytes=30_000)
            for version in (1, 2):
                await assert_push(learners, engine, config, version)
    finally:
        learners.close()


@pytest.mark.more
async def test_experts_that_a_kernel_repacks_take_the_general_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts on a CPU: full tensors, in rounds, through vLLM's own loader; twice."""
    from support.push_models import save_config, tiny_moe_config

    config = tiny_moe_config()
    save_config(config, tmp_path)
    learners = start_learners(config)
    try:
        async with running_engine(tmp_path, 1, monkeypatch) as engine:
            spec = await join(learners, engine, epoch=1, round_bytes=30_000)
            assert [layout.full_tensors for layout in spec.rollout_layouts] == [True]
            for version in (1, 2):
                await assert_push(learners, engine, config, version)
            with pytest.raises(WeightSyncError, match="not pushed in place"):
                await engine.digest(version=2)

            # A load that breaks off within a layer leaves nothing behind for the next.
            learners.call("set_seed", 3)
            await engine.call_workers("paceline_break_load", (4,), 30.0)
            sending = asyncio.ensure_future(learners.call_async("publish", 3))
            with pytest.raises(WeightSyncError, match="the load was broken off"):
                await engine.receive(3, 20.0)
            with pytest.raises(RuntimeError, match="PeerLostError"):
                await sending
            await join(learners, engine, epoch=2, round_bytes=30_000)
            await assert_push(learners, engine, config, version=4)
    finally:
        learners.close()
