"""A learner rank is killed or frozen: the other one notices by itself, ends and names it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from support.learner_fakes import write_model
from support.learner_processes import running

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

NOBODY = "redis://127.0.0.1:1"


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
@pytest.mark.parametrize("lost", [0, 1])
async def test_the_other_rank_ends_and_names_the_lost_one(
    tmp_path: Path, lost: int, fault: signal.Signals
) -> None:
    survivor = 1 - lost
    model = write_model(tmp_path / "model")
    async with running(model, NOBODY, tmp_path) as learner:
        os.kill(learner.ranks[lost].pid, fault)
        assert await asyncio.to_thread(learner.ranks[survivor].wait, 300) == 1
    said = learner.failure[0] if survivor == 0 else (tmp_path / "rank1.log").read_text()
    assert f"rank {lost} " in said.splitlines()[-1]
    if fault is signal.SIGSTOP:
        assert f"learner rank {lost} has been silent for 10 s (learner.rank_silent_s)" in said


async def test_a_rank_that_pauses_for_less_is_not_given_up(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    async with running(model, NOBODY, tmp_path) as learner:
        for rank in learner.ranks:
            os.kill(rank.pid, signal.SIGSTOP)
            await asyncio.sleep(4)
            os.kill(rank.pid, signal.SIGCONT)
        # Both at once, for longer than the limit, as when the machine sleeps.
        for rank in learner.ranks:
            os.kill(rank.pid, signal.SIGSTOP)
        await asyncio.sleep(13)
        for rank in learner.ranks:
            os.kill(rank.pid, signal.SIGCONT)
        await asyncio.sleep(4)
        assert [rank.poll() for rank in learner.ranks] == [None, None]
