"""The controller service: puts the parts together, runs the sequencer beside the fleet's watch, ends in order."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.broker import Broker, names, open_broker
from paceline.broker.mailbox import Mailbox
from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.controller.batch.dispatch import Collector
from paceline.controller.batch.inputs import Inputs
from paceline.controller.events import EventHub
from paceline.controller.fleet.clients import Peers
from paceline.controller.fleet.membership import Fleet
from paceline.controller.fleet.supervisor import FleetWatch
from paceline.controller.guard.report import GuardWatch
from paceline.controller.journal import Journal
from paceline.controller.run import checkpoints
from paceline.controller.run.phases import Phase
from paceline.controller.run.records import MetricsFile
from paceline.controller.run.sequencer import Progress, Sequencer
from paceline.controller.servicer import ControllerServicer
from paceline.controller.weights.push import WeightPush
from paceline.core.clock import SystemClock
from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.core.ids import run_id_for
from paceline.core.members import MemberKind
from paceline.data.cursor import PromptCursor
from paceline.data.prompts import PromptSet, load_tokenizer, stop_token_ids
from paceline.rpc.v1 import controller_pb2_grpc
from paceline.service import telemetry
from paceline.service.grpc_server import start_server
from paceline.service.runtime import ServiceContext

log = logging.getLogger(__name__)

# How long members have to hear of the end and leave before the server goes; a rollout server takes some seconds to end its engine.
_FAREWELL_S = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The command line."""

    config: Path
    run_dir: Path
    host: str
    port: int | None
    address_file: Path | None


def load_inputs(config: RunConfig) -> Inputs:
    """Reads prompts and tokenizer; raises DataError or ModelError."""
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
    train = PromptSet.load(config.data, tokenizer)
    val = PromptSet.load(config.data, tokenizer, split="val") if config.data.val_files else None
    seed = config.trainer.seed if config.data.seed is None else config.data.seed
    cursor = PromptCursor(
        train.ids(), batch_size=config.data.train_batch_size, seed=seed, shuffle=config.data.shuffle
    )
    return Inputs(
        train=train, val=val, cursor=cursor, stop_token_ids=stop_token_ids(config.model.path, tokenizer)
    )


async def serve(context: ServiceContext, options: Options) -> None:
    """Runs one training run to its end."""
    config = load(RunConfig, options.config)
    broker_url, token = (
        os.environ.get("PACELINE_BROKER_URL") or config.broker.url or "",
        os.environ.get("PACELINE_TOKEN", ""),
    )
    if not broker_url:
        raise ConfigError("no message broker: set broker.url, or PACELINE_BROKER_URL in the environment")
    inputs = await asyncio.to_thread(load_inputs, config)
    _log_inputs(inputs)
    resumed = checkpoints.newest(options.run_dir) if config.trainer.resume == "auto" else None
    progress = Progress()
    run_id = _resume(config, inputs, progress, resumed) or run_id_for(
        options.run_dir.name, config.trainer.name
    )
    telemetry.setup(
        "controller",
        run_dir=options.run_dir,
        otlp_endpoint=config.telemetry.otlp_endpoint,
        instance="controller",
    )

    clock = SystemClock()
    broker = await _open_broker(context, broker_url, run_id)
    hub = EventHub()
    journal = Journal(options.run_dir / "events.jsonl", clock)
    await journal.record(
        "run", run_id=run_id, step=progress.step, resumed_from=str(resumed[0]) if resumed else None
    )
    fleet = FleetWatch(
        Fleet(
            clock, suspect_after_s=config.service.suspect_after_s, dead_after_s=config.service.dead_after_s
        ),
        journal,
        hub,
    )
    peers = Peers(config, token)
    context.defer("channels", peers.close)
    stop = asyncio.get_running_loop().create_future()
    servicer = ControllerServicer(
        config=config,
        run_id=run_id,
        run_dir=str(options.run_dir),
        broker_url=broker_url,
        resume_from=str(resumed[0]) if resumed else "",
        fleet=fleet,
        progress=progress,
        hub=hub,
        stop=lambda reason: None if stop.done() else stop.set_result(reason),
    )
    await _listen(context, options, config, servicer, token)
    async with Mailbox(
        broker,
        names.scored(run_id),
        names.CONTROLLER_GROUP,
        "controller",
        lease_s=config.broker.lease_s,
    ) as box:
        collector = Collector(
            config=config,
            run_id=run_id,
            broker=broker,
            box=box,
            journal=journal,
            alive=lambda: _alive(fleet),
            progress=_teller(progress, hub),
        )
        last_step = progress.step if resumed else -1
        guard = GuardWatch(config, journal, hub)
        if resumed:
            guard.load_state_dict(resumed[1].guard)
        sequencer = Sequencer(
            config=config,
            run_id=run_id,
            run_dir=options.run_dir,
            inputs=inputs,
            broker=broker,
            collector=collector,
            peers=peers,
            push=WeightPush(config, peers, fleet.expel, fleet.gone),
            fleet=fleet,
            journal=journal,
            hub=hub,
            guard=guard,
            metrics_file=MetricsFile(options.run_dir / "metrics.jsonl", last_step=last_step),
            progress=progress,
        )
        await _run_to_the_end(context, sequencer, fleet, servicer, hub, journal, stop)


