"""Writes checkpoints: copies the state to host memory, then a thread writes it while the ranks go on.

    copy -> every rank writes its shards -> sizes and digests -> rank 0 writes the manifest: complete

The thread's collectives use a process group of their own, so they do not mix with those of training.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from paceline.core.errors import CheckpointError, DeadlineError
from paceline.core.members import MemberKind, RankRef
from paceline.core.run_record.manifest import MANIFEST
from paceline.core.text import one_line
from paceline.learner.checkpoint.files import FileRecord, measure, writer
from paceline.learner.checkpoint.manifest import Manifest
from paceline.learner.checkpoint.state import (
    HostCopy,
    State,
    base_of,
    digests_of_frozen,
    state_of,
    trainables_of,
)
from paceline.learner.distributed.collectives import CommandError, attempt, broadcast_bytes, gather_bytes
from paceline.learner.distributed.ranks import WRITE_TIMEOUT_S, Ranks
from paceline.learner.train.state.learner import Learner
from paceline.service.disk import full_disk
from paceline.storage.folder import Folder, Place, is_url, reason

log = logging.getLogger(__name__)


class ShardWriter:
    """Writes states as checkpoints, one at a time; every rank has one and calls it at the same places."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._background: Ranks = dataclasses.replace(ranks, control=ranks.storage)
        self._copy = HostCopy(ranks)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._folder: Folder | None = None
        self._written: Future[float] | None = None

    def write(self, place: Place, state: State, manifest: Manifest) -> Future[float]:
        """Copies the state and begins to write it, after waiting for the previous checkpoint.

        A folder that this writer wrote for the same step stays as it is.

        Args:
            place: place of the checkpoint, the same on every rank.

        Returns:
            A future of the seconds that writing takes. The checkpoint is valid once the future is done; if
            writing fails, the future carries a CheckpointError with the reason.

        Raises:
            CommandError: wraps a CheckpointError: the folder cannot be made.
        """
        folder = Folder.at(place)
        self.finish()
        if self._is_written(folder, manifest.step):
            assert self._written is not None
            return self._written
        attempt(self._ranks, lambda: _clear(folder, self._ranks))
        copied = self._copy.take(state)
        self._folder, self._written = folder, self._thread.submit(self._write, copied, folder, manifest)
        return self._written

    def finish(self) -> None:
        """Waits until the checkpoint that was saved last is written, or has failed.

        Raises:
            DeadlineError: the write did not end in time.
        """
        if self._written is not None and wait([self._written], timeout=WRITE_TIMEOUT_S).not_done:
            raise DeadlineError(
                phase="SAVE",
                peer=RankRef(MemberKind.LEARNER, self._ranks.world.rank),
                seconds=WRITE_TIMEOUT_S,
                hint=f"is the storage of {self._folder} stuck?",
            )

    def _is_written(self, folder: Folder, step: int) -> bool:
        """Returns whether rank 0 sees the checkpoint; the other ranks take its answer."""
        written = self._written is not None and self._written.exception() is None and self._folder == folder
        try:
            same = written and Manifest.read(folder.address).step == step
        except CheckpointError:
            same = False
        return broadcast_bytes(b"same" if same else b"", self._ranks) == b"same"

    def _write(self, state: State, folder: Folder, manifest: Manifest) -> float:
        """Writes this rank's files, in the thread."""
        began, ranks = time.monotonic(), self._background
        if ranks.device.type == "cuda":
            torch.cuda.set_device(ranks.device)  # a thread begins on the first GPU
        try:
            own = attempt(ranks, lambda: _write_shards(state, folder, ranks))
            plain = json.dumps({name: record.to_plain() for name, record in own.items()}).encode()
            files: dict[str, FileRecord] = {}
            for data in gather_bytes(plain, ranks):
                files |= {name: FileRecord.from_plain(record) for name, record in json.loads(data).items()}
            attempt(ranks, lambda: _commit(folder, dataclasses.replace(manifest, files=files), ranks))
        except CommandError as error:
            raise error.cause from error
        except RuntimeError as error:  # from the process group: a rank is lost
            raise CheckpointError(f"writing {folder} failed: {error}") from error
        return time.monotonic() - began


class CheckpointWriter(ShardWriter):
    """Writes checkpoints of a learner, with what its manifest says of the run."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner.ranks)
        self._learner = learner

    def save(self, place: Place, *, step: int, controller_state: bytes) -> Future[float]:
        """Begins a checkpoint as `write` does.

        Raises:
            CommandError: wraps a CheckpointError: the step is not the learner's, or the folder cannot be
                made.
        """
        learner = self._learner
        manifest = attempt(learner.ranks, lambda: _describe(learner, place, step, controller_state))
        return self.write(place, state_of(learner), manifest)


def _describe(learner: Learner, place: Place, step: int, controller_state: bytes) -> Manifest:
    """Returns the manifest without the records of files."""
    try:
        state = json.loads(controller_state or b"null")
    except ValueError as error:
        raise CheckpointError(f"the controller's state is not JSON: {error}") from error
    if step != learner.version:
        raise CheckpointError(
            f"a checkpoint of step {step} was asked for, the learner is at {learner.version}"
        )
    if not is_url(place) and not os.path.isabs(place):
        raise CheckpointError(
            f"the checkpoint folder {place} must be an absolute path, the same on every rank"
        )
    return Manifest(
        step=step,
        world_size=learner.ranks.world.size,
        model_path=learner.config.model.path,
        has_critic=learner.critic is not None,
        kl=learner.kl_controller.state_dict(),
        base=base_of(learner),
        schedules={name: network.schedule.state_dict() for name, network in trainables_of(learner).items()},
        frozen=digests_of_frozen(learner),
        controller_state=state,
        histories=learner.histories.state_dict(),
    )


def _clear(folder: Folder, ranks: Ranks) -> None:
    """Empties the folder: files of an earlier attempt must not mix with the new ones."""
    if ranks.world.rank != 0:
        return
    try:
        # The manifest goes first: a folder that is half removed must not look complete.
        folder.remove(MANIFEST)
        folder.delete()
        folder.make()
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {reason(error)}") from error


def _write_shards(state: State, folder: Folder, ranks: Ranks) -> dict[str, FileRecord]:
    """Writes this rank's shards; returns the records of its files."""
    try:
        save_shards(state, storage_writer=writer(folder), process_group=ranks.control)
        own = [name for name in folder.names() if name.startswith(f"__{ranks.world.rank}_")]
        if ranks.world.rank == 0:
            own.append(".metadata")
        return {name: measure(folder, name) for name in own}
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"writing {folder} failed: {_reason(error, folder)}") from error


def _reason(error: BaseException, folder: Folder) -> str:
    """Says what went wrong on the disk, on one line: torch's own error has the tracebacks of all ranks."""
    full = "" if is_url(folder.address) else full_disk(Path(folder.address))
    return full or f"{one_line(str(error))}; is the disk full or read-only?"


def _commit(folder: Folder, manifest: Manifest, ranks: Ranks) -> None:
    """Makes rank 0 write the manifest, which completes the checkpoint."""
    if ranks.world.rank != 0:
        return
    try:
        folder.write(MANIFEST, manifest.to_json())
    except OSError as error:
        raise CheckpointError(f"{folder}/{MANIFEST} cannot be written: {reason(error)}") from error
    log.info("checkpoint of step %d is complete: %s", manifest.step, folder)
