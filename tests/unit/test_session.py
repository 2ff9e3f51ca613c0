"""A script that leads a run: the real controller's flow over a socket, with fake services behind it."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.api.session import LedRun, LedStep
from paceline.core.errors import ConfigError, PeerLostError
from paceline.data.scripted import FLOW, SOCKET
from support.fake_fleet import FakeServices
from support.killed_sequencer import breaches_of, journal_events, live, metrics_lines
from support.memory_broker import MemoryBroker
from support.sequencer_run import config, run_of

CHANGES: dict[str, Any] = {
    "trainer__dataflow": FLOW,
    "trainer__total_steps": 3,
    "trainer__save_freq": 2,
    "data__max_prompt_length": 256,
    "actor__ppo_max_token_len_per_gpu": 4096,
}


class FakeProcess:
    """Stands for the process of `paceline train`: says what it is given, until it ends."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.said = run_dir, queue.Queue[dict[str, Any] | None]()
        self.interrupts = 0

    def events(self) -> Iterator[dict[str, Any]]:
        while (event := self.said.get(timeout=60)) is not None:
            yield event

    def interrupt(self) -> None:
        self.interrupts += 1


@asynccontextmanager
async def led(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[LedRun, FakeProcess]]:
    """A session whose controllers run in this process."""
    process: Any = FakeProcess(folder)
    socket = str(folder / "s")
    monkeypatch.setenv(SOCKET, socket)
    run = LedRun(process, lambda text: None)
    server = await asyncio.start_unix_server(run.connected, socket, limit=1 << 30)
    try:
        yield run, process
    finally:
        process.said.put(None)
        await run.leave(None)
        server.close()


async def revise(step: LedStep) -> None:
    drafts = await step.sample(await step.draw(), "draft")
    replies = [await step.reply(group[0], "Again, please.") for group in drafts.groups]
    revised = await step.sample(replies, step.ask("revise", 3))
    await step.note("revised", len(revised))
    await step.train([*drafts, *(s.with_reward(2 * s.reward).with_baseline(0.5) for s in revised)])
    await step.publish()


async def lead(run: LedRun) -> list[int]:
    numbers = []
    async for step in run:
        numbers.append(step.number)
        await revise(step)
    return numbers


def score(group: Any, index: int) -> dict[str, Any]:
    """The reward of every sample is its index."""
    return {"reward": float(index), "reward_error": None, "components": {"exact_match": float(index)}}


def writing() -> FakeServices:
    fakes = FakeServices()
    fakes.writes = True
    return fakes


async def test_a_script_leads_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, fakes = config(**CHANGES), writing()
    async with led(tmp_path, monkeypatch) as (run, process), run_of(cfg, tmp_path, fakes) as it:
        leading = asyncio.create_task(lead(run))
        await it.enlist_all()
        await it.go(score)
        process.said.put({"event": "step", "step": 3, "metrics": {"a": 1.0}})
        process.said.put(None)
        assert await leading == [1, 2, 3]
        assert run.metrics == {"a": 1.0}
    rows = [str(row.trajectory_id) for row in fakes.orders[0].rows]
    assert [name.partition(":")[0] for name in rows] == ["draft"] * 6 + ["revise"] * 9
    assert [row.reward for row in fakes.orders[0].rows[-3:]] == [0.0, 2.0, 4.0]
    assert [row.greedy_score for row in fakes.orders[0].rows[5:7]] == [None, 0.5]
    assert metrics_lines(tmp_path)[1]["dataflow/revised"] == 9
    assert breaches_of(tmp_path, cfg) == []