async def _open_broker(context: ServiceContext, url: str, run_id: str) -> Broker:
    """Connects, and makes the run's mailboxes anew: what an earlier process of this run left in flight is of no use."""
    broker = open_broker(url)
    context.defer("broker connection", broker.close)
    await broker.ping()
    await broker.purge(names.prefix(run_id))
    await broker.ensure_group(names.trajectories(run_id), names.REWARD_GROUP)
    await broker.ensure_group(names.scored(run_id), names.CONTROLLER_GROUP)
    return broker


async def _listen(
    context: ServiceContext, options: Options, config: RunConfig, servicer: ControllerServicer, token: str
) -> None:
    """Starts the gRPC server and tells where it listens."""
    server = await start_server(
        controller_pb2_grpc.add_ControllerServiceServicer_to_server,
        servicer,
        host=options.host,
        port=config.service.controller_port if options.port is None else options.port,
        token=token,
        max_message_bytes=config.service.max_message_mib << 20,
        port_key="service.controller_port",
    )
    context.defer("gRPC server", server.stop)
    _announce(options.address_file, server.address)
    log.info("listening on %s", server.address)


async def _run_to_the_end(
    context: ServiceContext,
    sequencer: Sequencer,
    fleet: FleetWatch,
    servicer: ControllerServicer,
    hub: EventHub,
    journal: Journal,
    stop: asyncio.Future[str],
) -> None:
    """Runs until the loop ends, something fails, or somebody asks to stop; then tells everybody."""
    running = asyncio.create_task(sequencer.run(), name="sequencer")
    watching = asyncio.create_task(fleet.watch(), name="fleet watch")
    signalled = asyncio.create_task(context.stopping.wait(), name="signal")
    tasks: list[asyncio.Task[Any]] = [running, watching, signalled]
    try:
        await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
        failure = next((t.exception() for t in (watching, running) if t.done() and t.exception()), None)
        ok = running.done() and failure is None
        if ok:
            message = f"{sequencer.progress.step} steps done"
        elif failure is not None:
            message = (
                str(failure) if isinstance(failure, PacelineError) else f"{type(failure).__name__}: {failure}"
            )
        else:
            message = (
                f"stopped in step {sequencer.progress.step}: {stop.result() if stop.done() else 'signal'}"
            )
        if not ok:
            await _cancel(running)
            sequencer.progress.phase = Phase.FAILED
        await journal.record("end", ok=ok, message=message, step=sequencer.progress.step)
        servicer.end()
        hub.end(ok=ok, message=message)
        await fleet.all_gone(timeout_s=_FAREWELL_S)
        if failure is not None:
            raise failure
    finally:
        for task in tasks:
            await _cancel(task)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _resume(
    config: RunConfig,
    inputs: Inputs,
    progress: Progress,
    resumed: tuple[Path, checkpoints.ControllerState] | None,
) -> str | None:
    if resumed is None:
        return None
    folder, state = resumed
    if state.num_prompts != len(inputs.train.prompts) or state.seed != config.trainer.seed:
        raise CheckpointError(
            f"{folder} was written with {state.num_prompts} prompts and seed {state.seed}; now there are {len(inputs.train.prompts)} and "
            f"{config.trainer.seed}. Resume with the same data and seed, or set trainer.resume: never and another trainer.run_dir"
        )
    inputs.cursor.restore(state.cursor)
    progress.step = state.step
    log.info("resuming run %s after step %d from %s", state.run_id, state.step, folder)
    return state.run_id


def _log_inputs(inputs: Inputs) -> None:
    for name, prompts in (("training", inputs.train), ("validation", inputs.val)):
        if prompts is not None:
            log.info(
                "%d %s prompts, %d left out as over-long", len(prompts.prompts), name, prompts.num_filtered
            )


def _announce(file: Path | None, address: str) -> None:
    if file is not None:
        temporary = file.with_suffix(".tmp")
        temporary.write_text(address, encoding="utf-8")
        temporary.rename(file)


def _alive(fleet: FleetWatch) -> None:
    fleet.require(MemberKind.ROLLOUT)
    fleet.require(MemberKind.REWARD)


def _teller(progress: Progress, hub: EventHub) -> Callable[[int, int], None]:
    def tell(admitted: int, wanted: int) -> None:
        progress.admitted, progress.wanted = admitted, wanted
        hub.phase(step=progress.step, phase=progress.phase.value, admitted=admitted, wanted=wanted)

    return tell
