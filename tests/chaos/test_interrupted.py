"""Ctrl-C again and again: each time the step in progress is finished and saved, and the run is the one that
nothing disturbed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.api import load_run, train
from support.training_run import TRANSPORT, Row, assert_same_metrics, assert_sound, only, read_jsonl, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_run_goes_on_where_ctrl_c_has_stopped_it(
    config: dict[str, object], undisturbed: list[Row], tmp_path: Path
) -> None:
    for step, phase in ((3, "collect"), (8, "learn")):
        with training(config, tmp_path / "run", "trainer.save_freq=0") as run:
            run.wait_for_phase(phase, step)
            in_progress = run.interrupt()
            assert run.finish() == 130, run.output
            last = run.metrics[-1]["step"]
            assert last in (in_progress, in_progress + 1)
            assert f"stopped after step {last} of 16: SIGINT" in run.output
            assert only(run.events, "checkpoint")[-1]["step"] == last
    with training(config, tmp_path / "run", "trainer.save_freq=0") as run:
        assert run.finish() == 0, run.output
        assert not only(run.events, "rewind"), "no step was done twice"
        assert_same_metrics(run.metrics, undisturbed, without=TRANSPORT)
        assert_sound(run)


def test_a_loop_that_is_left_and_begun_again_is_one_run(
    config: dict[str, object], undisturbed: list[Row], tmp_path: Path
) -> None:
    overrides, notes = (f"trainer.run_dir={tmp_path}/run", "trainer.save_freq=0"), list[str]()
    for step in train(config, *overrides, say=notes.append):
        if step.number == 4:
            assert len(step.samples) == 8
            break
    last = load_run(tmp_path / "run").metrics["step"][-1].as_py()
    assert last > 4
    # The run does not wait for the loop: how many steps it was ahead is the machine's affair.
    end = only(read_jsonl(tmp_path / "run/events.jsonl"), "end")[-1]
    assert end["message"] == f"stopped after step {last} of 16: SIGINT", notes
    assert [step.number for step in train(config, *overrides, say=notes.append)] == [*range(last + 1, 17)]
    run = load_run(tmp_path / "run")
    assert len(run.samples(3)) == 8
    assert_same_metrics(read_jsonl(run.run_dir / "metrics.jsonl"), undisturbed, without=TRANSPORT)