async def test_a_controller_killed_in_any_verb_is_told_again_what_the_script_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, calm = config(**CHANGES), tmp_path / "calm"
    calm.mkdir()
    undisturbed = writing()
    async with led(calm, monkeypatch) as (run, process):
        leading = asyncio.create_task(lead(run))
        async with run_of(cfg, calm, undisturbed) as it:
            await it.enlist_all()
            await it.go(score)
        process.said.put(None)
        await leading
    recorded = journal_events(calm)
    chosen = [
        event["n"]
        for event in recorded
        if event["event"] in ("dispatch", "sampling", "batch", "trained", "commit", "step")
        and event.get("step", event.get("version")) == 2
    ]
    assert len(chosen) == 6
    for number in chosen:
        folder, fakes, broker = tmp_path / f"{number}", writing(), MemoryBroker()
        folder.mkdir()
        async with led(folder, monkeypatch) as (run, process):
            leading = asyncio.create_task(lead(run))
            assert not await live(cfg, folder, fakes, broker, score, (number, True), keep={leading})
            async with run_of(cfg, folder, fakes, broker) as it:
                await it.enlist_all()
                await it.go(score)
            process.said.put(None)
            assert await leading in ([1, 2, 3], [1, 2, 2, 3]), number
        assert fakes.trained == undisturbed.trained, number
        assert breaches_of(folder, cfg) == [], number


async def test_a_script_whose_samples_are_drawn_anew_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller dies, the broker with it, and the samples are other ones after that."""
    cfg, fakes = config(**CHANGES, algorithm__adv_estimator="rloo"), writing()

    def other(group: Any, index: int) -> dict[str, Any]:
        return score(group, 7 - index)

    async with led(tmp_path, monkeypatch) as (run, process):
        leading = asyncio.create_task(lead(run))
        recorded = tmp_path / "events.jsonl"
        at = 60
        assert not await live(cfg, tmp_path, fakes, MemoryBroker(), score, (at, True), keep={leading})
        assert "sampling" in recorded.read_text()
        async with run_of(cfg, tmp_path, fakes) as it:
            await it.enlist_all()
            going = asyncio.create_task(it.go(other))
            with pytest.raises(PeerLostError, match=r"its sample\(\) now gives another result"):
                await leading
            process.said.put(None)
            await run.leave(None)
            with pytest.raises(ConfigError, match="the script has left in step"):
                await going


async def test_leaving_the_loop_ends_the_run_with_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, fakes = config(**CHANGES), writing()

    async def two_steps(run: LedRun, process: FakeProcess) -> None:
        async for step in run:
            await revise(step)
            if step.number == 1:
                break
        await run.leave("stop")

    async with led(tmp_path, monkeypatch) as (run, process), run_of(cfg, tmp_path, fakes) as it:
        leading = asyncio.create_task(two_steps(run, process))
        await it.enlist_all()
        await it.go(score)
        process.said.put(None)
        await leading
        assert it.sequencer.result == "stopped after step 1 of 3: the script has left the loop"
        assert process.interrupts == 0
    assert [e["step"] for e in journal_events(tmp_path) if e["event"] == "checkpoint"] == [1]


async def test_a_fault_of_the_script_is_told_to_it_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, told = config(**CHANGES), []

    async def faulty(run: LedRun) -> None:
        async for step in run:
            drawn = await step.draw()
            with pytest.raises(ConfigError, match="asks for 0 samples") as error:
                await step.sample(drawn, step.ask(n=0))
            told.append(error)

    async with led(tmp_path, monkeypatch) as (run, process), run_of(cfg, tmp_path) as it:
        leading = asyncio.create_task(faulty(run))
        await it.enlist_all()
        with pytest.raises(ConfigError, match="asks for 0 samples"):
            await it.go(score)
        process.said.put(None)
        with pytest.raises(ConfigError, match="step 1 is not published"):
            await leading
        assert len(told) == 1


async def test_a_script_that_leaves_in_a_step_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(**CHANGES)

    async def leaves(run: LedRun) -> None:
        async for step in run:
            await step.draw()
            break
        await run.leave(None)

    async with led(tmp_path, monkeypatch) as (run, process), run_of(cfg, tmp_path) as it:
        leading = asyncio.create_task(leaves(run))
        await it.enlist_all()
        with pytest.raises(ConfigError, match="the script has left in step 1; start it again"):
            await it.go(score)
        process.said.put(None)
        await leading
        assert process.interrupts == 1
