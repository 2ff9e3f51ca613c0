"""One rank's work, from the group's formation to its end; it runs in the only thread that uses torch.

rank 0:  form the group -> load the newest intact checkpoint -> commands of the queue until STOP
others:  wait for rank 0 -> the same -> the same commands, broadcast
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch._C._distributed_c10d import Store

from paceline.broker.blobs import BlobReader
from paceline.config.run import RunConfig
from paceline.core.errors import DeadlineError, PeerLostError
from paceline.learner.checkpoint.load import load_newest
from paceline.learner.commands import Commands
from paceline.learner.distributed.collectives import broadcast_bytes
from paceline.learner.distributed.command_loop import CommandLoop, CommandQueue, Handler
from paceline.learner.distributed.heartbeats import Heartbeats
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
from paceline.learner.train.learner import Learner
from paceline.service.logs import set_level

log = logging.getLogger(__name__)

_FIRST_WAIT_S = 120.0
_GROUP_KEY = "paceline/group"


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The part of the registration that every rank needs, and where rank 0 listens.

    Attributes:
        checkpoints: may be loaded, newest first.
        host, advertise: of rank 0: what it listens on, and where others reach it.
    """

    config: RunConfig
    broker_url: str
    checkpoints: tuple[Path, ...]
    host: str
    advertise: str

    def to_bytes(self) -> bytes:
        """Bytes for the other ranks; with the broker's password, so for the group and not for its store."""
        checkpoints = [str(folder) for folder in self.checkpoints]
        fields = [self.config.model_dump_json(), self.broker_url, checkpoints, self.host, self.advertise]
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Assignment:
        """Reads what `to_bytes` wrote."""
        config, broker_url, checkpoints, host, advertise = json.loads(data)
        return cls(
            config=RunConfig.model_validate_json(config),
            broker_url=broker_url,
            checkpoints=tuple(Path(folder) for folder in checkpoints),
            host=host,
            advertise=advertise,
        )


class Head(Protocol):
    """What rank 0's thread tells the process around it."""

    @property
    def commands(self) -> CommandQueue:
        """Where the thread takes its commands from."""
        ...

    def ready(self, learner: Learner) -> None:
        """Every rank has loaded its part."""
        ...

    def notify(self, message: str) -> None:
        """A person should read this."""
        ...

    def lost(self, error: PeerLostError) -> None:
        """A rank is silent; the training thread may wait for it for ever. Ends the process."""
        ...


def lead(environment: RankEnvironment, assignment: Assignment, head: Head) -> None:
    """Rank 0's training thread: forms the group, tells the others, serves commands until STOP.

    Raises:
        PeerLostError: another rank failed.
        CheckpointError: none of the checkpoints can be loaded.
    """
    settings = assignment.config.learner
    store = open_store(environment, settings.collective_timeout_s)
    # The other ranks know only the store's address; they need these settings to form the group.
    group = [
        settings.device,
        settings.devices,
        settings.threads,
        settings.collective_timeout_s,
        settings.rank_silent_s,
    ]
    store.set(_GROUP_KEY, json.dumps(group))
    _serve(environment, store, assignment, head)


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
    _serve(environment, store, None, None)


def _serve(
    environment: RankEnvironment, store: Store, assignment: Assignment | None, head: Head | None
) -> None:
    device_word, devices, threads, timeout_s, silent_s = json.loads(store.get(_GROUP_KEY))
    use_threads(threads, environment)
    device = choose_device(device_word, environment, tuple(devices) if devices else None)
    ranks = form_group(environment, store, device, timeout_s)
    if head is None:
        # From now on rank 0 ends the group; a signal to all processes must not end single ranks.
        signal.signal(signal.SIGTERM, lambda number, frame: log.info("SIGTERM: rank 0 will end the group"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.ExitStack() as stack:
        heartbeats = stack.enter_context(
            Heartbeats(ranks, limit_s=silent_s, lost=head.lost if head else _end_follower)
        )
        commands: Commands | None = None

        def load() -> dict[str, Handler]:
            nonlocal commands
            data = assignment.to_bytes() if assignment else b""
            commands = _load(Assignment.from_bytes(broadcast_bytes(data, ranks)), ranks, head, stack)
            return commands.table

        queue = head.commands if head else None
        CommandLoop(ranks, load, queue, find_silent=heartbeats.find_silent).run()
        if commands is not None:
            commands.finish()
    leave_group()


def _end_follower(error: PeerLostError) -> None:
    """Ends this process at once: its main thread may wait in a collective."""
    log.error("fatal: %s", error)
    logging.shutdown()
    os._exit(1)


def _load(assignment: Assignment, ranks: Ranks, head: Head | None, stack: contextlib.ExitStack) -> Commands:
    """Loads this rank's part of everything; its connections are closed with `stack`."""
    config = assignment.config
    set_level(config.telemetry.log_level)
    learner = Learner.build(config, ranks)
    log.info("rank %d of %d holds its shards on %s", ranks.rank, ranks.world_size, ranks.device)
    folder = load_newest(learner, assignment.checkpoints, notify=head.notify if head else log.warning)
    if folder is not None:
        log.info("resumed from %s at version %d", folder, learner.version)
    publisher = WeightPublisher(
        learner.actor.network.lm,
        ranks.device,
        host=assignment.host,
        advertise=assignment.advertise,
    )
    blobs = stack.enter_context(
        BlobReader(assignment.broker_url, outage_timeout_s=config.broker.outage_timeout_s)
    )
    if head is not None:
        head.ready(learner)
    return Commands(learner, blobs, publisher)
