"""Checkpoints that are passed over, and those that go when newer ones are complete."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.run.records import checkpoints
from paceline.controller.run.records.checkpoints import ControllerState, folder_of
from paceline.core.errors import CheckpointError
from paceline.core.run_record.manifest import manifest_text
from paceline.data.mixture import MixtureState
from paceline.storage.folder import Folder
from support.sequencer_run import events_of, guarded, run


def with_manifest(run_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in run_dir.glob("checkpoints/*/manifest.json"))


async def test_the_only_checkpoint_goes_when_the_next_one_is_complete(tmp_path: Path) -> None:
    async with run(tmp_path, **guarded(2), trainer__keep_checkpoints=1, trainer__save_freq=1) as it:
        await it.enlist_all()
        it.services.writes = True
        there: dict[int, list[str]] = {}

        async def waiting(member: Any, *, step: int) -> float:
            there[step] = with_manifest(tmp_path)
            if step == 2:
                raise CheckpointError("the disk is full")
            return 0.0

        it.services.learner.wait_checkpoint = waiting  # type: ignore[method-assign]
        await it.go()
        assert there[2] == ["step_000001", "step_000002"]
        # The second was never said to be complete, so the first is still there.
        assert "step_000001" in with_manifest(tmp_path)


def prune(root: Folder, keep: int) -> list[Folder]:
    old = checkpoints.outdated(root, keep)
    checkpoints.remove(old)
    return old


async def test_a_checkpoint_is_removed_when_the_journal_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that ends meanwhile leaves no checkpoint that the journal has and the disk has not."""
    honest, unsaid = checkpoints.remove, []

    async with run(tmp_path, **guarded(4), trainer__keep_checkpoints=1) as it:

        def remove(folders: Sequence[Folder]) -> None:
            said = {e["folder"] for e in events_of(it, "checkpoint_removed")}
            unsaid.append({str(folder) for folder in folders} - said)
            honest(folders)

        monkeypatch.setattr(checkpoints, "remove", remove)
        await it.enlist_all()
        await it.go()
    assert len(unsaid) >= 3
    assert not set().union(*unsaid)


def test_pruning_counts_only_checkpoints_that_are_intact(tmp_path: Path) -> None:
    root = Folder.at(tmp_path / "checkpoints")
    for step in (1, 2, 3, 4):
        state = ControllerState(
            run_id="r", step=step, cursor=MixtureState.of_one(epoch=0, position=step), good=False
        )
        folder_of(root, step).make()
        if step != 4:
            text = manifest_text({"controller_state": json.loads(state.to_bytes())})
            folder_of(root, step).write("manifest.json", text)
    torn = folder_of(root, 3).path / "manifest.json"
    torn.write_text(torn.read_text()[:50])
    # 3 is torn and 4 is being written: 2 is the only one that a run can go on from.
    assert [f.name for f in prune(root, 1)] == ["step_000001"]
    assert sorted(path.name for path in root.path.iterdir()) == ["step_000002", "step_000003", "step_000004"]
    assert [f.name for f in prune(root, 1)] == []


def test_pruning_keeps_the_newest_good_checkpoint(tmp_path: Path) -> None:
    root = Folder.at(tmp_path / "checkpoints")

    def write(step: int, good: bool) -> None:
        state = ControllerState(
            run_id="r",
            step=step,
            cursor=MixtureState.of_one(epoch=0, position=0),
            good=good,
        )
        folder_of(root, step).make()
        manifest = {"controller_state": json.loads(state.to_bytes())}
        folder_of(root, step).write("manifest.json", manifest_text(manifest))

    for step, good in ((1, True), (2, True), (3, False), (4, False), (5, False)):
        write(step, good)
    assert [f.name for f in prune(root, 2)] == ["step_000001", "step_000003"]
    write(6, True)
    assert [f.name for f in prune(root, 2)] == ["step_000002", "step_000004"]


def test_a_damaged_manifest_is_passed_over_here_and_left_to_the_learner(tmp_path: Path) -> None:
    root = Folder.at(tmp_path / "checkpoints")
    folders = []
    for step, run_id in ((1, "r"), (2, "other"), (3, "r"), (4, "r")):
        state = ControllerState(run_id=run_id, step=step, cursor=MixtureState.of_one(epoch=0, position=step))
        folder = folder_of(root, step)
        folder.make()
        text = manifest_text({"controller_state": json.loads(state.to_bytes())})
        folder.write("manifest.json", text)
        folders.append(folder)
    torn, flipped = folders[3].path / "manifest.json", folders[2].path / "manifest.json"
    torn.write_text(torn.read_text()[:50])
    flipped.write_text(flipped.read_text().replace('"position": 3', '"position": 7'))
    assert [folder for folder, _ in checkpoints.complete(root)] == [folders[1], folders[0]]
    assert list(checkpoints.candidates(root, "r")) == [folders[3], folders[2], folders[0]]


def test_in_an_object_store_old_and_void_checkpoints_go_in_the_same_way() -> None:
    root = Folder.at("memory://in-an-object-store/r-1")
    for step in (1, 2, 3, 4):
        state = ControllerState(run_id="r", step=step, cursor=MixtureState.of_one(epoch=0, position=step))
        text = manifest_text({"controller_state": json.loads(state.to_bytes())})
        folder_of(root, step).write("manifest.json", text)
    assert [f.name for f in prune(root, 2)] == ["step_000001", "step_000002"]
    assert root.folders() == ["step_000003", "step_000004"]
    assert [f.name for f in checkpoints.later(root, 3)] == ["step_000004"]
    checkpoints.set_aside(checkpoints.later(root, 3))
    assert [f.name for f, _ in checkpoints.complete(root)] == ["step_000003"]
    assert list(checkpoints.candidates(root, "r")) == [folder_of(root, 3)]
