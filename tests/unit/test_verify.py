"""`paceline verify` on a sound run, and on copies of it in which one thing is wrong."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.controller.verify.__main__ import main
from paceline.controller.verify.check import follow, verify
from paceline.controller.verify.entries import read
from paceline.controller.verify.findings import Findings
from paceline.core.errors import DataError
from support.journals import RecordedRun, admission, names, sound_run, weights

Spoil = Callable[[RecordedRun], object]


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


# --- what is wrong -> the sentence


def _swap_numbers(run: RecordedRun) -> None:
    run.events[7]["n"] = 99


def _second_batch_digest(run: RecordedRun) -> None:
    run.find("trained")["digest"] = "0" * 32


def _twice(run: RecordedRun, name: str, **changes: object) -> None:
    event = run.trajectory(name)
    run.insert_after(event, {**event, **changes})


def _rollback(run: RecordedRun) -> None:
    run.insert_after(
        run.find("trained", lambda e: e["step"] == 2),
        {"event": "rollback", "step": 2, "to_step": 1, "folder": "f", "reason": "kl"},
        {"event": "phase", "step": 2, "to": "rollback"},
    )


def _trained_again_elsewise(run: RecordedRun) -> None:
    """Step 2's learner answers a second time, for another batch."""
    trained = run.find("trained", lambda e: e["step"] == 2)
    run.insert_after(trained, {**trained, "digest": "1" * 32})


def _recollect_after_training(run: RecordedRun) -> None:
    trained = run.find("trained", lambda e: e["step"] == 2)
    run.insert_after(trained, {"event": "recollect", "step": 2, "reason": "blobs are gone"})


def _train_void_rows(run: RecordedRun) -> None:
    """Of step 3's second collection only prompt 6 is there: the rest is of the void part."""
    place = [i for i, e in enumerate(run.events) if e["event"] == "recollect"][-1]
    for name in names(3, 6):
        late = [e for e in run.events[place:] if e.get("id") == name]
        run.remove(late[0])


def _slow(run: RecordedRun) -> None:
    for n, event in enumerate(run.events):
        event["time"] = 100.0 + n
    place = next(i for i, e in enumerate(run.events) if e.get("to") == "commit")
    for event in run.events[place + 1 :]:
        event["time"] += 3000.0


