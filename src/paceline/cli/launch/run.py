"""One run as local processes: Redis, controller, rollout servers, learner ranks, reward service.

    Redis -> controller -> (address file) -> members -> follow the run -> stop in order -> nothing left behind

Whatever happens, the last part happens: after success, an error, SIGINT, SIGTERM, or a process that died.
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

from paceline.cli.launch import plan
from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.launch.machine import free_port
from paceline.cli.launch.plan import Machine, ProcessSpec, Role
from paceline.cli.launch.processes import ManagedProcess
from paceline.cli.launch.supervise import Supervisor
from paceline.cli.live.follow import RunEnd, follow
from paceline.cli.live.view import View
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, DeadlineError, PacelineError, PeerLostError, exit_code
from paceline.rpc.v1 import controller_pb2, controller_pb2_grpc
from paceline.service import channels
from paceline.service.process import BROKER_URL, TOKEN, adopt_orphans

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After an error nobody waits for a fine farewell: people are told within 20 s.
_FAILURE_BUDGET_S = 8.0

# How long a killed process may take to be gone after its peers have noticed.
_LATE_DEATH_S = 1.0
_TAIL_LINES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a launch ended; `exit_code` is the command's."""

    ok: bool
    message: str
    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is started; tests put other processes here."""

    controller: Callable[[RunConfig, Path, Path], ProcessSpec] = plan.controller
    checks: Callable[[RunConfig, Path], Sequence[ProcessSpec]] = plan.checks
    members: Callable[..., Sequence[ProcessSpec]] = plan.members


async def launch(config: RunConfig, run_dir: Path, view: View, *, what: Plan | None = None) -> Outcome:
    """Runs a run to its end, whatever that is; raises nothing that is expected to happen.

    Must be called in the main thread of a process that has no other children to care for.
    """
    adopt_orphans()
    launcher = _Launcher(config, run_dir, view, what or Plan())
    with launcher.signals():
        return await launcher.run()


class _Launcher:
    def __init__(self, config: RunConfig, run_dir: Path, view: View, what: Plan) -> None:
        self._config, self._run_dir, self._view, self._what = config, run_dir, view, what
        self._token = secrets.token_urlsafe(24)
        self._note = run_dirs.new_note(run_dir, self._token)
        self._supervisor = Supervisor(run_dir / "logs")
        self._stop_redis: Callable[[], None] | None = None
        self._signal: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._following: asyncio.Task[RunEnd] | None = None
        self._address = ""

    async def run(self) -> Outcome:
        """Starts, follows, stops."""
        outcome = Outcome(ok=False, message="ended by an error of the launcher itself", exit_code=1)
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
        """The first signal stops in order, the second one at once."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if self._signal.done():
                self._supervisor.hurry()
            else:
                self._view.notice(
                    f"{signal.Signals(number).name}: stopping in order; once more to stop at once"
                )
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
            asyncio.create_task(self._check(spec)) for spec in self._what.checks(self._config, self._run_dir)
        ]
        try:
            controller = await self._start_controller(broker_url)
            for check in checks:
                await check
        finally:
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        self._note.controller, self._note.state = self._address, "running"
        specs = self._what.members(
            self._config, Machine.here(), controller_address=self._address, master_port=free_port()
        )
        for spec in specs:
            await self._supervisor.start(spec, {TOKEN: self._token})
        self._note.pids = {"launcher": os.getpid(), **self._supervisor.pids}
        if redis_pid is not None:
            self._note.pids["redis"] = redis_pid
        run_dirs.write_note(self._run_dir, self._note)
        self._view.milestone(f"started {_summary(specs)}; logs in {self._run_dir / 'logs'}")
        self._following = asyncio.create_task(follow(self._address, self._token, self._view), name="follow")
        redis_gone = asyncio.create_task(_exit_of(redis_pid), name="exit of redis")
        try:
            return await self._until_the_end(controller, self._following, redis_gone)
        finally:
            redis_gone.cancel()
            await asyncio.gather(redis_gone, return_exceptions=True)

    def _start_broker(self) -> tuple[str, int | None]:
        if self._config.broker.url is not None:
            return self._config.broker.url, None
        from paceline.broker.redis_server import RedisServer

        # In this very thread: the server dies with the thread that started it.
        server = RedisServer.start(self._run_dir / "redis", die_with_parent=True)
        self._stop_redis = server.stop
        self._view.milestone(f"Redis answers on port {server.port}")
        return server.url, server.pid

    async def _check(self, spec: ProcessSpec) -> None:
        """Runs beside the controller's start; members, which cost more, come after both."""
        timeout_s = self._config.service.startup_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                process = await self._supervisor.run(spec)
        except TimeoutError as error:
            raise DeadlineError(
                phase="START",
                peer=spec.name,
                seconds=timeout_s,
                hint="a module of yours, with a reward function or a policy loss, does not return from its import",
            ) from error
        if process.exited.result() != 0:
            raise _death_at_start(process)

    async def _start_controller(self, broker_url: str) -> ManagedProcess:
        address_file = self._run_dir / "controller.address"
        address_file.unlink(missing_ok=True)
        spec = self._what.controller(self._config, self._run_dir, address_file)
        controller = await self._supervisor.start(spec, {TOKEN: self._token, BROKER_URL: broker_url})
        timeout_s = self._config.service.startup_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                # The file is looked for, not announced: the controller may as well be started by others, who read it too.
                while not address_file.exists():
                    if not controller.running:
                        raise _death_at_start(controller)
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
        return controller

    # --- follow

    async def _until_the_end(
        self,
        controller: ManagedProcess,
        following: asyncio.Task[RunEnd],
        redis_gone: asyncio.Task[None],
    ) -> Outcome:
        while True:
            ended = asyncio.create_task(self._supervisor.next_exit(), name="next exit")
            try:
                watched: list[asyncio.Task[Any]] = [following, ended, redis_gone]
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                if following.done() and not ended.done():
                    return await self._reason(_of(following), ended)
                if not ended.done():
                    return _failed(
                        f"the run's Redis server ended; its log: {self._run_dir / 'redis' / 'redis.log'}"
                    )
                outcome = await self._judge(ended.result(), following)
                if outcome is not None:
                    return outcome
            finally:
                ended.cancel()
                await asyncio.gather(ended, return_exceptions=True)

    async def _reason(self, told: Outcome, ended: asyncio.Task[ManagedProcess]) -> Outcome:
        """What the controller told, or the death that it is a consequence of: a process that is killed lets go of its connections
        before it is gone, so that the news of what it broke may come first."""
        if not told.ok:
            await asyncio.wait([ended], timeout=_LATE_DEATH_S)
            if ended.done() and ended.result().exited.result() < 0:
                return _failed(_obituary(ended.result(), "ended unexpectedly"))
        return told

    async def _judge(self, process: ManagedProcess, following: asyncio.Task[RunEnd]) -> Outcome | None:
        """What the end of a process means for the run; None: it goes on."""
        well = process.exited.result() == 0
        # Members leave when the run is over, and their news may be here before the controller's.
        await asyncio.wait([following], timeout=10.0 if well else 1.0)
        words = _obituary(process, "ended unexpectedly")
        if following.done() and following.exception() is None and (well or following.result().ok):
            return _of(following)
        if process.spec.role is Role.ROLLOUT and self._supervisor.running(Role.ROLLOUT):
            self._view.notice(f"{words}. The run goes on with the other rollout servers")
            return None
        if process.spec.role is Role.CONTROLLER and following.done() and following.exception() is None:
            return _of(following)
        return _failed(words)

    # --- stop

    async def _stop(self, outcome: Outcome) -> None:
        """Everything ends, in order; what does not is killed."""
        budget_s = self._config.service.shutdown_timeout_s
        if not outcome.ok and not self._signal.done():
            budget_s = min(budget_s, _FAILURE_BUDGET_S)
        try:
            self._view.milestone("stopping the services")
            await self._ask_to_stop(outcome)
            killed = await self._supervisor.stop(budget_s=budget_s)
            if killed:
                log.warning("killed, as they did not end in time: %s", ", ".join(killed))
        finally:
            if self._following is not None:
                self._following.cancel()
                await asyncio.gather(self._following, return_exceptions=True)
            if self._stop_redis is not None:
                self._stop_redis()
            for left in self._supervisor.sweep():
                log.warning("killed a process that was left behind: %s", left)
            run_dirs.end_note(self._run_dir, self._note, outcome.message)

    async def _ask_to_stop(self, outcome: Outcome) -> None:
        """Tells the controller, so that its journal ends with the reason and its members hear of it."""
        following = self._following
        if not self._address or following is None or following.done():
            return
        if not self._supervisor.running(Role.CONTROLLER):
            return
        channel = channels.connect(self._address, token=self._token)
        try:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            request = controller_pb2.StopRunRequest(reason=outcome.message)
            await channels.call(stub.StopRun, request, timeout_s=2.0, phase="STOP", peer="controller")
            await asyncio.wait([following], timeout=3.0)
        except PacelineError as error:
            log.info("the controller was not told to stop: %s", error)
        finally:
            await channel.close()


