"""What `paceline verify` counts and shows, and what is no breach; the breaches: test_verify_breaches.py."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.controller.verify.__main__ import main
from paceline.controller.verify.check import follow, verify
from paceline.controller.verify.findings import Findings
from paceline.controller.verify.journal.entries import read
from paceline.controller.verify.journal.history import History
from paceline.core.errors import DataError
from paceline.service import process_ends
from paceline.service.process_ends import ProcessEnd
from support.journals import RecordedRun, admit_twice, sound_run
from support.source import ROOT


def test_a_sound_run_has_no_breach_and_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sound_run().write(tmp_path))]) == 0
    assert capsys.readouterr().out.endswith("\nsound\n")
    counts = verify(tmp_path).counts
    expected = {
        "controller restarts": 1,
        "steps finished": 4,
        "batches": 4,
        "commits": 7,
        "rewinds": 1,
        "re-collections": 1,
        "pushes to newcomers": 1,
        "checkpoints": 2,
        "prompt groups dispatched": 9,
        "prompt groups set aside": 1,
        "prompt groups dropped": 1,
        "rows trained": 10,
        "rows in parquet files": 10,
        "trajectories duplicate": 1,
        "trajectories reward error": 1,
    }
    assert {name: counts[name] for name in expected} == expected


def test_an_invariant_that_does_not_hold_is_shown_with_its_first_breach_and_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sound_run()
    for name in ("train:1:3:0", "train:1:3:1"):
        admit_twice(run, name)
    assert main([str(run.write(tmp_path))]) == 1
    out = capsys.readouterr().out
    place = next(i for i, e in enumerate(run.events) if e.get("id") == "train:1:3:0")
    breached, *rest = out[out.index("BREACHED") :].splitlines()
    assert breached.startswith("BREACHED  I3")
    assert rest[0].strip() == "2 breach(es); the first: train:1:3:0 was admitted twice"
    assert [line.strip().partition(":")[0] for line in rest[1:3]] == [
        f"line {place + 1} (n={place})",
        f"line {place + 2} (n={place + 1})",
    ]
    assert [line[:9].strip() for line in rest[3:5]] == ["holds", "holds"]


def test_long_events_are_cut_and_found_by_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sound_run()
    dispatch = run.find("dispatch")
    dispatch["note"] = "x" * 50_000
    run.insert_after(dispatch, dict(dispatch, prompts=[77]))
    assert main([str(run.write(tmp_path))]) == 1
    shown = [
        line.strip() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("line ")
    ]
    place = run.events.index(dispatch)
    assert shown[0].startswith(f'line {place + 1} (n={place}): {{"n": {place}, ')
    assert shown[0].endswith(" more characters)")
    assert max(map(len, shown)) < 400


def peak_bytes(folder: Path, num_steps: int) -> int:
    """The most memory that a journal of so many steps takes to be checked."""
    run = RecordedRun()
    run.start(1, 0)
    run.push(0)
    run.finish(0)
    for step in range(1, num_steps + 1):
        run.dispatch(step, *range(60))
        run.admit(step, *range(60))
        run.batch(step, *range(60))
        run.push(step)
        run.finish(step)
    findings, config = Findings(), load(RunConfig, run.write(folder) / "config.resolved.yaml")
    tracemalloc.start()
    history = follow(read(folder / "events.jsonl", findings), findings, config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (history.finished, findings.counts["rows trained"]) == (num_steps, num_steps * 120)
    return peak


def test_memory_does_not_grow_with_the_trajectories_of_finished_steps(tmp_path: Path) -> None:
    few, many = peak_bytes(tmp_path / "few", 3), peak_bytes(tmp_path / "many", 24)
    # A step more costs its dispatch and 24 bytes per row, and not its 180 events.
    assert (many - few) / 21 < 180 * 60


class WalkedDict(dict[Any, Any]):
    """Counts how often all of it is gone through."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()

    def items(self) -> Any:
        """As a dict's."""
        self.walks += 1
        return super().items()

    def values(self) -> Any:
        """As a dict's."""
        self.walks += 1
        return super().values()


def test_no_event_goes_through_the_steps_before_it(tmp_path: Path) -> None:
    """A run of 100,000 steps would take hours."""
    run = RecordedRun()
    run.start(1, 0)
    run.phases(0, "forming")
    run.push(0)
    run.finish(0)
    for step in range(1, 21):
        run.dispatch(step, 1, 2)
        run.admit(step, 1, 2)
        run.batch(step, 1, 2)
        run.push(step)
        run.finish(step)
    findings, config = Findings(), load(RunConfig, run.write(tmp_path) / "config.resolved.yaml")
    history = History(findings, config)
    history.steps, history.versions._commits = steps, commits = WalkedDict(), WalkedDict()
    history.follow(read(tmp_path / "events.jsonl", findings))
    assert (len(steps), len(commits), findings.breaches) == (21, 21, [])
    assert (steps.walks, commits.walks) == (0, 0)


