"""One rank's work, from the group's formation to its end; it runs in the only thread that uses torch.

rank 0:  form the group -> load the newest intact checkpoint -> commands of the queue until STOP
others:  wait for rank 0 -> the same -> the same commands, broadcast
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch._C._distributed_c10d import Store

from paceline.broker.redis.redis_blobs import BlobClient
from paceline.config.run import RunConfig
from paceline.config.services import LearnerConfig
from paceline.core.errors import DeadlineError, PacelineError, PeerLostError
from paceline.learner.checkpoint.load import load_newest
from paceline.learner.commands import Commands
from paceline.learner.distributed.collectives import CommandError, agree, broadcast_bytes
from paceline.learner.distributed.command_loop import CommandLoop, CommandQueue, Handler
from paceline.learner.distributed.heartbeats import Heartbeats
from paceline.learner.distributed.publisher import WeightPublisher
from paceline.learner.distributed.ranks import (
    RankEnvironment,
    Ranks,
    join_group,
    leave_group,
    open_store,
)
from paceline.learner.model.lora import adapter_names
from paceline.learner.model.self_test import check_models
from paceline.learner.train.profiler import StepProfiler
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.warm_up import load_warm
from paceline.service.member.runtime import stop_grace_s
from paceline.service.observability.logs import set_level
from paceline.storage.folder import Folder
from paceline.storage.models import local_folder, local_model
from paceline.storage.places import require_marker

log = logging.getLogger(__name__)

_FIRST_WAIT_S = 120.0
_END_S = 4.0
_PROFILING_SILENT_S = 120.0
_GROUP_KEY = "paceline/group"
_LOCAL_KEY = "paceline/local"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRegistration:
    """The part of the registration that every rank needs, and where rank 0 listens.

    Attributes:
        broker_url, blob_stores: addresses of the broker and its blob stores.
        checkpoints: checkpoints that may be loaded, newest first.
        run_dir: directory of the run, where this host sees it.
        host, advertise: the address on which rank 0 listens, and where others reach it.
    """

    config: RunConfig
    broker_url: str
    checkpoints: tuple[str, ...]
    checkpoint_root: str
    checkpoint_marker: str
    run_dir: str
    host: str
    advertise: str
    blob_stores: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Encodes it for other ranks. The group's store must not hold it: it has the broker's password."""
        fields = dataclasses.asdict(self) | {"config": self.config.model_dump_json()}
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RankRegistration:
        """Reads the registration that `to_bytes` wrote."""
        fields = json.loads(data)
        config = RunConfig.model_validate_json(fields.pop("config"))
        checkpoints, stores = tuple(fields.pop("checkpoints")), tuple(fields.pop("blob_stores"))
        return cls(config=config, checkpoints=checkpoints, blob_stores=stores, **fields)


class Head:
    """Passes messages of rank 0's training thread on to the event loop of its process.

    Attributes:
        commands: where the thread takes its commands from.
    """

    def __init__(
        self,
        open_service: Callable[[int, float], None],
        notify: Callable[[str], None],
        commands: CommandQueue,
        settle: Callable[[BaseException | None], None],
        command_timeout_s: float,
        tell_to_end: Callable[[], None],
    ) -> None:
        self._open_service, self._notify, self._tell_to_end = open_service, notify, tell_to_end
        self.commands, self._settle = commands, settle
        self._command_timeout_s = command_timeout_s
        self._loop = asyncio.get_running_loop()

    def ready(self, learner: Learner) -> None:
        """Opens the service to the controller's calls."""
        self._loop.call_soon_threadsafe(self._open_service, learner.version, self._command_timeout_s)

    def notify(self, message: str) -> None:
        """Logs the message and sends it to the controller."""
        log.warning("%s", message)
        self._loop.call_soon_threadsafe(self._notify, message)

    def told_to_end(self) -> None:
        """Ends the group as soon as the run can do without it."""
        self._loop.call_soon_threadsafe(self._tell_to_end)

    def lost(self, error: PeerLostError) -> None:
        """Ends the service with the error; after a grace period, ends the process in any case."""
        self.commands.close(error)
        self._loop.call_soon_threadsafe(self._settle, error)
        time.sleep(_END_S)
        _end_process(error)


def lead(environment: RankEnvironment, assignment: RankRegistration, head: Head) -> None:
    """Runs rank 0's training thread: forms the group, tells the others, serves commands until STOP.

    Raises:
        PeerLostError: another rank failed.
        CheckpointError: none of the checkpoints can be loaded.
    """
    settings = assignment.config.learner
    store = open_store(environment, settings.collective_timeout_s)
    if assignment.config.trainer.profile.steps:
        # A rank that writes a profile may hold the interpreter for seconds.
        silent_s = max(settings.rank_silent_s, _PROFILING_SILENT_S)
        settings = settings.model_copy(update={"rank_silent_s": silent_s})
    # The other ranks know only the store's address; they need these settings to form the group.
    store.set(_GROUP_KEY, settings.model_dump_json())
    _serve(environment, store, assignment, head)


