"""The reward service's process: register, start the scorers, work the mailbox until the run is over.

starting (tokenizer, workers, remote services) -> serving -> the run is over, or SIGTERM -> left
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from paceline.broker import open_broker
from paceline.core.errors import PacelineError
from paceline.core.members import MemberKind, RewardState
from paceline.core.reward_function import check_extra_keys
from paceline.data.prompts import load_tokenizer
from paceline.reward.consumer import Consumer, ConsumerOptions
from paceline.reward.scorer import ScorerSettings
from paceline.reward.servicer import RewardServicer
from paceline.reward.weighted_sum import WeightedSum
from paceline.rpc.v1 import reward_pb2_grpc
from paceline.service import telemetry
from paceline.service.controller_link import ControllerLink, MemberReport, Registration
from paceline.service.grpc_server import start_server
from paceline.service.logs import set_level
from paceline.service.process import REWARD_TOKEN, env_token
from paceline.service.runtime import ServiceContext, run_service

_log = logging.getLogger(__name__)

_REGISTER_TIMEOUT_S = 60.0
_WIND_UP_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The command line."""

    controller: str
    member_id: str
    host: str
    port: int


class RewardService:
    """One reward service of a run."""

    def __init__(self, context: ServiceContext, options: Options) -> None:
        self._context, self._options = context, options
        self._state = RewardState.STARTING
        self._consumer: Consumer | None = None

    async def run(self) -> None:
        """Serves until the run is over or a signal comes.

        Raises:
            PacelineError: the service cannot start or go on; the controller has been told.
        """
        options, context, token = self._options, self._context, env_token()
        servicer = RewardServicer()
        server = await start_server(
            [(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer)],
            host=options.host,
            port=options.port,
            token=token,
        )
        context.defer("gRPC server", server.stop)
        link = ControllerLink(
            options.controller,
            kind=MemberKind.REWARD,
            member_id=options.member_id,
            address=server.address,
            token=token,
        )
        context.defer("connection to the controller", link.close)
        registration = await link.register(_REGISTER_TIMEOUT_S)
        config = registration.config
        set_level(config.telemetry.log_level)
        telemetry.setup(
            "reward",
            run_dir=registration.run_dir,
            otlp_endpoint=config.telemetry.otlp_endpoint,
            instance=options.member_id,
        )
        heartbeats = context.spawn("heartbeats", link.run(self._report))
        context.defer("goodbye to the controller", lambda: link.leave("stopped"))
        work = context.spawn("work", _tell(link, self._work(registration, servicer, link)))
        stopped = asyncio.create_task(context.stopping.wait(), name="stopping")
        try:
            await asyncio.wait({heartbeats, work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            work.cancel()
            await asyncio.wait({work}, timeout=_WIND_UP_S)

    async def _work(self, registration: Registration, servicer: RewardServicer, link: ControllerLink) -> None:
        config = registration.config
        check_extra_keys(config.data.extra_keys)
        scorer = WeightedSum.configured(
            ScorerSettings(
                config=config.reward,
                token=os.environ.get(REWARD_TOKEN, ""),
                max_message_bytes=config.service.max_message_mib * 2**20,
            )
        )
        self._context.defer("scorers", scorer.close)
        folder = config.model.tokenizer_path or config.model.path
        # Importing the tokenizer library takes seconds, in which heartbeats must go on.
        tokenizer, _ = await asyncio.gather(asyncio.to_thread(load_tokenizer, folder), scorer.start())
        broker = open_broker(registration.broker_url)
        self._context.defer("broker", broker.close)
        self._consumer = Consumer(
            broker=broker,
            scorer=scorer,
            tokenizer=tokenizer,
            options=ConsumerOptions(
                run_id=registration.run_id,
                member_id=self._options.member_id,
                lease_s=config.broker.lease_s,
                max_stream_length=config.broker.max_stream_length,
                room_timeout_s=config.barrier.stall_timeout_s,
            ),
        )
        servicer.scorer = scorer
        self._state = RewardState.SERVING
        link.poke()
        _log.info("serving")
        await self._consumer.run()

    def _report(self) -> MemberReport:
        in_flight = self._consumer.num_in_flight if self._consumer else 0
        return MemberReport(state=self._state, in_flight=in_flight)


async def _tell(link: ControllerLink, work: Awaitable[None]) -> None:
    """Has the controller know in one sentence why the service is about to end."""
    try:
        await work
    except* PacelineError as group:
        await link.fail("; ".join(str(error) for error in _leaves(group)))
        raise


def _leaves(group: BaseExceptionGroup[PacelineError]) -> list[PacelineError]:
    found: list[PacelineError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def parse_options(arguments: Sequence[str] | None) -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.reward",
        description="A reward service of a run. Everything but its addresses comes from the controller; the run's token "
        f"from PACELINE_TOKEN, one for remote reward services from {REWARD_TOKEN}.",
    )
    parser.add_argument("--controller", required=True, metavar="HOST:PORT", help="the run's controller")
    parser.add_argument("--member-id", default="reward-0", help="this service's name, the same over restarts")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes any free one")
    given = parser.parse_args(arguments)
    return Options(controller=given.controller, member_id=given.member_id, host=given.host, port=given.port)


def main(arguments: Sequence[str] | None = None) -> int:
    """The process; returns its exit code."""
    options = parse_options(arguments)

    async def serve(context: ServiceContext) -> None:
        await RewardService(context, options).run()

    return run_service(serve, name=options.member_id)
