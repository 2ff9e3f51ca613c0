"""Measures event-loop lag: how much later than planned this process's event loop runs its callbacks.

A blocked loop sends no heartbeats and answers no calls, so others take the process for dead. The gauge
`paceline_event_loop_lag_seconds` is the largest lag of each interval; lags over a second are logged at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NoReturn

from paceline.service.observability import metrics, telemetry

log = logging.getLogger(__name__)

_TICK_S = 0.25
_WARN_S = 1.0


async def measure_loop_lag(*, interval_s: float = 10.0) -> NoReturn:
    """Measures the lag of the event loop until cancelled."""
    while True:
        worst_s, until = 0.0, time.monotonic() + interval_s
        while time.monotonic() < until:
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            lag_s = time.monotonic() - due
            worst_s = max(worst_s, lag_s)
            if lag_s > _WARN_S:
                log.warning(
                    "this process did nothing for %.1f s: its event loop was blocked, or the process or the "
                    "machine was paused",
                    lag_s,
                )
        telemetry.record(metrics.LOOP_LAG, worst_s)