def follow(environment: RankEnvironment) -> bool:
    """Runs every other rank's process: waits for rank 0, then serves its commands until STOP.

    Returns:
        Whether the run is over; if not, the group must be started again.

    Raises:
        DeadlineError: rank 0 did not appear in time.
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
    return _serve(environment, store, None, None)


def _serve(
    environment: RankEnvironment, store: Store, assignment: RankRegistration | None, head: Head | None
) -> bool:
    settings = LearnerConfig.model_validate_json(store.get(_GROUP_KEY))
    ranks = join_group(settings, environment, store)
    if head is not None:
        beating = Heartbeats(ranks, limit_s=settings.rank_silent_s, lost=head.lost, told=head.told_to_end)
    else:
        beating = Heartbeats(ranks, limit_s=settings.rank_silent_s, lost=_end_process)
        # From now on rank 0 ends the group; a signal to all processes must not end single ranks.
        signal.signal(signal.SIGTERM, lambda number, frame: _note_sigterm(beating))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.ExitStack() as stack:
        heartbeats = stack.enter_context(beating)
        commands: Commands | None = None

        def load() -> dict[str, Handler]:
            nonlocal commands
            data = assignment.to_bytes() if assignment else b""
            received = RankRegistration.from_bytes(broadcast_bytes(data, ranks))
            commands = _load(_localise(received, ranks, store, head), ranks, head, stack)
            return commands.table

        queue = head.commands if head else None
        loop = CommandLoop(ranks, load, queue, find_silent=heartbeats.find_silent)
        loop.run()
        if commands is not None:
            commands.finish()
    leave_group()
    return loop.is_over


def _note_sigterm(heartbeats: Heartbeats) -> None:
    """Tells rank 0, which may be on another host, if there is a grace period in which it can act."""
    log.info("SIGTERM: rank 0 will end the group")
    if stop_grace_s():
        heartbeats.is_told.set()


def _end_process(error: PeerLostError) -> None:
    """Ends this process at once: the thread that trains may wait in a collective."""
    log.error("fatal: %s", error)
    logging.shutdown()
    os._exit(1)


def _localise(
    assignment: RankRegistration, ranks: Ranks, store: Store, head: Head | None
) -> RankRegistration:
    """Returns the assignment with this host's paths of models; checks that it sees the checkpoints' folder.

    A host's first rank copies remote folders. The others wait in the group's store, because in a collective a
    large model would exceed `collective_timeout_s`.

    Raises:
        ConfigError: a rank does not see the checkpoints' folder.
        ModelError: a model folder cannot be copied here.
    """
    config = assignment.config
    tell = head.notify if head else log.warning

    def localise() -> RunConfig:
        if assignment.checkpoint_root:
            root = Folder.at(assignment.checkpoint_root)
            require_marker(root, assignment.checkpoint_marker, who=f"learner rank {ranks.world.rank}")
        model = local_model(config.model, "learner", tell=tell)
        path = config.critic.path
        critic = config.critic.model_copy(update={"path": path and local_folder(path, config.model)})
        algorithm = config.algorithm.with_places(partial(local_folder, model=config.model))
        return config.model_copy(update={"model": model, "critic": critic, "algorithm": algorithm})

    failure: CommandError | None = None
    try:
        config = localise()
    except PacelineError as error:
        failure = CommandError(error)
    _await_all(store, ranks, config.learner.command_timeout_s)
    try:
        agree(ranks, failure)
    except CommandError as error:
        raise error.cause from error
    return dataclasses.replace(assignment, config=config)


def _await_all(store: Store, ranks: Ranks, timeout_s: float) -> None:
    store.set(f"{_LOCAL_KEY}/{ranks.world.rank}", "here")
    keys = [f"{_LOCAL_KEY}/{rank}" for rank in range(ranks.world.size)]
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise DeadlineError(
            phase="FORMING",
            peer="the other learner ranks, which look for checkpoints and model",
            seconds=timeout_s,
            hint="their logs say how far they are; learner.command_timeout_s bounds this, too",
        ) from error


def _load(
    assignment: RankRegistration, ranks: Ranks, head: Head | None, stack: contextlib.ExitStack
) -> Commands:
    """Loads this rank's part of everything; its connections are closed with `stack`."""
    config = assignment.config
    set_level(config.telemetry.log_level)
    for outcome in check_models(config):
        log.info("self-test: %s", outcome)
    learner = load_warm(config, ranks, head.notify if head else log.warning)
    folder = load_newest(learner, assignment.checkpoints, notify=head.notify if head else log.warning)
    if folder is not None:
        log.info("resumed from %s at version %d", folder, learner.version)
    publisher = WeightPublisher(
        learner.actor.network.lm,
        ranks.device,
        host=assignment.host,
        advertise=assignment.advertise,
        exclude=adapter_names(learner.actor.network.lm),
    )
    blobs = stack.enter_context(
        BlobClient(
            assignment.broker_url,
            stores=assignment.blob_stores,
            outage_timeout_s=config.broker.outage_timeout_s,
        )
    )
    if head is not None:
        head.ready(learner)
    profiler = StepProfiler(config.trainer.profile, Path(assignment.run_dir) / "profile", ranks.world.rank)
    return Commands(learner, blobs, publisher, profiler)
