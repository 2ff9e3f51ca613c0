"""The controller service: builds the parts, runs the sequencer beside the supervisor, and ends in order."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.broker import open_broker
from paceline.broker.address import STORES, URL, check_reach, with_password
from paceline.broker.base import Broker
from paceline.config.load import dump_yaml, load
from paceline.config.run import RunConfig
from paceline.controller.batch.collect import Collector
from paceline.controller.batch.dispatch import Dispatcher
from paceline.controller.batch.inputs import Inputs, load_inputs
from paceline.controller.batch.mailboxes import Mailboxes, ValMailboxes
from paceline.controller.batch.tasks import with_tasks
from paceline.controller.events import EventHub
from paceline.controller.fleet.clients import Channels, LearnerClient, RolloutClient
from paceline.controller.fleet.membership import Fleet, Member
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.fleet.turns import Turns
from paceline.controller.guard.report import Guard
from paceline.controller.health import measure_mailboxes, observe_run
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.run.dataflow.dataflow import Dataflow, load_dataflow
from paceline.controller.run.dataflow.rehearsal import rehearse
from paceline.controller.run.records import checkpoints
from paceline.controller.run.records.opening import open_run
from paceline.controller.run.sequencer import Sequencer
from paceline.controller.servicer import ControllerServicer
from paceline.controller.watchdog import Watchdog
from paceline.controller.weights.epoch import Epochs
from paceline.controller.weights.push import WeightPush
from paceline.core.clock import SystemClock
from paceline.core.errors import BrokerError, ConfigError, PacelineError
from paceline.core.members import MemberKind
from paceline.data.hub import pinned_run
from paceline.data.scripted import FLOW
from paceline.rpc.v1 import controller_pb2_grpc
from paceline.service.grpc.server import start_server
from paceline.service.identity.credentials import Credentials
from paceline.service.member.runtime import ServiceContext
from paceline.service.observability import telemetry
from paceline.service.process import BLOB_STORES, BROKER_URL, write_atomically
from paceline.service.tasks import cancel
from paceline.storage.places import mark

log = logging.getLogger(__name__)

# Before the server stops, members have this long to hear of the end and to leave; a rollout server takes some
# seconds to end its engine. On a busy machine they may take longer, until this process gets a signal.
_FAREWELL_S, _LONGEST_FAREWELL_S = 8.0, 60.0
# The broker has this long to remove the run's data. Both times together are less than a service has after a
# signal.
_PURGE_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Holds the arguments of the command line."""

    config: Path
    overrides: tuple[str, ...]
    run_dir: Path
    host: str
    advertise: str
    port: int | None
    address_file: Path | None


async def serve(context: ServiceContext, options: Options) -> None:
    """Runs one training run to its end."""
    config, inputs, credentials = await _configured(options)
    (broker_url, *stores), flow = _broker_urls(config), await _dataflow(config, inputs)
    clock = SystemClock()
    journal, run_id, notices = await asyncio.to_thread(open_run, options.run_dir, config, inputs, clock)
    _keep_settings(config, options)
    _start_telemetry(config, options)
    events = _events(notices)
    broker = await _connect(context, config, broker_url, stores, events)
    run = Run(config=config, id=run_id, dir=options.run_dir, journal=journal, events=events)
    progress = Progress(run, step=max(0, journal.standing.finished))
    progress.policy = journal.standing.committed
    fleet = Fleet(
        clock, suspect_after_s=config.service.suspect_after_s, dead_after_s=config.service.dead_after_s
    )
    supervisor = Supervisor(fleet, journal, events, clock)
    observe_run(run, progress, fleet, clock)
    _measure_mailboxes(context, run, progress, broker)
    stop = asyncio.get_running_loop().create_future()
    channels = Channels(config, credentials, journal.term)
    context.defer("channels", channels.close)
    learner, rollout = LearnerClient(config, channels, supervisor.gone), RolloutClient(config, channels)
    turns = Turns(run, supervisor, learner, rollout)
    servicer = ControllerServicer(
        run,
        progress,
        supervisor,
        turns=turns,
        broker_url=broker_url,
        blob_stores=stores,
        credentials=credentials,
        checkpoints=lambda: list(checkpoints.candidates(run.checkpoints, run.id)),
        checkpoint_marker=await asyncio.to_thread(mark, run.checkpoints),
        stop=lambda reason: None if stop.done() else stop.set_result(reason),
    )
    await _listen(context, options, config, servicer, credentials)
    mailboxes = Mailboxes(broker, run_id, own_server=config.broker.url is None)
    epochs = Epochs(config, learner, rollout, supervisor.expel, supervisor.gone, term=journal.term)
    sequencer = Sequencer(
        run,
        progress,
        inputs=inputs,
        collector=_collector(run, progress, broker, mailboxes, inputs, supervisor),
        learner=learner,
        push=WeightPush(epochs, learner, rollout),
        supervisor=supervisor,
        guard=Guard(run),
        turns=turns,
        flow=flow,
        collector_of=functools.partial(validation_collector, run, progress, broker),
    )
    try:
        await _run_to_the_end(context, run, sequencer, supervisor, servicer, stop)
    finally:
        # The run is over, with or without an error. Otherwise the data stays for the next controller.
        if journal.standing.ended:
            await _forget(mailboxes)


