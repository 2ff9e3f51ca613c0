"""A controller of a few lines on a host of its own: `python -m support.host_controller HOST:PORT`.

It prints a line for each call of a member.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.rpc.v1 import controller_pb2 as pb
from paceline.rpc.v1 import controller_pb2_grpc
from paceline.service.addresses import split
from paceline.service.grpc.server import start_server
from paceline.service.identity.credentials import Credentials
from support.fake_controller import FakeController
from support.hosts import OWN

CONFIG = {
    "data": {"train_files": ["x.parquet"]},
    "model": {"path": str(OWN / "model")},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 2},
}


class Telling(FakeController):
    """Prints registrations and heartbeats."""

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        print(f"register {request.member_id} {request.address}", flush=True)
        return await super().Register(request, context)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        print("heartbeat", flush=True)
        return await super().Heartbeat(request, context)


async def main(address: str) -> None:
    """Serves until it is killed."""
    host, port = split(address)
    add = controller_pb2_grpc.add_ControllerServiceServicer_to_server
    controller = Telling(parse(RunConfig, CONFIG).model_dump_json())
    server = await start_server(add, controller, host=host, port=port, credentials=Credentials.from_env())
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
