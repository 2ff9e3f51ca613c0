"""Which checkpoints `paceline verify` expects on disk."""

from __future__ import annotations

from paceline.controller.verify.findings import Findings
from paceline.controller.verify.journal.checkpoints import WrittenCheckpoints


def _written(*steps: int) -> WrittenCheckpoints:
    checkpoints = WrittenCheckpoints(Findings())
    for step in steps:
        checkpoints.write({"step": step}, newest=step)
    return checkpoints


def test_a_removed_checkpoint_is_not_expected() -> None:
    checkpoints = _written(1, 2)
    checkpoints.remove({"folder": "/runs/r/checkpoints/step_000001"})
    assert list(checkpoints.by_step) == [2]


def test_a_removed_void_checkpoint_leaves_that_of_its_step() -> None:
    checkpoints = _written(1, 2)
    checkpoints.remove({"folder": "/runs/r/checkpoints/void_step_000002"})
    assert list(checkpoints.by_step) == [1, 2]


def test_a_rewind_makes_later_checkpoints_void() -> None:
    checkpoints = _written(1, 2, 3)
    checkpoints.rewind(2)
    assert list(checkpoints.by_step) == [1, 2]
