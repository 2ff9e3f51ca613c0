"""`paceline health`: asks a service for its health, as container engines do every few seconds."""

from __future__ import annotations

import argparse
import asyncio
import sys

from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.service.grpc import channels
from paceline.service.identity.credentials import Credentials

_DEADLINE_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("address", metavar="HOST:PORT", help="where the service listens")
    parser.add_argument(
        "--role",
        default="",
        help="with TLS: role of the service (controller, learner, rollout, reward) in its certificate",
    )
    parser.add_argument(
        "--timeout", type=float, default=_DEADLINE_S, metavar="SECONDS", help="default: %(default)g"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the service answers that it is serving; otherwise prints why not and returns 1."""
    status = asyncio.run(_ask(args.address, args.role, args.timeout))
    if status == health_pb2.HealthCheckResponse.SERVING:
        return 0
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    print(f"paceline health: {args.address} answers {name}", file=sys.stderr)
    return 1


async def _ask(address: str, role: str, timeout_s: float) -> int:
    channel = channels.connect(address, credentials=Credentials.from_env(), role=role)
    try:
        answer = await channels.call(
            health_pb2_grpc.HealthStub(channel).Check,
            health_pb2.HealthCheckRequest(),
            timeout_s=timeout_s,
            phase="HEALTH",
            peer=address,
        )
    finally:
        await channel.close(grace=None)
    return int(answer.status)
