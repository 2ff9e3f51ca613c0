"""Conducts a run of `paceline chaos`: launches it, injects faults, writes down how it recovers, ends it.

all ready -> faults at random instants, at most `overlap` of them not recovered from -> all ready -> the end
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.chaos.faults import Fault, draw
from paceline.chaos.inject import Injector
from paceline.chaos.record import FaultRecovery, Record
from paceline.chaos.roster import Roster, ends_its_process
from paceline.config.run import RunConfig
from paceline.core.errors import DeadlineError, PacelineError
from paceline.engines.registry import engine_facts
from paceline.launch.launcher import ProcessPlanner, launch
from paceline.launch.outcome import LaunchOutcome
from paceline.launch.planning import plan
from paceline.launch.planning.plan import ProcessSpec
from paceline.runs import run_dir as run_dirs
from paceline.runs.controller_client import ControllerClient
from paceline.service.tasks import cancel
from paceline.show.live.view import View
from paceline.show.live.wrapping_views import WatchedView

log = logging.getLogger(__name__)

_DONE = "all faults were injected"
_STOP_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How many faults a run gets, from which seed, at which rate, and how many at the same time.

    Attributes:
        overlap: most faults at a time from which the run has not recovered yet; 1: one after the other.
        stop: whether the run ends after the last recovery instead of at its last step.
        only: patterns of the faults that may be drawn; all if empty.
    """

    seed: int
    num_faults: int
    per_minute: float
    overlap: int
    stop: bool
    only: tuple[str, ...] = ()


class Conductor:
    """Injects the faults of a plan into the run in `run_dir`."""

    def __init__(self, config: RunConfig, run_dir: Path, plan: Plan, clock: WatchedView) -> None:
        self._config, self._run_dir, self._plan, self._clock = config, run_dir, plan, clock
        words = [engine_facts(name).process_word for name in config.rollout.engine_names]
        self.injector, self.record = Injector(run_dir, list(filter(None, words))), Record(run_dir)
        self._roster = Roster(config, run_dir)
        self._rng = np.random.default_rng([plan.seed, 1])
        self._room = asyncio.Semaphore(plan.overlap)
        self._places: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._num_open = self._num_injected = 0

    async def run(self) -> None:
        """Injects all faults and waits for the recovery from each; ends the run if the plan says so.

        Raises:
            PacelineError: a fault could not be injected.
            DeadlineError: the run did not recover within service.recovery_timeout_s.
        """
        asking = asyncio.create_task(self._roster.run(), name="roster")
        try:
            await self._all_ready("START")
            await self._inject_all()
            await self._all_ready("END")
            if self._plan.stop:
                await self._stop()
        except ExceptionGroup as errors:
            expected, others = errors.split(PacelineError)
            if others is not None or expected is None:
                raise
            raise expected.exceptions[0] from None
        finally:
            await cancel(asking)

    async def _inject_all(self) -> None:
        faults = draw(self._config, seed=self._plan.seed, only=self._plan.only)
        async with asyncio.TaskGroup() as strikes:
            for number in range(1, self._plan.num_faults + 1):
                await asyncio.sleep(float(self._rng.exponential(60 / self._plan.per_minute)))
                await self._room.acquire()
                strikes.create_task(self._strike(number, next(faults)), name=f"fault {number}")

    async def _strike(self, number: int, fault: Fault) -> None:
        limit_s = self._config.service.recovery_timeout_s
        self._num_open += 1
        try:
            async with self._places[fault.place]:
                act = await self.injector.aim(fault, within_s=limit_s)
                pid = self.injector.pid_of(fault.target) if ends_its_process(fault) else None
                members = self._roster.affected_by(fault)
                alone, self._num_injected = self._num_open == 1, self._num_injected + 1
                mark = self._num_injected
                step, phase, began, wall = (
                    self._clock.now_step,
                    self._clock.now_phase,
                    time.monotonic(),
                    time.time(),
                )
                self._clock.notice(f"fault {number} of {self._plan.num_faults}: {fault}")
                log.warning("fault %d: %s in step %d, %s", number, fault, step, phase)
                await act()
            step_s, ready_s = await self._recovered(fault, members, pid, began, limit_s)
            self.record.add(
                FaultRecovery(
                    number=number,
                    time=wall,
                    fault=fault,
                    step=step,
                    phase=phase,
                    alone=alone and mark == self._num_injected,
                    step_s=step_s,
                    ready_s=ready_s,
                )
            )
            if step_s is None or ready_s is None:
                lacking = "a further step" if step_s is None else ", ".join(sorted(members))
                raise DeadlineError(
                    phase="RECOVERY", peer=lacking, seconds=limit_s, hint=f"the run hangs after {fault}"
                )
        finally:
            self._num_open -= 1
            self._room.release()

    async def _recovered(
        self, fault: Fault, members: frozenset[str], pid: int | None, began: float, limit_s: float
    ) -> tuple[float | None, float | None]:
        """Returns seconds from the fault until a step was finished, and until all hit members worked."""
        service = fault.target.partition("/")[0]

        async def timed(waiting: Any) -> float | None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await waiting
                    return time.monotonic() - began
            return None

        return await asyncio.gather(
            timed(self._clock.next_step()),
            timed(self._roster.until_working(members, service=service, unlike=pid)),
        )

    async def _all_ready(self, phase: str) -> None:
        limit_s = self._config.service.recovery_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._clock.next_step()
                await self._roster.until_working(self._roster.all)
        except TimeoutError:
            raise DeadlineError(phase=phase, peer="a step with all members", seconds=limit_s) from None

    async def _stop(self) -> None:
        """Ends the run in order, but not during a recovery."""
        note = run_dirs.read_note(self._run_dir)
        if note is None:
            return
        async with ControllerClient.of_run(note) as controller:
            await controller.stop_run(_DONE)


