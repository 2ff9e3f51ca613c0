"""Conducts a run of `paceline chaos`: launches it, injects faults until it ends, writes down how it recovers.

all ready -> a random pause -> fault -> it is over -> the next new step and all members ready -> again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from paceline.cli.chaos.faults import Fault, draw
from paceline.cli.chaos.inject import Injector
from paceline.cli.chaos.record import Outage, Record
from paceline.cli.controller_client import ControllerClient
from paceline.cli.launch import plan
from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.launch.launcher import Planner, launch
from paceline.cli.launch.outcome import Outcome
from paceline.cli.launch.plan import ProcessSpec
from paceline.cli.live.view import Metrics, View
from paceline.config.run import RunConfig
from paceline.core.errors import DeadlineError, PacelineError
from paceline.core.members import LearnerState, RewardState, RolloutState
from paceline.service.credentials import Credentials

log = logging.getLogger(__name__)

_POLL_S = 0.5
_WORKING = frozenset(
    state.value
    for state in (
        RolloutState.SERVING,
        RolloutState.SYNCING,
        RewardState.SERVING,
        *(set(LearnerState) - {LearnerState.LOADING}),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How many faults a run gets, from which seed, and about how many seconds apart."""

    seed: int
    num_faults: int
    interval_s: float


class Clock:
    """A view that notes when steps are finished, and passes everything on."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.now_step, self.now_phase, self.last_step = 0, "start", -1
        self.finished = asyncio.Event()

    def milestone(self, text: str) -> None:
        """Passes it on."""
        self._view.milestone(text)

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """Notes where the run is."""
        self.now_step, self.now_phase = step, phase
        self._view.phase(step=step, phase=phase, admitted=admitted, wanted=wanted)

    def step(self, step: int, metrics: Metrics) -> None:
        """Notes that a step is finished."""
        self.last_step = step
        self.finished.set()
        self._view.step(step, metrics)

    def notice(self, text: str) -> None:
        """Passes it on."""
        self._view.notice(text)

    def pulse(self) -> None:
        """Passes it on."""
        self._view.pulse()

    def close(self) -> None:
        """Passes it on."""
        self._view.close()


class Conductor:
    """Injects the faults of a plan into the run in `run_dir`, one after the other's recovery."""

    def __init__(self, config: RunConfig, run_dir: Path, plan: Plan, clock: Clock) -> None:
        self._config, self._run_dir, self._plan, self._clock = config, run_dir, plan, clock
        self.injector, self.record = Injector(run_dir), Record(run_dir)
        self._rng = np.random.default_rng([plan.seed, 1])

    async def run(self) -> None:
        """Injects all faults.

        Raises:
            PacelineError: a fault could not be injected.
            DeadlineError: the run did not recover within service.recovery_timeout_s.
        """
        limit_s = self._config.service.recovery_timeout_s
        _, ready_s = await self._recovered(time.monotonic(), limit_s)
        if ready_s is None:
            raise DeadlineError(phase="START", peer="the first step", seconds=limit_s)
        faults = draw(self._config, seed=self._plan.seed)
        for number in range(1, self._plan.num_faults + 1):
            await asyncio.sleep(self._pause_s(number))
            await self._strike(number, next(faults), limit_s)

    def _pause_s(self, number: int) -> float:
        """A random pause; a short one if otherwise the run might end before its last fault."""
        steps_left = self._config.trainer.total_steps - self._clock.last_step
        faults_left = self._plan.num_faults - number + 1
        hurry = steps_left < 2 * faults_left
        return float(self._rng.uniform(0, 0.3 if hurry else 2 * self._plan.interval_s))

    async def _strike(self, number: int, fault: Fault, limit_s: float) -> None:
        step, phase, began = self._clock.now_step, self._clock.now_phase, time.monotonic()
        self._clock.notice(f"fault {number} of {self._plan.num_faults}: {fault}")
        log.warning("fault %d: %s in step %d, %s", number, fault, step, phase)
        self._clock.finished.clear()
        wall = time.time()
        await self.injector.inject(fault)
        step_s, ready_s = await self._recovered(began, limit_s + fault.seconds)
        outage = Outage(
            number=number, time=wall, fault=fault, step=step, phase=phase, step_s=step_s, ready_s=ready_s
        )
        self.record.add(outage)
        if outage.recovery_s is None:
            lacking = "a further step" if step_s is None else "all members"
            raise DeadlineError(
                phase="RECOVERY", peer=lacking, seconds=limit_s, hint=f"the run hangs after {fault}"
            )

    async def _recovered(self, began: float, limit_s: float) -> tuple[float | None, float | None]:
        """Seconds until a new step was finished, and until all members were ready."""
        step_s = ready_s = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._clock.finished.wait()
                step_s = time.monotonic() - began
                await self._all_ready()
                ready_s = time.monotonic() - began
        return step_s, ready_s

    async def _all_ready(self) -> None:
        wanted = set(_member_ids(self._config))
        while True:
            with contextlib.suppress(PacelineError):
                note = run_dirs.read_note(self._run_dir)
                if note is not None and note.controller and _all_run(note.pids.values()):
                    credentials = Credentials.from_env().with_token(note.token)
                    async with ControllerClient(note.controller, credentials) as controller:
                        members = (await controller.status()).members
                    if wanted <= {m.member_id for m in members if m.state in _WORKING}:
                        return
            await asyncio.sleep(_POLL_S)


