"""The learner on a GPU computes what it computes on the CPU."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from paceline.learner.distributed.host_memory import host_memory
from support.learner_cuda import findings

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device; test_learner_step.py is the CPU twin"
)
def test_a_gpu_computes_what_the_cpu_does(tmp_path: Path) -> None:
    results = findings(tmp_path)
    for host, device in zip(results["cpu"], results["cuda"], strict=True):
        for name in ("actor/pg_loss", "critic/vf_loss", "actor/entropy", "algorithm/reference_kl"):
            assert device[name] == pytest.approx(host[name], abs=1e-4), name
    assert results["again"] == results["cuda"]
    assert results["offloaded"] == results["cuda"]
    for host, rough in zip(results["cpu"], results["half"], strict=True):
        assert rough["actor/entropy"] == pytest.approx(host["actor/entropy"], abs=2e-2)
        assert rough["critic/vf_loss"] == pytest.approx(host["critic/vf_loss"], rel=5e-2)
        assert abs(rough["actor/first_ppo_kl"]) < 1e-3
    for host, shared in zip(results["cpu"], results["shared"], strict=True):
        for name in ("actor/pg_loss", "critic/vf_loss", "actor/entropy", "algorithm/reference_kl"):
            assert shared[name] == pytest.approx(host[name], abs=1e-4), name
    for host, rough in zip(results["cpu"], results["half_shared"], strict=True):
        assert rough["actor/entropy"] == pytest.approx(host["actor/entropy"], abs=2e-2)
        assert rough["critic/vf_loss"] == pytest.approx(host["critic/vf_loss"], rel=5e-2)
    assert results["resumed_equals"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; the unpinning has a CPU test")
def test_memory_that_was_pinned_can_be_used_again() -> None:
    size = 64 << 20
    for _ in range(3):
        part = host_memory(size, pinned=True).view(torch.float32)[16:]
        assert part.is_pinned()
        address = part.untyped_storage().data_ptr()
        del part
        others = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in range(64)]
        [other] = [other for other in others if other.data_ptr() == address]  # else this shows nothing
        assert other.fill_(1).cuda().sum().item() == size
