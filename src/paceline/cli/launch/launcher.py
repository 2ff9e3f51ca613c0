"""Launches a run as local processes: Redis, controller, rollout servers, learner ranks, reward service.

    Redis -> controller -> (address file) -> members -> follow the run -> stop in order -> nothing left behind

The stop always happens: after success, an error, SIGINT, SIGTERM, or the death of a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.controller_client import ControllerClient
from paceline.cli.launch import plan
from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.launch.machine import Machine, free_port
from paceline.cli.launch.outcome import Outcome, error_at_start, failed, outcome_of_run
from paceline.cli.launch.plan import ProcessSpec, Role
from paceline.cli.launch.process_tree import ProcessTree
from paceline.cli.launch.processes import ManagedProcess, wait_for_exit
from paceline.cli.live.follow import follow
from paceline.cli.live.view import View
from paceline.config.run import RunConfig
from paceline.core.errors import DeadlineError, PacelineError, exit_code
from paceline.core.run_events import EndEvent
from paceline.service.process import BROKER_URL, TOKEN, adopt_orphans

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After an error the services get less time to end, so that people see the error within 20 s.
_FAILURE_BUDGET_S = 8.0

# How long after its peers noticed a killed process may still be seen as running.
_LATE_DEATH_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """Makes the specs of the processes to start; tests replace these functions."""

    controller: Callable[[RunConfig, Path, Path], ProcessSpec] = plan.controller
    checks: Callable[[RunConfig, Path], Sequence[ProcessSpec]] = plan.checks
    members: Callable[..., Sequence[ProcessSpec]] = plan.members


async def launch(config: RunConfig, run_dir: Path, view: View, *, planner: Planner | None = None) -> Outcome:
    """Starts a run, follows it to its end and stops it; returns expected failures as an outcome.

    Must be called in the main thread of a process that has no other children.
    """
    adopt_orphans()
    launcher = _Launcher(config, run_dir, view, planner or Planner())
    with launcher.signals():
        return await launcher.run()


class _Launcher:
    def __init__(self, config: RunConfig, run_dir: Path, view: View, planner: Planner) -> None:
        self._config, self._run_dir, self._view, self._planner = config, run_dir, view, planner
        self._token = secrets.token_urlsafe(24)
        self._note = run_dirs.new_note(run_dir, self._token)
        self._tree = ProcessTree(run_dir / "logs")
        self._stop_redis: Callable[[], None] | None = None
        self._signal: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._following: asyncio.Task[EndEvent] | None = None
        self._address = ""

    async def run(self) -> Outcome:
        """Starts, follows, stops."""
        outcome = Outcome(ok=False, message="ended by an error in the launcher", exit_code=1)
        running = asyncio.create_task(self._start_and_follow(), name="run")
        pulse = asyncio.create_task(self._pulse(), name="pulse")
        try:
            waiting: list[asyncio.Future[Any]] = [running, self._signal]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                outcome = running.result()
            else:
                number = signal.Signals(self._signal.result())
                outcome = Outcome(ok=False, message=f"stopped by {number.name}", exit_code=128 + number)
        except PacelineError as error:
            outcome = Outcome(ok=False, message=str(error), exit_code=exit_code(error))
        finally:
            running.cancel()
            pulse.cancel()
            await asyncio.gather(running, pulse, return_exceptions=True)
            await self._stop(outcome)
        return outcome

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._view.pulse()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """The first signal stops the run in order, the second one at once."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if self._signal.done():
                self._tree.hurry()
            else:
                name = signal.Signals(number).name
                self._view.notice(f"{name}: stopping in order; send it again to stop at once")
                self._signal.set_result(number)

        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

    # --- start

    async def _start_and_follow(self) -> Outcome:
        broker_url, redis_pid = self._start_broker()
        checks = [
            asyncio.create_task(self._check(spec))
            for spec in self._planner.checks(self._config, self._run_dir)
        ]
        try:
            await self._start_controller(broker_url)
            for check in checks:
                await check
        finally:
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        self._note.controller, self._note.state = self._address, "running"
        specs = self._planner.members(
            self._config, Machine.here(), controller_address=self._address, master_port=free_port()
        )
        for spec in specs:
            await self._tree.start(spec, {TOKEN: self._token})
        self._note.pids = {"launcher": os.getpid(), **self._tree.pids}
        if redis_pid is not None:
            self._note.pids["redis"] = redis_pid
        run_dirs.write_note(self._run_dir, self._note)
        names = ", ".join(spec.name for spec in specs)
        self._view.milestone(f"started {names}; logs in {self._run_dir / 'logs'}")
        self._following = asyncio.create_task(follow(self._address, self._token, self._view), name="follow")
        redis_exit = asyncio.create_task(wait_for_exit(redis_pid), name="exit of redis")
        try:
            return await self._until_the_end(self._following, redis_exit)
        finally:
            redis_exit.cancel()
            await asyncio.gather(redis_exit, return_exceptions=True)

    def _start_broker(self) -> tuple[str, int | None]:
        if self._config.broker.url is not None:
            return self._config.broker.url, None
        from paceline.broker.redis_server import RedisServer

        # In the main thread: the server dies with the thread that started it.
        server = RedisServer.start(
            self._run_dir / "redis",
            max_memory_mib=self._config.broker.max_memory_mib,
            die_with_parent=True,
        )
        self._stop_redis = server.stop
        self._view.milestone(f"Redis answers on port {server.port}")
        return server.url, server.pid

    async def _check(self, spec: ProcessSpec) -> None:
        """Runs while the controller starts; members, which cost more, start after both."""
        timeout_s = self._config.service.startup_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                process = await self._tree.run(spec)
        except TimeoutError as error:
            raise DeadlineError(
                phase="START",
                peer=spec.name,
                seconds=timeout_s,
                hint="importing the module of a reward function or a policy loss takes too long",
            ) from error
        if process.exited.result() != 0:
            raise error_at_start(process)

    async def _start_controller(self, broker_url: str) -> None:
        address_file = self._run_dir / "controller.address"
        address_file.unlink(missing_ok=True)
        spec = self._planner.controller(self._config, self._run_dir, address_file)
        controller = await self._tree.start(spec, {TOKEN: self._token, BROKER_URL: broker_url})
        timeout_s = self._config.service.startup_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                # The controller knows nothing of its launcher, so it announces its address in a file.
                while not address_file.exists():
                    if not controller.running:
                        raise error_at_start(controller)
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise DeadlineError(
                phase="START",
                peer="the controller",
                seconds=timeout_s,
                hint=f"its log {controller.log_path} ends with: {controller.last_error()}",
            ) from error
        self._address = address_file.read_text(encoding="utf-8").strip()
        self._view.milestone(f"the controller answers on {self._address}")

    # --- follow

    async def _until_the_end(
        self,
        following: asyncio.Task[EndEvent],
        redis_exit: asyncio.Task[None],
    ) -> Outcome:
        while True:
            ended = asyncio.create_task(self._tree.next_exit(), name="next exit")
            try:
                watched: list[asyncio.Task[Any]] = [following, ended, redis_exit]
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                if following.done() and not ended.done():
                    return await self._explain(outcome_of_run(following), ended)
                if not ended.done():
                    log_path = self._run_dir / "redis" / "redis.log"
                    return failed(f"the run's Redis server ended [log: {log_path}]")
                outcome = await self._after_exit(ended.result(), following)
                if outcome is not None:
                    return outcome
            finally:
                ended.cancel()
                await asyncio.gather(ended, return_exceptions=True)

    async def _explain(self, outcome: Outcome, ended: asyncio.Task[ManagedProcess]) -> Outcome:
        """The controller's outcome, or the death of the process that caused it.

        A killed process loses its connections before its end is seen here, so the controller's error may
        arrive first.
        """
        if not outcome.ok:
            await asyncio.wait([ended], timeout=_LATE_DEATH_S)
            if ended.done() and ended.result().exited.result() < 0:
                return failed(ended.result().describe_end("ended unexpectedly"))
        return outcome

    async def _after_exit(self, process: ManagedProcess, following: asyncio.Task[EndEvent]) -> Outcome | None:
        """What the end of a process means for the run; None if the run goes on."""
        is_clean = process.exited.result() == 0
        # Members leave when the run is over, and their exit may be seen before the controller's last event.
        await asyncio.wait([following], timeout=10.0 if is_clean else 1.0)
        has_end = following.done() and following.exception() is None
        if has_end and (is_clean or following.result().ok or process.spec.role is Role.CONTROLLER):
            return outcome_of_run(following)
        reason = process.describe_end("ended unexpectedly")
        if process.spec.role is Role.ROLLOUT and self._tree.running(Role.ROLLOUT):
            self._view.notice(f"{reason}. The run goes on with the other rollout servers")
            return None
        return failed(reason)

    # --- stop

    async def _stop(self, outcome: Outcome) -> None:
        """Ends everything in order; kills what does not end in time."""
        budget_s = self._config.service.shutdown_timeout_s
        if not outcome.ok and not self._signal.done():
            budget_s = min(budget_s, _FAILURE_BUDGET_S)
        try:
            self._view.milestone("stopping the services")
            await self._ask_to_stop(outcome)
            killed = await self._tree.stop(budget_s=budget_s)
            if killed:
                log.warning("killed, because they did not end in time: %s", ", ".join(killed))
        finally:
            if self._following is not None:
                self._following.cancel()
                await asyncio.gather(self._following, return_exceptions=True)
            if self._stop_redis is not None:
                self._stop_redis()
            for process in self._tree.sweep():
                log.warning("killed a process that was left behind: %s", process)
            run_dirs.end_note(self._run_dir, self._note, outcome.message)

    async def _ask_to_stop(self, outcome: Outcome) -> None:
        """Tells the controller, so that its journal ends with the reason and its members leave."""
        following = self._following
        if not self._address or following is None or following.done():
            return
        if not self._tree.running(Role.CONTROLLER):
            return
        try:
            async with ControllerClient(self._address, self._token) as controller:
                await controller.stop_run(outcome.message)
            await asyncio.wait([following], timeout=3.0)
        except PacelineError as error:
            log.info("could not tell the controller to stop: %s", error)
