"""Whether any phase went on for longer than its deadlines without an event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from paceline.config.run import RunConfig
from paceline.controller.phases import Phase
from paceline.controller.verify.findings import Entry, Findings, Invariant

# A machine may be slow to wake a process, and a clock may be set.
_SLACK = 1.5
_SLACK_S = 30.0


def check(entries: Iterable[Entry], config: RunConfig, findings: Findings) -> Iterator[Entry]:
    """Compares the times between events with the deadlines of the phase they lie in; passes the events on.

    The time before a controller's start is nobody's: it was not there.
    """
    limits = limits_of(config)
    phase, before = Phase.STARTING, None
    for entry in entries:
        if entry.kind == "run":
            phase, before = Phase.STARTING, None
        if before is not None and phase in limits:
            seconds = float(entry["time"]) - float(before["time"])
            limit = limits[phase]
            if seconds > _SLACK * limit + _SLACK_S:
                findings.add(
                    Invariant.I5,
                    f"nothing happened for {seconds:.0f} s in phase {phase.value}, which has a deadline of "
                    f"{limit:.0f} s",
                    before,
                    entry,
                )
        if entry.kind == "phase":
            phase = Phase(entry["to"])
        before = entry
        yield entry


def limits_of(config: RunConfig) -> Mapping[Phase, float]:
    """Per phase, the longest time in seconds that it may be without an event."""
    push = config.weights.push_timeout_s + config.weights.join_timeout_s
    collection = config.collect_timeout_s + config.service.recovery_timeout_s + config.broker.outage_timeout_s
    return {
        Phase.STARTING: config.service.startup_timeout_s,
        # The run waits this long for a member that was lost.
        Phase.FORMING: max(config.service.startup_timeout_s, config.service.recovery_timeout_s)
        + config.weights.join_timeout_s,
        Phase.DISPATCH: config.stall_timeout_s + config.broker.outage_timeout_s,
        Phase.COLLECT: collection,
        Phase.VALIDATE: collection,
        Phase.LEARN: config.learner.command_timeout_s,
        Phase.ROLLBACK: config.learner.command_timeout_s,
        Phase.CHECKPOINT: config.learner.command_timeout_s,
        Phase.PUBLISH: push,
        Phase.COMMIT: config.service.rpc_timeout_s + push,
    }
