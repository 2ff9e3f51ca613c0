"""Finds a dead or frozen rank: every rank writes heartbeats to the group's store and reads the others'.

    beat:  every second, writes its own count to the store and reads the others' counts
    check: every second, adds one for each rank without a new count; at the limit the rank is lost

The count of a rank whose process was told to end is negative, so that rank 0 learns of it across hosts. There
are two threads, because a call to the store of a frozen rank 0 does not return. Time is counted in turns of
the check, so a rank that was itself paused declares no other rank dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from paceline.core.errors import PeerLostError
from paceline.core.members import MemberKind, RankRef
from paceline.learner.distributed.collectives import agree
from paceline.learner.distributed.ranks import Ranks

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
_SUSPECT_TURNS = 3
_KEY = "paceline/beat/{rank}"


class Silence:
    """Counts for how many turns each rank has been silent.

    Args:
        others: the ranks to watch.
        limit: turns after which a rank is lost.
    """

    def __init__(self, others: Sequence[int], limit: int) -> None:
        self._limit = limit
        self._counts = dict.fromkeys(others, -1)
        self._turns = dict.fromkeys(others, 0)

    def heard(self, counts: Mapping[int, int]) -> None:
        """Notes the counts in the store; only a count that has changed is a sign of life."""
        for rank, count in counts.items():
            if count != self._counts[rank]:
                self._counts[rank], self._turns[rank] = count, 0

    def turn(self) -> int | None:
        """Counts one more turn; returns the lowest rank that is lost."""
        for rank in self._turns:
            self._turns[rank] += 1
        return self.silent_for(self._limit)

    def silent_for(self, turns: int) -> int | None:
        """Returns the lowest rank that has been silent for at least `turns` turns; None if none has."""
        return min((rank for rank, silent in self._turns.items() if silent >= turns), default=None)


class Heartbeats:
    """A rank's two threads; a context manager.

    Args:
        ranks: the group; every rank enters at the same time.
        limit_s: longest time in seconds that a rank may be silent.
        lost: called once, in the checking thread, with the error that names the silent rank. The thread that
            trains may wait for that rank in a collective, so `lost` has to end the process.
        told: called once, in the beating thread, when another rank's process was told to end.

    Attributes:
        is_told: set when this rank's process is told to end.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        limit_s: float,
        lost: Callable[[PeerLostError], None],
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self._ranks, self._limit_s, self._lost, self._told = ranks, limit_s, lost, told
        self.is_told = threading.Event()
        self._others = [rank for rank in range(ranks.world.size) if rank != ranks.world.rank]
        self._silence = Silence(self._others, limit=round(limit_s / INTERVAL_S))
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        if self._others:
            self._ranks.store.set(_KEY.format(rank=self._ranks.world.rank), "0")
            agree(self._ranks, None)  # now the store has a count of every rank
            for name, work in (("heartbeat", self._beat), ("heartbeat-check", self._check)):
                threading.Thread(target=work, name=name, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def find_silent(self) -> int | None:
        """Returns the rank that went silent just now, if one did; takes some seconds."""
        deadline = time.monotonic() + (_SUSPECT_TURNS + 2) * INTERVAL_S
        while self._others and time.monotonic() < deadline:
            with self._lock:
                rank = self._silence.silent_for(_SUSPECT_TURNS)
            if rank is not None:
                return rank
            time.sleep(INTERVAL_S / 4)
        return None

    def _beat(self) -> None:
        # A separate connection, because the group's is busy while a rank waits for a key.
        store = self._ranks.store.clone()  # type: ignore[attr-defined]
        keys = [_KEY.format(rank=rank) for rank in self._others]
        count, has_said = 0, False
        while not self._stopped.wait(INTERVAL_S):
            count += 1
            beat = -count if self.is_told.is_set() else count
            try:
                store.set(_KEY.format(rank=self._ranks.world.rank), str(beat))
                counts = [int(value) for value in store.multi_get(keys)]
            except RuntimeError as error:  # the store died with rank 0, which `_check` will notice
                log.debug("heartbeat: %s", error)
                continue
            with self._lock:
                self._silence.heard(dict(zip(self._others, counts, strict=True)))
            if not has_said and any(count < 0 for count in counts):
                has_said = True
                self._told()

    def _check(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            with self._lock:
                rank = self._silence.turn()
            if rank is not None and not self._stopped.is_set():
                self._lost(
                    PeerLostError(
                        f"learner rank {rank} has been silent for {self._limit_s:g} s "
                        "(learner.rank_silent_s): it is dead, frozen or cut off; look at its log and machine",
                        peer=RankRef(MemberKind.LEARNER, rank),
                    )
                )
                return
