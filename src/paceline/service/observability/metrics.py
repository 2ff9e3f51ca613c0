"""Lists all exported metrics with their kinds, labels and help texts.

Names are part of the interface: dashboards and alerts use them. `training` derives names from those of
metrics.jsonl: "actor/grad_norm" becomes paceline_training_actor_grad_norm.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial

from paceline.core.run_record import step_metrics


class MetricKind(enum.Enum):
    """The type of a metric; the value is Prometheus' word."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
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
    _: KW_ONLY
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
_of_all = partial(Metric, services=_ALL)
_of_member = partial(Metric, labels=("kind", "member"))
_of_gpu = partial(Metric, labels=("gpu", "uuid"), services=_ON_GPUS)
_of_mailbox = partial(_counter, labels=("mailbox",), services=("rollout", "reward"))

# --- the process

MEMORY = _of_all(
    "paceline_process_resident_memory_bytes",
    "Resident memory of the process (part=self) and of its child processes together (part=children).",
    labels=("part",),
)
CPU = _counter(
    "paceline_process_cpu_seconds_total",
    "CPU time of the process and of children that have ended.",
    services=_ALL,
)
OPEN_FILES = _of_all("paceline_process_open_files", "Open file descriptors, sockets included.")
START_TIME = _of_all("paceline_process_start_time_seconds", "Unix time at which the process started.")
CERTIFICATE_LIFE = _of_all(
    "paceline_certificate_life_left_ratio",
    "Remaining share of the lifetime of the process's certificate (file=cert.pem), and of the last "
    "authority that it trusts (file=ca.pem). Both are renewed at half. Absent without TLS.",
    labels=("file",),
)
LOOP_LAG = _of_all(
    "paceline_event_loop_lag_seconds",
    "Largest lag of the event loop in the last 10 s: how late it ran a callback.",
)
GPU_MEMORY_USED = _of_gpu(
    "paceline_gpu_memory_used_bytes", "Memory in use, by any process, on a GPU that this process may use."
)
GPU_MEMORY_TOTAL = _of_gpu("paceline_gpu_memory_total_bytes", "Memory of the GPU.")
GPU_UTILISATION = _of_gpu(
    "paceline_gpu_utilisation_ratio",
    "Share of the driver's last sampling period in which a kernel ran, 0 to 1.",
)
GPU_POWER = _of_gpu("paceline_gpu_power_watts", "Power that the GPU draws.")

BROKER_OUTAGE = _counter(
    "paceline_broker_outage_seconds_total",
    "Seconds for which the message broker did not answer this process, or had no memory for it.",
    services=_ALL,
)

BLOB_STORE_OUTAGE = _counter(
    "paceline_blob_store_outage_seconds_total",
    "Seconds for which a blob store did not answer this process, or had no memory for it.",
    services=_ALL,
)

# --- members

HEARTBEATS = _counter(
    "paceline_heartbeats_total",
    "Heartbeats to the controller (result=answered or failed).",
    labels=("result",),
    services=_MEMBERS,
)
DELIVERIES = _of_mailbox("paceline_deliveries_total", "Entries that this process took from a mailbox.")
REDELIVERIES = _of_mailbox(
    "paceline_redeliveries_total",
    "Entries taken that had been delivered before: their consumer died, was slow, or gave them back.",
)
LEASES_LOST = _of_mailbox(
    "paceline_leases_lost_total", "Entries that went to another consumer while this process worked on them."
)
TOKENS_CARRIED_OVER = _counter(
    "paceline_tokens_carried_over_total",
    "Tokens from earlier attempts that this server reused to continue unfinished samples.",
    services=("rollout",),
)
PROGRESS_SAVED = _counter(
    "paceline_progress_saved_bytes_total",
    "Bytes of progress of unfinished samples, saved in case this server dies or leaves.",
    services=("rollout",),
)
REWARD_QUEUE = Metric(
    "paceline_reward_queue_items",
    "Items sent to a scorer and not scored yet, waiting or under way; functions count together.",
    labels=("scorer",),
    services=("reward",),
)

