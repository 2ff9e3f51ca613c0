"""A real learner of one rank in the place of the fake one: behind its own servicer and commands, without processes between."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from paceline.controller.fleet.membership import Member
from paceline.core.batch import BatchRow
from paceline.core.errors import PacelineError
from paceline.core.guard import Adjustments
from paceline.core.policy import PolicyTag
from paceline.learner.distributed.command_loop import CommandError, CommandQueue
from paceline.learner.distributed.commands import Commands
from paceline.learner.servicer import LearnerServicer
from paceline.learner.train.learner import Learner
from paceline.rpc.v1 import learner_pb2
from paceline.wire.guard import adjustments_to_proto
from paceline.wire.protobuf import batch_row_to_proto
from support.fake_fleet import FakePeers
from support.learner_fakes import DictBlobs, make_batch


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


class LearnerPeers(FakePeers):
    """Trains for real on made-up tokens, with the rewards that the loop sends; `before` is called with the step ahead of each."""

    def __init__(self, learner: Learner, num_prompts: int, num_samples: int) -> None:
        super().__init__()
        self.learner, self.before = learner, lambda step: None
        self._shape = {"num_prompts": num_prompts, "num_samples": num_samples}
        self._blobs = DictBlobs({})
        publisher: Any = None
        self._servicer = LearnerServicer(
            _AtOnce(Commands(learner, self._blobs, publisher).table), lambda: None
        )
        self._servicer.ready(learner.version, 60.0)
        self.version = self.source = learner.version

    async def train(
        self,
        member: Member,
        *,
        step: int,
        policy: PolicyTag,
        rows: Sequence[BatchRow],
        adjustments: Adjustments,
    ) -> learner_pb2.TrainStepResponse:
        self.calls.append(f"train {step}")
        self.before(step)
        made, self._blobs.blobs = make_batch(step=step, policy=policy, seed=1, **self._shape)
        scored = [dataclasses.replace(one, reward=row.reward) for one, row in zip(made, rows, strict=True)]
        request = learner_pb2.TrainStepRequest(
            step=step,
            policy_version=policy.version,
            weights_digest=policy.digest,
            rows=[batch_row_to_proto(row) for row in scored],
            adjustments=adjustments_to_proto(adjustments),
        )
        reply = await self._servicer.TrainStep(request, None)
        self.version = self.source = step
        return reply

    async def save(self, member: Member, *, step: int, folder: str, controller_state: bytes) -> float:
        self.calls.append(f"save {step}")
        request = learner_pb2.SaveCheckpointRequest(
            step=step, folder=folder, controller_state=controller_state
        )
        return (await self._servicer.SaveCheckpoint(request, None)).seconds

    async def load(self, member: Member, *, folder: str, version: int) -> float:
        await super().load(member, folder=folder, version=version)
        request = learner_pb2.LoadCheckpointRequest(folder=folder, version=version)
        return (await self._servicer.LoadCheckpoint(request, None)).seconds
