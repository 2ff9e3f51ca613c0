"""Breaches planted in a sound run, one at a time: what is wrong -> the sentence of `paceline verify`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.controller.verify.check import verify
from support.journals import RecordedRun, admission, admit_twice, names, sound_run, weights

Spoil = Callable[[RecordedRun], object]


def _swap_numbers(run: RecordedRun) -> None:
    run.events[7]["n"] = 99


def _second_batch_digest(run: RecordedRun) -> None:
    run.find("trained")["digest"] = "0" * 32


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
    "tokens of older weights than the bound allows": (
        lambda r: r.find("dispatch", lambda e: e["step"] == 2).update(policy=f"v0@{weights(0)}"),
        f"I1: step 2 trained tokens of v0@{weights(0)}, 1 versions older than the weights that it trained",
    ),
    # the record
    "a gap": (_swap_numbers, "RECORD: an event has the number 99 where 7 is due"),
    "a term that does not increase": (
        lambda r: r.last("run").update(term=1),
        "RECORD: a term 1 begins where 2 is due",
    ),
    "other data": (
        lambda r: r.last("run").update(data_digest="e"),
        "RECORD: term 2 has another data_digest than the term before",
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
        "RECORD: the checkpoint step_000002 is of step 2, but has the controller's state of step 2 of run s",
    ),
    "a checkpoint with another step's state": (
        lambda r: r.manifests[2]["controller_state"].update(step=1),
        "RECORD: the checkpoint step_000002 is of step 2, but has the controller's state of step 1 of run r",
    ),
    "a checkpoint's file is torn": (
        lambda r: r.manifests[2]["files"]["weights"].update(size=99),
        "RECORD: the checkpoint step_000002 has 10 bytes in weights, but 99 were written",
    ),
    "a bit of a checkpoint's file is another": (
        lambda r: r.manifests[2]["files"]["weights"].update(blake2b="0" * 32),
        "RECORD: the checkpoint step_000002 has a changed file weights",
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
        f"I1: validate:0:9:0 was admitted with v0@ff, but v0@{weights(0)} is committed",
    ),
    "a batch of another policy": (
        lambda r: r.find("batch").update(policy="v1@ff"),
        f"I1: the batch of step 1 is of v1@ff, but its prompts were dispatched for v0@{weights(0)}",
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
    "a sample that is not one of those asked for": (
        lambda r: r.trajectory("train:1:3:1").update(id="train:1:3:2"),
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
        "I2: prompt 1 of step 1 was dropped, but was already left out",
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
        "I2: step 3 first asked for other prompts",
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
    "a checkpoint that is not there, while a void one of its step was removed": (
        lambda r: (
            r.manifests.pop(2),
            r.insert_after(
                r.last("checkpoint"),
                {"event": "checkpoint_removed", "folder": "checkpoints/void_step_000002"},
            ),
        ),
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
    "admitted twice": (lambda r: admit_twice(r, "train:1:3:0"), "I3: train:1:3:0 was admitted twice"),
    "a greedy answer twice": (
        lambda r: admit_twice(r, "greedy:1:3:0"),
        "I3: greedy:1:3:0 was admitted twice",
    ),
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
        "I3: train:2:4:0 differs from what it was before the controller was restarted",
    ),
    "rows of a void collection are trained": (
        _train_void_rows,
        "I2: prompt 6 of step 3 was trained with 0 of 2 samples",
    ),
    "a parquet row that was not trained": (
        lambda r: r.parquet["step_000001"].append(r.parquet["step_000001"][0]),
        "I3: step_000001.parquet has 3 rows, but 2 were trained",
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