# --- the run

TERM = Metric("paceline_journal_term", "Number of starts of the controller in this run.")
RUN_STEP = Metric("paceline_run_step", "The step that the run is in.")
RUN_STEPS = Metric("paceline_run_total_steps", "trainer.total_steps.")
PHASE_SECONDS = Metric(
    "paceline_run_phase_seconds",
    "Seconds since the run entered its current phase; other phases have no series.",
    labels=("phase",),
)
WANTED = Metric("paceline_collection_wanted", "Trajectories that the current collection needs; else 0.")
ADMITTED = Metric("paceline_collection_admitted", "Trajectories that the current collection has; else 0.")
POLICY_VERSION = Metric("paceline_policy_version", "The committed policy version.")
MEMBERS = Metric(
    "paceline_members",
    "Members by kind, state and health as the controller sees them.",
    labels=("kind", "state", "health"),
)
MEMBER_SILENCE = _of_member(
    "paceline_member_silence_seconds",
    "Seconds since a member's last heartbeat; only members that are alive or suspect.",
)
MEMBER_IN_FLIGHT = _of_member(
    "paceline_member_in_flight", "Samples or trajectories that a member is working on."
)
MEMBER_CHANGES = _counter(
    "paceline_member_changes_total",
    "Members that registered, became suspect, alive again or dead, or left (change).",
    labels=("kind", "change"),
)
MEMBER_RESTARTS = _counter(
    "paceline_member_restarts_total",
    "Registrations of a new incarnation of a member that the controller already knew.",
    labels=("kind", "member"),
)
RECOVERY_SECONDS = _of_member(
    "paceline_member_recovery_seconds",
    "Seconds from the detection of a member's last loss until the member was ready again.",
)
MAILBOX_ENTRIES = Metric(
    "paceline_mailbox_entries",
    "Entries in a mailbox's stream, taken ones included, measured every 5 s.",
    labels=("mailbox",),
)
BLOB_STORE_UP = Metric(
    "paceline_blob_store_up",
    "1 if a blob store answers the controller, measured every 5 s, else 0.",
    labels=("store",),
)
BLOB_STORE_BYTES = Metric(
    "paceline_blob_store_bytes",
    "Memory that a blob store uses, measured every 5 s; 0 while it does not answer.",
    labels=("store",),
)
REFUSALS = _counter(
    "paceline_refusals_total",
    "Prompt groups that rollout servers or reward services gave up.",
    labels=("reason",),
)
VERDICTS = _counter(
    "paceline_trajectories_total",
    "Trajectories that the barrier judged, by its verdict.",
    labels=("verdict",),
)
PUSH_SECONDS = Metric(
    "paceline_push_seconds",
    "Duration of the last push, from its start until every server samples the new version.",
)
PUSHES = _counter(
    "paceline_pushes_total",
    "Pushes (result=committed, or lost if a member was lost in the transfer).",
    labels=("result",),
)
GUARD_VALUE = Metric(
    "paceline_guard_value",
    "Value that a guard rule judged in the last step, in the units of its bounds: for a relative rule "
    "the multiple of the running median.",
    labels=("rule", "network"),
)
GUARD_BOUND = Metric(
    "paceline_guard_bound",
    "The bound of a guard rule's action in this run's configuration.",
    labels=("rule", "action"),
)
GUARD_FIRINGS = _counter(
    "paceline_guard_firings_total",
    "Firings of guard rules by the strongest action taken.",
    labels=("rule", "network", "action"),
)
TRAINING_STEP = Metric(
    "paceline_training_step", "The finished step to which the paceline_training_ metrics belong."
)


def training(name: str) -> Metric:
    """Returns the exported metric of a name in metrics.jsonl; it keeps its value in steps without it."""
    return Metric(
        "paceline_training_" + re.sub(r"[^a-zA-Z0-9_]", "_", name),
        f"{name} of metrics.jsonl, of the last step that has it. {step_metrics.meaning(name)}".rstrip(),
    )
