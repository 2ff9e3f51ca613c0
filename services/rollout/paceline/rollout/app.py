"""The rollout service's process: wiring, in the order in which things start and, reversed, end.

gRPC server -> register -> heartbeats (joining) -> engine -> stale -> pushes and prompts, until the run is
over or the process is told to stop
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from paceline.broker.opening import open_broker
from paceline.core.errors import PacelineError
from paceline.core.members import MemberKind
from paceline.rollout.capacity import SamplerLimits
from paceline.rollout.engines.base import Engine
from paceline.rollout.engines.registry import start_engine
from paceline.rollout.sampler import Sampler
from paceline.rollout.server import Parts, RolloutServer
from paceline.rollout.servicer import RolloutServicer
from paceline.rpc.v1 import rollout_pb2_grpc
from paceline.service import logs, telemetry
from paceline.service.controller_link import ControllerLink, MemberReport, Registration
from paceline.service.grpc_server import start_server
from paceline.service.process import env_token
from paceline.service.runtime import ServiceContext

log = logging.getLogger(__name__)

_REGISTER_S = 60.0
_HEALTH_S = 1.0
_ENGINE_SHUTDOWN_S = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The command line."""

    controller: str
    member_id: str
    host: str = "127.0.0.1"
    port: int = 0


class RolloutApp:
    """One rollout server process."""

    def __init__(self, context: ServiceContext, options: Options) -> None:
        self._context, self._options = context, options
        self._link: ControllerLink | None = None
        self._server = RolloutServer(self._changed)

    async def run(self) -> None:
        """Serves until the run is over or the process is told to stop."""
        context, options, token = self._context, self._options, env_token()
        service = (rollout_pb2_grpc.add_RolloutServiceServicer_to_server, RolloutServicer(self._server))
        listening = await start_server([service], host=options.host, port=options.port, token=token)
        context.defer("gRPC server", listening.stop)
        link = ControllerLink(
            options.controller,
            kind=MemberKind.ROLLOUT,
            member_id=options.member_id,
            address=listening.address,
            token=token,
        )
        context.defer("controller link", link.close)
        registration = await link.register(_REGISTER_S)
        self._link = link
        config = registration.config
        logs.set_level(config.telemetry.log_level)
        telemetry.setup(
            "rollout",
            run_dir=registration.run_dir,
            otlp_endpoint=config.telemetry.otlp_endpoint,
            instance=options.member_id,
        )
        context.defer("goodbye", lambda: link.leave("stopping"), budget_s=4.0)
        self._spawn("heartbeats", self._heartbeats(link))
        try:
            engine = await self._load(registration)
        except PacelineError as error:
            await link.fail(str(error))
            raise
        if engine is None:
            return
        await self._serve(engine, registration)

    async def _load(self, registration: Registration) -> Engine | None:
        """The engine, or None where the service was told to stop meanwhile."""
        loading = asyncio.ensure_future(start_engine(registration.config))
        stopping = asyncio.ensure_future(self._context.stopping.wait())
        try:
            await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
            return loading.result() if loading.done() else None
        finally:
            stopping.cancel()
            if loading.cancel():
                await asyncio.wait([loading])

    async def _serve(self, engine: Engine, registration: Registration) -> None:
        context, config = self._context, registration.config
        assert self._link is not None
        context.defer("engine", engine.shutdown, budget_s=_ENGINE_SHUTDOWN_S)
        broker = open_broker(registration.broker_url)
        context.defer("broker", broker.close)
        await broker.ping()
        sampler = Sampler(
            engine=engine,
            broker=broker,
            run_id=registration.run_id,
            server_id=self._options.member_id,
            consumer=f"{self._options.member_id}/{self._link.incarnation}",
            limits=SamplerLimits.of(config),
            spawn=self._spawn,
        )
        context.defer("sampler", sampler.close)
        self._server.start(
            Parts(
                engine=engine,
                sampler=sampler,
                join_timeout_s=config.weights.join_timeout_s,
                push_timeout_s=config.weights.push_timeout_s,
            )
        )
        self._spawn("engine health", self._watch(engine))
        await context.stopping.wait()

    def _changed(self) -> None:
        if self._link is not None:
            self._link.poke()

    def _report(self) -> MemberReport:
        standing = self._server.standing
        return MemberReport(state=standing.state, policy=standing.policy, in_flight=self._server.in_flight)

    async def _heartbeats(self, link: ControllerLink) -> None:
        def reregistered(_: Registration) -> None:
            self._spawn("forget", self._server.forget())

        await link.run(self._report, on_reregistered=reregistered)
        self._context.stop("the run is over")

    async def _watch(self, engine: Engine) -> None:
        # vLLM tells of the death of an idle engine only who asks.
        while not self._context.stopping.is_set():
            await engine.check_health()
            await asyncio.sleep(_HEALTH_S)

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._context.spawn(name, self._reported(work))

    async def _reported(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a task; what ends the service is told to the controller first."""
        try:
            await work
        except Exception as error:
            if self._context.stopping.is_set():
                # The launcher's signal reaches the engine's processes too: that they go is no news.
                log.info("while stopping: %s", error)
                return
            if self._link is not None:
                await self._link.fail(str(error) if isinstance(error, PacelineError) else repr(error))
            raise
