"""Launches a run as local processes: Redis, controller, rollout servers, learner ranks, reward service.

    Redis -> controller, members -> (address file) -> follow the run -> stop in order -> nothing left behind

Members import modules for seconds before they need the controller, so they start at the same time. A process
that ends before the run does is restarted (services, own_redis); a process that hangs is killed first
(liveness). Processes are always stopped in the end: after success, an error, a signal, or a loss that a
restart cannot fix. After a first SIGINT while steps are trained, the step in progress ends with a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.run import RunConfig
from paceline.core.errors import DeadlineError, EnvironmentLackError, PacelineError, exit_code
from paceline.core.ports import read_ports
from paceline.core.run_record.run_events import EndEvent
from paceline.launch.liveness import Liveness
from paceline.launch.outcome import LaunchOutcome, error_at_start, failed, outcome_of_run
from paceline.launch.planning import joining, plan
from paceline.launch.planning.plan import ProcessSpec, Role
from paceline.launch.presence import Presence
from paceline.launch.processes.process_tree import ProcessTree
from paceline.launch.processes.restarts import RestartHistory, RestartRule
from paceline.launch.processes.scratch import scratch_folder
from paceline.launch.services import Services, Unit
from paceline.runs import run_dir as run_dirs
from paceline.runs.controller_client import ControllerClient
from paceline.service import process_ends
from paceline.service.addresses import announced
from paceline.service.disk import DISK_IS_FULL, full_disk
from paceline.service.identity.credentials import TOKEN, Credentials
from paceline.service.member.runtime import STOP_GRACE
from paceline.service.process import BLOB_STORES, BROKER_URL, adopt_orphans
from paceline.service.process_ends import ProcessEnd
from paceline.service.tasks import cancel
from paceline.show.live.follow import follow
from paceline.show.live.view import View
from paceline.show.live.wrapping_views import WatchedView
from paceline.sizing.machine import Machine, free_port

if TYPE_CHECKING:
    from paceline.launch.own_redis import OwnRedis

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After an error the services get less time to end, so that people see the error within 20 s.
_FAILURE_BUDGET_S = 8.0
# The request to end after a step is repeated, because a restarted controller has not received it.
_ASK_AGAIN_S = 2.0
# A terminal signals its whole group, and a program that runs this command (uv, make) may pass the signal on.
_SAME_SIGNAL_S = 0.5

# A killed process may still appear to run for this long after its peers have noticed its loss.
_LATE_DEATH_S = 1.0
# A process that was killed at most this long before the controller's error is taken for its cause.
_RECENT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlanner:
    """Makes the specs of the processes to start; tests and `paceline chaos` replace these functions.

    `broker_url` gives the address by which services reach the run's own Redis server.
    """

    controller: Callable[[RunConfig, Path, Path], ProcessSpec] = plan.controller
    checks: Callable[[RunConfig, Path], Sequence[ProcessSpec]] = plan.checks
    members: Callable[..., Sequence[ProcessSpec]] = plan.members
    broker_url: Callable[[str], str] = str


async def launch(
    config: RunConfig,
    run_dir: Path,
    view: View,
    *,
    planner: ProcessPlanner | None = None,
    is_open: bool = False,
) -> LaunchOutcome:
    """Starts a run, follows it to its end and stops it; returns expected failures as an outcome.

    Must be called in the main thread of a process that has no other children.

    Args:
        run_dir: the directory that `run_dirs.prepare` made.
        is_open: whether to keep the token in the run directory and to show how further members join.
    """
    adopt_orphans()
    launcher = _Launcher(config, run_dir, view, planner or ProcessPlanner(), is_open=is_open)
    with launcher.signals():
        return await launcher.run()


class _Launcher:
    def __init__(
        self, config: RunConfig, run_dir: Path, view: View, planner: ProcessPlanner, *, is_open: bool
    ) -> None:
        self._config, self._run_dir, self._planner = _with_ports(config), run_dir, planner
        self._view = WatchedView(view)
        self._is_open, token = is_open, secrets.token_urlsafe(24)
        self._credentials = (
            Credentials.from_env()
            .for_own_machine()
            .with_token(joining.keep_token(run_dir, token) if is_open else token)
        )
        self._note = run_dirs.new_note(run_dir, self._credentials.token)
        self._scratch = scratch_folder()
        # No grace period: the controller is told before services are ended here, or else the launcher has
        # died.
        self._tree = ProcessTree(run_dir / "logs", env={"TMPDIR": self._scratch.name, STOP_GRACE: "0"})
        rule = RestartRule(max_restarts=config.service.max_restarts, window_s=config.service.restart_window_s)
        self._services = Services(
            self._tree,
            rule,
            say=view.notice,
            changed=self._write_note,
            note_end=self._note_end,
            report_end=self._report_end,
            has_worked=self._has_worked,
        )
        self._redis: OwnRedis | None = None
        self._stores: list[OwnRedis] = []
        self._signal: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._last_step: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._following: asyncio.Task[EndEvent] | None = None
        self._address_file = run_dir / "controller.address"
        self._address = announced(self._config.service.host, self._config.service.controller_port)
        self._began = False

    async def run(self) -> LaunchOutcome:
        """Starts the services, follows the run, and stops them."""
        outcome = LaunchOutcome(ok=False, message="ended by an error in the launcher", exit_code=1)
        running = asyncio.create_task(self._start_and_follow(), name="run")
        pulse = asyncio.create_task(self._pulse(), name="pulse")
        try:
            waiting: list[asyncio.Future[Any]] = [running, self._signal]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                outcome = self._if_interrupted(running.result())
            else:
                number = signal.Signals(self._signal.result())
                outcome = LaunchOutcome(ok=False, message=f"stopped by {number.name}", exit_code=128 + number)
        except PacelineError as error:
            outcome = LaunchOutcome(ok=False, message=str(error), exit_code=exit_code(error))
        finally:
            tasks = [running, pulse, *([self._last_step] if self._last_step else [])]
            await cancel(*tasks)
            outcome = self._with_full_disk(outcome)
            await self._stop(outcome)
        return replace(outcome, began=self._began)

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._view.pulse()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handles signals: SIGINT ends the run after the current step, others end it in order, a second one
        at once."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number))
        try:
            yield
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        now, asked_before = time.monotonic(), self._last_step is not None
        if asked_before and number is signal.SIGINT and now - self._asked_at < _SAME_SIGNAL_S:
            return
        if self._signal.done():
            self._tree.hurry()
        elif number is signal.SIGINT and not asked_before and self._view.trains:
            self._view.notice(
                f"{number.name}: the run ends after this step, with a checkpoint; again stops it at once"
            )
            self._asked_at = now
            self._last_step = asyncio.create_task(self._ask_for_last_step(), name="last step")
        else:
            self._signal.set_result(number)
            if asked_before and number is signal.SIGINT:
                self._tree.hurry()
                self._view.notice(f"{number.name}: stopping at once")
            else:
                self._view.notice(f"{number.name}: stopping in order; send it again to stop at once")

    async def _ask_for_last_step(self) -> None:
        while True:
            try:
                async with ControllerClient(self._address, self._credentials) as controller:
                    await controller.stop_run(signal.SIGINT.name, after_step=True)
            except PacelineError as error:
                log.info("could not tell the controller to end after this step: %s", error)
            await asyncio.sleep(_ASK_AGAIN_S)

    def _if_interrupted(self, outcome: LaunchOutcome) -> LaunchOutcome:
        """Returns the outcome, or that of an interrupted run if the run ended in order but early."""
        if not outcome.ok or self._last_step is None or self._view.finished >= self._config.trainer.num_steps:
            return outcome
        return replace(outcome, ok=False, exit_code=128 + signal.SIGINT)

    # --- start

    async def _start_and_follow(self) -> LaunchOutcome:
        broker_url = self._start_broker()
        checks = [
            asyncio.create_task(self._check(spec))
            for spec in self._planner.checks(self._config, self._run_dir)
        ]
        try:
            controller = await self._start_controller(broker_url)
            for unit in self._member_units():
                await self._services.start(unit)
            await self._controller_answers(controller)
            for check in checks:
                await check
        finally:
            await cancel(*checks)
            self._tree.end_forking()
        self._began = True
        run_dirs.link_latest(self._run_dir)
        specs = [process.spec for unit in self._services.units for process in unit.processes]
        if targets := plan.scrape_targets(specs):
            self._view.milestone(f"metrics endpoints: {run_dirs.write_targets(self._run_dir, targets)}")
        self._note.controller, self._note.state = self._address, "running"
        self._write_note()
        units = [unit for unit in self._services.units if unit.role is not Role.CONTROLLER]
        names = ", ".join(process.name for unit in units for process in unit.processes)
        self._view.milestone(f"started {names}; logs in {self._run_dir / 'logs'}")
        self._view.milestone("waiting until they have loaded the model")
        if self._is_open:
            self._view.notice(joining.how_to_join(self._config, self._run_dir, self._address))
        patience_s = self._config.service.recovery_timeout_s
        self._following = asyncio.create_task(
            follow(self._address, self._credentials, self._view, patience_s=patience_s), name="follow"
        )
        return await self._until_the_end(self._following)

    def _start_broker(self) -> str:
        if self._config.broker.url is not None:
            return self._config.broker.url
        from paceline.launch.own_redis import OwnRedis

        num_stores = self._config.num_own_stores
        start = functools.partial(
            OwnRedis, max_memory_mib=self._config.broker.max_memory_mib, num_servers=1 + num_stores
        )
        self._redis = start(self._run_dir / "redis", RestartHistory(self._services.rule))
        self._view.milestone(f"Redis answers on port {self._redis.server.port}")
        for number in range(num_stores):
            folder, history = self._run_dir / f"blob-store-{number}", RestartHistory(self._services.rule)
            self._stores.append(start(folder, history, what=f"blob store {number}", is_durable=False))
            self._view.milestone(f"blob store {number} answers on port {self._stores[-1].server.port}")
        return self._planner.broker_url(self._redis.server.url)

    def _note_end(self, name: str, outcome: str, restarts: bool) -> str:
        """Records that a process ended; returns in words when, and in which step."""
        end = ProcessEnd(
            time=round(time.time(), 3),
            name=name,
            outcome=outcome,
            step=self._view.now_step,
            restarts=restarts,
        )
        process_ends.append(self._run_dir, end)
        return end.where

    def _has_worked(self, role: Role) -> bool:
        """Returns whether a step was finished or a prompt answered; True for reward models (unknown)."""
        answered = role is Role.ROLLOUT and self._view.has_answers
        return answered or role is Role.REWARD_MODEL or self._view.finished >= 0

    async def _report_end(self, member_id: str, incarnations: Sequence[str], reason: str) -> None:
        """Tells the controller that a member has ended; gives up when its silence has shown that."""
        try:
            async with ControllerClient(self._address, self._credentials) as controller:
                patience_s = self._config.service.dead_after_s
                await controller.report_end(member_id, incarnations, reason, timeout_s=patience_s)
        except PacelineError as error:
            log.info("could not tell the controller that %s has ended: %s", member_id, error)

    def _write_note(self) -> None:
        if self._note.state == "ended":
            return
        self._note.pids = {"launcher": os.getpid(), **self._tree.pids}
        for redis in self._own_servers:
            if redis.server.running:
                self._note.pids[redis.name] = redis.server.pid
        run_dirs.write_note(self._run_dir, self._note)

    async def _check(self, spec: ProcessSpec) -> None:
        """Runs a check of the user's code or model while the services start."""
        hint = "importing the module of a reward function or a policy loss takes too long"
        async with self._startup_limit(spec.name, lambda: hint):
            process = await self._tree.run(spec)
        if process.exited.result() != 0:
            raise error_at_start(process)

    @contextlib.asynccontextmanager
    async def _startup_limit(self, peer: str, hint: Callable[[], str]) -> AsyncIterator[None]:
        """Raises DeadlineError, with the hint, if the block takes longer than a service may take to start."""
        timeout_s = self._config.service.startup_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            raise DeadlineError(phase="START", peer=peer, seconds=timeout_s, hint=hint()) from error

    async def _start_controller(self, broker_url: str) -> Unit:
        self._address_file.unlink(missing_ok=True)
        self._view.milestone("starting the controller, which reads the data and the tokenizer")
        unit = self._unit(
            "controller",
            Role.CONTROLLER,
            plan=lambda: [self._planner.controller(self._config, self._run_dir, self._address_file)],
            secrets={
                TOKEN: self._credentials.token,
                BROKER_URL: broker_url,
                **({BLOB_STORES: " ".join(s.server.url for s in self._stores)} if self._stores else {}),
            },
        )
        await self._services.start(unit)
        return unit

    async def _controller_answers(self, unit: Unit) -> None:
        (controller,) = unit.processes
        async with self._startup_limit(
            "the controller", lambda: f"its log {controller.log_path} ends with: {controller.last_error()}"
        ):
            # The controller knows nothing of its launcher, so it announces its address in a file.
            while not self._address_file.exists():
                if not controller.running:
                    raise error_at_start(controller)
                await asyncio.sleep(0.05)
        unit.presence.was_ready = True
        self._view.milestone(f"the controller answers on {self._address}")

    def _member_units(self) -> list[Unit]:
        """Returns the members; specs with the same member id are one unit."""
        by_member: dict[str, list[ProcessSpec]] = {}
        for spec in self._plan_members():
            by_member.setdefault(spec.member_id or spec.name, []).append(spec)
        return [
            self._unit(
                "the learner" if len(specs) > 1 else specs[0].name,
                specs[0].role,
                member_id=member_id,
                plan=functools.partial(self._plan_members, member_id),
                secrets={specs[0].token_variable: self._credentials.token},
            )
            for member_id, specs in by_member.items()
        ]

    def _plan_members(self, member_id: str | None = None) -> list[ProcessSpec]:
        """Returns the specs of one member or of all, with a new port for the learner's ranks."""
        specs = self._planner.members(
            self._config, Machine.here(), controller_address=self._address, master_port=free_port()
        )
        return [spec for spec in specs if member_id in (None, spec.member_id or spec.name)]

    def _unit(
        self,
        name: str,
        role: Role,
        *,
        plan: Callable[[], Sequence[ProcessSpec]],
        secrets: Mapping[str, str],
        member_id: str = "",
    ) -> Unit:
        service = self._config.service
        # The controller, which declares the others dead, gets more time itself.
        silence_s = service.dead_after_s * (2 if role is Role.CONTROLLER else 1)
        presence = Presence(startup_s=service.startup_timeout_s, silence_s=silence_s)
        presence.was_ready = role is Role.REWARD_MODEL  # a reward model does not report when it is ready
        history = RestartHistory(self._services.rule)
        return Unit(
            name, role, member_id=member_id, plan=plan, secrets=secrets, history=history, presence=presence
        )

    # --- follow

    async def _until_the_end(self, following: asyncio.Task[EndEvent]) -> LaunchOutcome:
        """Returns when the controller reports the end, or when a service cannot be restarted."""
        liveness = Liveness(self._services, say=self._view.notice, milestone=self._view.milestone)
        tending = [
            asyncio.create_task(self._services.tend(), name="services"),
            asyncio.create_task(liveness.run(self._address, self._credentials), name="liveness"),
        ]
        tending += [asyncio.create_task(self._tend(redis), name=redis.name) for redis in self._own_servers]
        try:
            await asyncio.wait([following, *tending], return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                return await self._explain(outcome_of_run(following))
            return failed(next(task.result() for task in tending if task.done()))
        finally:
            await cancel(*tending)

    @property
    def _own_servers(self) -> list[OwnRedis]:
        return [*([self._redis] if self._redis is not None else []), *self._stores]

    async def _tend(self, redis: OwnRedis) -> str:
        """Restarts a server whenever it ends; returns why the run cannot go on without it."""
        reason = await redis.tend(say=self._view.notice, changed=self._write_note, note_end=self._note_end)
        if redis is not self._redis:
            self._view.notice(f"{reason}; the run goes on without it")
            await asyncio.Event().wait()
        return reason

    async def _explain(self, outcome: LaunchOutcome) -> LaunchOutcome:
        """Returns the controller's outcome, with the death of the process that may have caused it.

        A killed process loses its connections before its end is seen here, so the controller's error may
        arrive first.
        """
        if outcome.ok:
            return outcome
        await asyncio.sleep(_LATE_DEATH_S)
        loss = self._services.recent_loss(_RECENT_S)
        return failed(f"{outcome.message} ({loss})") if loss else outcome

    def _with_full_disk(self, outcome: LaunchOutcome) -> LaunchOutcome:
        """Adds a full disk to the outcome as its possible cause, which a process could not log."""
        full = "" if outcome.ok or DISK_IS_FULL in outcome.message else full_disk(self._run_dir)
        return replace(outcome, message=f"{outcome.message} ({full})") if full else outcome

    # --- stop

    async def _stop(self, outcome: LaunchOutcome) -> None:
        """Ends everything in order; kills what does not end in time."""
        budget_s = self._config.service.shutdown_timeout_s
        was_asked = self._signal.done() or self._last_step is not None
        if not outcome.ok and not was_asked:
            budget_s = min(budget_s, _FAILURE_BUDGET_S)
        try:
            self._view.milestone("stopping the services")
            if not self._tree.hurried:
                await self._ask_to_stop(outcome)
            killed = await self._tree.stop(budget_s=budget_s)
            if killed:
                log.warning("killed, because they did not end in time: %s", ", ".join(killed))
        finally:
            if self._following is not None:
                await cancel(self._following)
            for redis in self._own_servers:
                redis.end(keep_data=not outcome.ok and not self._signal.done())
            for process in self._tree.sweep():
                log.warning("killed a process that was left behind: %s", process)
            self._scratch.cleanup()
            with contextlib.suppress(EnvironmentLackError):  # the disk is full, as the outcome says
                run_dirs.end_note(self._run_dir, self._note, outcome.message)

    async def _ask_to_stop(self, outcome: LaunchOutcome) -> None:
        """Tells the controller, so that its journal ends with the reason and its members leave."""
        following = self._following
        if following is None or following.done():
            return
        if not self._tree.running(Role.CONTROLLER):
            return
        try:
            async with ControllerClient(self._address, self._credentials) as controller:
                await controller.stop_run(outcome.message)
            await asyncio.wait([following], timeout=3.0)
        except PacelineError as error:
            log.info("could not tell the controller to stop: %s", error)


def _with_ports(config: RunConfig) -> RunConfig:
    """Returns the configuration with the ports that others must know before a server listens.

    These are the ports of the controller and, if reward models attach to it, of the reward service. Restarted
    servers keep them.
    """
    service = config.service
    ports, among = {}, read_ports(service.ports) if service.ports else None
    if not service.controller_port:
        ports["controller_port"] = free_port(among)
    if config.reward.models and not service.reward_port:
        ports["reward_port"] = free_port(among)
    return config.model_copy(update={"service": service.model_copy(update=ports)})
