"""The learner's processes: rank 0 serves gRPC beside its training thread, the others follow its commands.

rank 0:  join the fleet -> training thread: form the group, load, resume -> commands until the run is over
others:  form the group -> load, resume -> commands until STOP
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch._C._distributed_c10d import Store

from paceline.broker.blobs import BlobReader
from paceline.config.run import RunConfig
from paceline.core.errors import DeadlineError, PacelineError
from paceline.learner import checkpoint
from paceline.learner.commands import Commands
from paceline.learner.distributed.collectives import broadcast_bytes
from paceline.learner.distributed.command_loop import STOP, CommandLoop, CommandQueue, Handler
from paceline.learner.distributed.publisher import WeightPublisher
from paceline.learner.distributed.ranks import (
    RankEnvironment,
    Ranks,
    choose_device,
    form_group,
    leave_group,
    open_store,
    use_threads,
)
from paceline.learner.servicer import LearnerServicer
from paceline.learner.train.learner import Learner
from paceline.rpc.v1 import learner_pb2_grpc
from paceline.service.controller_link import MemberReport
from paceline.service.logs import set_level, setup_logging
from paceline.service.member import MemberSession
from paceline.service.process import die_with_parent

log = logging.getLogger(__name__)

_STOP_S = 5.0
_FIRST_WAIT_S = 120.0
_GROUP_KEY = "paceline/group"


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The part of the registration that every rank needs."""

    config: RunConfig
    broker_url: str
    resume_from: Path | None
    publish_host: str

    def to_bytes(self) -> bytes:
        """Bytes for the other ranks; with the broker's password, so for the group and not for its store."""
        resume_from = str(self.resume_from) if self.resume_from else ""
        fields = [self.config.model_dump_json(), self.broker_url, resume_from, self.publish_host]
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Assignment:
        """Reads what `to_bytes` wrote."""
        config, broker_url, resume_from, publish_host = json.loads(data)
        return cls(
            config=RunConfig.model_validate_json(config),
            broker_url=broker_url,
            resume_from=Path(resume_from) if resume_from else None,
            publish_host=publish_host,
        )


class LearnerApp:
    """Rank 0's process."""

    def __init__(self, session: MemberSession, environment: RankEnvironment) -> None:
        self._session, self._environment = session, environment
        self._queue = CommandQueue()
        self._servicer = LearnerServicer(self._queue, session.poke)

    async def run(self) -> None:
        """Serves until the run is over or a signal comes.

        Raises:
            PacelineError: the group failed.
        """
        registration = await self._session.join(
            learner_pb2_grpc.add_LearnerServiceServicer_to_server, self._servicer, self._report
        )
        assignment = Assignment(
            config=registration.config,
            broker_url=registration.broker_url,
            resume_from=next(iter(registration.checkpoints), None),
            publish_host=self._session.link.address.rpartition(":")[0],
        )
        training = self._start_training(assignment)
        await self._session.context.stopping_or(training)
        if training.done():
            training.result()
        else:
            await self._stop(training)

    def _start_training(self, assignment: Assignment) -> asyncio.Future[None]:
        """Starts the only thread that uses torch; a daemon: a hanging collective must not hold it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if not done.done():
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)

        def ready(learner: Learner) -> None:
            loop.call_soon_threadsafe(
                self._servicer.ready, learner.version, assignment.config.learner.command_timeout_s
            )

        def work() -> None:
            error: BaseException | None = None
            try:
                lead(self._environment, assignment, self._queue, ready)
            except BaseException as raised:  # noqa: BLE001  handed to the event loop, which raises it
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(settle, error)

        threading.Thread(target=work, name="training", daemon=True).start()
        return done

    async def _stop(self, training: asyncio.Future[None]) -> None:
        self._queue.submit(STOP, {})
        await asyncio.wait({training}, timeout=_STOP_S)
        if not training.done():
            log.warning("the group did not stop within %g s; its ranks end with this process", _STOP_S)

    def _report(self) -> MemberReport:
        return MemberReport(state=self._servicer.state, policy=self._servicer.policy)


def lead(
    environment: RankEnvironment,
    assignment: Assignment,
    queue: CommandQueue,
    ready: Callable[[Learner], None],
) -> None:
    """Rank 0's training thread: forms the group, tells the others, serves commands until STOP."""
    settings = assignment.config.learner
    store = open_store(environment, settings.collective_timeout_s)
    # The other ranks know only the store's address; they need these settings to form the group.
    group = [settings.device, settings.devices, settings.threads, settings.collective_timeout_s]
    store.set(_GROUP_KEY, json.dumps(group))
    _serve(environment, store, assignment, queue, ready)


def follow(environment: RankEnvironment) -> None:
    """Every other rank's process: waits for rank 0, then serves its commands until STOP.

    Raises:
        DeadlineError: rank 0 did not come.
        PeerLostError: another rank failed.
    """
    try:
        store = open_store(environment, _FIRST_WAIT_S)
        store.wait([_GROUP_KEY], datetime.timedelta(seconds=_FIRST_WAIT_S))
    except RuntimeError as error:
        raise DeadlineError(
            phase="FORMING",
            peer=f"learner rank 0 at {environment.master_host}:{environment.master_port}",
            seconds=_FIRST_WAIT_S,
            hint="its log says why",
        ) from error
    _serve(environment, store, None, None, lambda learner: None)


def _serve(
    environment: RankEnvironment,
    store: Store,
    assignment: Assignment | None,
    queue: CommandQueue | None,
    ready: Callable[[Learner], None],
) -> None:
    device_word, devices, threads, timeout_s = json.loads(store.get(_GROUP_KEY))
    use_threads(threads, environment)
    device = choose_device(device_word, environment, tuple(devices) if devices else None)
    ranks = form_group(environment, store, device, timeout_s)
    if queue is None:
        # From now on rank 0 ends the group; a signal to all processes must not end single ranks.
        signal.signal(signal.SIGTERM, lambda number, frame: log.info("SIGTERM: rank 0 will end the group"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.ExitStack() as stack:

        def load() -> dict[str, Handler]:
            known = Assignment.from_bytes(
                broadcast_bytes(assignment.to_bytes() if assignment else b"", ranks)
            )
            set_level(known.config.telemetry.log_level)
            learner = _build(known, ranks)
            publisher = WeightPublisher(
                learner.actor.network.lm,
                device,
                known.config.weight_backend(device.type),
                host=known.publish_host,
            )
            blobs = stack.enter_context(
                BlobReader(known.broker_url, outage_timeout_s=known.config.broker.outage_timeout_s)
            )
            ready(learner)
            return Commands(learner, blobs, publisher).table

        CommandLoop(ranks, load, queue).run()
    leave_group()


def _build(assignment: Assignment, ranks: Ranks) -> Learner:
    learner = Learner.build(assignment.config, ranks)
    log.info("rank %d of %d holds its shards on %s", ranks.rank, ranks.world_size, ranks.device)
    if assignment.resume_from is not None:
        checkpoint.load(learner, assignment.resume_from)
        log.info("resumed from %s at version %d", assignment.resume_from, learner.version)
    return learner


def run_follower(environment: RankEnvironment) -> int:
    """The main function of every rank but 0; returns the exit code."""
    die_with_parent()
    setup_logging(f"learner-rank{environment.rank}")
    try:
        follow(environment)
    except PacelineError as error:
        log.error("fatal: %s", error)
        return 1
    except Exception:
        log.exception("fatal")
        return 1
    log.info("stopped")
    return 0