def test_a_run_that_is_drawn_for_the_record_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps of what `benchmarks/long_run.py` measures."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    long_run = importlib.import_module("long_run")
    options = long_run.arguments(["--files", "--prompts", "2", "--samples", "3"])
    asyncio.run(long_run.DrawnRun(tmp_path / "run", options, 12).write())
    findings = verify(tmp_path / "run")
    assert findings.breaches == []
    assert findings.unseen == {}
    counts = ("steps finished", "rows trained", "digests of trajectories recomputed")
    assert [findings.counts[name] for name in counts] == [13, 72, 72]


def test_a_last_line_that_was_cut_off_is_no_breach(tmp_path: Path) -> None:
    run = sound_run()
    run.torn = '{"n": 102, "ti'
    assert verify(run.write(tmp_path)).breaches == []


def test_a_line_that_was_written_into_is_a_breach(tmp_path: Path) -> None:
    run = sound_run()
    journal = run.write(tmp_path) / "events.jsonl"
    lines = journal.read_text().splitlines()
    lines[20] = lines[20][:9] + lines[20]
    journal.write_text("\n".join(lines) + "\n")
    breaches = [str(breach) for breach in verify(tmp_path).breaches]
    assert "RECORD: line 21 cannot be read, and it is not the last of its term" in breaches


def test_a_manifest_that_was_changed_is_a_breach(tmp_path: Path) -> None:
    manifest = sound_run().write(tmp_path) / "checkpoints" / "step_000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"weights"', '"weighty"'))
    (breach,) = verify(tmp_path).breaches
    assert "step_000002 cannot be used: manifest.json was changed after it was written" in breach.sentence


def test_a_run_that_was_killed_has_no_breach_wherever_it_was_killed(tmp_path: Path) -> None:
    """Every prefix of a sound journal is sound, with the metrics and checkpoints of that time."""
    full = sound_run()
    full.write(tmp_path)
    for length in range(1, len(full.events)):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        part = RecordedRun(events=full.events[:length])
        for event in part.events:
            if event["event"] == "step":
                part.metrics.append(json.dumps({"step": event["step"]}))
            elif event["event"] == "rewind":
                part.metrics = part.metrics[: event["to_step"] + 1]
            elif event["event"] == "checkpoint":
                part.manifests[event["step"]] = full.manifests[event["step"]]
        breaches = [str(breach) for breach in verify(part.write(tmp_path)).breaches]
        assert breaches == [], (length, part.events[-1])


def test_the_code_of_the_user_is_shown_from_the_term_in_which_it_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sound_run()
    starts = [event for event in run.events if event["event"] == "run"]
    starts[0]["code"] = {"algorithm.path": ["my.py:A", "11"], "rollout.tools[0]": ["t.py:f", ""]}
    starts[1]["code"] = {"algorithm.path": ["my.py:A", "22"], "rollout.tools[0]": ["t.py:f", ""]}
    assert main([str(run.write(tmp_path))]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("code")]
    assert lines == [
        "code      from term 1 on: algorithm.path=my.py:A, file 11",
        "code      from term 1 on: rollout.tools[0]=t.py:f, file is not on the controller's host",
        "code      from term 2 on: algorithm.path=my.py:A, file 22",
    ]


def test_members_may_leave_after_the_end(tmp_path: Path) -> None:
    run = sound_run()
    run.add("member", member="reward-0", incarnation="a", what="left", reason="the run is over")
    assert verify(run.write(tmp_path)).breaches == []


def test_the_line_of_metrics_may_be_ahead_of_its_event(tmp_path: Path) -> None:
    run = sound_run()
    place = run.events.index(run.last("step"))
    run.events = run.events[:place]
    assert verify(run.write(tmp_path)).breaches == []


def test_a_gpu_need_not_give_the_same_bitsadmit_twice(tmp_path: Path) -> None:
    run = sound_run()
    run.last("commit").update(digest="ff")
    run.config = {"learner": {"device": "cuda"}}
    assert verify(run.write(tmp_path)).breaches == []


def test_a_run_from_before_the_record_cannot_be_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sound_run()
    del run.find("run")["term"]
    with pytest.raises(DataError, match="cannot be verified: a start of the controller has no term"):
        verify(run.write(tmp_path))
    assert main([str(tmp_path)]) == 2
    (tmp_path / "events.jsonl").unlink()
    assert main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_processes_that_ended_are_named_with_signal_step_and_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = sound_run().write(tmp_path)
    for step, name, outcome in ((0, "redis", "exit code 1"), (12, "learner-1", "killed by SIGSEGV")):
        end = ProcessEnd(time=1e9 + step, name=name, outcome=outcome, step=step, restarts=bool(step))
        process_ends.append(run_dir, end)
    with (run_dir / process_ends.FILE).open("a") as torn:
        torn.write('{"time": 1, "name": "re')
    assert main([str(run_dir)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ended")]
    at = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1e9 + step)) for step in (0, 12)]
    assert told == [
        f"ended     redis ended with exit code 1 before step 1 at {at[0]}; not started again",
        f"ended     learner-1 was killed by SIGSEGV in step 12 at {at[1]}; started again",
    ]
    process_ends.append(run_dir, end)
    assert [e.step for e in process_ends.read(run_dir)] == [0, 12, 12]
    (run_dir / process_ends.FILE).unlink()
    for _ in range(32):
        process_ends.append(run_dir, end)
    main([str(run_dir)])
    assert "ended     12 more, in ends.jsonl\n" in capsys.readouterr().out
