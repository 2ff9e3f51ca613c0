"""The rows of a run whose environment supplies them: requested once, and kept in the run directory.

    tasks_train.jsonl, tasks_val.jsonl    rows as in data files; a run that goes on reads these

Later changes in the environment do not matter, because a resumed run keeps the rows with which it began.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path

from paceline.config.rollout import EnvironmentConfig
from paceline.config.run import RunConfig
from paceline.core.errors import DataError, PeerLostError
from paceline.rpc.v1 import environment_pb2 as pb
from paceline.rpc.v1 import environment_pb2_grpc
from paceline.service.grpc import channels
from paceline.service.identity.credentials import Credentials
from paceline.service.process import write_atomically
from paceline.wire.json_object import read_json_object

_log = logging.getLogger(__name__)

_SPLITS = ("train", "val")
_TASKS_S = 600.0
# An environment that starts beside the run may not be up yet.
_PATIENCE_S = 60.0
_PAUSE_S = 1.0


async def with_tasks(config: RunConfig, run_dir: Path, credentials: Credentials) -> RunConfig:
    """Returns the configuration with files for its rows; unchanged if it names files.

    Args:
        config: configuration of a run; without data.train_files it names an environment's address.
        run_dir: directory of the run, which keeps the rows.

    Raises:
        DataError: the environment has no rows for training.
        PacelineError: the environment cannot be asked; an unreachable one is tried for a minute.
    """
    service = config.rollout.environment
    if config.data.training_sets or service is None:
        return config
    paths = {split: run_dir / f"tasks_{split}.jsonl" for split in _SPLITS}
    # The training rows are written last, so their file shows that both files are complete.
    for split in reversed(_SPLITS):
        if not paths["train"].exists():
            rows = await _ask_until_up(service, split, credentials)
            write_atomically(paths[split], "".join(f"{json.dumps(row)}\n" for row in rows))
    if not paths["train"].stat().st_size:
        paths["train"].unlink()
        raise DataError(
            f"the environment at {service.address} has no tasks for training: set data.train_files, or let "
            "it serve some (the argument `tasks` of serve_environment)"
        )
    has_val = paths["val"].exists() and paths["val"].stat().st_size > 0
    files = {
        "train_files": (str(paths["train"]),),
        "val_files": (str(paths["val"]),) if has_val else config.data.val_files,
    }
    return config.changed(data=files)


async def _ask_until_up(
    service: EnvironmentConfig, split: str, credentials: Credentials
) -> list[dict[str, object]]:
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return await _ask(service, split, credentials)
        except PeerLostError as error:
            if time.monotonic() > until:
                raise
            _log.info("%s; asking again", error)
            await asyncio.sleep(_PAUSE_S)


async def _ask(service: EnvironmentConfig, split: str, credentials: Credentials) -> list[dict[str, object]]:
    assert service.address is not None, "the configuration was checked"
    peer = f"environment at {service.address}"
    credentials = credentials.with_token_file(
        service.token_file,
        setting=f"rollout.environment.token_file={service.token_file}",
        place="on the controller's host too, as the environment has the run's tasks",
    )
    channel = channels.connect(service.address, credentials=credentials, role="environment")
    try:
        tasks = environment_pb2_grpc.EnvironmentServiceStub(channel).Tasks
        request = pb.EnvironmentTasksRequest(split=split)
        answers = channels.stream(tasks, request, phase="TASKS", peer=peer, timeout_s=_TASKS_S)
        return [read_json_object(answer.task_json, f"task of the {peer}") async for answer in answers]
    finally:
        await channel.close()