async def _configured(options: Options) -> tuple[RunConfig, Inputs, Credentials]:
    """Returns the configuration, completed from data and environments, and the run's inputs."""
    given = load(RunConfig, options.config, options.overrides).with_context()
    config = await asyncio.to_thread(pinned_run, given)
    credentials = _credentials(config)
    config = await with_tasks(config, options.run_dir, credentials)
    inputs = await asyncio.to_thread(load_inputs, config)
    return config.with_epochs_counted(len(inputs.train.prompts)), inputs, credentials


def _events(notices: Sequence[str]) -> EventHub:
    """Opens the run's events, and announces the notices of opening the run."""
    events = EventHub()
    for notice in notices:
        log.warning("%s", notice)
        events.notice(notice)
    return events


async def _dataflow(config: RunConfig, inputs: Inputs) -> Dataflow:
    """Returns the run's dataflow; tries out a user's dataflow before anything is opened."""
    flow = await asyncio.to_thread(load_dataflow, config)
    if config.trainer.dataflow not in (None, FLOW):
        log.info("dataflow: %s", await rehearse(flow, config, inputs))
    return flow


def _measure_mailboxes(context: ServiceContext, run: Run, progress: Progress, broker: Broker) -> None:
    measuring = context.spawn(
        "mailbox lengths",
        measure_mailboxes(broker, run.id, progress, in_flight=run.config.pushes_in_flight),
    )
    context.defer("mailbox lengths", lambda: cancel(measuring))


def _start_telemetry(config: RunConfig, options: Options) -> None:
    telemetry.setup(
        "controller",
        run_dir=options.run_dir,
        otlp_endpoint=config.telemetry.otlp_endpoint,
        prometheus_port=config.telemetry.prometheus_port,
        instance="controller",
    )


def _collector(
    run: Run,
    progress: Progress,
    broker: Broker,
    mailboxes: Mailboxes,
    inputs: Inputs,
    supervisor: Supervisor,
) -> Collector:
    return Collector(
        run,
        broker=broker,
        mailboxes=mailboxes,
        dispatcher=Dispatcher(run, broker, inputs.images),
        wait_for_services=lambda: _services(supervisor, run.config.service.recovery_timeout_s),
        count=progress.count,
    )


def validation_collector(
    run: Run,
    progress: Progress,
    broker: Broker,
    version: int,
    wait_for_services: Callable[[], Awaitable[None]],
) -> Collector:
    """Returns the collector of a version's validation beside training."""

    def count(admitted: int, wanted: int) -> None:
        if progress.phase is Phase.VALIDATE:
            progress.count(admitted, wanted)

    return Collector(
        run,
        broker=broker,
        mailboxes=ValMailboxes(broker, run.id, version),
        dispatcher=Dispatcher(run, broker, beside=True),
        wait_for_services=wait_for_services,
        count=count,
        beside=True,
    )


def _broker_urls(config: RunConfig) -> list[str]:
    """Returns the addresses of the broker and of the blob stores."""
    url = os.environ.get(BROKER_URL) or config.broker.url
    if not url:
        raise ConfigError(f"no message broker: set broker.url, or {BROKER_URL} in the environment")
    stores = os.environ.get(BLOB_STORES, "").split() or config.broker.store_urls
    keys = [URL, *(STORES for _ in stores)]
    urls = [with_password(at, os.environ, key=key) for at, key in zip((url, *stores), keys, strict=True)]
    for address, key in zip(urls, keys, strict=True):
        check_reach(address, insecure=config.broker.insecure, key=key)
    return urls


def _credentials(config: RunConfig) -> Credentials:
    credentials = Credentials.from_env()
    return replace(credentials, insecure=True) if config.service.insecure else credentials


async def _connect(
    context: ServiceContext, config: RunConfig, url: str, stores: Sequence[str], events: EventHub
) -> Broker:
    """Opens the broker; announces its outages, and those of its stores, to the run's followers."""
    broker = open_broker(
        url,
        stores=stores,
        outage_timeout_s=config.broker.outage_timeout_s,
        on_outage=events.notice,
        on_recovery=events.notice,
    )
    context.defer("broker connection", broker.close)
    await broker.ping()
    return broker


async def _forget(mailboxes: Mailboxes) -> None:
    """Removes the run's data from the broker; if the broker is away, the data stays and the run ends."""
    try:
        async with asyncio.timeout(_PURGE_S):
            await mailboxes.purge()
    except (BrokerError, TimeoutError) as error:
        reason = str(error) or f"it has not answered within {_PURGE_S:g} s"
        log.warning("the run's data stays in the broker: %s", reason)


