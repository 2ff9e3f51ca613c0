"""The learner as its two processes over gloo, with a fake controller, for tests that talk to it over gRPC."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from paceline.core.policy import PolicyTag
from paceline.core.training import BatchRow, TrainOrder
from paceline.rpc.v1 import learner_pb2, learner_pb2_grpc
from paceline.service.grpc.channels import call, connect
from paceline.service.identity.credentials import Credentials
from paceline.sizing.machine import free_port
from paceline.wire.calls.training import order_to_proto
from support.fake_controller import FakeController, serve
from support.forked import Forked
from support.learner_fakes import run_config

TOKEN = "a secret of the run"


class Learner:
    """Two running ranks and a channel to rank 0."""

    def __init__(self, controller: FakeController, ranks: list[Forked], channel: Any) -> None:
        self.controller, self.ranks = controller, ranks
        self.stub = learner_pb2_grpc.LearnerServiceStub(channel)

    @property
    def failure(self) -> tuple[str, bool]:
        """What the learner said before it ended, and whether that is final."""
        # A regular heartbeat that was under way may arrive after it.
        (said,) = [(beat.failure, beat.is_final) for beat in self.controller.heartbeats if beat.failure]
        return said

    async def train(
        self, step: int, rows: tuple[BatchRow, ...], policy: PolicyTag
    ) -> learner_pb2.TrainStepResponse:
        request = order_to_proto(TrainOrder(step=step, policy=policy, rows=rows))
        reply: learner_pb2.TrainStepResponse = await self.call(self.stub.TrainStep, request)
        return reply

    async def call(self, method: Any, request: Any) -> Any:
        return await call(method, request, timeout_s=300, phase="TEST", peer="learner-0")


@asynccontextmanager
async def running(
    model: Path,
    broker_url: str,
    folder: Path,
    *,
    checkpoints: Sequence[Path] = (),
    **sections: dict[str, Any],
) -> AsyncIterator[Learner]:
    """Starts the ranks and waits until they have loaded; prints their logs at the end.

    `sections` are merged into the run's configuration.
    """
    controller = FakeController(run_config(model, **sections).model_dump_json())
    controller.broker_url, controller.run_dir = broker_url, str(folder)
    controller.checkpoints = [str(folder) for folder in checkpoints]
    server = await serve(controller, token=TOKEN)
    port = free_port()
    ranks = []
    for rank in range(2):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PACELINE_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
        }
        with (folder / f"rank{rank}.log").open("ab") as output:
            words = ("-m", "paceline.learner", "--controller", server.address, "--member-id", "learner-0")
            ranks.append(Forked(words, env=env, stdout=output, stderr=output))
    channel: grpc.aio.Channel | None = None
    try:
        await controller.reported("ready")
        channel = connect(controller.registrations[0].address, credentials=Credentials(token=TOKEN))
        yield Learner(controller, ranks, channel)
    finally:
        if channel is not None:
            await channel.close(grace=None)
        for process in ranks:
            process.kill()
            process.wait()
        await server.stop(0.2)
        print((folder / "rank0.log").read_text(), (folder / "rank1.log").read_text())
