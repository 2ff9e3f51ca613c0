"""Lists all exported metrics with their kinds, labels and help texts.

Names are part of the interface: dashboards and alerts use them. `training` derives names from those of
metrics.jsonl: "actor/grad_norm" becomes paceline_training_actor_grad_norm.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from paceline.core.run_record import step_metrics


class MetricKind(enum.Enum):
    """The type of a metric; the value is Prometheus' word."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Describes a metric that services export.

    Attributes:
        name: as Prometheus shows it; counters end in _total.
        help: one line that describes it, with its unit.
        labels: labels of its series, besides service_name and service_instance_id.
        services: the services that export it.
    """

    name: str
    help: str
    kind: MetricKind = MetricKind.GAUGE
    labels: tuple[str, ...] = ()
    services: tuple[str, ...] = ("controller",)


Observation = tuple[float, Mapping[str, str]]
"""A value and its labels."""

Observer = Callable[[], Iterable[Observation]]
"""Called in the reader's thread when the metrics are read; series that it omits are not exported."""

Observe = Callable[[Metric, Observer], None]
"""Registers the callback of a metric."""

_ALL = ("controller", "rollout", "learner", "reward")
_MEMBERS = ("rollout", "learner", "reward")
_ON_GPUS = ("rollout", "learner")

_counter = partial(Metric, kind=MetricKind.COUNTER)
_of_gpu = partial(Metric, labels=("gpu", "uuid"), services=_ON_GPUS)
_of_mailbox = partial(_counter, labels=("mailbox",), services=("rollout", "reward"))

# --- the process

MEMORY = Metric(
    name="paceline_process_resident_memory_bytes",
    help="Resident memory of the process (part=self) and of its child processes together (part=children).",
    labels=("part",),
    services=_ALL,
)
CPU = _counter(
    name="paceline_process_cpu_seconds_total",
    help="CPU time of the process and of children that have ended.",
    services=_ALL,
)
OPEN_FILES = Metric(
    name="paceline_process_open_files", help="Open file descriptors, sockets included.", services=_ALL
)
START_TIME = Metric(
    name="paceline_process_start_time_seconds", help="Unix time at which the process started.", services=_ALL
)
CERTIFICATE_LIFE = Metric(
    name="paceline_certificate_life_left_ratio",
    help="Remaining share of the lifetime of the process's certificate (file=cert.pem), and of the last "
    "authority that it trusts (file=ca.pem). Both are renewed at half. Absent without TLS.",
    labels=("file",),
    services=_ALL,
)
LOOP_LAG = Metric(
    name="paceline_event_loop_lag_seconds",
    help="Largest lag of the event loop in the last 10 s: how late it ran a callback.",
    services=_ALL,
)
GPU_MEMORY_USED = _of_gpu(
    name="paceline_gpu_memory_used_bytes",
    help="Memory in use, by any process, on a GPU that this process may use.",
)
GPU_MEMORY_TOTAL = _of_gpu(
    name="paceline_gpu_memory_total_bytes",
    help="Memory of the GPU.",
)
GPU_UTILISATION = _of_gpu(
    name="paceline_gpu_utilisation_ratio",
    help="Share of the driver's last sampling period in which a kernel ran, 0 to 1.",
)
GPU_POWER = _of_gpu(
    name="paceline_gpu_power_watts",
    help="Power that the GPU draws.",
)

BROKER_OUTAGE = _counter(
    name="paceline_broker_outage_seconds_total",
    help="Seconds for which the message broker did not answer this process, or had no memory for it.",
    services=_ALL,
)

BLOB_STORE_OUTAGE = _counter(
    name="paceline_blob_store_outage_seconds_total",
    help="Seconds for which a blob store did not answer this process, or had no memory for it.",
    services=_ALL,
)

# --- members

HEARTBEATS = _counter(
    name="paceline_heartbeats_total",
    help="Heartbeats to the controller (result=answered or failed).",
    labels=("result",),
    services=_MEMBERS,
)
DELIVERIES = _of_mailbox(
    name="paceline_deliveries_total",
    help="Entries that this process took from a mailbox.",
)
REDELIVERIES = _of_mailbox(
    name="paceline_redeliveries_total",
    help="Entries taken that had been delivered before: their consumer died, was slow, or gave them back.",
)
LEASES_LOST = _of_mailbox(
    name="paceline_leases_lost_total",
    help="Entries that went to another consumer while this process worked on them.",
)
TOKENS_CARRIED_OVER = _counter(
    name="paceline_tokens_carried_over_total",
    help="Tokens from earlier attempts that this server reused to continue unfinished samples.",
    services=("rollout",),
)
PROGRESS_SAVED = _counter(
    name="paceline_progress_saved_bytes_total",
    help="Bytes of progress of unfinished samples, saved in case this server dies or leaves.",
    services=("rollout",),
)
REWARD_QUEUE = Metric(
    name="paceline_reward_queue_items",
    help="Items sent to a scorer and not scored yet, waiting or under way; functions count together.",
    labels=("scorer",),
    services=("reward",),
)