def _keep_settings(config: RunConfig, options: Options) -> None:
    """Writes the run's settings, which `paceline verify`, `report` and `export` read.

    Settings that `paceline train` has written to the run directory are kept unchanged.
    """
    file, given = options.run_dir / "config.resolved.yaml", options.config.resolve()
    mode = 0o600 if config.broker.has_secrets else 0o644
    if given.parent == options.run_dir.resolve() and not options.overrides:
        if given != file.resolve():
            write_atomically(file, given.read_text(encoding="utf-8"), mode=mode)
        return
    write_atomically(file, dump_yaml(config.changed(trainer={"run_dir": str(options.run_dir)})), mode=mode)


async def _services(supervisor: Supervisor, timeout_s: float) -> None:
    """Returns when all members that a collection needs are there."""
    await supervisor.rollouts_ready(timeout_s)
    await supervisor.reward_ready(timeout_s)


async def _listen(
    context: ServiceContext,
    options: Options,
    config: RunConfig,
    servicer: ControllerServicer,
    credentials: Credentials,
) -> None:
    """Starts the gRPC server and writes its address to the address file."""
    server = await start_server(
        controller_pb2_grpc.add_ControllerServiceServicer_to_server,
        servicer,
        host=options.host,
        advertise=options.advertise,
        port=config.service.controller_port if options.port is None else options.port,
        credentials=credentials,
        max_message_bytes=config.service.max_message_mib << 20,
        port_key="service.controller_port",
    )
    context.defer("gRPC server", server.stop)
    if options.address_file is not None:
        write_atomically(options.address_file, server.address)
    log.info("listening on %s", server.address)


def _stop_after_step(context: ServiceContext, run: Run, progress: Progress, supervisor: Supervisor) -> None:
    """Ends this process after SIGTERM and the step in progress; at once if no learner works on a step."""
    progress.stop_reason = signal.SIGTERM.name
    if all(learner.is_starting for learner in supervisor.fleet.usable(MemberKind.LEARNER)):
        context.stop(signal.SIGTERM.name)
        return
    run.events.notice(f"SIGTERM: the controller ends after step {max(1, progress.step)}, with a checkpoint")


async def _run_to_the_end(
    context: ServiceContext,
    run: Run,
    sequencer: Sequencer,
    supervisor: Supervisor,
    servicer: ControllerServicer,
    stop: asyncio.Future[str],
) -> None:
    """Runs until the loop ends, something fails, or a stop is requested; then tells members and followers."""
    progress = sequencer.progress
    context.before_stopping(lambda: _stop_after_step(context, run, progress, supervisor))
    running = asyncio.create_task(sequencer.run(), name="sequencer")
    supervising = asyncio.create_task(supervisor.supervise(), name="supervisor")
    signalled = asyncio.create_task(context.stopping.wait(), name="signal")
    watchdog = Watchdog(progress, supervisor.fleet, run.events, SystemClock())
    watching = asyncio.create_task(watchdog.run(), name="watchdog")
    tasks: list[asyncio.Task[Any]] = [running, supervising, watching, signalled]
    try:
        await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
        failure = next(
            (t.exception() for t in (supervising, watching, running) if t.done() and t.exception()), None
        )
        ok = running.done() and failure is None
        if ok:
            message = sequencer.result
        elif failure is not None:
            message = _sentence(failure)
        else:
            message = f"stopped in step {progress.step}: {stop.result() if stop.done() else 'signal'}"
        if not ok:
            await cancel(running)
            progress.phase = Phase.FAILED
        run.journal.record("end", ok=ok, message=message, step=progress.step)
        context.before_stopping(None)
        is_complete = run.journal.standing.finished >= run.config.trainer.num_steps
        context.is_over = failure is not None or stop.done() or is_complete
        if context.is_terminated and not context.is_over:
            # Members that nobody has told to end wait for the next controller.
            supervisor.departures.end()
            members = supervisor.departures.asked
        else:
            servicer.end()
            members = supervisor.fleet.members
        run.events.end(ok=ok, message=message)
        await _farewell(context, supervisor, members)
        if failure is not None:
            raise failure
    finally:
        for task in tasks:
            await cancel(task)


async def _farewell(
    context: ServiceContext, supervisor: Supervisor, members: Callable[[], Sequence[Member]]
) -> None:
    """Waits until `members` have left; a signal ends the wait, but not its first seconds."""
    await supervisor.all_gone(members, timeout_s=_FAREWELL_S)
    longest_s = _LONGEST_FAREWELL_S - _FAREWELL_S
    leaving = asyncio.create_task(supervisor.all_gone(members, timeout_s=longest_s))
    try:
        await context.stopping_or(leaving)
    finally:
        await cancel(leaving)


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
