"""The vLLM engine's calls to its workers: what it asks of AsyncLLM, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import DeadlineError, ModelError, PacelineError, PeerLostError, WeightSyncError
from paceline.core.members import EnginePart, LocalPart, MemberKind, RankRef, peer_to_plain
from paceline.core.samples.trajectory import FinishReason
from paceline.rollout.engines.processes import EngineProcesses
from paceline.rollout.engines.vllm import engine as module
from paceline.rollout.engines.vllm.engine import VllmEngine
from paceline.rollout.engines.vllm.sampling.samples import to_sample
from paceline.weights.digest.agreement import DigestReport
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt

LAYOUT = RankLayout(
    dtype="float32",
    slices=(TensorSlice(name="w", global_shape=(2,), box=Box((0,), (2,)), param="w", offset=(0,)),),
)
SPEC = WeightGroupSpec(
    epoch=1,
    backend="gloo",
    store_host="127.0.0.1",
    store_port=29500,
    learner_layouts=(LAYOUT, LAYOUT),
    rollout_layouts=(LAYOUT, LAYOUT),
    wire_dtype="float32",
)


class FakeLlm:
    """Stands in for AsyncLLM: answers every call with prepared replies, one per TP rank."""

    def __init__(self, replies: list[Any], *, idle: bool = True, delay_s: float = 0.0) -> None:
        self.replies, self.idle, self.delay_s = replies, idle, delay_s
        self.calls: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.errored = False

    async def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        assert method == "paceline_call"
        called, given = args
        self.calls.append((called, timeout, given))
        await asyncio.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure
        return self.replies

    async def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset_prefix_cache",))
        return self.idle

    async def reset_mm_cache(self) -> None:
        self.calls.append(("reset_mm_cache",))

    async def reset_encoder_cache(self) -> None:
        self.calls.append(("reset_encoder_cache",))

    async def sleep(self, level: int) -> None:
        await self._order("sleep", level)

    async def wake_up(self, tags: list[str]) -> None:
        await self._order("wake_up", *tags)

    async def _order(self, *call: object) -> None:
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure


def engine(llm: FakeLlm) -> VllmEngine:
    return VllmEngine(llm, EngineProcesses())


def receipt(rank: int, num_bytes: int, ms: float) -> dict[str, bytes]:
    report = DigestReport.of(rank=f"rollout rank {rank}", version=4, slices=())
    made = PushReceipt(
        version=4,
        reports=(report,),
        num_bytes=num_bytes,
        relayed_bytes=num_bytes // 2,
        transfer_ms=ms,
        digest_ms=ms / 2,
        peak_extra_bytes=num_bytes,
    )
    return {"receipt": made.to_bytes()}


def failure(kind: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": f"a {kind}", "rank": None, **fields}}


async def test_a_push_into_a_model_with_a_vision_tower_resets_what_is_kept_of_images() -> None:
    llm = FakeLlm([receipt(0, 100, 3.0)])
    await VllmEngine(llm, EngineProcesses(), has_tower=True).receive(4, 20.0)
    order = [call[0] for call in llm.calls]
    assert order == ["paceline_receive", "reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache"]


async def test_a_push_is_received_then_the_prefix_cache_is_reset() -> None:
    llm = FakeLlm([receipt(0, 100, 3.0), receipt(1, 140, 2.0)])
    result = await engine(llm).receive(4, 20.0)
    assert llm.calls == [("paceline_receive", 30.0, (4, 20.0, False)), ("reset_prefix_cache",)]
    assert (result.version, result.num_bytes, result.transfer_ms, result.digest_ms) == (4, 240, 3.0, 1.5)
    assert (result.peak_extra_bytes, result.relayed_bytes) == (140, 120)
    assert [report.rank for report in result.reports] == ["rollout rank 0", "rollout rank 1"]


async def test_describe_and_join_reach_every_worker() -> None:
    llm = FakeLlm([{"layout": LAYOUT.to_bytes()}] * 2)
    assert await engine(llm).describe() == (LAYOUT, LAYOUT)
    llm.replies = [{}, {}]
    await engine(llm).join(SPEC, 2, 5.0)
    assert llm.calls[-1] == ("paceline_join", 15.0, (SPEC.to_bytes(), 2, 5.0))


async def test_the_cause_is_reported_before_its_consequences() -> None:
    lost = failure("PeerLostError", peer=["learner", 0])
    with pytest.raises(WeightSyncError, match="TP rank 1: a WeightSyncError"):
        await engine(FakeLlm([lost, failure("WeightSyncError")])).receive(1, 5.0)
    with pytest.raises(PeerLostError, match="TP rank 0: a PeerLostError") as caught:
        await engine(FakeLlm([lost, lost])).receive(1, 5.0)
    assert caught.value.peer == RankRef(MemberKind.LEARNER, 0)


async def test_a_lost_peer_outside_of_the_engine_is_reported_before_one_inside() -> None:
    """Rank 0 lost rank 1 of the same engine, which gave up when a server that passes weights on went away."""
    within = failure("PeerLostError", peer=["rollout", 3], rank=["rollout", 2])
    beyond = failure("PeerLostError", peer=["rollout", 1], rank=["rollout", 3])
    with pytest.raises(PeerLostError, match="TP rank 1") as caught:
        await engine(FakeLlm([within, beyond])).receive(1, 5.0)
    assert caught.value.peer == RankRef(MemberKind.ROLLOUT, 1)


async def test_errors_keep_their_class() -> None:
    late = failure("DeadlineError", phase="push", peer=["learner", 1], seconds=2.0, hint="")
    with pytest.raises(DeadlineError, match="TP rank 0: push: no answer from learner rank 1 within 2 s"):
        await engine(FakeLlm([late])).receive(1, 5.0)
    with pytest.raises(ModelError, match="TP rank 0: a ModelError"):
        await engine(FakeLlm([failure("ModelError")])).describe()
    with pytest.raises(WeightSyncError, match="TP rank 0: KeyError: a KeyError"):
        await engine(FakeLlm([failure("KeyError")])).join(SPEC, 1, 1.0)


@pytest.mark.parametrize(("dead", "kind"), [(False, WeightSyncError), (True, PeerLostError)])
async def test_a_call_that_raises_is_told_apart_from_a_dead_engine(dead: bool, kind: type[Exception]) -> None:
    llm = FakeLlm([])
    llm.failure, llm.errored = Exception("worker said no"), dead
    message = "the inference engine has died" if dead else "paceline_describe failed .* worker said no"
    with pytest.raises(kind, match=message):
        await engine(llm).describe()


async def test_running_requests_make_a_push_unusable() -> None:
    llm = FakeLlm([receipt(0, 1, 1.0)], idle=False)
    with pytest.raises(WeightSyncError, match="version 4 arrived while requests were running"):
        await engine(llm).receive(4, 5.0)


async def test_an_engine_that_hangs_is_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    with pytest.raises(DeadlineError, match=r"paceline_join: no answer from the engine within 0\.05 s"):
        await engine(FakeLlm([{}], delay_s=5.0)).join(SPEC, 2, 0.05)


async def test_a_reset_that_hangs_is_a_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    llm = FakeLlm([receipt(0, 100, 3.0)])

    async def hang() -> bool:
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(llm, "reset_prefix_cache", hang)
    with pytest.raises(
        DeadlineError, match=r"reset of the prefix cache: no answer from the engine .* restarted"
    ):
        await engine(llm).receive(4, 20.0)


async def test_an_engine_that_does_not_answer_ends_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    subject = engine(FakeLlm([], delay_s=10.0))
    with pytest.raises(DeadlineError):
        await subject.join(SPEC, 2, 0.05)
    with pytest.raises(PeerLostError, match="paceline_join: no answer from the engine") as caught:
        await subject.check_health()
    assert caught.value.peer is LocalPart.ENGINE


async def test_an_engine_with_a_stopped_process_ends_its_server() -> None:
    """The look takes the time of now; what it has seen once is not taken back by a SIGCONT on the way out."""
    processes, looks, answers = EngineProcesses(), list[float](), iter([None, "77 (VLLM::Worker)"])

    def stopped(now: float) -> str | None:
        looks.append(now)
        return next(answers)

    processes.stopped = stopped  # type: ignore[method-assign]
    subject, before = VllmEngine(FakeLlm([]), processes), time.monotonic()
    await subject.check_health()
    for _ in range(2):
        with pytest.raises(
            PeerLostError, match=r"process 77 \(VLLM::Worker\) of the inference engine is stopped"
        ):
            await subject.check_health()
    assert before <= looks[0] <= looks[1] <= time.monotonic()


async def test_an_engine_whose_loader_is_broken_ends_its_server() -> None:
    llm = FakeLlm([failure("PeerLostError", peer=peer_to_plain(LocalPart.ENGINE))])
    subject = engine(llm)
    await subject.check_health()
    with pytest.raises(PeerLostError):
        await subject.receive(4, 1.0)
    with pytest.raises(PeerLostError, match="TP rank 0: a PeerLostError"):
        await subject.check_health()


async def test_a_request_that_the_engine_ends_for_another_reason_is_no_sample() -> None:
    """vLLM names errors of a single request, and some models' endless repetitions, as finish reasons."""
    completion = SimpleNamespace(token_ids=[5], logprobs=None, finish_reason="error")
    output = SimpleNamespace(request_id="7:0", outputs=[completion])
    with pytest.raises(PacelineError, match="has ended request 7:0 with the finish reason 'error'"):
        await to_sample(output, "r", None)
    completion.finish_reason = "stop"
    assert (await to_sample(output, "r", None)).finish_reason is FinishReason.STOP


