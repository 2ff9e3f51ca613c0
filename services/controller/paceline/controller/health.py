"""The run's health as metrics: step, phase and policy, members, mailboxes, the guard's bounds.

Values that change with time or disappear with a member are read when the metrics are scraped. Mailbox lengths
are requested from the broker every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NoReturn

from paceline.broker import names
from paceline.broker.base import Broker
from paceline.controller.batch.barrier import Verdict
from paceline.controller.fleet.membership import Fleet, Member
from paceline.controller.progress import Progress, Run
from paceline.core.clock import Clock
from paceline.core.errors import BrokerError, DeadlineError
from paceline.core.guard import RULES
from paceline.service.observability import metrics, telemetry
from paceline.service.observability.metrics import Observation

log = logging.getLogger(__name__)

_INTERVAL_S = 5.0
_REFUSALS = ("deadline", "engine_error", "max_deliveries", "not_finite")


def observe_run(run: Run, progress: Progress, fleet: Fleet, clock: Clock) -> None:
    """Offers the metrics of the run and its members; call it after telemetry's `setup`."""
    _begin_counters(run)
    _observe_progress(run, progress)
    _observe_members(fleet, clock)

    def bounds() -> Iterator[Observation]:
        for rule, limits in run.config.guard.limits.items():
            for action, bound in limits.bounds.items():
                yield bound, {"rule": rule, "action": action.value}

    telemetry.observe(metrics.GUARD_BOUND, bounds)


def _begin_counters(run: Run) -> None:
    """Creates counters with the value 0: if one appeared with the value 1, the increase would not be seen."""
    for verdict in Verdict:
        telemetry.count(metrics.VERDICTS, 0, verdict=verdict.value)
    for reason in _REFUSALS:
        telemetry.count(metrics.REFUSALS, 0, reason=reason)
    for result in ("committed", "lost"):
        telemetry.count(metrics.PUSHES, 0, result=result)
    for rule, limits in run.config.guard.limits.items():
        for action in limits.bounds:
            for network in RULES[rule].networks or ("",):
                telemetry.count(metrics.GUARD_FIRINGS, 0, rule=rule, network=network, action=action.value)


def _observe_progress(run: Run, progress: Progress) -> None:
    def policy_version() -> Iterator[Observation]:
        if progress.policy is not None:
            yield progress.policy.version, {}

    def phase_seconds() -> Iterator[Observation]:
        yield time.monotonic() - progress.phase_began, {"phase": progress.phase.value}

    telemetry.observe(metrics.TERM, lambda: [(run.journal.term, {})])
    telemetry.observe(metrics.RUN_STEP, lambda: [(progress.step, {})])
    telemetry.observe(metrics.RUN_STEPS, lambda: [(run.config.trainer.num_steps, {})])
    telemetry.observe(metrics.PHASE_SECONDS, phase_seconds)
    telemetry.observe(metrics.POLICY_VERSION, policy_version)
    telemetry.observe(metrics.WANTED, lambda: [(progress.wanted, {})])
    telemetry.observe(metrics.ADMITTED, lambda: [(progress.admitted, {})])


def _observe_members(fleet: Fleet, clock: Clock) -> None:
    def of_usable(value: Callable[[Member], float]) -> Iterator[Observation]:
        for member in fleet.members():
            if member.usable:
                yield value(member), {"kind": member.kind.value, "member": member.member_id}

    def members() -> Iterator[Observation]:
        states = Counter(
            (m.kind.value, m.state.value if m.state else "registered", m.health.value)
            for m in fleet.members()
        )
        for (kind, state, health), number in states.items():
            yield number, {"kind": kind, "state": state, "health": health}

    telemetry.observe(metrics.MEMBERS, members)
    telemetry.observe(metrics.MEMBER_SILENCE, lambda: of_usable(lambda m: clock.monotonic() - m.last_heard))
    telemetry.observe(metrics.MEMBER_IN_FLIGHT, lambda: of_usable(lambda m: m.in_flight))


async def measure_mailboxes(
    broker: Broker, run_id: str, progress: Progress, *, in_flight: bool = False
) -> NoReturn:
    """Asks for the lengths of the run's mailboxes, and for the state of the blob stores, until cancelled.

    Args:
        in_flight: whether pushes land in the middle of an answer; one mailbox then has the prompts for all
            versions.
    """
    while True:
        version = progress.policy.version if progress.policy is not None else 0
        streams = (
            names.prompts(run_id, None if in_flight else version),
            names.trajectories(run_id),
            names.scored(run_id),
        )
        try:
            for stream in streams if telemetry.is_measuring() else ():
                length = await broker.length(stream)
                telemetry.record(metrics.MAILBOX_ENTRIES, length, mailbox=names.mailbox(stream))
            for store, used in (await broker.store_bytes() if telemetry.is_measuring() else {}).items():
                telemetry.record(metrics.BLOB_STORE_UP, used is not None, store=store)
                telemetry.record(metrics.BLOB_STORE_BYTES, used or 0, store=store)
        except (BrokerError, DeadlineError) as error:
            log.debug("mailbox lengths: %s", error)
        await asyncio.sleep(_INTERVAL_S)
