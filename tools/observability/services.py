"""The dashboard of service health."""

from __future__ import annotations

from observability.dashboards import Dashboard, Panel

SERVICES = Dashboard(
    uid="paceline-services",
    title="Paceline: service health",
    rows=(
        (
            "Are all members there?",
            (
                Panel(
                    title="Members by state",
                    answers="Which members serve, load or drain, and which are suspect or dead?",
                    expressions=(
                        (
                            "sum by (kind, state, health) (paceline_members)",
                            "{{kind}} {{state}} ({{health}})",
                        ),
                    ),
                ),
                Panel(
                    title="Silence",
                    answers="How long has the controller not heard of a member?",
                    expressions=(("paceline_member_silence_seconds", "{{member}}"),),
                    unit="s",
                ),
                Panel(
                    title="Restarts and losses",
                    answers="Which members restart repeatedly, and how long are they away?",
                    expressions=(
                        (
                            "sum by (member) (increase(paceline_member_restarts_total[10m]))",
                            "{{member}} restarts in 10 min",
                        ),
                        ("paceline_member_recovery_seconds", "{{member}} seconds to recover"),
                    ),
                ),
                Panel(
                    title="Phase",
                    answers="In which phase is the run, and for how long?",
                    expressions=(("paceline_run_phase_seconds", "{{phase}}"),),
                    unit="s",
                ),
                Panel(
                    title="Controller",
                    answers="Was the controller restarted, and which policy is committed?",
                    expressions=(
                        ("paceline_journal_term", "term"),
                        ("paceline_policy_version", "policy version"),
                    ),
                ),
                Panel(
                    title="Heartbeats",
                    answers="Do members reach the controller?",
                    expressions=(
                        (
                            "sum by (service_instance_id, result) (rate(paceline_heartbeats_total[1m]))",
                            "{{service_instance_id}} {{result}}",
                        ),
                    ),
                    unit="ops",
                ),
            ),
        ),
        (
            "Does work flow?",
            (
                Panel(
                    title="Collection",
                    answers="How many trajectories does the step still wait for?",
                    expressions=(
                        ("paceline_collection_wanted", "wanted"),
                        ("paceline_collection_admitted", "admitted"),
                        ("sum by (kind) (paceline_member_in_flight)", "in flight: {{kind}}"),
                    ),
                ),
                Panel(
                    title="Mailboxes",
                    answers="How many entries do the mailboxes hold?",
                    expressions=(("paceline_mailbox_entries", "{{mailbox}}"),),
                ),
                Panel(
                    title="Reward queue",
                    answers="How many items wait for each scorer?",
                    expressions=(("sum by (scorer) (paceline_reward_queue_items)", "{{scorer}}"),),
                ),
                Panel(
                    title="Deliveries",
                    answers="How many entries are delivered, and how many are redelivered?",
                    expressions=(
                        ("sum by (mailbox) (rate(paceline_deliveries_total[1m]))", "{{mailbox}}"),
                        ("sum by (mailbox) (rate(paceline_redeliveries_total[1m]))", "{{mailbox}} again"),
                        (
                            "sum by (mailbox) (rate(paceline_leases_lost_total[1m]))",
                            "{{mailbox}} leases lost",
                        ),
                    ),
                    unit="ops",
                ),
                Panel(
                    title="Refusals and verdicts",
                    answers="What is refused or not admitted, and why?",
                    expressions=(
                        ("sum by (reason) (increase(paceline_refusals_total[10m]))", "refused: {{reason}}"),
                        (
                            (
                                "sum by (verdict) "
                                '(increase(paceline_trajectories_total{verdict!="admitted"}[10m]))'
                            ),
                            "{{verdict}}",
                        ),
                    ),
                ),
                Panel(
                    title="Push",
                    answers="How long does a weight push take, and does it lose servers?",
                    expressions=(
                        ("paceline_push_seconds", "seconds"),
                        (
                            "sum by (result) (increase(paceline_pushes_total[10m]))",
                            "{{result}} in 10 min",
                        ),
                    ),
                ),
                Panel(
                    title="Guard firings",
                    answers="Which rules fired, with which action?",
                    expressions=(
                        (
                            (
                                "sum by (rule, network, action) "
                                "(increase(paceline_guard_firings_total[10m])) > 0"
                            ),
                            "{{rule}} {{network}} {{action}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Do the processes have what they need?",
            (
                Panel(
                    title="Event-loop lag",
                    answers="Is a process blocked, so that it looks dead to others?",
                    expressions=(("paceline_event_loop_lag_seconds", "{{service_instance_id}}"),),
                    unit="s",
                ),
                Panel(
                    title="Memory",
                    answers="Does a process or its children leak?",
                    expressions=(
                        ("paceline_process_resident_memory_bytes", "{{service_instance_id}} {{part}}"),
                    ),
                    unit="bytes",
                ),
                Panel(
                    title="CPU",
                    answers="Which processes use the cores?",
                    expressions=(
                        ("rate(paceline_process_cpu_seconds_total[1m])", "{{service_instance_id}}"),
                    ),
                ),
                Panel(
                    title="Open files and uptime",
                    answers="Do file descriptors leak, and how long has each process run?",
                    expressions=(
                        ("paceline_process_open_files", "{{service_instance_id}} open files"),
                        (
                            "(time() - paceline_process_start_time_seconds) / 60",
                            "{{service_instance_id}} minutes up",
                        ),
                    ),
                ),
                Panel(
                    title="GPU memory",
                    answers="How full is the memory of each GPU?",
                    expressions=(
                        (
                            (
                                "max by (uuid, gpu, instance) "
                                "(paceline_gpu_memory_used_bytes / paceline_gpu_memory_total_bytes)"
                            ),
                            "{{instance}} GPU {{gpu}}",
                        ),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    title="GPU utilisation",
                    answers="Which GPUs are idle?",
                    expressions=(
                        (
                            "max by (uuid, gpu, instance) (paceline_gpu_utilisation_ratio)",
                            "{{instance}} GPU {{gpu}}",
                        ),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    title="GPU power",
                    answers="How much power do the GPUs draw?",
                    expressions=(
                        (
                            "max by (uuid, gpu, instance) (paceline_gpu_power_watts)",
                            "{{instance}} GPU {{gpu}}",
                        ),
                    ),
                    unit="watt",
                ),
            ),
        ),
    ),
)