async def conduct(
    config: RunConfig, run_dir: Path, view: View, chaos_plan: Plan
) -> tuple[LaunchOutcome, Record, str]:
    """Runs to the end under faults; returns the outcome, the faults, and what went wrong with them, or ""."""
    clock = WatchedView(view)
    conductor = Conductor(config, run_dir, chaos_plan, clock)
    injector = conductor.injector

    def members(*args: Any, controller_address: str, **rest: Any) -> Sequence[ProcessSpec]:
        behind = injector.controller_address(controller_address)
        return plan.members(*args, controller_address=behind, **rest)

    planner = ProcessPlanner(members=members, broker_url=injector.broker_url)
    async with contextlib.AsyncExitStack() as links:
        for link in injector.links.values():
            await links.enter_async_context(link)
        running = asyncio.create_task(launch(config, run_dir, clock, planner=planner), name="run")
        striking = asyncio.create_task(conductor.run(), name="faults")
        try:
            await asyncio.wait([running, striking], return_when=asyncio.FIRST_COMPLETED)
            reason = _reason(striking)
            if reason:
                await cancel(running)
                return LaunchOutcome(ok=False, message=reason, exit_code=1), conductor.record, reason
            if striking.done() and chaos_plan.stop:
                return _as_wanted(await asyncio.wait_for(running, _STOP_S)), conductor.record, ""
            outcome = await running
            if outcome.ok:
                reason = _reason(striking) or _unfinished(striking, conductor.record, chaos_plan)
            return outcome, conductor.record, reason
        finally:
            await cancel(striking, running)


def _as_wanted(outcome: LaunchOutcome) -> LaunchOutcome:
    if not outcome.ok and _DONE in outcome.message:
        return LaunchOutcome(ok=True, message=outcome.message, exit_code=0)
    return outcome


def _reason(striking: asyncio.Task[None]) -> str:
    """Returns why a fault could not be injected, or ""."""
    if not striking.done():
        return ""
    error = striking.exception()
    if error is not None and not isinstance(error, PacelineError):
        raise error
    return "" if error is None else str(error)


def _unfinished(striking: asyncio.Task[None], record: Record, plan: Plan) -> str:
    if striking.done():
        return ""
    return (
        f"the run ended after {len(record.outages)} of {plan.num_faults} faults; raise "
        "trainer.total_steps, or leave it out: then the run ends after the last recovery"
    )
