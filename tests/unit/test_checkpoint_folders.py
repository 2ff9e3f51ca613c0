"""The folders of checkpoints in the loop of a run: slow storage, void checkpoints, a removal under way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.run.records import checkpoints
from paceline.controller.run.records.checkpoints import ControllerState, folder_of
from paceline.core.errors import GuardError
from paceline.core.guard import Reading
from paceline.core.run_record.manifest import MANIFEST, manifest_text
from paceline.data.mixture import MixtureState
from paceline.storage import folder as storage
from paceline.storage.folder import Folder
from support.fake_fleet import FakeServices
from support.memory_broker import MemoryBroker
from support.sequencer_run import RUN, SequencerRun, config, run_of

CHANGES: dict[str, Any] = {
    "trainer__val_before_train": False,
    "trainer__test_freq": 0,
    "trainer__save_trajectories": False,
    "trainer__total_steps": 4,
    "trainer__keep_checkpoints": 9,
}


def write(root: Folder, step: int, *, intact: bool = True) -> None:
    state = ControllerState(run_id=RUN, step=step, cursor=MixtureState.of_one(epoch=0, position=0))
    folder_of(root, step).make()
    if intact:
        fields = {"step": step, "controller_state": json.loads(state.to_bytes()), "files": {}}
        folder_of(root, step).write(MANIFEST, manifest_text(fields))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def events(it: SequencerRun, kind: str) -> list[dict[str, Any]]:
    return [event for event in it.events() if event["event"] == kind]


async def run_to(folder: Path, services: FakeServices, broker: MemoryBroker, **changes: Any) -> SequencerRun:
    async with run_of(config(**{**CHANGES, **changes}), folder, services, broker) as it:
        services.writes = True
        await it.enlist_all()
        await it.go()
    return it


def back_at(services: FakeServices, step: int) -> None:
    """The learner was started again and has loaded the checkpoint of a step."""
    services.version = services.source = step
    services.trained.clear()
    services.standings.clear()


async def test_no_storage_is_asked_in_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewind, a rollback and the guard's end of a run; a storage of URLs may take seconds per answer."""
    asked: list[tuple[str, bool]] = []
    opened = storage._open

    def opening(address: str) -> Any:
        asked.append((address, threading.current_thread() is threading.main_thread()))
        return opened(address)

    monkeypatch.setattr(storage, "_open", opening)
    services, broker = FakeServices(), MemoryBroker()
    await run_to(tmp_path, services, broker, trainer__total_steps=2)
    back_at(services, 1)
    readings = [Reading(rule="ppo_kl", network="actor", value=0.3)]
    services.readings = {2: readings}
    rules = {"rollback": 0.1, "skip": None}
    it = await run_to(tmp_path, services, broker, guard__ppo_kl=rules)
    assert events(it, "rewind")
    assert events(it, "rollback")
    services.readings = {5: readings}
    with pytest.raises(GuardError, match="the last good checkpoint is"):
        await run_to(tmp_path, services, broker, trainer__total_steps=5, guard__ppo_kl={"stop": 0.1})
    assert len(asked) > 20
    assert [address for address, in_loop in asked if in_loop] == []


async def test_void_checkpoints_go_when_newer_ones_have_replaced_them(tmp_path: Path) -> None:
    services, broker = FakeServices(), MemoryBroker()
    await run_to(tmp_path, services, broker)
    back_at(services, 1)
    changes = {"trainer__save_freq": 2, "trainer__total_steps": 6}
    seen: dict[int, list[str]] = {}
    honest = services.learner.train

    async def train(member: Any, order: Any) -> Any:
        seen[order.step] = names(tmp_path)
        return await honest(member, order)

    services.learner.train = train  # type: ignore[method-assign]
    it = await run_to(tmp_path, services, broker, **changes)
    void = [f"void_step_00000{step}" for step in (2, 3, 4)]
    assert seen[2] == ["step_000001", *void]
    assert [name for name in seen[5] if name in void] in ([], void[1:], void[2:])
    assert names(tmp_path) == ["step_000001", "step_000002", "step_000004", "step_000006"]
    removed = [Path(e["folder"]).name for e in events(it, "checkpoint_removed")]
    assert removed == ["step_000002", "step_000003", "step_000004", *void]
    assert it.breaches() == []


def test_a_void_checkpoint_stays_until_there_is_one_of_its_step_or_a_later(tmp_path: Path) -> None:
    root = Folder.at(tmp_path / "checkpoints")
    for step in (1, 2, 3, 4):
        write(root, step)
    checkpoints.set_aside(checkpoints.later(root, 1))
    assert root.folders() == ["step_000001", *(f"void_step_00000{step}" for step in (2, 3, 4))]
    assert checkpoints.outdated(root, 9) == []
    write(root, 2)
    write(root, 3, intact=False)
    assert [f.name for f in checkpoints.outdated(root, 9)] == ["void_step_000002"]
    write(root, 3)
    assert [f.name for f in checkpoints.outdated(root, 1)] == [
        "step_000001",
        "step_000002",
        "void_step_000002",
        "void_step_000003",
    ]


@pytest.mark.parametrize("at", ["checkpoint_removed", "rewind"])
async def test_a_controller_killed_in_a_rewind_leaves_no_void_checkpoint_to_the_next(
    at: str, tmp_path: Path
) -> None:
    """One that stayed would count as the newest, and what is saved from then on would be removed for it."""
    services, broker = FakeServices(), MemoryBroker()
    await run_to(tmp_path, services, broker)
    back_at(services, 1)

    class Killed(Exception):
        pass

    async with run_of(config(**CHANGES), tmp_path, services, broker) as it:
        record_all = it.journal.record_all

        def recording(events: Iterable[Any]) -> None:
            for event in list(events):
                record_all([event])
                if event["event"] == at:
                    raise Killed

        it.journal.record_all = recording  # type: ignore[method-assign]
        await it.enlist_all()
        with pytest.raises(Killed):
            await it.go()
    it = await run_to(tmp_path, services, broker, trainer__total_steps=2, trainer__keep_checkpoints=1)
    assert names(tmp_path) == ["step_000002", "void_step_000003", "void_step_000004"]
    assert it.breaches() == []


async def test_a_checkpoint_that_is_being_removed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner is lost meanwhile: nobody may set folders aside that a thread still removes."""
    began, goes_on, honest = threading.Event(), threading.Event(), checkpoints.remove
    ended: list[str] = []

    def remove(folders: Sequence[Folder]) -> None:
        if folders:
            began.set()
            goes_on.wait(120)
            honest(folders)
            ended.append("removed")

    monkeypatch.setattr(checkpoints, "remove", remove)
    services = FakeServices()
    services.writes = True
    async with run_of(config(**CHANGES | {"trainer__keep_checkpoints": 1}), tmp_path, services) as it:
        await it.enlist_all()
        running = asyncio.create_task(it.go())
        assert await asyncio.to_thread(began.wait, 60)
        running.cancel()
        asyncio.get_running_loop().call_later(0.2, goes_on.set)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended == ["removed"]
