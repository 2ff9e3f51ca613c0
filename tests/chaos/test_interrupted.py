"""Ctrl-C, and a loop over the steps that is left: each time the step in progress is finished and saved, the
next start goes on after it, and the run is the one that nothing disturbed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.api import load_run, train
from support.training_run import TRANSPORT, Row, assert_same_metrics, assert_sound, only, read_jsonl, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

NUM_STEPS = 14  # with a validation after the last one, as in the reference


def test_a_run_goes_on_where_ctrl_c_or_the_end_of_a_loop_has_stopped_it(
    config: dict[str, object], undisturbed: list[Row], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    overrides, notes = ("trainer.save_freq=0", f"trainer.total_steps={NUM_STEPS}"), list[str]()
    for step in train(config, *overrides, f"trainer.run_dir={run_dir}", say=notes.append):
        if step.number == 2:
            assert len(step.samples) == 8
            break
    # The run does not wait for the loop: how many steps it was ahead is the machine's affair.
    last = load_run(run_dir).metrics["step"][-1].as_py()
    end = only(read_jsonl(run_dir / "events.jsonl"), "end")[-1]
    assert end["message"] == f"stopped after step {last} of {NUM_STEPS}: SIGINT", notes
    assert last >= 2

    for phase in ("collect", "learn"):
        with training(config, run_dir, *overrides) as run:
            run.wait_for(lambda e, phase=phase: e["event"] == "phase" and e["to"] == phase)
            in_progress = run.interrupt()
            assert run.finish() == 130, run.output
            last = run.metrics[-1]["step"]
            assert last in (in_progress, in_progress + 1)
            assert f"stopped after step {last} of {NUM_STEPS}: SIGINT" in run.output
            assert only(run.events, "checkpoint")[-1]["step"] == last

    went_on = [
        step.number for step in train(config, *overrides, f"trainer.run_dir={run_dir}", say=notes.append)
    ]
    assert went_on == list(range(last + 1, NUM_STEPS + 1)) != []
    assert len(load_run(run_dir).samples(3)) == 8
    assert not only(run.events, "rewind"), "no step was done twice"
    assert_same_metrics(run.metrics, undisturbed[: NUM_STEPS + 1], without=TRANSPORT)
    assert_sound(run)
