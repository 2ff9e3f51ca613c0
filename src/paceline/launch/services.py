"""The services of a run: starts them, restarts lost ones, and says when a restart cannot help.

a process ends -> its companions end -> the controller is told
    -> restarts.judge -> left | pause, start again | the run ends
a process that was never ready ends with an error, or one ends twice with the same error before any work
    -> the run ends, because more attempts would only delay the message, unless the process says that the next
    start may succeed
the controller misses a process that still runs -> it is killed -> as above
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence

from paceline.launch.planning.plan import ProcessSpec, Role
from paceline.launch.presence import Presence
from paceline.launch.processes.process_tree import ProcessTree
from paceline.launch.processes.restarts import End, RestartHistory, RestartRule, judge
from paceline.launch.processes.spawn import ManagedProcess
from paceline.service.tasks import cancel

log = logging.getLogger(__name__)

# After the end of a process, the reason or the end of the run may still be on its way. Members leave without
# an error when the run is over, and the controller's last event may come after their end.
_LATE_NEWS_S = 0.5
_LATE_END_S = 5.0
# The other ranks of a learner get this long to log why they lost a rank.
_COMPANIONS_S = 1.0
# Process ids, ports and addresses: two errors that differ only in these are the same.
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


class Unit:
    """A group of processes that start and end together: a service, or all ranks of a learner."""

    def __init__(
        self,
        name: str,
        role: Role,
        *,
        member_id: str = "",
        plan: Callable[[], Sequence[ProcessSpec]],
        secrets: Mapping[str, str],
        history: RestartHistory,
        presence: Presence,
    ) -> None:
        self.name, self.role, self.member_id = name, role, member_id
        self.plan, self.secrets = plan, secrets
        self.history, self.presence = history, presence
        self.processes: list[ManagedProcess] = []
        self.ending: asyncio.Task[str | None] | None = None
        self.gone = False
        self.last_error = ""

    @property
    def running(self) -> bool:
        """Whether the unit works, as far as the launcher knows."""
        return self.ending is None and any(process.running for process in self.processes)

    def repeats(self, error: str) -> bool:
        """Notes the error with which the unit ended, or ""; returns whether it ended with the same error
        before."""
        last, self.last_error = self.last_error, _NUMBERS.sub("#", error)
        return bool(error) and self.last_error == last

    def kill(self) -> None:
        """Kills the unit's processes that still run."""
        for process in self.processes:
            if process.running:
                process.signal_group(signal.SIGKILL)


