"""The bootstrap that all members of a run's fleet share; a service adds only its own parts.

gRPC server -> register -> log level, telemetry -> heartbeats -> the service's work, until the run is over, a
signal comes or the controller drains the member -> report unhealthy -> finish the work under way -> shutdown
steps -> goodbye -> close the connection -> stop the gRPC server
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from paceline.core.errors import EXIT_FINAL, EXIT_GIVEN, ConfigError, PacelineError, PeerLostError, exit_code
from paceline.core.members import MemberKind
from paceline.service.addresses import (
    add_address_arguments,
    add_data_argument,
    from_environment,
    to_advertise,
    to_bind,
)
from paceline.service.grpc.connection import DEFAULT_MAX_MESSAGE_BYTES
from paceline.service.grpc.fencing import TermFence
from paceline.service.grpc.server import RunningServer, start_server
from paceline.service.identity.credentials import Credentials
from paceline.service.member.controller_link import PEER, ControllerLink, MemberReport, Registration
from paceline.service.member.run_directory import read_run_id
from paceline.service.member.runtime import ServiceContext, run_service
from paceline.service.observability import telemetry
from paceline.service.observability.logs import set_level
from paceline.service.tasks import cancel

log = logging.getLogger(__name__)

MAX_MESSAGE_MIB = "PACELINE_MAX_MESSAGE_MIB"
"""Variable with the largest message that a member accepts before it knows service.max_message_mib."""

_CONTROLLER = "PACELINE_CONTROLLER"
_MEMBER_ID = "PACELINE_MEMBER_ID"

# A restarted member does not know the run's configuration yet, and its controller may be unreachable.
_REGISTER_S = 600.0
_GOODBYE_S = 4.0

_Servicer = TypeVar("_Servicer")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberOptions:
    """A member's command line; credentials come from the environment, the rest from the controller.

    Attributes:
        advertise: address that others use; "": `host`, or if that is a wildcard, the address on the route to
            the controller.
        data_host: address for weights and for traffic between learner ranks; "": `host`.
        validates: whether a rollout server only answers held-out prompts.
        engine: a rollout server's engine, one of rollout.other_engines; "": rollout.name.
    """

    controller: str
    member_id: str
    host: str
    port: int
    advertise: str = ""
    data_host: str = ""
    validates: bool = False
    engine: str = ""

    @property
    def host_of_data(self) -> str:
        """The address or interface for weights and for traffic between learner ranks."""
        return self.data_host or self.host

    @classmethod
    def parse(cls, arguments: Sequence[str] | None, *, prog: str, kind: MemberKind, description: str) -> Self:
        """Reads the command line; missing options come from the environment."""
        parser = argparse.ArgumentParser(prog=prog, description=description)
        controller = from_environment(_CONTROLLER, "")
        parser.add_argument(
            "--controller",
            required=not controller,
            default=controller,
            metavar="HOST:PORT",
            help=f"address of the run's controller (or {_CONTROLLER})",
        )
        parser.add_argument(
            "--member-id",
            default=from_environment(_MEMBER_ID, f"{kind.value}-{socket.gethostname()}"),
            help="name of this member in the run, the same after a restart; several of a kind on one host "
            f"need one each (or {_MEMBER_ID}; default: %(default)s)",
        )
        add_address_arguments(parser)
        add_data_argument(parser)
        parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes any free one")
        if kind is MemberKind.ROLLOUT:
            parser.add_argument(
                "--validates",
                action="store_true",
                help="only answer held-out prompts, as one of rollout.validation_servers",
            )
            parser.add_argument(
                "--engine",
                default="",
                metavar="NAME",
                help="an engine of rollout.other_engines; default: rollout.name",
            )
        return cls(**vars(parser.parse_args(arguments)))


class MemberSession:
    """A process's membership in the fleet.

    Args:
        kind: what the member does.

    Attributes:
        run_over: whether the controller has ended the run, so that no work needs to be finished.
    """

    def __init__(
        self, context: ServiceContext, options: MemberOptions, *, kind: MemberKind, num_ranks: int = 1
    ) -> None:
        self.context, self.options = context, options
        self._kind, self._num_ranks = kind, num_ranks
        self._link: ControllerLink | None = None
        self._draining = asyncio.Event()
        self.run_over = asyncio.Event()

    @property
    def link(self) -> ControllerLink:
        """The connection to the controller, once the member has joined."""
        assert self._link is not None, "join() comes first"
        return self._link

    async def join(
        self,
        add: Callable[[_Servicer, grpc.aio.Server], None],
        servicer: _Servicer,
        report: Callable[[], MemberReport],
        *,
        on_reregistered: Callable[[], None] | None = None,
    ) -> Registration:
        """Serves gRPC, registers and starts heartbeats; the service stops when the controller ends the run.

        Args:
            servicer: the servicer, with `async def` methods.
            report: returns the content of each heartbeat.
            on_reregistered: see `ControllerLink.run`.

        Raises:
            DeadlineError: no controller answers at the address.
            PacelineError: the controller refused the member, or this process cannot listen.
        """
        context = self.context
        link = await self._serve(add, servicer)
        registration = await self._register(link, report())
        self._link = link
        _check_limit(registration)
        self._set_up_telemetry(registration)
        heartbeats = self.spawn("heartbeats", self._heartbeats(link, report, on_reregistered))

        async def say_goodbye() -> None:
            # A heartbeat after the goodbye would register the member again.
            heartbeats.cancel()
            await asyncio.wait([heartbeats])
            await link.leave("drained" if self._draining.is_set() else "stopped")

        context.defer("goodbye to the controller", say_goodbye, budget_s=_GOODBYE_S)
        context.before_stopping(self.tell_to_end)
        await asyncio.sleep(0)  # lets the heartbeats begin
        return registration

    async def _serve(
        self, add: Callable[[_Servicer, grpc.aio.Server], None], servicer: _Servicer
    ) -> ControllerLink:
        """Serves gRPC; returns a link to the controller that advertises the address."""
        context, options = self.context, self.options
        credentials, fence = Credentials.from_env(), TermFence()
        is_reward = self._kind is MemberKind.REWARD
        host = to_bind(options.host)
        server = await start_server(
            add,
            servicer,
            host=host,
            port=options.port,
            advertise=to_advertise(host, options.advertise, towards=options.controller),
            credentials=credentials.for_outside_callers() if is_reward else credentials,
            max_message_bytes=_max_message_mib() << 20,
            fence=fence,
        )
        context.defer("gRPC server", server.stop)
        context.spawn("health", self._refuse_work(server))
        link = ControllerLink(
            options.controller,
            kind=self._kind,
            member_id=options.member_id,
            address=server.address,
            num_ranks=self._num_ranks,
            validates=options.validates,
            engine=options.engine,
            credentials=credentials,
            fence=fence,
        )
        context.defer("connection to the controller", link.close)
        await server.answer_as(link.incarnation)
        return link

    def _set_up_telemetry(self, registration: Registration) -> None:
        settings = registration.config.telemetry
        set_level(settings.log_level)
        telemetry.setup(
            self._kind.value,
            run_dir=_visible(registration),
            otlp_endpoint=settings.otlp_endpoint,
            prometheus_port=settings.prometheus_port,
            instance=self.options.member_id,
            uses_gpus=self._kind is not MemberKind.REWARD,
        )

    async def until_leaving(self) -> None:
        """Returns when the run is over, a signal arrives, or the controller drains this member."""
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await self.context.stopping_or(draining)
        finally:
            draining.cancel()

    def tell_to_end(self) -> None:
        """Ends the member once the controller can spare it, after SIGTERM to one of its processes."""
        log.info("SIGTERM: continuing until the controller can do without this member")
        self.context.is_terminated = True
        self.link.ask_to_leave(lambda: self.context.stop("the controller can do without this member"))

    async def finish(self, work: Callable[[], Coroutine[Any, Any, None]], *, grace_s: float) -> None:
        """Awaits work that this member must finish before it leaves; cancels it after the grace period.

        A drained member has unlimited time; after a signal it has `grace_s` seconds. If the run is over, it
        does not start the work.
        """
        if self.run_over.is_set():
            return
        finishing = asyncio.create_task(work(), name="finish")
        over = asyncio.create_task(self.run_over.wait(), name="run over")
        try:
            await self.context.stopping_or(finishing)
            await asyncio.wait({finishing, over}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if finishing.done():
                finishing.result()
        finally:
            self.context.stop("drained")
            await cancel(finishing, over)

    def poke(self) -> None:
        """Sends a heartbeat at once, after a change of state. Call it from the event loop's thread."""
        if self._link is not None:
            self._link.poke()

    def notify(self, message: str) -> None:
        """Calls `ControllerLink.notify`; valid once `join` has returned."""
        self.link.notify(message)

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a named task; its error ends the service and is reported to the controller."""
        return self.context.spawn(name, self.reporting(work))

    async def reporting(self, work: Awaitable[None]) -> None:
        """Awaits `work`; reports its error to the controller and raises it. While stopping, only logs it."""
        try:
            await work
        except Exception as error:
            if self.context.stopping.is_set():
                # The launcher's signal also ends peers and children, so errors about them are expected.
                log.info("while stopping: %s", _reason(error))
                return
            if self._link is not None:
                await self._link.fail(_reason(error), is_final=exit_code(error) in (EXIT_GIVEN, EXIT_FINAL))
            raise

    async def _heartbeats(
        self,
        link: ControllerLink,
        report: Callable[[], MemberReport],
        on_reregistered: Callable[[], None] | None,
    ) -> None:
        await link.run(report, on_reregistered=on_reregistered, on_drain=self._draining.set)
        self.run_over.set()
        self.context.is_over = True
        self.context.stop("the run is over")
        await link.linger(report)

    async def _register(self, link: ControllerLink, report: MemberReport) -> Registration:
        registering = asyncio.create_task(link.register(_REGISTER_S, report), name="register")
        try:
            await self.context.stopping_or(registering)
            if registering.done():
                return registering.result()
            raise PeerLostError("told to stop before the controller had answered", peer=PEER)
        finally:
            registering.cancel()
            await asyncio.wait({registering})

    async def _refuse_work(self, server: RunningServer) -> None:
        await self.until_leaving()
        await server.refuse_work()


def run_member(
    serve: Callable[[MemberSession], Awaitable[None]],
    options: MemberOptions,
    *,
    kind: MemberKind,
    num_ranks: int = 1,
) -> int:
    """Runs a member's process until `serve` returns; returns the exit code."""

    async def main(context: ServiceContext) -> None:
        session = MemberSession(context, options, kind=kind, num_ranks=num_ranks)
        await session.reporting(serve(session))

    return run_service(main, name=options.member_id)


def _max_message_mib() -> int:
    text = from_environment(MAX_MESSAGE_MIB, str(DEFAULT_MAX_MESSAGE_BYTES >> 20))
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{MAX_MESSAGE_MIB}={text!r} must be a number of MiB, as service.max_message_mib")
    return int(text)


def _check_limit(registration: Registration) -> None:
    """Raises ConfigError if this process accepts only smaller messages than the run sends."""
    wanted, limit = registration.config.service.max_message_mib, _max_message_mib()
    if limit < wanted:
        raise ConfigError(
            f"this process takes messages of up to {limit} MiB, the run has service.max_message_mib={wanted}"
            f": set {MAX_MESSAGE_MIB}={wanted}"
        )


def _visible(registration: Registration) -> Path | None:
    """Returns the run directory if it is the controller's; another host may have a different one, or none."""
    if read_run_id(registration.run_dir) == registration.run_id:
        return registration.run_dir
    if not registration.config.telemetry.otlp_endpoint:
        log.info(
            "the run directory %s is not seen from here: no spans are kept (telemetry.otlp_endpoint)",
            registration.run_dir,
        )
    return None


def _reason(error: BaseException) -> str:
    """Describes an error; joins the errors of a group."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_reason(part) for part in error.exceptions)
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