# --- the run

TERM = Metric(name="paceline_journal_term", help="Number of starts of the controller in this run.")
RUN_STEP = Metric(name="paceline_run_step", help="The step that the run is in.")
RUN_STEPS = Metric(name="paceline_run_total_steps", help="trainer.total_steps.")
PHASE_SECONDS = Metric(
    name="paceline_run_phase_seconds",
    help="Seconds since the run entered its current phase; other phases have no series.",
    labels=("phase",),
)
WANTED = Metric(
    name="paceline_collection_wanted", help="Trajectories that the current collection needs; else 0."
)
ADMITTED = Metric(
    name="paceline_collection_admitted", help="Trajectories that the current collection has; else 0."
)
POLICY_VERSION = Metric(name="paceline_policy_version", help="The committed policy version.")
MEMBERS = Metric(
    name="paceline_members",
    help="Members by kind, state and health as the controller sees them.",
    labels=("kind", "state", "health"),
)
MEMBER_SILENCE = Metric(
    name="paceline_member_silence_seconds",
    help="Seconds since a member's last heartbeat; only members that are alive or suspect.",
    labels=("kind", "member"),
)
MEMBER_IN_FLIGHT = Metric(
    name="paceline_member_in_flight",
    help="Samples or trajectories that a member is working on.",
    labels=("kind", "member"),
)
MEMBER_CHANGES = _counter(
    name="paceline_member_changes_total",
    help="Members that registered, became suspect, alive again or dead, or left (change).",
    labels=("kind", "change"),
)
MEMBER_RESTARTS = _counter(
    name="paceline_member_restarts_total",
    help="Registrations of a new incarnation of a member that the controller already knew.",
    labels=("kind", "member"),
)
RECOVERY_SECONDS = Metric(
    name="paceline_member_recovery_seconds",
    help="Seconds from the detection of a member's last loss until the member was ready again.",
    labels=("kind", "member"),
)
MAILBOX_ENTRIES = Metric(
    name="paceline_mailbox_entries",
    help="Entries in a mailbox's stream, taken ones included, measured every 5 s.",
    labels=("mailbox",),
)
BLOB_STORE_UP = Metric(
    name="paceline_blob_store_up",
    help="1 if a blob store answers the controller, measured every 5 s, else 0.",
    labels=("store",),
)
BLOB_STORE_BYTES = Metric(
    name="paceline_blob_store_bytes",
    help="Memory that a blob store uses, measured every 5 s; 0 while it does not answer.",
    labels=("store",),
)
REFUSALS = _counter(
    name="paceline_refusals_total",
    help="Prompt groups that rollout servers or reward services gave up.",
    labels=("reason",),
)
VERDICTS = _counter(
    name="paceline_trajectories_total",
    help="Trajectories that the barrier judged, by its verdict.",
    labels=("verdict",),
)
PUSH_SECONDS = Metric(
    name="paceline_push_seconds",
    help="Duration of the last push, from its start until every server samples the new version.",
)
PUSHES = _counter(
    name="paceline_pushes_total",
    help="Pushes (result=committed, or lost if a member was lost in the transfer).",
    labels=("result",),
)
GUARD_VALUE = Metric(
    name="paceline_guard_value",
    help="Value that a guard rule judged in the last step, in the units of its bounds: for a relative rule "
    "the multiple of the running median.",
    labels=("rule", "network"),
)
GUARD_BOUND = Metric(
    name="paceline_guard_bound",
    help="The bound of a guard rule's action in this run's configuration.",
    labels=("rule", "action"),
)
GUARD_FIRINGS = _counter(
    name="paceline_guard_firings_total",
    help="Firings of guard rules by the strongest action taken.",
    labels=("rule", "network", "action"),
)
TRAINING_STEP = Metric(
    name="paceline_training_step", help="The finished step to which the paceline_training_ metrics belong."
)


def training(name: str) -> Metric:
    """Returns the exported metric of a name in metrics.jsonl; it keeps its value in steps without it."""
    return Metric(
        name="paceline_training_" + re.sub(r"[^a-zA-Z0-9_]", "_", name),
        help=f"{name} of metrics.jsonl, of the last step that has it. {step_metrics.meaning(name)}".rstrip(),
    )
