"""LearnerService in front of a queue that answers by hand: idempotence, states, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.broker import names
from paceline.config.combined.agreements import BYTES_PER_ROW, BYTES_PER_TEACHER_DIGEST
from paceline.core.errors import (
    CheckpointError,
    DeadlineError,
    IllegalTransitionError,
    InvalidMessageError,
    LostDataError,
    PeerLostError,
    ProtocolError,
    VersionMismatchError,
)
from paceline.core.ids import TrajectoryId
from paceline.core.members import LearnerState, MemberKind, RankRef
from paceline.core.policy import PolicyTag
from paceline.core.training import ChunkOrder, TrainOrder, TrainResult
from paceline.learner import commands
from paceline.learner.distributed.command_loop import STOP, CommandLoop, CommandQueue
from paceline.learner.servicer import LearnerServicer
from paceline.learner.train.profiler import StepProfiler
from paceline.rpc.v1 import learner_pb2
from paceline.weights.transport.rendezvous import Abandonment, open_store
from paceline.wire.calls.training import chunk_to_proto, decode_chunk, decode_order, order_to_proto
from support.learner_fakes import make_batch, run_config
from support.learner_ranks import alone

pytestmark = pytest.mark.torch


class Queue(CommandQueue):
    """Keeps what is submitted for the test to answer."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[tuple[str, dict[str, Any]]] = []
        self.futures: list[Future[Any]] = []

    def submit(self, name: str, arguments: Any) -> Future[Any]:
        self.submitted.append((name, dict(arguments)))
        self.futures.append(Future())
        return self.futures[-1]


