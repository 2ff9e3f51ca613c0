"""Over NCCL, from one or two GPUs to an engine on the next: it generates as with the weights from disk."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import WeightSyncError
from paceline.rollout.engines.vllm.engine import VllmEngine
from paceline.weights.digest.agreement import disagreement, model_digest
from support.push_engines import generate, join, push, running_engine
from support.push_learners import LearnerGroup
from support.push_models import save_config, seeded_model, tiny_config, tiny_moe_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

PROMPTS = [[5, 17, 102, 3], [198, 0, 64], [1], [77] * 20]
NUM_PUSHES = 100
Generated = list[tuple[list[int], list[float]]]
ENGINE = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 28}


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")
def test_a_hundred_pushes_end_where_the_disk_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(kv_heads=2, tied=False)
    generated, expected, digests = asyncio.run(_push_and_read(config, tmp_path, monkeypatch))
    assert len(digests) == 3
    # The same bits in the same engine: tokens and log-probs are equal, not close.
    assert generated == expected


async def _push_and_read(
    config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Generated, Generated, set[int]]:
    """What is generated after the pushes, and with the weights from disk; the digests of all versions."""

    last = NUM_PUSHES % 3
    written = folder / "written"
    seeded_model(config, last).to(torch.bfloat16).save_pretrained(written)
    save_config(config, written)
    save_config(config, folder / "empty")
    plain = {key: value for key, value in config.to_dict().items() if key != "architectures"}
    learners = LearnerGroup(plain, size=2, device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    try:
        async with running_engine(written, 1, monkeypatch, **ENGINE, load_format="auto") as engine:
            expected = [await generate(engine, prompt, str(i)) for i, prompt in enumerate(PROMPTS)]
        async with running_engine(folder / "empty", 1, monkeypatch, **ENGINE) as engine:
            await join(learners, engine, 1, 30_000, backend="nccl", wire_dtype="bfloat16")
            digests = set[int]()
            for version in range(1, NUM_PUSHES + 1):
                learners.call("set_seed", version % 3)
                sent, received, _ = await push(learners, engine, version)
                assert disagreement(sent, received.reports) is None
                digests.add(model_digest(received.reports))
            generated = [await generate(engine, prompt, str(i)) for i, prompt in enumerate(PROMPTS)]
            await engine.leave()
    finally:
        learners.close()
    return generated, expected, digests


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_general_path_after_loads_that_broke_off_ends_where_the_disk_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Mixture-of-Experts through vLLM's own loader, which breaks off within a layer and before one."""
    generated, expected = asyncio.run(_break_off_and_push(tmp_path, monkeypatch))
    assert generated == expected


async def _break_off_and_push(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Generated, Generated]:
    config = tiny_moe_config()
    written = folder / "written"
    seeded_model(config, 4).to(torch.bfloat16).save_pretrained(written)
    save_config(config, written)
    save_config(config, folder / "empty")
    plain = {key: value for key, value in config.to_dict().items() if key != "architectures"}
    learners = LearnerGroup(plain, size=1, device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    try:
        async with running_engine(written, 1, monkeypatch, **ENGINE, load_format="auto") as engine:
            expected = [await generate(engine, prompt, str(i)) for i, prompt in enumerate(PROMPTS)]
        async with running_engine(folder / "empty", 1, monkeypatch, **ENGINE) as engine:
            await engine.call_workers("paceline_take_general_path", (), 30.0)
            await join(learners, engine, 1, 30_000, backend="nccl", wire_dtype="bfloat16")
            for version in range(1, 4):
                learners.call("set_seed", version)
                await _push(learners, engine, version)
            for epoch, after in enumerate((0, 1, 4, 7), start=2):
                learners.call("set_seed", 10 + epoch)
                await engine.call_workers("paceline_break_load", (after,), 30.0)
                sending = asyncio.ensure_future(learners.call_async("publish", 10 + epoch))
                began = time.monotonic()
                with pytest.raises(WeightSyncError, match="the load was broken off"):
                    await engine.receive(10 + epoch, 20.0)
                with pytest.raises(RuntimeError, match="PeerLostError"):
                    await sending
                print(f"broken off after {after} tensors: known after {time.monotonic() - began:.2f} s")
                await join(learners, engine, epoch, 30_000, backend="nccl", wire_dtype="bfloat16")
            learners.call("set_seed", 4)
            await _push(learners, engine, 20)
            generated = [await generate(engine, prompt, str(i)) for i, prompt in enumerate(PROMPTS)]
            await engine.leave()
    finally:
        learners.close()
    return generated, expected


async def _push(learners: LearnerGroup, engine: VllmEngine, version: int) -> None:
    began = time.monotonic()
    sent, received, _ = await push(learners, engine, version)
    took_ms = 1e3 * (time.monotonic() - began)
    assert disagreement(sent, received.reports) is None
    print(f"general push {version}: {took_ms:.0f} ms, of it {received.transfer_ms:.0f} receiving and loading")
