"""A real learner of one rank in place of the fake one: behind its own servicer, in the same process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from paceline.controller.fleet.membership import Member
from paceline.core.errors import PacelineError
from paceline.core.training import TrainOrder, TrainResult
from paceline.learner.commands import Commands
from paceline.learner.distributed.collectives import CommandError
from paceline.learner.distributed.command_loop import CommandQueue
from paceline.learner.servicer import LearnerServicer
from paceline.learner.train.profiler import StepProfiler
from paceline.learner.train.state.learner import Learner
from paceline.rpc.v1 import learner_pb2
from paceline.wire.calls.training import order_to_proto, result_from_proto
from support.fake_fleet import FakeLearner, FakeServices
from support.learner_fakes import DictBlobs, Sampler, make_batch


class _AtOnce(CommandQueue):
    """Runs every command where it is submitted."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self._table = table

    def submit(self, name: str, arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self._table[name](arguments))
        except CommandError as error:
            future.set_exception(error.cause)
        except PacelineError as error:
            future.set_exception(error)
        return future


class LearnerServices(FakeServices):
    """Trains for real on made-up tokens, with the rewards that the loop sends.

    `before` is called with the step before each training step. `sampler` gives the tokens' log-probs; without
    it they are made up, too.
    """

    def __init__(self, learner: Learner, num_prompts: int, num_samples: int) -> None:
        super().__init__()
        self.learner = _RealLearner(self, learner, {"num_prompts": num_prompts, "num_samples": num_samples})
        self.before: Callable[[int], None] = lambda step: None
        self.sampler: Sampler | None = None
        self.version = self.source = learner.version


class _RealLearner(FakeLearner):
    services: LearnerServices

    def __init__(self, services: LearnerServices, learner: Learner, shape: dict[str, int]) -> None:
        super().__init__(services)
        self._shape, self._blobs = shape, DictBlobs({})
        publisher: Any = None
        profiler = StepProfiler(learner.config.trainer.profile, Path("profile"), 0)
        self._servicer = LearnerServicer(
            _AtOnce(Commands(learner, self._blobs, publisher, profiler).table), lambda: None
        )
        self._servicer.ready(learner.version, 60.0)

    async def train(self, member: Member, order: TrainOrder) -> TrainResult:
        self.services.calls.append(f"train {order.step}")
        self.services.before(order.step)
        made, self._blobs.blobs = make_batch(
            step=order.step, policy=order.policy, seed=1, sampler=self.services.sampler, **self._shape
        )
        rows = [
            dataclasses.replace(row, reward=wanted.reward)
            for row, wanted in zip(made, order.rows, strict=True)
        ]
        request = order_to_proto(dataclasses.replace(order, rows=tuple(rows)))
        reply = await self._servicer.TrainStep(request, None)
        self.services.version = self.services.source = order.step
        return result_from_proto(reply)

    async def save(self, member: Member, *, step: int, folder: str, controller_state: bytes) -> float:
        self.services.calls.append(f"save {step}")
        request = learner_pb2.SaveCheckpointRequest(
            step=step, folder=folder, controller_state=controller_state
        )
        return (await self._servicer.SaveCheckpoint(request, None)).seconds

    async def wait_checkpoint(self, member: Member, *, step: int) -> float:
        return (
            await self._servicer.WaitCheckpoint(learner_pb2.WaitCheckpointRequest(step=step), None)
        ).seconds

    async def load(self, member: Member, *, folder: str, version: int) -> float:
        await super().load(member, folder=folder, version=version)
        request = learner_pb2.LoadCheckpointRequest(folder=folder, version=version)
        return (await self._servicer.LoadCheckpoint(request, None)).seconds