BREACHES: dict[str, tuple[Spoil, str]] = {
    # the record
    "a gap": (_swap_numbers, "RECORD: an event has the number 99 where 7 is due"),
    "a term that does not increase": (
        lambda r: r.last("run").update(term=1),
        "RECORD: a term 1 begins where 2 is due",
    ),
    "other data": (
        lambda r: r.last("run").update(data_digest="e"),
        "RECORD: term 2 has another data_digest than the one before",
    ),
    "an event after the end": (
        lambda r: r.add("phase", step=3, to="dispatch"),
        "RECORD: an event follows the end of its term",
    ),
    "a step that is finished twice": (
        lambda r: r.insert_after(
            r.find("step", lambda e: e["step"] == 1), dict(r.find("step", lambda e: e["step"] == 1))
        ),
        "RECORD: step 1 was finished after step 1",
    ),
    "a step that is left out": (
        lambda r: r.remove(r.find("step", lambda e: e["step"] == 1)),
        "RECORD: step 2 was finished after step 0",
    ),
    "a metrics line that is missing": (
        lambda r: r.metrics.pop(1),
        "RECORD: metrics.jsonl lacks step 1, which is finished",
    ),
    "a metrics line that is doubled": (
        lambda r: r.metrics.insert(1, r.metrics[1]),
        "RECORD: metrics.jsonl has two lines of step 1",
    ),
    "metrics lines in another order": (
        lambda r: r.metrics.insert(1, r.metrics.pop(2)),
        "RECORD: metrics.jsonl is not in the order of the steps: 0, 2, 1, 3",
    ),
    "a metrics line of a step that was not run": (
        lambda r: r.metrics.append(json.dumps({"step": 9})),
        "RECORD: metrics.jsonl has a line of step 9, which is not finished",
    ),
    "a torn metrics line": (
        lambda r: r.metrics.insert(1, '{"step'),
        "RECORD: metrics.jsonl has a line that cannot be read: line 2",
    ),
    "a checkpoint of another run": (
        lambda r: r.manifests[2]["controller_state"].update(run_id="s"),
        "RECORD: the checkpoint step_000002 is of step 2 with the controller's state of step 2 of run s",
    ),
    "a checkpoint with another step's state": (
        lambda r: r.manifests[2]["controller_state"].update(step=1),
        "RECORD: the checkpoint step_000002 is of step 2 with the controller's state of step 1 of run r",
    ),
    "a checkpoint's file is torn": (
        lambda r: r.manifests[2]["files"]["weights"].update(size=99),
        "RECORD: the checkpoint step_000002 has 10 bytes in weights, 99 were written",
    ),
    "a bit of a checkpoint's file is another": (
        lambda r: r.manifests[2]["files"]["weights"].update(blake2b="0" * 32),
        "RECORD: the checkpoint step_000002 has another weights than was written",
    ),
    "a checkpoint's file is gone": (
        lambda r: r.manifests[2]["files"].update(optimizer={"size": 1, "blake2b": ""}),
        "RECORD: the checkpoint step_000002 lacks optimizer",
    ),
    # I1
    "dispatched for a version that is not committed": (
        lambda r: r.find("dispatch").update(policy="v0@ff"),
        f"I1: step 1 was dispatched for v0@ff, but v0@{weights(0)} is committed",
    ),
    "admitted of another digest": (
        lambda r: r.trajectory("train:1:3:0").update(policy="v0@ff"),
        f"I1: train:1:3:0 of v0@ff was admitted in a step of v0@{weights(0)}",
    ),
    "admitted of another version": (
        lambda r: r.trajectory("train:1:3:0").update(policy=f"v1@{weights(0)}"),
        f"I1: train:1:3:0 of v1@{weights(0)} was admitted in a step of v0@{weights(0)}",
    ),
    "admitted of another step": (
        lambda r: r.trajectory("train:2:5:1").update(id="train:1:5:1"),
        "I1: train:1:5:1 was admitted in step 2",
    ),
    "admitted after the collection": (
        lambda r: r.insert_after(r.find("trained"), {"event": "trajectory", **admission(1, "train:1:3:0")}),
        "I1: train:1:3:0 was admitted in phase learn, not collect",
    ),
    "validated with another policy": (
        lambda r: r.trajectory("validate:0:9:0").update(policy="v0@ff"),
        f"I1: validate:0:9:0 was admitted of v0@ff, but v0@{weights(0)} is committed",
    ),
    "a batch of another policy": (
        lambda r: r.find("batch").update(policy="v1@ff"),
        f"I1: the batch of step 1 is of v1@ff, its prompts were dispatched for v0@{weights(0)}",
    ),
    "served before it is committed": (
        lambda r: r.remove(r.find("commit")),
        f"I1: step 1 was dispatched for v0@{weights(0)}, but nothing is committed",
    ),
    # I2
    "a sample is missing": (
        lambda r: r.remove(r.trajectory("train:1:3:1")),
        "I2: prompt 3 of step 1 was trained with 1 of 2 samples",
    ),
    "a greedy answer is missing": (
        lambda r: r.remove(r.trajectory("greedy:1:3:0")),
        "I2: prompt 3 of step 1 was trained with 0 of 1 greedy answers",
    ),
    "a prompt without an end": (
        lambda r: r.remove(r.find("group_dropped")),
        "I2: prompt 2 of step 1 was trained with 0 of 2 samples",
    ),
    "dropped without a reason": (
        lambda r: r.find("group_dropped").update(reason=""),
        "I2: prompt 2 of step 1 was dropped without a reason",
    ),
    "set aside without a reason": (
        lambda r: r.find("refill").update(reason=""),
        "I2: prompt 1 of step 1 was set aside without a reason",
    ),
    "set aside before it was complete": (
        lambda r: r.remove(r.trajectory("train:1:1:0")),
        "I2: prompt 1 of step 1 was set aside with 1 of 2 samples",
    ),
    "set aside and dropped": (
        lambda r: r.insert_after(r.find("group_dropped"), {**r.find("group_dropped"), "prompt": 1}),
        "I2: prompt 1 of step 1 was dropped though it was out already",
    ),
    "trained and dropped": (
        lambda r: r.insert_after(r.find("group_dropped"), {**r.find("group_dropped"), "prompt": 3}),
        "I3: the batch of step 1 has 2 rows",
    ),
    "asked for twice": (
        lambda r: r.find("refill")["prompts"].append(2),
        "I2: prompt 2 was asked for twice in step 1",
    ),
    "a stranger is set aside": (
        lambda r: r.find("refill")["set_aside"].append([8, 0.0]),
        "I2: prompt 8 was set aside in step 1, which did not ask for it",
    ),
    "a stranger is dropped": (
        lambda r: r.find("group_dropped").update(prompt=8),
        "I2: prompt 8 was dropped in step 1, which did not ask for it",
    ),
    "a stranger is trained": (
        lambda r: r.find("refill").update(prompts=[]),
        "I2: train:1:3:0 was admitted, but step 1 did not ask for prompt 3",
    ),
    "more trained than the step began with": (
        lambda r: r.find("dispatch").update(prompts=[1]),
        "I2: prompt 2 was dropped in step 1, which did not ask for it",
    ),
    "dispatched twice": (
        lambda r: r.insert_after(r.trajectory("train:1:1:0"), dict(r.find("dispatch"))),
        "I2: step 1 was dispatched twice",
    ),
    "other prompts after a rewind": (
        lambda r: r.last("dispatch").update(prompts=[6, 8]),
        "I2: step 3 asked for other prompts at first",
    ),
    "a step that is skipped": (
        lambda r: r.find("dispatch", lambda e: e["step"] == 2).update(step=3),
        "I2: step 3 was dispatched after step 1",
    ),
    "finished without a commit": (
        lambda r: r.remove(r.find("commit", lambda e: e["version"] == 3)) or r.remove(r.last("commit")),
        "I2: step 3 was finished without a commit",
    ),
    "committed without training": (
        lambda r: r.remove(r.find("trained")),
        "I2: version 1 was committed without training",
    ),
    "trained without a batch": (
        lambda r: r.remove(r.find("batch")),
        "I2: step 1 was trained without a batch",
    ),
    "a rewind to a step that was not run": (
        lambda r: r.find("rewind").update(to_step=7),
        "I2: the run went back to step 7, but only step 3 is finished",
    ),
    "collected again after the training": (
        _recollect_after_training,
        "I2: step 2 was collected again after it was trained",
    ),
    "a checkpoint that is not there": (
        lambda r: r.manifests.pop(2),
        "I2: the checkpoint of step 2 is not on disk, or incomplete",
    ),
    "a checkpoint of a version that is not committed": (
        lambda r: r.find("checkpoint").update(step=2),
        "I2: a checkpoint of step 2, but version 1 is committed",
    ),
    "an end in the middle of a step": (
        lambda r: r.remove(r.last("step")),
        "I2: the run ended well while a step was not finished",
    ),
    # I3
    "admitted twice": (lambda r: _twice(r, "train:1:3:0"), "I3: train:1:3:0 was admitted twice"),
    "a greedy answer twice": (lambda r: _twice(r, "greedy:1:3:0"), "I3: greedy:1:3:0 was admitted twice"),
    "admitted without a digest": (
        lambda r: r.trajectory("train:1:3:0").pop("digest"),
        "I3: train:1:3:0 was admitted without a digest or a reward",
    ),
    "other tokens": (
        lambda r: r.trajectory("train:1:3:0").update(digest="another blob"),
        "I3: the batch of step 1 has 2 rows",
    ),
    "another reward": (
        lambda r: r.trajectory("train:1:3:0").update(reward=0.25),
        "I3: the batch of step 1 has 2 rows",
    ),
    "another greedy score": (
        lambda r: r.trajectory("greedy:1:3:0").update(reward=0.25),
        "I3: the batch of step 1 has 2 rows",
    ),
    "a row too many": (
        lambda r: r.find("batch").update(num_rows=3),
        "I3: the batch of step 1 has 3 rows",
    ),
    "the learner trained another batch": (_second_batch_digest, "I3: step 1 trained the batch 0000"),
    "trained twice with other rows": (_trained_again_elsewise, "I3: step 2 trained the batch 1111"),
    "another trajectory after a restart": (
        lambda r: r.trajectory("train:2:4:0").update(digest="another blob"),
        "I3: train:2:4:0 is another after the controller was started again",
    ),
    "rows of a void collection are trained": (
        _train_void_rows,
        "I2: prompt 6 of step 3 was trained with 0 of 2 samples",
    ),
    "a parquet row that was not trained": (
        lambda r: r.parquet["step_000001"].append(r.parquet["step_000001"][0]),
        "I3: step_000001.parquet has 3 rows, 2 were trained",
    ),
    "a parquet row with another reward": (
        lambda r: r.parquet["step_000002"][1].update(reward=7.0),
        "I3: step_000002.parquet has {'step': 2, 'prompt_id': 4, 'sample_index': 1, 'reward': 7.0",
    ),
    "parquet rows in another order": (
        lambda r: r.parquet["step_000002"].reverse(),
        "I3: step_000002.parquet has {'step': 2, 'prompt_id': 5, 'sample_index': 1",
    ),
    "no parquet file": (
        lambda r: r.parquet.pop("step_000002"),
        "I3: step_000002.parquet of a finished step cannot be read",
    ),
    # I4
    "two digests of a version": (
        lambda r: r.insert_after(
            r.find("trained", lambda e: e["step"] == 2),
            {**r.find("commit", lambda e: e["version"] == 1), "digest": "ff"},
        ),
        f"I4: version 1 was committed as {weights(1)} and as ff",
    ),
    "a version that is left out": (
        lambda r: r.find("commit", lambda e: e["version"] == 1).update(version=2),
        "I4: version 2 was committed where 1 is due",
    ),
    "another digest after a rewind": (
        lambda r: r.last("commit").update(digest="ff"),
        f"I4: version 3 was committed as {weights(3)} before a rewind and as ff after it",
    ),
    "a rollback with other weights": (
        _rollback,
        f"I4: version 2 is a rollback to 1, which was committed as {weights(1)}, but has {weights(2)}",
    ),
    "newcomers with another version": (
        lambda r: r.find("newcomers").update(version=1),
        "I4: newcomers got version 1, but 2 is committed",
    ),
    # I5
    "a phase that may not follow": (
        lambda r: r.find("phase", lambda e: e["to"] == "learn").update(to="commit"),
        "I5: no move from COLLECT to COMMIT",
    ),
    "an end in a phase that is none": (
        lambda r: r.remove(r.last("phase")),
        "I5: the run ended well in phase commit",
    ),
    "a phase beyond its deadline": (
        _slow,
        "I5: nothing happened for 3001 s in phase commit, which has a deadline of",
    ),
}


@pytest.mark.parametrize("name", BREACHES)
def test_each_breach_is_found(name: str, tmp_path: Path) -> None:
    spoil, sentence = BREACHES[name]
    run = sound_run()
    spoil(run)
    sentences = [str(breach) for breach in verify(run.write(tmp_path)).breaches]
    assert any(text.startswith(sentence) for text in sentences), sentences


def test_an_invariant_that_does_not_hold_is_shown_with_its_first_breach_and_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sound_run()
    for name in ("train:1:3:0", "train:1:3:1"):
        _twice(run, name)
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


def test_members_may_leave_after_the_end(tmp_path: Path) -> None:
    run = sound_run()
    run.add("member", member="reward-0", incarnation="a", what="left", reason="the run is over")
    assert verify(run.write(tmp_path)).breaches == []


def test_the_line_of_metrics_may_be_ahead_of_its_event(tmp_path: Path) -> None:
    run = sound_run()
    place = run.events.index(run.last("step"))
    run.events = run.events[:place]
    assert verify(run.write(tmp_path)).breaches == []


def test_a_gpu_need_not_give_the_same_bits_twice(tmp_path: Path) -> None:
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
