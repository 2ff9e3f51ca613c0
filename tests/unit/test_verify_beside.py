"""What `paceline verify` says of a run with validation servers whose record was tampered with."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.verify.digests import digest_of
from support.beside import BESIDE, by_version
from support.fake_fleet import FakeServices
from support.killed_sequencer import breaches_of
from support.memory_broker import MemoryBroker
from support.sequencer_run import config, run_of

Events = list[dict[str, Any]]
Lines = list[dict[str, Any]]

CHANGES: dict[str, Any] = {**BESIDE, "trainer__total_steps": 3}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Validations of steps 0, 2 and 3; that of 2 comes in with step 3."""
    folder = tmp_path_factory.mktemp("recorded")

    async def live() -> None:
        fakes = FakeServices()
        fakes.writes = True
        async with run_of(config(**CHANGES), folder, fakes, MemoryBroker()) as it:
            it.may_validate = lambda version: version != 2 or it.progress.step == 3
            await it.enlist_all()
            await it.go(by_version)
            it.journal.record("end", ok=True, message="done", step=3)

    asyncio.run(live())
    return folder


def of(events: Events, kind: str, step: int) -> dict[str, Any]:
    return next(e for e in events if e["event"] == kind and e["step"] == step)


def answers(events: Events, step: int) -> Events:
    return [e for e in events if e["event"] == "trajectory" and e.get("beside") == step]


def of_other_version(events: Events, lines: Lines) -> None:
    answers(events, 2)[0]["policy"] = answers(events, 0)[0]["policy"]


def lost(events: Events, lines: Lines) -> None:
    events.remove(answers(events, 2)[0])


def doubled(events: Events, lines: Lines) -> None:
    first = answers(events, 2)[0]
    events.insert(events.index(first), dict(first))


def not_asked_for(events: Events, lines: Lines) -> None:
    of(events, "validate", 2)["sets"][""]["prompts"].remove(1)


def validated_with_other_weights(events: Events, lines: Lines) -> None:
    policy = of(events, "validate", 0)["policy"]
    for event in (of(events, "validate", 2), of(events, "validated", 2), *answers(events, 2)):
        event["policy"] = policy


def without_result(events: Events, lines: Lines) -> None:
    events.remove(of(events, "validated", 2))
    lines.remove([line for line in lines if line["step"] == 2][1])


def without_begin(events: Events, lines: Lines) -> None:
    events.remove(of(events, "validate", 2))


def left_out_in_silence(events: Events, lines: Lines) -> None:
    place = events.index(of(events, "validated", 2))
    events[place] = {"event": "validation_skipped", "step": 2, "time": events[place]["time"]}
    lines.remove([line for line in lines if line["step"] == 2][1])


def other_value(events: Events, lines: Lines) -> None:
    line = [line for line in lines if line["step"] == 2][1]
    line["val/reward/mean"] += 1
    of(events, "validated", 2)["metrics"] = digest_of(json.dumps(line).encode())


def changed_line(events: Events, lines: Lines) -> None:
    [line for line in lines if line["step"] == 2][1]["timing_s/validate"] = 0.0


def without_line(events: Events, lines: Lines) -> None:
    lines.remove([line for line in lines if line["step"] == 2][1])


def three_lines(events: Events, lines: Lines) -> None:
    lines.append([line for line in lines if line["step"] == 2][1])


FAULTS: dict[Callable[[Events, Lines], None], str] = {
    of_other_version: "was admitted with v0@",
    lost: "prompt 0 of the validation of step 2 has 0 of 1 answers",
    doubled: "was admitted twice",
    not_asked_for: "validate:2:1:0 was admitted, but the validation of step 2 did not ask for it",
    validated_with_other_weights: "step 2 was validated with v0@",
    without_result: "the run ended well, but the validation of step 2 has no result",
    without_begin: "was admitted, but no validation was asked for",
    left_out_in_silence: "the validation of step 2 was left out without a reason",
    other_value: "the line of the validation of step 2 in metrics.jsonl has val/reward/mean",
    changed_line: "the line of the validation of step 2 in metrics.jsonl was changed after it was written",
    without_line: "metrics.jsonl lacks the line of the validation of step 2, which is over",
    three_lines: "metrics.jsonl has two lines of step 2",
}


def tampered(recorded: Path, folder: Path, fault: Callable[[Events, Lines], None]) -> list[str]:
    shutil.copytree(recorded, folder)
    events, lines = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("events.jsonl", "metrics.jsonl")
    )
    fault(events, lines)
    events = [{**event, "n": n} for n, event in enumerate(events)]
    for name, rows in (("events.jsonl", events), ("metrics.jsonl", lines)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return breaches_of(folder, config(**CHANGES))


def test_a_copy_without_a_fault_is_sound(recorded: Path, tmp_path: Path) -> None:
    assert tampered(recorded, tmp_path / "copy", lambda events, lines: None) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_told(fault: Callable[[Events, Lines], None], recorded: Path, tmp_path: Path) -> None:
    breaches = tampered(recorded, tmp_path / "copy", fault)
    assert any(FAULTS[fault] in breach for breach in breaches), breaches