def _all_run(pids: Iterable[int]) -> bool:
    """Whether the processes exist: the launcher replaces the ids of those that it starts again."""
    try:
        return all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    except psutil.NoSuchProcess:
        return False


def _member_ids(config: RunConfig) -> Iterator[str]:
    yield from ("learner-0", "reward-0")
    yield from (f"rollout-{i}" for i in range(config.rollout.replicas))


async def conduct(
    config: RunConfig, run_dir: Path, view: View, chaos_plan: Plan
) -> tuple[Outcome, Record, str]:
    """Runs to the end under faults; returns the outcome, the faults, and why there are no more, or ""."""
    clock = Clock(view)
    conductor = Conductor(config, run_dir, chaos_plan, clock)
    injector = conductor.injector

    def members(*args: Any, controller_address: str, **rest: Any) -> Sequence[ProcessSpec]:
        behind = injector.controller_address(controller_address)
        return plan.members(*args, controller_address=behind, **rest)

    planner = Planner(members=members, broker_url=injector.broker_url)
    async with contextlib.AsyncExitStack() as links:
        for link in injector.links.values():
            await links.enter_async_context(link)
        running = asyncio.create_task(launch(config, run_dir, clock, planner=planner), name="run")
        striking = asyncio.create_task(conductor.run(), name="faults")
        try:
            await asyncio.wait([running, striking], return_when=asyncio.FIRST_COMPLETED)
            reason = _reason(striking)
            if reason:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                return Outcome(ok=False, message=reason, exit_code=1), conductor.record, reason
            outcome = await running
            if outcome.ok:
                reason = _reason(striking) or _unfinished(striking, conductor.record, chaos_plan)
            return outcome, conductor.record, reason
        finally:
            for task in (striking, running):
                task.cancel()
            await asyncio.gather(striking, running, return_exceptions=True)


def _reason(striking: asyncio.Task[None]) -> str:
    """Why the injecting failed, or ""."""
    if not striking.done():
        return ""
    error = striking.exception()
    if error is not None and not isinstance(error, PacelineError):
        raise error
    return "" if error is None else str(error)


def _unfinished(striking: asyncio.Task[None], record: Record, plan: Plan) -> str:
    if striking.done():
        return ""
    return f"the run ended after {len(record.outages)} of {plan.num_faults} faults; raise trainer.total_steps"
