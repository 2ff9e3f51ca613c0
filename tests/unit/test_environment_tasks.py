"""Rows that the environment owns: asked for once, in its order, and the same when the run goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.checks.preflight import parts
from paceline.config.run import RunConfig
from paceline.controller.batch import tasks
from paceline.controller.batch.tasks import with_tasks
from paceline.core.errors import ConfigError, DataError, PacelineError, PeerLostError
from paceline.data.rows import read_rows
from paceline.sdk import EnvironmentServer
from paceline.service.identity.credentials import Credentials
from paceline.sizing.machine import free_port
from support.environments import Guess

CREDENTIALS = Credentials(token="secret")


def config(address: str, **data: Any) -> RunConfig:
    tree = {
        "data": data,
        "model": {"path": "model"},
        "rollout": {"environment": {"address": address}, "n": 2},
        "trainer": {"total_steps": 1},
    }
    return RunConfig.model_validate(tree)


def rows(split: str) -> Iterator[Mapping[str, object]]:
    for number in range(3 if split == "train" else 1):
        yield {"prompt": [{"role": "user", "content": f"{split} {number} ü"}], "ground_truth": str(number)}


async def test_rows_come_in_order_and_stay_when_the_run_goes_on(tmp_path: Path) -> None:
    async with EnvironmentServer(Guess, token="secret", tasks=rows) as server:
        asked = await with_tasks(config(server.address), tmp_path, CREDENTIALS)
    for files, split in ((asked.data.train_files, "train"), (asked.data.val_files, "val")):
        assert read_rows(files) == list(rows(split))
    # The environment is gone, or has other rows by now.
    again = await with_tasks(config("127.0.0.1:1"), tmp_path, CREDENTIALS)
    assert again.data == asked.data


async def test_a_start_that_broke_off_asks_again(tmp_path: Path) -> None:
    def broken(split: str) -> Iterator[Mapping[str, object]]:
        if split == "train":
            raise OSError("no disk")
        return rows(split)

    async with EnvironmentServer(Guess, token="secret", tasks=broken) as server:
        with pytest.raises(PacelineError, match="no disk"):
            await with_tasks(config(server.address), tmp_path, CREDENTIALS)
    async with EnvironmentServer(Guess, token="secret", tasks=lambda split: ()) as server:
        with pytest.raises(DataError, match="has no tasks for training"):
            await with_tasks(config(server.address), tmp_path, CREDENTIALS)
    async with EnvironmentServer(Guess, token="secret", tasks=rows) as server:
        asked = await with_tasks(config(server.address), tmp_path, CREDENTIALS)
    assert len(read_rows(asked.data.train_files)) == 3


async def test_an_environment_that_comes_up_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_PAUSE_S", 0.1)
    port = free_port()
    asking = asyncio.create_task(with_tasks(config(f"127.0.0.1:{port}"), tmp_path, CREDENTIALS))
    await asyncio.sleep(0.5)
    assert not asking.done()
    async with EnvironmentServer(Guess, token="secret", tasks=rows, port=port):
        asked = await asking
    assert len(read_rows(asked.data.train_files)) == 3
    monkeypatch.setattr(tasks, "_PATIENCE_S", 0.0)
    with pytest.raises(PeerLostError, match="environment at 127.0.0.1:1 cannot be reached"):
        await with_tasks(config("127.0.0.1:1"), tmp_path / "other", CREDENTIALS)


async def test_environments_without_tasks_and_runs_with_files(tmp_path: Path) -> None:
    async with EnvironmentServer(Guess, token="secret") as server:
        with pytest.raises(PacelineError, match="Guess serves no tasks"):
            await with_tasks(config(server.address), tmp_path, CREDENTIALS)
    named = config("127.0.0.1:1", train_files="rows.jsonl")
    assert await with_tasks(named, tmp_path, CREDENTIALS) == named
    assert not [*tmp_path.iterdir()]  # noqa: ASYNC240


def test_a_run_needs_rows_from_somewhere() -> None:
    tree = json.loads(config("127.0.0.1:1").model_dump_json())
    tree["rollout"]["environment"] = {"attached": "game"}
    with pytest.raises(ValueError, match=r"data\.train_files is empty"):
        RunConfig.model_validate(tree)


async def test_the_tokens_file_is_read_on_the_controllers_host(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    async with EnvironmentServer(Guess, token="secret", tasks=rows) as server:
        for name, fault in (("none", "cannot be read"), ("token", "")):
            tree = json.loads(config(server.address).model_dump_json())
            tree["rollout"]["environment"]["token_file"] = str(tmp_path / name)
            run = RunConfig.model_validate(tree)
            if fault:
                with pytest.raises(ConfigError, match=fault):
                    await with_tasks(run, tmp_path, Credentials())
            else:
                assert (await with_tasks(run, tmp_path, Credentials())).data.train_files


def test_check_says_where_the_rows_come_from() -> None:
    checks = {part.name: part.run for part in parts(here=True, tests=None)}
    for part in ("training prompts", "validation prompts"):
        said = checks[part](config("127.0.0.1:50071"))
        assert said == "the run asks the environment at 127.0.0.1:50071 for them"
    none = checks["validation prompts"](config("127.0.0.1:50071", train_files="rows.jsonl"))
    assert none == "none (data.val_files and data.val_sets are empty: no validation)"