class Services:
    """The units of a run.

    Args:
        say: shows a message to the user.
        changed: called after every start, with new process ids.
        note_end: records that a process ended: its name, how, and whether it is started again; returns in
            words when and in which step.
        report_end: tells the controller which incarnations of a member have ended, and how.
        has_worked: whether units of a role have done useful work in this run.
    """

    def __init__(
        self,
        tree: ProcessTree,
        rule: RestartRule,
        *,
        say: Callable[[str], None],
        changed: Callable[[], None],
        note_end: Callable[[str, str, bool], str],
        report_end: Callable[[str, Sequence[str], str], Awaitable[None]],
        has_worked: Callable[[Role], bool],
    ) -> None:
        self._tree, self.rule, self._say, self._changed = tree, rule, say, changed
        self._note_end_of, self._report_end, self._has_worked = note_end, report_end, has_worked
        self._reports: set[asyncio.Task[None]] = set()
        self.units: list[Unit] = []
        self._last_loss, self._lost_at = "", -math.inf

    async def start(self, unit: Unit) -> None:
        """Adds a unit to the run and starts its processes."""
        self.units.append(unit)
        await self._start(unit)

    def recent_loss(self, within_s: float) -> str:
        """Returns a sentence on the last process that a signal ended, if that was at most this long ago; or
        ""."""
        return self._last_loss if asyncio.get_running_loop().time() - self._lost_at < within_s else ""

    async def tend(self) -> str:
        """Restarts units that end, until a restart cannot help; returns a sentence that says why."""
        try:
            while True:
                ended = asyncio.create_task(self._tree.next_exit(), name="next exit")
                endings = {unit.ending for unit in self.units if unit.ending is not None}
                try:
                    await asyncio.wait({ended, *endings}, return_when=asyncio.FIRST_COMPLETED)
                    if ended.done():
                        self._note_end(ended.result())
                finally:
                    await cancel(ended)
                failures = [failure for unit in self.units if (failure := self._settle(unit)) is not None]
                if failures:
                    return failures[0]
        finally:
            await self._cancel_endings()

    def _note_end(self, process: ManagedProcess) -> None:
        """Begins to handle a unit's end; later ends of its other processes count as the same end."""
        unit = next((unit for unit in self.units if process in unit.processes), None)
        if unit is not None and unit.ending is None:
            unit.ending = asyncio.create_task(self._end(unit, process), name=f"end of {unit.name}")

    def _settle(self, unit: Unit) -> str | None:
        """Closes an end that has been handled; a process may have ended again in the meantime."""
        if unit.ending is None or not unit.ending.done():
            return None
        failure, unit.ending = unit.ending.result(), None
        again = next((process for process in unit.processes if not process.running), None)
        if failure is None and again is not None and not unit.gone:
            self._note_end(again)
        return failure

    async def _cancel_endings(self) -> None:
        endings = [unit.ending for unit in self.units if unit.ending is not None]
        await cancel(*endings, *self._reports)

    async def _end(self, unit: Unit, first: ManagedProcess) -> str | None:
        """Handles the end of a unit's first process; returns why the run cannot go on, or None."""
        if first.exited.result() < 0:
            self._last_loss = first.describe_end("ended unexpectedly")
            self._lost_at = asyncio.get_running_loop().time()
        ended = await self._end_companions(unit)
        end = judge([process.exited.result() for process in ended])
        cause = _cause(ended, first, end)
        self._report(unit, cause)
        await asyncio.sleep(_LATE_END_S if end is End.LEFT else _LATE_NEWS_S)
        if end is End.LEFT and unit.role is Role.ROLLOUT:
            unit.gone = True
            self._tell(f"{unit.name} has left; it is not started again")
            return None
        failed = end is End.FAILED
        repeats = unit.repeats(cause.last_error() if failed else "") and not self._has_worked(unit.role)
        is_final = end is End.FINAL or repeats or (failed and not unit.presence.was_ready)
        pause_s = None if is_final else unit.history.next_pause(asyncio.get_running_loop().time())
        where = self._note_end_of(cause.name, cause.outcome(), pause_s is not None)
        reason = f"{cause.describe_end('ended unexpectedly')} {where}"
        if repeats:
            reason += "; it ended like this twice before it had done any work, so it is not started again"
        if is_final:
            return self._give_up(unit, reason)
        if pause_s is None:
            return self._give_up(unit, f"{reason}; it was started again {self.rule} already")
        self._tell(f"{reason}; starting {unit.name} again ({unit.history.recent} of at most {self.rule})")
        await asyncio.sleep(pause_s)
        await self._start(unit)
        return None

    def _report(self, unit: Unit, cause: ManagedProcess) -> None:
        """Tells the controller, which would only notice the member's silence; the restart does not wait for
        this."""
        if not unit.member_id or unit.role is Role.REWARD_MODEL:
            return
        error, name = cause.last_error(), "" if cause.name == unit.member_id else f"{cause.name} "
        reason = f"{name}{cause.outcome()}{f': {error}' if error else ''}"
        marks = [process.mark for process in unit.processes]
        report = asyncio.ensure_future(self._report_end(unit.member_id, marks, reason))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _end_companions(self, unit: Unit) -> list[ManagedProcess]:
        """Ends the rest of a unit; returns the processes that ended by themselves.

        The ranks that are left of a learner wait for the lost one, maybe for a long time.
        """
        waiting = [process.exited for process in unit.processes if process.running]
        if waiting:
            await asyncio.wait(waiting, timeout=_COMPANIONS_S)
        ended = [process for process in unit.processes if not process.running]
        unit.kill()
        await asyncio.gather(*(asyncio.shield(process.exited) for process in unit.processes))
        return ended

    def _give_up(self, unit: Unit, reason: str) -> str | None:
        unit.gone = True
        others = [u for u in self.units if u.role is Role.ROLLOUT and u is not unit and not u.gone]
        if unit.role is Role.ROLLOUT and others:
            self._tell(f"{reason}. The run goes on with the other rollout servers")
            return None
        return reason

    async def _start(self, unit: Unit) -> None:
        unit.processes = []
        unit.presence.start(asyncio.get_running_loop().time())
        for spec in unit.plan():
            unit.processes.append(await self._tree.start(spec, unit.secrets))
        self._changed()

    def _tell(self, sentence: str) -> None:
        log.warning("%s", sentence)
        self._say(sentence)


def _cause(processes: Sequence[ManagedProcess], first: ManagedProcess, end: End) -> ManagedProcess:
    """Returns the process whose end explains those of the others: `first`, unless it blames another one."""
    causes = [process for process in processes if judge([process.exited.result()]) is end]
    return first if first in causes or not causes else causes[0]