def _death_at_start(process: ManagedProcess) -> PacelineError:
    """Where it refused what it was given, its own sentence is all there is to say."""
    said = process.last_error()
    if process.exited.result() == 2 and said:
        return ConfigError(said)
    return PeerLostError(_obituary(process, "ended while starting"), peer=process.name)


def _of(following: asyncio.Task[RunEnd]) -> Outcome:
    try:
        end = following.result()
    except PeerLostError as error:
        return _failed(str(error))
    return Outcome(ok=end.ok, message=end.message, exit_code=0 if end.ok else 1)


def _failed(message: str) -> Outcome:
    return Outcome(ok=False, message=message, exit_code=1)


def _obituary(process: ManagedProcess, verb: str) -> str:
    last = process.last_error()
    said = f": {last}" if last else ""
    return f"{process.name} {verb} ({process.outcome()}){said} [log: {process.log_path}]"


def _summary(specs: Sequence[ProcessSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


async def _exit_of(pid: int | None) -> None:
    """Returns when the process has ended; never, where there is none."""
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    if pid is None:
        await gone
        return
    descriptor = os.pidfd_open(pid)

    def on_end() -> None:
        loop.remove_reader(descriptor)
        if not gone.done():
            gone.set_result(None)

    loop.add_reader(descriptor, on_end)
    try:
        await gone
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
