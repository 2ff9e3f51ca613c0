"""A controller that is killed at an event of its journal, and one that goes on after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from paceline.config.run import RunConfig
from paceline.controller.verify.check import verify
from support.fake_fleet import Answer, FakeServices
from support.memory_broker import MemoryBroker
from support.sequencer_run import SequencerRun, run_of

TRANSPORT = ("barrier/duplicates", "barrier/rejected", "weights/bytes", "weights/relayed_bytes")
"""Metrics that a kill may change."""

BEFORE = ("phase", "trained", "checkpoint", "step")
"""Events before which a crash differs from one after the event before: something happened in between."""


class Killed(Exception):
    """The process ends here, without any clean-up of its own."""


def kill_at(it: SequencerRun, number: int, *, written: bool) -> None:
    """Lets the process end at the journal's event with this number, before or after it is written."""
    record_all, dead = it.journal.record_all, []

    def recording(events: Any) -> None:
        for event in list(events):
            is_last = it.journal._next == number
            if not dead and (written or not is_last):
                record_all([event])
            if dead or is_last:
                dead.append(event)
                raise Killed

    it.journal.record_all = recording  # type: ignore[method-assign]


async def live(
    cfg: RunConfig,
    folder: Path,
    fakes: FakeServices,
    broker: MemoryBroker,
    answer: Answer,
    kill: tuple[int, bool] | None = None,
    keep: Set[asyncio.Task[Any]] = frozenset(),
    prepare: Callable[[SequencerRun], None] = lambda it: None,
) -> bool:
    """One life of a controller; returns whether it reached the end. Tasks in `keep` outlive it."""
    async with run_of(cfg, folder, fakes, broker) as it:
        prepare(it)
        if kill is not None:
            kill_at(it, kill[0], written=kill[1])
        try:
            await it.enlist_all()
            await it.go(answer)
        except Killed:
            return False
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()} - keep
            for task in others:
                task.cancel()
            with contextlib.suppress(Killed):
                await asyncio.gather(*others, return_exceptions=True)
    return True


def kills(recorded: list[dict[str, Any]], *, written: bool) -> list[int]:
    """The events of a journal at which a kill differs from one at the event before."""
    kinds = [event["event"] for event in recorded]
    return [
        number
        for number in range(1, len(recorded))
        if not kinds[number] == kinds[number - 1] == "trajectory" and (kinds[number] in BEFORE) != written
    ]


def metrics_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def journal_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def breaches_of(folder: Path, cfg: RunConfig) -> list[str]:
    """What `paceline verify` says of journal, metrics, trajectories and checkpoints."""
    trainer = cfg.trainer.model_copy(update={"run_dir": str(folder)})
    file = folder / "config.resolved.yaml"
    file.write_text(cfg.model_copy(update={"trainer": trainer}).model_dump_json())
    return [str(breach) for breach in verify(folder).breaches]