class Gpus(FakeLlm):
    """Of an engine of two ranks, whose workers see so many free bytes, call after call."""

    def __init__(self, *free: list[int]) -> None:
        super().__init__([])
        self.free = itertools.chain(free, itertools.repeat([0, 0]))

    async def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        assert (method, args) == ("paceline_call", ("paceline_free_bytes", ()))
        return [{"free_bytes": number} for number in next(self.free)]


async def test_an_order_to_sleep_or_to_wake_that_failed_is_given_again() -> None:
    llm = Gpus()
    subject = engine(llm)
    llm.failure = RuntimeError("no memory to save buffers in")
    with pytest.raises(WeightSyncError, match="sleep failed in the engine: no memory to save buffers in"):
        await subject.sleep()
    llm.failure = None
    await subject.sleep()
    await subject.sleep()
    llm.failure = RuntimeError("out of memory")
    with pytest.raises(WeightSyncError, match="wake weights failed"):
        await subject.wake(EnginePart.WEIGHTS)
    llm.failure = None
    await subject.wake(EnginePart.WEIGHTS)
    await subject.wake(EnginePart.WEIGHTS)
    await subject.sleep()
    assert llm.calls == [
        ("sleep", 2),
        ("sleep", 2),
        ("wake_up", "weights"),
        ("wake_up", "weights"),
        ("sleep", 2),
    ]


async def test_an_engine_that_sleeps_says_how_much_of_a_gpu_it_gave_up_at_most() -> None:
    subject = engine(Gpus([10, 20], [70, 90], [5, 20], [15, 20], [5, 20], [65, 60]))
    assert await subject.sleep() == 70
    assert await subject.sleep() == 70  # asleep already
    await subject.wake(EnginePart.WEIGHTS)
    assert await subject.sleep() == 70  # with only its weights awake
    for part in EnginePart:
        await subject.wake(part)
    assert await subject.sleep() == 70