class Bench:
    """A servicer, its queue and the states it went through."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self.queue = Queue()
        self.states: list[LearnerState] = []
        self.servicer = LearnerServicer(self.queue, self._note)
        self.servicer.ready(0, timeout_s)

    def _note(self) -> None:
        self.states.append(self.servicer.state)

    async def train(self, step: int) -> learner_pb2.TrainStepResponse:
        return await self.servicer.TrainStep(request(step), None)


def request(step: int, *, seed: int = 0) -> learner_pb2.TrainStepRequest:
    rows, _ = make_batch(step=step, num_prompts=2, num_samples=2, seed=seed)
    policy = PolicyTag(version=step - 1, digest="0123456789abcdef")
    return order_to_proto(TrainOrder(step=step, policy=policy, rows=rows))


def test_an_order_has_at_most_the_bytes_that_a_configuration_is_checked_for() -> None:
    """Names of runs and servers are long ones."""
    (row, *_), _ = make_batch(step=1, num_prompts=2, num_samples=2)
    own = TrajectoryId(step=1_000_000, purpose="train", prompt_id=10_000_000, sample_index=1023)
    key = names.blob(f"{'r' * 24}-20261128-050000-abcd", str(own), "rollout-" + "s" * 32, "0" * 16)
    row = replace(row, trajectory_id=own, blob_key=key, blob_digest="f" * 32, reward=0.1)
    row = replace(row, num_prompt_tokens=100_000, num_response_tokens=100_000, num_sampled_tokens=100_000)
    policy = PolicyTag(version=1_000_000, digest="0" * 16)
    data = order_to_proto(TrainOrder(step=1, policy=policy, rows=(row,) * 1000)).SerializeToString()
    assert 0.9 * BYTES_PER_ROW < len(data) / 1000 <= BYTES_PER_ROW
    row = replace(row, teacher_digest="f" * 32)
    with_teacher = order_to_proto(TrainOrder(step=1, policy=policy, rows=(row,) * 1000)).SerializeToString()
    assert len(with_teacher) - len(data) <= 1000 * BYTES_PER_TEACHER_DIGEST + 100


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  the loop has nothing else to run
            await asyncio.sleep(0)


async def test_a_restart_is_answered_and_then_wanted_even_while_a_step_trains() -> None:
    bench = Bench()
    training = asyncio.create_task(bench.train(1))
    await until(lambda: len(bench.queue.futures) == 1)
    wanted = asyncio.create_task(bench.servicer.restart_wanted())
    await asyncio.sleep(0)
    assert not wanted.done()
    await bench.servicer.Restart(learner_pb2.RestartRequest(reason="its data is gone"), None)
    assert await asyncio.wait_for(wanted, 120) == "its data is gone"
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)


async def test_a_step_is_trained_once_however_often_it_is_asked_for() -> None:
    bench = Bench()
    first, second = (asyncio.create_task(bench.train(1)) for _ in range(2))
    await until(lambda: len(bench.queue.futures) == 1)
    assert bench.servicer.state is LearnerState.TRAINING
    # A caller that gives up does not end the step.
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    third = asyncio.create_task(bench.train(1))
    await asyncio.sleep(0)
    bench.queue.futures[0].set_result(
        TrainResult(step=1, metrics={"actor/lr": 0.5}, skip_reasons=("actor: bad", "critic: worse"))
    )
    replies = [await first, await third, await bench.train(1)]
    assert {reply.SerializeToString(deterministic=True) for reply in replies} == {
        learner_pb2.TrainStepResponse(
            step=1,
            metrics={"actor/lr": 0.5},
            skip_reasons=["actor: bad", "critic: worse"],
        ).SerializeToString(deterministic=True)
    }
    ((name, arguments),) = bench.queue.submitted
    order = decode_order(arguments["order"])
    assert name == commands.TRAIN
    assert (order.step, order.policy.version, order.rows) == (
        1,
        0,
        make_batch(num_prompts=2, num_samples=2)[0],
    )
    assert bench.states == [LearnerState.READY, LearnerState.TRAINING, LearnerState.READY]
    assert bench.servicer.policy is not None
    assert (bench.servicer.policy.version, bench.servicer.policy.digest) == (1, "")


async def test_work_ahead_is_a_command_of_its_own_and_shows_in_the_state() -> None:
    bench = Bench()
    rows, _ = make_batch(num_prompts=2, num_samples=2)
    policy = PolicyTag(version=0, digest="0123456789abcdef")
    order = ChunkOrder(step=1, policy=policy, first_row=2, rows=rows[2:], with_gradient=True)
    asked = asyncio.create_task(bench.servicer.WorkAhead(chunk_to_proto(order), None))
    await until(lambda: len(bench.queue.futures) == 1)
    assert bench.servicer.state is LearnerState.TRAINING
    bench.queue.futures[0].set_result(None)
    assert await asked == learner_pb2.WorkAheadResponse()
    ((name, arguments),) = bench.queue.submitted
    assert (name, decode_chunk(arguments["order"])) == (commands.AHEAD, order)
    assert bench.servicer.state is LearnerState.READY
    # The step itself has not begun.
    training = asyncio.create_task(bench.train(1))
    await until(lambda: len(bench.queue.futures) == 2)
    bench.queue.futures[1].set_result(TrainResult(step=1, metrics={}))
    await training


async def test_another_batch_for_a_step_that_trains_or_was_trained_is_refused() -> None:
    bench, other = Bench(), request(1, seed=7)
    first = asyncio.create_task(bench.train(1))
    await until(lambda: len(bench.queue.futures) == 1)
    both = rf"on the batch with digest {request(1).digest} .* batch with digest {other.digest}"
    with pytest.raises(IllegalTransitionError, match="step 1 is training " + both):
        await bench.servicer.TrainStep(other, None)
    bench.queue.futures[0].set_result(TrainResult(step=1, metrics={}))
    await first
    with pytest.raises(IllegalTransitionError, match="step 1 was trained " + both):
        await bench.servicer.TrainStep(other, None)
    assert (await bench.train(1)).step == 1
    assert len(bench.queue.submitted) == 1


@pytest.mark.parametrize("again", [request(1), request(1, seed=7)], ids=["same batch", "another batch"])
async def test_after_a_failure_that_trained_nothing_the_step_may_be_trained(
    again: learner_pb2.TrainStepRequest,
) -> None:
    bench = Bench()
    attempt = asyncio.create_task(bench.train(1))
    await until(lambda: len(bench.queue.futures) == 1)
    bench.queue.futures[0].set_exception(LostDataError("2 blobs are missing"))
    with pytest.raises(LostDataError, match="2 blobs are missing"):
        await attempt
    training = asyncio.create_task(bench.servicer.TrainStep(again, None))
    await until(lambda: len(bench.queue.futures) == 2)
    bench.queue.futures[1].set_result(TrainResult(step=1, metrics={}))
    assert (await training).step == 1


async def test_a_step_that_outlasts_its_callers_deadline_is_not_lost() -> None:
    bench = Bench(timeout_s=0.5)
    with pytest.raises(DeadlineError, match=r"TRAIN: no answer from some learner rank within 0.5 s"):
        await bench.train(1)
    assert bench.servicer.state is LearnerState.TRAINING
    again = asyncio.create_task(bench.train(1))
    await asyncio.sleep(0)
    bench.queue.futures[0].set_result(TrainResult(step=1, metrics={"actor/lr": 0.5}))
    assert (await again).metrics["actor/lr"] == 0.5
    assert len(bench.queue.submitted) == 1
    assert bench.servicer.policy == PolicyTag(version=1, digest="")


async def test_another_step_while_one_trains_is_refused() -> None:
    bench = Bench()
    running = asyncio.create_task(bench.train(1))
    await until(lambda: len(bench.queue.futures) == 1)
    with pytest.raises(ProtocolError, match="step 2 was asked for while step 1 is still training"):
        await bench.train(2)
    bench.queue.futures[0].set_exception(IllegalTransitionError("holds version 4"))
    with pytest.raises(IllegalTransitionError, match="holds version 4"):
        await running


async def test_before_it_is_loaded_every_call_is_refused() -> None:
    servicer = LearnerServicer(Queue(), lambda: None)
    with pytest.raises(ProtocolError, match="still loading"):
        await servicer.TrainStep(request(1), None)
    with pytest.raises(ProtocolError, match="still loading"):
        await servicer.DescribeWeights(learner_pb2.DescribeLearnerWeightsRequest(), None)


@contextlib.contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LearnerServicer, threading.Thread]]:
    """A servicer whose commands run in a thread, as on rank 0, for a learner that trains nothing."""

    def train_step(learner: Any, order: TrainOrder, fetch: object, deposit: object) -> TrainResult:
        learner.version = order.step
        return TrainResult(step=order.step, metrics={})

    monkeypatch.setattr(commands, "train_step", train_step)
    monkeypatch.setattr(commands, "work_ahead", lambda learner, order, fetch: None)
    monkeypatch.setattr(commands, "CheckpointWriter", lambda learner: None)
    queue, nothing = CommandQueue(), cast("Any", None)
    with alone() as ranks:
        config = run_config(Path("m"))
        learner: Any = SimpleNamespace(version=0, config=config, ranks=ranks)
        profiler = StepProfiler(config.trainer.profile, Path("profile"), 0)
        table = commands.Commands(learner, nothing, nothing, profiler).table
        thread = threading.Thread(target=CommandLoop(ranks, lambda: table, queue).run, daemon=True)
        thread.start()
        servicer = LearnerServicer(queue, lambda: None)
        servicer.ready(0, 30.0)
        yield servicer, thread
        queue.submit(STOP, {}).result(timeout=120)
        thread.join(timeout=120)


async def test_orders_are_decoded_once_and_never_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large step's rows take 100 ms: heartbeats would wait, and every rank reads them anyway."""
    decoded: list[tuple[str, str]] = []
    parse = TrajectoryId.parse

    def noted(text: str) -> TrajectoryId:
        decoded.append((text, threading.current_thread().name))
        return parse(text)

    train, rows = request(1), make_batch(num_prompts=2, num_samples=2)[0]
    chunk = ChunkOrder(step=1, policy=PolicyTag.parse("v0@0123456789abcdef"), first_row=2, rows=rows[2:])
    ids = [str(row.trajectory_id) for row in rows]
    with serving(monkeypatch) as (servicer, thread):
        monkeypatch.setattr(TrajectoryId, "parse", noted)
        await servicer.WorkAhead(chunk_to_proto(chunk), None)
        assert (await servicer.TrainStep(train, None)).step == 1
        assert decoded == [(i, thread.name) for i in (*ids[2:], *ids)]
        # A step that was trained is known by its digest.
        assert (await servicer.TrainStep(train, None)).step == 1
        assert len(decoded) == len(ids[2:]) + len(ids)


