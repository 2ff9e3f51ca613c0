"""Which folder a run gets, what happens to an earlier run in it, and what people are told about that."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.runs import run_dir as run_dirs
from support.cli_configs import accept, config


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checkpoint(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def settings(run_dir: Path) -> dict[str, object]:
    tree: dict[str, dict[str, object]] = yaml.safe_load((run_dir / "config.start.yaml").read_text())
    return tree["trainer"]


def test_the_same_configuration_gets_the_same_folder(folder: Path) -> None:
    first = run_dirs.prepare(config(trainer={"total_steps": 9, "name": "adder"}))
    assert first.run_dir == folder / "runs/adder"
    assert first.remarks == []
    second = run_dirs.prepare(config(trainer={"total_steps": 9, "name": "adder"}))
    assert second.run_dir == first.run_dir
    assert second.remarks == []
    assert not (folder / "runs/latest").exists(), "only a run that has begun is the latest"
    run_dirs.link_latest(first.run_dir)
    assert (folder / "runs/latest").resolve() == first.run_dir
    assert run_dirs.prepare(config(trainer={"total_steps": 9})).run_dir == folder / "runs/run"


def test_an_interrupted_run_goes_on_and_changes_are_named(folder: Path) -> None:
    before = run_dirs.prepare(config(trainer={"total_steps": 9}))
    accept(before.run_dir)
    checkpoint(before.run_dir, 4)
    again = run_dirs.prepare(
        config(trainer={"total_steps": 12}, actor={"optim": {"lr": 3e-4}}, learner={"world_size": 2})
    )
    goes_on, changed = again.remarks
    assert goes_on.startswith(f"{folder}/runs/run holds a run with a checkpoint of step 4: it goes on")
    assert changed.removeprefix("changed since its last start: ").split(", ") == [
        "actor.optim.lr 1e-06 -> 0.0003",
        "trainer.total_steps 9 -> 12",
        "learner.world_size 1 -> 2",
    ]


def test_what_takes_no_effect_is_not_told_as_a_change(folder: Path) -> None:
    def algorithm(kind: str, coef: float) -> dict[str, object]:
        return {"kl_ctrl": {"type": kind, "kl_coef": coef}, "use_kl_in_reward": True}

    def told(kind: str, coef: float, warmup: float) -> list[str]:
        optim = {"optim": {"warmup_steps_ratio": warmup, "lr": 1e-6 + coef}}
        changed = config(trainer={"total_steps": 9}, algorithm=algorithm(kind, coef), actor=optim)
        return run_dirs.prepare(changed).remarks[1:]

    def begin(kind: str) -> None:
        first = config(
            trainer={"total_steps": 9, "resume": "never"},
            algorithm=algorithm(kind, 0.0001),
            actor={"optim": {"lr": 1e-6 + 0.0001}},
        )
        run_dir = run_dirs.prepare(first).run_dir
        accept(run_dir)
        checkpoint(run_dir, 4)

    start = "changed since its last start: "
    kept = "without effect, because the run continues from its checkpoint: "
    rate, warmup = "actor.optim.lr 0.000101 -> 0.000201", "actor.optim.warmup_steps_ratio 0.0 -> 0.5"
    coef = "algorithm.kl_ctrl.kl_coef 0.0001 -> 0.0002"
    begin("fixed")
    assert told("fixed", 0.0002, 0.5) == [f"{start}{rate}, {coef}", f"{kept}{warmup}"]
    assert told("fixed", 0.0001, 0.5) == [f"{kept}{warmup}"]
    assert told("adaptive", 0.0002, 0.0) == [
        f"{start}{rate}, algorithm.kl_ctrl.type fixed -> adaptive, {coef}"
    ]
    begin("adaptive")
    assert told("adaptive", 0.0002, 0.5) == [f"{start}{rate}", f"{kept}{warmup}, {coef}"]


def test_a_start_changes_no_settings_until_a_controller_takes_the_run_on(folder: Path) -> None:
    before = run_dirs.prepare(config(trainer={"total_steps": 9}))
    assert not (before.run_dir / "config.resolved.yaml").exists()
    accept(before.run_dir)
    kept = (before.run_dir / "config.resolved.yaml").read_text()
    checkpoint(before.run_dir, 4)
    for _ in range(2):
        # The controller refuses the first: the second is told the same changes.
        again = run_dirs.prepare(config(trainer={"total_steps": 9}, rollout={"n": 4}))
        assert (before.run_dir / "config.resolved.yaml").read_text() == kept
        assert "changed since its last start: rollout.n 8 -> 4" in again.remarks


def test_a_finished_run_is_refused(folder: Path) -> None:
    before = run_dirs.prepare(config(trainer={"total_steps": 9}))
    checkpoint(before.run_dir, 8)
    checkpoint(before.run_dir, 9)
    metrics = before.run_dir / "metrics.jsonl"
    metrics.write_text('{"step": 8}\n')
    assert run_dirs.prepare(config(trainer={"total_steps": 9})).remarks, "step 9 is not finished"
    metrics.write_text('{"step": 8}\n{"step": 9}\n')
    with pytest.raises(ConfigError, match=r"has finished its 9 steps.*trainer.total_steps.*resume=never"):
        run_dirs.prepare(config(trainer={"total_steps": 9}))
    assert run_dirs.prepare(config(trainer={"total_steps": 10})).remarks


def test_never_moves_the_earlier_run_aside(folder: Path) -> None:
    never = config(trainer={"total_steps": 9, "resume": "never"})
    first = run_dirs.prepare(never)
    assert first.remarks == []
    for number in (1, 2):
        checkpoint(first.run_dir, 9)
        accept(first.run_dir)
        again = run_dirs.prepare(never)
        assert again.run_dir == first.run_dir
        assert again.remarks == [f"moved the earlier run to {folder}/runs/run.{number}"]
        assert not (first.run_dir / "checkpoints").exists()
        assert (folder / f"runs/run.{number}/checkpoints/step_000009/manifest.json").is_file()
    # A controller that is started again in this run must go on with it.
    assert settings(first.run_dir)["resume"] == "auto"


def test_a_run_that_is_under_way_is_not_moved(folder: Path) -> None:
    never = config(trainer={"total_steps": 9, "resume": "never"})
    run = run_dirs.prepare(never)
    run_dirs.write_note(run.run_dir, run_dirs.new_note(run.run_dir, "secret"))
    with pytest.raises(EnvironmentLackError, match="belongs to a run that is still running"):
        run_dirs.prepare(never)


def test_a_copy_of_a_run_that_is_under_way_goes_on_by_itself(folder: Path) -> None:
    """Unless both would write to one place outside: their ids are the same."""
    mailboxes, weights = {"url": "redis://h:1"}, {"checkpoint_url": "s3://b/c"}
    original = run_dirs.prepare(config(trainer={"total_steps": 9, **weights}, broker=mailboxes)).run_dir
    checkpoint(original, 4)
    run_dirs.write_note(original, run_dirs.new_note(original, "secret"))
    copied = folder / "runs/copy"
    shutil.copytree(original, copied)

    def again(broker: dict[str, str], **trainer: str) -> list[str]:
        return run_dirs.prepare(
            config(trainer={"total_steps": 9, "run_dir": str(copied), **trainer}, broker=broker)
        ).remarks

    with pytest.raises(ConfigError) as caught:
        again(mailboxes, **weights)
    assert str(caught.value) == (
        f"{copied} is a copy of the run in {original}, which is still running and has the same id; with the "
        "same broker.url and trainer.checkpoint_url, each would overwrite the other's files: stop that run, "
        "or give this one another broker.url and another trainer.checkpoint_url"
    )
    with pytest.raises(ConfigError, match="or give this one another broker.url$"):
        again(mailboxes)
    is_copy, goes_on = again({"url": "redis://other:1"})
    assert is_copy == f"{copied} is a copy of the run in {original}, which is still running independently"
    assert goes_on.startswith(f"{copied} holds a run with a checkpoint of step 4: it goes on")
    for stopped in (False, True):
        if stopped:
            run_dirs.end_note(original, run_dirs.new_note(original, ""), "stopped")
            assert again(mailboxes)[0].startswith(f"{copied} holds a run"), "the copy's note is of nobody now"
        else:
            with pytest.raises(
                EnvironmentLackError, match=f"{original} belongs to a run that is still running"
            ):
                run_dirs.prepare(config(trainer={"total_steps": 9}))


def test_a_folder_that_was_moved_under_its_run_is_no_copy(folder: Path) -> None:
    original = run_dirs.prepare(config(trainer={"total_steps": 9})).run_dir
    run_dirs.write_note(original, run_dirs.new_note(original, "secret"))
    original.rename(folder / "moved")
    for begun_anew in (False, True):
        if begun_anew:
            run_dirs.prepare(config(trainer={"total_steps": 9}))
        with pytest.raises(EnvironmentLackError, match="moved belongs to a run that is still running"):
            run_dirs.prepare(config(trainer={"total_steps": 9, "run_dir": "moved"}))


def test_an_empty_folder_of_the_users_own_is_used(folder: Path) -> None:
    (folder / "mine").mkdir()
    never = config(trainer={"total_steps": 9, "resume": "never", "run_dir": "mine"})
    assert run_dirs.prepare(never).remarks == []
    assert not (folder / "mine.1").exists()
