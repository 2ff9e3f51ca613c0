"""Serves LearnerService on rank 0: checks requests, queues commands, and trains each step only once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.core.errors import (
    CheckpointError,
    DeadlineError,
    IllegalTransitionError,
    ProtocolError,
    VersionMismatchError,
)
from paceline.core.members import LearnerState, MemberKind, RankRef
from paceline.core.policy import PolicyTag
from paceline.core.training import TrainResult
from paceline.learner import commands
from paceline.learner.distributed.command_loop import CommandQueue
from paceline.learner.distributed.engine_memory import ReleasedMemory
from paceline.rpc.v1 import learner_pb2 as pb
from paceline.rpc.v1 import learner_pb2_grpc
from paceline.service.observability import telemetry
from paceline.weights.digest.agreement import format_digest, model_digest
from paceline.weights.receipt import PushReceipt
from paceline.weights.transport.rendezvous import abandon
from paceline.wire.calls.training import result_to_proto

T = TypeVar("T")

_STORE_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Training:
    """The current or last training step; its task runs until the step ends, even without a caller."""

    step: int
    digest: str
    task: asyncio.Task[TrainResult]


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """Answers the controller's calls to the learner."""

    def __init__(self, queue: CommandQueue, on_change: Callable[[], None]) -> None:
        self._queue, self._on_change = queue, on_change
        self._state = LearnerState.LOADING
        self._command_timeout_s = 60.0
        self._policy: PolicyTag | None = None
        self._store: tuple[str, int] | None = None
        self._epoch: int | None = None
        self._training: _Training | None = None
        self._saved: tuple[int, Future[float]] | None = None
        self._restart, self._restart_reason = asyncio.Event(), ""

    @property
    def state(self) -> LearnerState:
        """What the learner is doing."""
        return self._state

    @property
    def policy(self) -> PolicyTag | None:
        """The policy that the learner holds; its digest is empty until the weights are published."""
        return self._policy

    def ready(self, version: int, command_timeout_s: float) -> None:
        """Opens the service once every rank has loaded its part at `version`."""
        self._policy = PolicyTag(version=version, digest="")
        self._command_timeout_s = command_timeout_s
        self._enter(LearnerState.READY)

    async def restart_wanted(self) -> str:
        """Waits until the controller wants a restart of this process; returns the reason."""
        await self._restart.wait()
        return self._restart_reason

    async def DescribeWeights(
        self, request: pb.DescribeLearnerWeightsRequest, context: Any
    ) -> pb.DescribeLearnerWeightsResponse:
        """Reports the layouts of the ranks and the address of the weight group's rendezvous.

        A controller dissolves its group before it forms another. So an existing group belongs to a dead
        controller; members that wait in its join or push are released.
        """
        if self._epoch is not None:
            epoch, self._epoch = self._epoch, None
            await self._abandon(epoch, "the controller that formed the group")
        description: pb.DescribeLearnerWeightsResponse = await self._run(commands.DESCRIBE, {})
        self._store = description.store_host, description.store_port
        return description

    async def JoinWeightGroup(
        self, request: pb.JoinLearnerGroupRequest, context: Any
    ) -> pb.JoinLearnerGroupResponse:
        """Joins the weight group of the rollout servers."""
        self._epoch = request.epoch
        await self._run(commands.JOIN, {"spec": request.spec})
        return pb.JoinLearnerGroupResponse()

    async def PublishWeights(
        self, request: pb.PublishWeightsRequest, context: Any
    ) -> pb.PublishWeightsResponse:
        """Sends the learner's weights to the group."""
        if request.epoch != self._epoch:
            raise VersionMismatchError(
                f"the learner is in weight group {self._epoch}, the push is for group {request.epoch}: "
                "join that one first"
            )
        receipt: PushReceipt = await self._run(
            commands.PUBLISH, {"version": request.version}, LearnerState.PUBLISHING
        )
        digest = format_digest(model_digest(receipt.reports))
        self._policy = PolicyTag(version=receipt.version, digest=digest)
        return pb.PublishWeightsResponse(receipt=receipt.to_bytes())

    async def LeaveWeightGroup(
        self, request: pb.LeaveLearnerGroupRequest, context: Any
    ) -> pb.LeaveLearnerGroupResponse:
        """Leaves an epoch's weight group, if the learner is in it."""
        if request.epoch == self._epoch:
            self._epoch = None
            await self._run(commands.LEAVE, {})
        return pb.LeaveLearnerGroupResponse()

    async def FreeMemory(self, request: pb.FreeMemoryRequest, context: Any) -> pb.FreeMemoryResponse:
        """Frees cached GPU memory that engines need; a step in progress finishes first."""
        arguments = {"parts": list(request.parts), "engine_bytes": request.engine_bytes}
        made: ReleasedMemory = await self._run(commands.FREE, arguments)
        return pb.FreeMemoryResponse(freed_bytes=made.freed_bytes, has_room=made.has_room)

    async def AbandonPush(self, request: pb.AbandonPushRequest, context: Any) -> pb.AbandonPushResponse:
        """Releases ranks that wait for a lost member; bypasses the queue, whose thread may wait, too."""
        await self._abandon(request.epoch, request.lost)
        return pb.AbandonPushResponse()

    async def TrainStep(self, request: pb.TrainStepRequest, context: Any) -> pb.TrainStepResponse:
        """Trains a step; a repeated call with the same digest gets the first result.

        The step continues if the caller gives up or reaches its deadline, because the caller will ask again.
        Only the ranks read the rows: reading many rows would block the event loop.

        Raises:
            IllegalTransitionError: the step was trained, or is training, on another batch, or is not the
                next step.
            InvalidMessageError: see `order_from_proto`.
            ProtocolError: another step is training.
        """
        self._require_ready()
        training = self._training
        if training is not None and training.step == request.step:
            if request.digest != training.digest:
                begun = "was trained" if training.task.done() else "is training"
                raise IllegalTransitionError(
                    f"step {request.step} {begun} on the batch with digest {training.digest} and cannot be "
                    f"trained on the batch with digest {request.digest}: a step is trained once"
                )
        elif training is not None and not training.task.done():
            raise ProtocolError(
                f"step {request.step} was asked for while step {training.step} is still training"
            )
        else:
            task = asyncio.create_task(self._train(request), name=f"train step {request.step}")
            training = self._training = _Training(step=request.step, digest=request.digest, task=task)
        return result_to_proto(await self._within_deadline(commands.TRAIN, training.task))

    async def WorkAhead(self, request: pb.WorkAheadRequest, context: Any) -> pb.WorkAheadResponse:
        """Computes ahead for a chunk of the next step; continues if the caller gives up.

        Raises:
            IllegalTransitionError: the chunk does not belong to the next step.
            InvalidMessageError: see `chunk_from_proto`.
        """
        attributes = {"step": request.step, "first_row": request.first_row, "rows": len(request.rows)}
        arguments: dict[str, object] = {"order": request.SerializeToString()}
        with telemetry.span("learner.work_ahead", attributes=attributes):
            await self._run(commands.AHEAD, arguments, LearnerState.TRAINING)
        return pb.WorkAheadResponse()

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: Any
    ) -> pb.SaveCheckpointResponse:
        """Begins to write a checkpoint; `WaitCheckpoint` waits for its end."""
        arguments = {
            "step": request.step,
            "folder": request.folder,
            "controller_state": request.controller_state,
        }
        began = time.monotonic()
        written: Future[float] = await self._run(commands.SAVE, arguments, LearnerState.SAVING)
        self._saved = request.step, written
        return pb.SaveCheckpointResponse(seconds=time.monotonic() - began)

    async def WaitCheckpoint(
        self, request: pb.WaitCheckpointRequest, context: Any
    ) -> pb.WaitCheckpointResponse:
        """Waits until the last saved checkpoint is complete.

        Raises:
            CheckpointError: the checkpoint could not be written, or is not the last saved checkpoint.
        """
        step, written = self._saved or (None, None)
        if step != request.step or written is None:
            raise CheckpointError(
                f"the checkpoint of step {request.step} is not the one that was saved last ({step}); "
                "save it again"
            )
        seconds = await self._within_deadline(commands.SAVE, asyncio.wrap_future(written))
        return pb.WaitCheckpointResponse(seconds=seconds)

    async def LoadCheckpoint(
        self, request: pb.LoadCheckpointRequest, context: Any
    ) -> pb.LoadCheckpointResponse:
        """Rolls back to a checkpoint of this run."""
        began = time.monotonic()
        arguments = {"folder": request.folder, "version": request.version}
        await self._run(commands.LOAD, arguments, LearnerState.ROLLING_BACK)
        return pb.LoadCheckpointResponse(seconds=time.monotonic() - began)

    async def Restart(self, request: pb.RestartRequest, context: Any) -> pb.RestartResponse:
        """Ends the process with an error, so that it is restarted."""
        self._restart_reason = request.reason
        self._restart.set()
        return pb.RestartResponse()

    async def _train(self, request: pb.TrainStepRequest) -> TrainResult:
        arguments = {"order": request.SerializeToString()}
        with telemetry.span(
            "learner.train_step", attributes={"step": request.step, "rows": len(request.rows)}
        ) as span:
            try:
                with self._during(LearnerState.TRAINING):
                    result: TrainResult = await asyncio.wrap_future(
                        self._queue.submit(commands.TRAIN, arguments)
                    )
            except BaseException:
                # Nothing was trained, so the step may be requested again, even with another batch.
                self._training = None
                raise
            for name, value in result.metrics.items():
                if name.startswith("timing_s/"):
                    span.set_attribute(name, value)
        self._policy = PolicyTag(version=result.step, digest="")
        return result

    async def _abandon(self, epoch: int, lost: str) -> None:
        if self._store is None:
            raise ProtocolError("no weight group was ever described, so there is no join or push to abandon")
        host, port = self._store
        await asyncio.to_thread(abandon, host, port, epoch=epoch, lost=lost, timeout_s=_STORE_TIMEOUT_S)

    async def _run(self, name: str, arguments: dict[str, object], state: LearnerState | None = None) -> Any:
        self._require_ready()
        with self._during(state):
            future = asyncio.wrap_future(self._queue.submit(name, arguments))
            return await self._within_deadline(name, future)

    async def _within_deadline(self, name: str, answer: asyncio.Future[T]) -> T:
        """Awaits a command's answer; the command continues after the deadline."""
        try:
            async with asyncio.timeout(self._command_timeout_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            if answer.done():
                raise
            raise DeadlineError(
                phase=name.upper(),
                peer=RankRef(MemberKind.LEARNER),
                seconds=self._command_timeout_s,
                hint="raise learner.command_timeout_s if the work is that large",
            ) from None

    @contextlib.contextmanager
    def _during(self, state: LearnerState | None) -> Iterator[None]:
        if state is not None:
            self._enter(state)
        try:
            yield
        finally:
            if state is not None:
                self._enter(LearnerState.READY)

    def _require_ready(self) -> None:
        if self._policy is None:
            raise ProtocolError("the learner is still loading; wait until its state is ready")

    def _enter(self, state: LearnerState) -> None:
        if state is not self._state:
            self._state = state
            self._on_change()