async def test_an_order_that_makes_no_sense_is_refused_and_the_learner_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, chunk = request(1), request(1)
    order.rows[1].reward = float("nan")
    chunk.rows[0].blob_key = ""
    with serving(monkeypatch) as (servicer, _):
        with pytest.raises(InvalidMessageError, match="has the reward nan"):
            await servicer.TrainStep(order, None)
        with pytest.raises(InvalidMessageError, match="has no blob_key"):
            await servicer.WorkAhead(
                learner_pb2.WorkAheadRequest(step=1, policy=chunk.policy, rows=chunk.rows), None
            )
        assert (await servicer.TrainStep(request(1), None)).step == 1


async def test_a_command_that_takes_too_long_ends_in_a_deadline_error() -> None:
    bench = Bench(timeout_s=0.05)
    with pytest.raises(DeadlineError, match=r"SAVE: no answer from some learner rank within 0.05 s"):
        await bench.servicer.SaveCheckpoint(learner_pb2.SaveCheckpointRequest(step=1, folder="/x"), None)


async def test_a_checkpoint_is_saved_at_once_and_complete_later() -> None:
    bench, written = Bench(), Future[float]()
    saving = asyncio.create_task(
        bench.servicer.SaveCheckpoint(learner_pb2.SaveCheckpointRequest(step=3, folder="/x"), None)
    )
    await until(lambda: len(bench.queue.futures) == 1)
    bench.queue.futures[0].set_result(written)
    await saving
    assert bench.states[-2:] == [LearnerState.SAVING, LearnerState.READY]
    waits = [
        asyncio.create_task(bench.servicer.WaitCheckpoint(learner_pb2.WaitCheckpointRequest(step=3), None))
        for _ in range(2)
    ]
    await asyncio.sleep(0.01)
    assert not any(wait.done() for wait in waits)
    waits[0].cancel()  # a caller that gives up does not end the writing
    written.set_result(1.5)
    assert (await waits[1]).seconds == 1.5
    with pytest.raises(
        CheckpointError, match=r"checkpoint of step 2 is not the one that was saved last \(3\)"
    ):
        await bench.servicer.WaitCheckpoint(learner_pb2.WaitCheckpointRequest(step=2), None)


