"""The journal file and what it says of the run: one writer, no torn line, no gap, the standing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.journal import Journal
from paceline.controller.standing import LOG_START, Standing
from paceline.core.clock import SystemClock
from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.policy import PolicyTag


def opened(folder: Path) -> Journal:
    return Journal(folder / "events.jsonl", SystemClock())


def numbers(folder: Path) -> list[int]:
    return [json.loads(line)["n"] for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_second_writer_is_refused_by_name_and_let_in_when_the_first_is_gone(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.record("run", run_id="r", term=first.term, step=0, pid=4711)
    with pytest.raises(ConfigError, match=r"is in use: process 4711 is the controller.*trainer\.run_dir"):
        opened(tmp_path)
    first.close()
    second = opened(tmp_path)
    assert (first.term, second.term, second.standing.run_id) == (1, 2, "r")
    second.close()


@pytest.mark.parametrize("last", ["phase", "trajectory"])
def test_a_torn_last_line_is_cut_off_and_the_numbers_go_on(tmp_path: Path, last: str) -> None:
    journal = opened(tmp_path)
    journal.record("run", run_id="r", term=1, step=0)
    journal.record(last, id="train:1:0:0", step=1, to="collect")
    journal.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"n":2,"event":"com' + b"x" * 100_000)
    journal = opened(tmp_path)
    journal.record("commit", version=0, digest="d")
    journal.close()
    assert numbers(tmp_path) == [0, 1, 2]
    assert opened(tmp_path).standing.commits == {0: "d"}


def test_a_journal_of_one_torn_line_is_a_new_journal(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"n":0,"ev')
    journal = opened(tmp_path)
    assert journal.term == 1
    assert (tmp_path / "events.jsonl").read_bytes() == b""
    journal.close()


def test_damage_in_the_middle_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"n":0,"event":"run","run_id":"r","term":1}\n{"n":1,\n')
    with pytest.raises(CheckpointError, match=r"events\.jsonl is damaged at line 2"):
        opened(tmp_path)


def test_events_that_a_crash_must_not_lose_are_on_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(journal._next))
    journal = opened(tmp_path)
    for event in ("run", "phase", "member", "end", "epoch"):
        journal.record(event, run_id="r", step=0, to="x", number=1)
    assert synced == [1, 4]
    journal.close()


def after(*events: dict[str, Any]) -> Standing:
    standing = Standing()
    for event in events:
        standing.note(event)
    return standing


RUN = {"event": "run", "run_id": "r", "term": 3, "data_digest": "dd", "step": 0}
DISPATCH = {"event": "dispatch", "step": 1, "policy": "v0@a", "prompts": [4, 6]}
STEP = {"event": "step", "step": 0, "log_position": "7-0", "cursor": {"epoch": 0, "position": 0}, "guard": {}}


def test_the_standing_of_a_step_in_progress() -> None:
    standing = after(
        RUN,
        {"event": "commit", "version": 0, "digest": "a"},
        STEP,
        {"event": "phase", "step": 1, "source": "commit", "to": "dispatch"},
        DISPATCH,
        {"event": "batch", "step": 1, "policy": "v0@a", "digest": "bb", "num_rows": 4},
        {"event": "trained", "step": 1, "digest": "bb"},
    )
    assert (standing.term, standing.run_id, standing.data_digest) == (3, "r", "dd")
    assert (standing.finished, standing.log_position) == (0, "7-0")
    assert standing.committed == PolicyTag(version=0, digest="a")
    current = standing.current
    assert current is not None
    assert (current.step, current.phase, current.policy) == (1, "dispatch", "v0@a")
    assert (current.prompts, current.digest, current.trained) == ((4, 6), "bb", True)


def test_a_finished_step_leaves_nothing_in_progress() -> None:
    standing = after(RUN, DISPATCH, {**STEP, "step": 1, "log_position": "9-0", "guard": {"a": 1}})
    assert (standing.finished, standing.current, standing.log_position) == (1, None, "9-0")
    assert standing.guard == {"a": 1}


def test_a_collection_from_the_start_reads_the_log_from_its_start() -> None:
    standing = after(RUN, STEP, DISPATCH, {"event": "recollect", "step": 1, "reason": "lost"})
    assert (standing.log_position, standing.finished) == (LOG_START, 0)
    assert standing.current is not None
    assert (standing.current.prompts, standing.current.num_recollects) == ((4, 6), 1)


def test_a_rewind_makes_later_steps_void() -> None:
    commits = [{"event": "commit", "version": v, "digest": f"d{v}"} for v in range(4)]
    back = {"event": "rewind", "to_step": 1, "reason": "", "cursor": {"epoch": 0, "position": 3}, "guard": {}}
    standing = after(RUN, *commits, {**STEP, "step": 3}, {**DISPATCH, "step": 4}, back)
    assert (standing.finished, standing.current, standing.log_position) == (1, None, LOG_START)
    assert standing.commits == {0: "d0", 1: "d1"}
    assert standing.cursor == {"epoch": 0, "position": 3}
