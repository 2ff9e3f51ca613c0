"""A Redis server of the run, which is started in the run directory and restarted when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from paceline.broker.redis.redis_server import RedisServer
from paceline.core.errors import EnvironmentLackError
from paceline.launch.processes.restarts import RestartHistory
from paceline.launch.processes.spawn import outcome_of, wait_for_exit

log = logging.getLogger(__name__)


class OwnRedis:
    """Owns a server; use it in the main thread: the server dies with the thread that started it.

    Args:
        folder: its folder, whose name is also the process's.
        what: the server in messages.
        is_durable: whether it is restarted with its data; a blob store is not.
        max_memory_mib, num_servers: as in `RedisServer.start`.
    """

    def __init__(
        self,
        folder: Path,
        history: RestartHistory,
        *,
        what: str = "Redis server",
        is_durable: bool = True,
        max_memory_mib: int | None = None,
        num_servers: int = 1,
    ) -> None:
        self.name, self._what, self._history = folder.name, what, history
        self.server = RedisServer.start(
            folder,
            max_memory_mib=max_memory_mib,
            num_servers=num_servers,
            is_durable=is_durable,
            die_with_parent=True,
        )

    def end(self, *, keep_data: bool) -> None:
        """Stops the server; `keep_data` is only for inspecting a failed run, because no run resumes from the
        data."""
        self.server.stop()
        if not keep_data:
            self.server.delete_data()

    async def tend(
        self,
        *,
        say: Callable[[str], None],
        changed: Callable[[], None],
        note_end: Callable[[str, str, bool], str],
    ) -> str:
        """Restarts the server whenever it ends; returns a sentence that says why it is not restarted any
        more.

        The arguments are those of `Services`.
        """
        reason = outcome = ""
        while True:
            if not reason:
                await wait_for_exit(self.server.pid)
                outcome = outcome_of(self.server.exit_code())
                reason = f"the run's {self._what} ended unexpectedly ({outcome})"
            pause_s = self._history.next_pause(asyncio.get_running_loop().time())
            if outcome:
                reason = f"{reason} {note_end(self.name, outcome, pause_s is not None)}"
                outcome = ""
            if pause_s is None:
                rule = self._history.rule
                return f"{reason}; it was started again {rule} already [log: {self.server.log_path}]"
            sentence = f"{reason}; starting it again ({self._history.recent} of at most {self._history.rule})"
            log.warning("%s", sentence)
            say(sentence)
            await asyncio.sleep(pause_s)
            try:
                self.server.restart()
            except EnvironmentLackError as error:
                reason = str(error)
            else:
                reason = ""
                changed()