async def test_a_push_or_a_goodbye_for_another_weight_group_does_nothing() -> None:
    """An order of an epoch that is over may arrive late; the group in being must not suffer for it."""
    bench = Bench()
    joining = asyncio.create_task(
        bench.servicer.JoinWeightGroup(learner_pb2.JoinLearnerGroupRequest(epoch=2, spec=b"spec"), None)
    )
    await until(lambda: len(bench.queue.futures) == 1)
    bench.queue.futures[0].set_result(None)
    await joining
    with pytest.raises(VersionMismatchError, match="in weight group 2, the push is for group 1"):
        await bench.servicer.PublishWeights(learner_pb2.PublishWeightsRequest(epoch=1, version=0), None)
    await bench.servicer.LeaveWeightGroup(learner_pb2.LeaveLearnerGroupRequest(epoch=1), None)
    assert bench.queue.submitted == [(commands.JOIN, {"spec": b"spec"})]

    leaving = asyncio.create_task(
        bench.servicer.LeaveWeightGroup(learner_pb2.LeaveLearnerGroupRequest(epoch=2), None)
    )
    await until(lambda: len(bench.queue.futures) == 2)
    bench.queue.futures[1].set_result(None)
    await leaving
    assert bench.queue.submitted[1:] == [(commands.LEAVE, {})]
    with pytest.raises(VersionMismatchError, match="in weight group None"):
        await bench.servicer.PublishWeights(learner_pb2.PublishWeightsRequest(epoch=2, version=0), None)


def test_a_closed_queue_fails_what_waits_and_what_comes() -> None:
    queue = CommandQueue()
    waiting = queue.submit("save", {})
    queue.close(PeerLostError("rank 1 died", peer=RankRef(MemberKind.LEARNER, 1)))
    for future in (waiting, queue.submit("save", {})):
        with pytest.raises(PeerLostError, match="rank 1 died"):
            future.result(timeout=120)
    assert queue.take(0.01) is None


async def test_who_waits_in_a_group_of_a_dead_controller_is_freed_when_another_describes() -> None:
    bench, store = Bench(), open_store("127.0.0.1", 60.0)
    there = learner_pb2.DescribeLearnerWeightsResponse(
        sharding=b"", store_host="127.0.0.1", store_port=store.port, version=0
    )

    async def answered(call: Coroutine[Any, Any, Any], answer: Any) -> None:
        asked, calling = len(bench.queue.futures), asyncio.create_task(call)
        await until(lambda: len(bench.queue.futures) > asked)
        bench.queue.futures[asked].set_result(answer)
        await calling

    await answered(bench.servicer.DescribeWeights(learner_pb2.DescribeLearnerWeightsRequest(), None), there)
    joining = learner_pb2.JoinLearnerGroupRequest(epoch=3, spec=b"")
    await answered(bench.servicer.JoinWeightGroup(joining, None), None)
    await answered(bench.servicer.DescribeWeights(learner_pb2.DescribeLearnerWeightsRequest(), None), there)
    with pytest.raises(
        PeerLostError, match="cancelled, since the controller that formed the group went away"
    ):
        Abandonment(store, 3).check("push")
    with pytest.raises(VersionMismatchError, match="weight group None"):
        await bench.servicer.PublishWeights(learner_pb2.PublishWeightsRequest(epoch=3, version=0), None)
