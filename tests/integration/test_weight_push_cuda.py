"""Over NCCL, from two GPUs to an engine on a third: it then generates as with the weights from disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.weights.digest.agreement import disagreement, model_digest
from support.push_engines import generate, join, push, running_engine
from support.push_learners import LearnerGroup
from support.push_models import save_config, seeded_model, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices"),
]

PROMPTS = [[5, 17, 102, 3], [198, 0, 64], [1], [77] * 20]
NUM_PUSHES = 100
Generated = list[tuple[list[int], list[float]]]
ENGINE = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 28}


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
