"""The rollout service's process: wires engine, broker and sampler in the order in which they start.

join the fleet (joining) -> engine -> stale -> pushes and prompts, until the run is over or the process is
told to stop. Then the groups under way are finished, as far as the time allows, and the parts end in reverse
order.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from paceline.broker.opening import open_broker
from paceline.config.run import RunConfig
from paceline.rollout.capacity import SamplerLimits
from paceline.rollout.engines.base import Engine
from paceline.rollout.engines.loading import start_engine
from paceline.rollout.episodes.agents.endpoint import AgentEndpoint
from paceline.rollout.episodes.environments.attached import AttachedEnvironment, EnvironmentGatewayServicer
from paceline.rollout.episodes.group import Episodes, environment_of, load_rules
from paceline.rollout.sampler import Sampler
from paceline.rollout.server import Parts, RolloutServer
from paceline.rollout.servicer import RolloutServicer
from paceline.rollout.trajectories import check_samples
from paceline.rpc.v1 import environment_pb2_grpc, rollout_pb2_grpc
from paceline.service.addresses import choose_for_nccl, to_advertise, to_bind
from paceline.service.identity.credentials import Credentials
from paceline.service.member.bootstrap import MemberSession
from paceline.service.member.controller_link import MemberReport, Registration
from paceline.service.ports import warn_of_kernel
from paceline.service.threads import in_stoppable_thread, in_thread
from paceline.storage.models import local_model

log = logging.getLogger(__name__)

_HEALTH_S = 1.0
_ENGINE_SHUTDOWN_S = 8.0
_ENVIRONMENT_SHUTDOWN_S = 5.0
# After a signal, running groups get this long; slower ones go to another server.
_FINISH_S = 5.0


def _add_to_server(
    servicers: tuple[RolloutServicer, EnvironmentGatewayServicer], server: grpc.aio.Server
) -> None:
    rollout, attached = servicers
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollout, server)
    environment_pb2_grpc.add_EnvironmentGatewayServicer_to_server(attached, server)


class RolloutApp:
    """Runs the process of one rollout server."""

    def __init__(self, session: MemberSession) -> None:
        self._session = session
        self._server = RolloutServer(session.poke)
        self._attached = EnvironmentGatewayServicer()

    async def run(self) -> None:
        """Serves until the run is over or the process is told to stop."""
        registration = await self._session.join(
            _add_to_server,
            (RolloutServicer(self._server), self._attached),
            self._report,
            on_reregistered=self._reregistered,
        )
        choose_for_nccl(self._session.options.host_of_data)
        warn_of_kernel(self._session.options.host_of_data)
        engine = await self._load(registration.config)
        if engine is not None:
            await self._serve(engine, registration)

    async def _load(self, config: RunConfig) -> Engine | None:
        """Returns the engine, or None if the service was told to stop meanwhile."""
        loading = asyncio.ensure_future(self._start(config))
        try:
            await self._session.context.stopping_or(loading)
            return loading.result() if loading.done() else None
        finally:
            if loading.cancel():
                await asyncio.wait([loading])

    async def _start(self, config: RunConfig) -> Engine:
        model = await in_stoppable_thread(
            lambda stopped: local_model(config.model, "rollout", stopped=stopped)
        )
        if not self._session.link.may_start.is_set():
            log.info("waiting for the end of the learner's turn on the GPUs")
            await self._session.link.may_start.wait()
        config = config.model_copy(update={"model": model})
        return await start_engine(config.with_engine(self._session.options.engine or config.rollout.name))

    async def _serve(self, engine: Engine, registration: Registration) -> None:
        session, context, config = self._session, self._session.context, registration.config
        context.defer("engine", engine.shutdown, budget_s=_ENGINE_SHUTDOWN_S)
        broker = open_broker(
            registration.broker_url,
            stores=registration.blob_stores,
            writer=session.options.member_id,
            outage_timeout_s=config.broker.outage_timeout_s,
        )
        context.defer("broker", broker.close)
        await broker.ping()
        episodes = (
            await self._open_episodes(config, engine, registration.run_id) if config.has_episodes else None
        )
        sampler = Sampler(
            engine=engine,
            broker=broker,
            run_id=registration.run_id,
            server_id=session.options.member_id,
            incarnation=session.link.incarnation,
            limits=SamplerLimits.of(config, validates=session.options.validates),
            spawn=session.spawn,
            episodes=episodes,
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
        session.spawn("engine health", self._check_health(engine))
        await session.until_leaving()
        await session.finish(self._server.drain, grace_s=_FINISH_S)

    async def _open_episodes(self, config: RunConfig, engine: Engine, run_id: str) -> Episodes:
        rules = await in_thread(load_rules, config, local_model(config.model, "rollout"))
        environment = environment_of(
            config,
            Credentials.from_env(),
            run_id=run_id,
            is_over=self._session.run_over.is_set,
        )
        self._session.context.defer("environment", environment.close, budget_s=_ENVIRONMENT_SHUTDOWN_S)
        await environment.start()
        endpoint = await self._open_endpoint(config)
        if isinstance(environment, AttachedEnvironment):
            self._attached.environment = environment
        return Episodes(
            engine=engine,
            environment=environment,
            rules=rules,
            retries=config.rollout.episode.retries,
            check=check_samples,
            endpoint=endpoint,
            max_context_tokens=config.rollout.episode.max_context_tokens or engine.kv_cache_tokens,
        )

    async def _open_endpoint(self, config: RunConfig) -> AgentEndpoint | None:
        service = config.rollout.environment
        if service is None or not service.is_driven:
            return None
        options = self._session.options
        host = to_bind(options.host)
        endpoint = AgentEndpoint(
            host=host,
            port=service.port,
            advertise=to_advertise(host, options.advertise, towards=options.controller),
            tls=Credentials.from_env().tls,
        )
        self._session.context.defer("endpoint", endpoint.close, budget_s=_ENVIRONMENT_SHUTDOWN_S)
        await endpoint.start()
        return endpoint

    def _reregistered(self) -> None:
        self._session.spawn("forget", self._server.forget())

    def _report(self) -> MemberReport:
        standing = self._server.standing
        return MemberReport(state=standing.state, policy=standing.policy, in_flight=self._server.in_flight)

    async def _check_health(self, engine: Engine) -> None:
        # An idle engine's death may be noticed only by asking the engine.
        while not self._session.context.stopping.is_set():
            await engine.check_health()
            await asyncio.sleep(_HEALTH_S)
