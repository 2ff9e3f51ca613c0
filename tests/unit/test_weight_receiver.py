"""The receiver's calls to an engine that records them, and what it makes of the workers' answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.core.errors import DeadlineError, ModelError, PeerLostError, WeightSyncError
from paceline.core.members import MemberKind, RankRef
from paceline.rollout.engines.vllm import weight_receiver
from paceline.rollout.engines.vllm.weight_receiver import WeightReceiver
from paceline.weights.digest.agreement import DigestReport
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.receipt import PushReceipt

LAYOUT = RankLayout(
    dtype="float32",
    slices=(TensorSlice(name="w", global_shape=(2,), box=Box((0,), (2,)), param="w", offset=(0,)),),
)


class FakeEngine:
    """Answers every call with prepared replies, one per TP rank."""

    def __init__(self, replies: list[Any], *, clean: bool = True, delay_s: float = 0.0) -> None:
        self.replies, self.clean, self.delay_s = replies, clean, delay_s
        self.calls: list[tuple[Any, ...]] = []

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        self.calls.append((method, timeout, args))
        await asyncio.sleep(self.delay_s)
        return self.replies

    async def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset_prefix_cache",))
        return self.clean


def receipt(rank: int, num_bytes: int, ms: float) -> dict[str, Any]:
    report = DigestReport.of(rank=f"rollout rank {rank}", version=4, slices=())
    part = PushReceipt(
        version=4,
        reports=(report,),
        num_bytes=num_bytes,
        relayed_bytes=num_bytes // 2,
        transfer_ms=ms,
        digest_ms=ms / 2,
        peak_extra_bytes=num_bytes,
    )
    return {"receipt": part.to_bytes()}


def failure(kind: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": f"a {kind}", "rank": None, **fields}}


async def test_a_push_is_received_then_the_prefix_cache_is_reset() -> None:
    engine = FakeEngine([receipt(0, 100, 3.0), receipt(1, 140, 2.0)])
    result = await WeightReceiver(engine).receive(4, 20.0)
    assert engine.calls == [("paceline_receive", 30.0, (4, 20.0)), ("reset_prefix_cache",)]
    assert (result.version, result.num_bytes, result.transfer_ms, result.digest_ms) == (4, 240, 3.0, 1.5)
    assert (result.peak_extra_bytes, result.relayed_bytes) == (140, 120)
    assert [report.rank for report in result.reports] == ["rollout rank 0", "rollout rank 1"]


async def test_describe_and_join_reach_every_worker() -> None:
    engine = FakeEngine([{"layout": LAYOUT.to_bytes()}] * 2)
    assert await WeightReceiver(engine).describe() == [LAYOUT, LAYOUT]
    engine.replies = [{}, {}]
    await WeightReceiver(engine).join(b"spec", 2, 5.0)
    assert engine.calls[-1] == ("paceline_join", 15.0, (b"spec", 2, 5.0))


async def test_the_cause_is_reported_before_its_consequences() -> None:
    lost = failure("PeerLostError", peer=["learner", 0])
    with pytest.raises(WeightSyncError, match="TP rank 1: a WeightSyncError"):
        await WeightReceiver(FakeEngine([lost, failure("WeightSyncError")])).receive(1, 5.0)
    with pytest.raises(PeerLostError, match="TP rank 0: a PeerLostError") as caught:
        await WeightReceiver(FakeEngine([lost, lost])).receive(1, 5.0)
    assert caught.value.peer == RankRef(MemberKind.LEARNER, 0)


async def test_whom_a_server_lost_is_nobody_of_its_own() -> None:
    """Rank 0 lost rank 1 of the same engine, which gave up when a server that passes weights on went away."""
    within = failure("PeerLostError", peer=["rollout", 3], rank=["rollout", 2])
    beyond = failure("PeerLostError", peer=["rollout", 1], rank=["rollout", 3])
    with pytest.raises(PeerLostError, match="TP rank 1") as caught:
        await WeightReceiver(FakeEngine([within, beyond])).receive(1, 5.0)
    assert caught.value.peer == RankRef(MemberKind.ROLLOUT, 1)


async def test_errors_keep_their_class() -> None:
    late = failure("DeadlineError", phase="push", peer=["learner", 1], seconds=2.0, hint="")
    with pytest.raises(DeadlineError, match="TP rank 0: push: no answer from learner rank 1 within 2 s"):
        await WeightReceiver(FakeEngine([late])).receive(1, 5.0)
    with pytest.raises(ModelError, match="TP rank 0: a ModelError"):
        await WeightReceiver(FakeEngine([failure("ModelError")])).describe()
    with pytest.raises(WeightSyncError, match="TP rank 0: KeyError: a KeyError"):
        await WeightReceiver(FakeEngine([failure("KeyError")])).join(b"", 1, 1.0)


async def test_running_requests_make_a_push_unusable() -> None:
    engine = FakeEngine([receipt(0, 1, 1.0)], clean=False)
    with pytest.raises(WeightSyncError, match="version 4 arrived while requests were running"):
        await WeightReceiver(engine).receive(4, 5.0)


async def test_an_engine_that_hangs_is_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_receiver, "_GRACE_S", 0.0)
    with pytest.raises(DeadlineError, match=r"paceline_leave: no answer from the engine within 0\.05 s"):
        await WeightReceiver(FakeEngine([{}], delay_s=5.0)).leave(timeout_s=0.05)


async def test_a_reset_that_hangs_is_a_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_receiver, "_GRACE_S", 0.05)
    engine = FakeEngine([receipt(0, 100, 3.0)])

    async def hang() -> bool:
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(engine, "reset_prefix_cache", hang)
    with pytest.raises(
        DeadlineError, match=r"reset of the prefix cache: no answer from the engine .* restarted"
    ):
        await WeightReceiver(engine).receive(4, 20.0)
