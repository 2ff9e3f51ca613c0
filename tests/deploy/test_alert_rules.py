"""Prometheus' own tools on deploy/observability: configurations, expressions, what raises an alert."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.certificates import Authority
from paceline.config.guard import GuardConfig
from paceline.core.guard import RULES, Action, Sense
from support.prometheus_server import program
from support.training_run import ROOT

FOLDER = ROOT / "deploy" / "observability"
WHO = 'service_instance_id="controller",instance="c:9464",job="paceline"'

# Series of a run that has two steps, of a learner's second rank that is not there, and of nothing.
RUN = {
    f"paceline_run_step{{{WHO}}}": "1x20",
    f"paceline_run_total_steps{{{WHO}}}": "2x20",
    f"paceline_training_step{{{WHO}}}": "0x20",
    'up{job="paceline-controller"}': "1x20",
}
NOTHING = {"another_metric": "1x20"}

# Per alert about the services: series by name and labels, and the minute at which it must fire; at minute 0,
# and for the quiet series, it must not.
CASES: dict[str, tuple[dict[str, str], dict[str, str], int]] = {
    "PacelineNothingAnswers": (NOTHING, RUN, 2),
    "PacelineControllerMissing": ({'up{job="paceline-reward"}': "1x20"}, RUN, 2),
    "PacelineBrokerAway": (
        {f"paceline_broker_outage_seconds_total{{{WHO}}}": "0+60x20"},
        {f"paceline_broker_outage_seconds_total{{{WHO}}}": "0 2x20"},
        4,
    ),
    "PacelineBlobStoreAway": (
        {'paceline_blob_store_up{store="0"}': "1x20", 'paceline_blob_store_up{store="1"}': "1 0x20"},
        {'paceline_blob_store_up{store="0"}': "1x20", 'paceline_blob_store_up{store="1"}': "0 1x20"},
        4,
    ),
    "PacelineTargetDown": ({'up{job="paceline"}': "1 0x20"}, {'up{job="paceline"}': "1x20"}, 3),
    "PacelineMemberDead": (
        {'paceline_members{kind="reward",state="serving",health="dead"}': "0 1x20"},
        {'paceline_members{kind="reward",state="serving",health="alive"}': "1x20"},
        4,
    ),
    "PacelineNoRollout": (
        {f"paceline_run_step{{{WHO}}}": "1x20"},
        {
            f"paceline_run_step{{{WHO}}}": "1x20",
            f'paceline_members{{{WHO},kind="rollout",state="serving",health="alive"}}': "2x20",
        },
        4,
    ),
    "PacelineMemberSilent": (
        {'paceline_member_silence_seconds{member="r"}': "1 6x20"},
        {'paceline_member_silence_seconds{member="r"}': "1x20"},
        3,
    ),
    "PacelineCertificateEnds": (
        {'paceline_certificate_life_left_ratio{file="ca.pem",instance="l"}': "0.3 0.2x20"},
        {'paceline_certificate_life_left_ratio{file="cert.pem",instance="l"}': "0.45x20"},
        9,
    ),
    "PacelineRestartsAgainAndAgain": (
        {'paceline_member_restarts_total{member="r"}': "0+1x20"},
        {'paceline_member_restarts_total{member="r"}': "0 0 1x20"},
        9,
    ),
    "PacelineControllerRestarted": (
        {"paceline_journal_term": "1 1 2x20"},
        {"paceline_journal_term": "1x20"},
        4,
    ),
    "PacelineControllerOutOfReach": (
        {'paceline_heartbeats_total{result="failed"}': "0+6x20"},
        {'paceline_heartbeats_total{result="failed"}': "0 0 0 1x20"},
        5,
    ),
    "PacelineEventLoopBlocked": (
        {"paceline_event_loop_lag_seconds": "0.1 2x20"},
        {"paceline_event_loop_lag_seconds": "0.1x20"},
        3,
    ),
    "PacelinePhaseStandsStill": (
        {'paceline_run_phase_seconds{phase="learn"}': "60+60x60"},
        {'paceline_run_phase_seconds{phase="learn"}': "60x60"},
        40,
    ),
    "PacelineManyRedeliveries": (
        {
            'paceline_redeliveries_total{mailbox="prompts"}': "0+5x20",
            'paceline_deliveries_total{mailbox="prompts"}': "0+10x20",
        },
        {
            'paceline_redeliveries_total{mailbox="prompts"}': "0+1x20",
            'paceline_deliveries_total{mailbox="prompts"}': "0+10x20",
        },
        8,
    ),
    "PacelineRefusals": (
        {'paceline_refusals_total{reason="deadline"}': "0 0 1x20"},
        {'paceline_refusals_total{reason="deadline"}': "0x20"},
        5,
    ),
    "PacelineRewardErrors": (
        {f'paceline_trajectories_total{{{WHO},verdict="reward_error"}}': "0 0 1x20"},
        {f'paceline_trajectories_total{{{WHO},verdict="admitted"}}': "0+64x20"},
        5,
    ),
    "PacelineSlowPush": ({"paceline_push_seconds": "2 16x20"}, {"paceline_push_seconds": "2x20"}, 3),
    "PacelinePushesLost": (
        {'paceline_pushes_total{result="lost"}': "0 0 1x20"},
        {'paceline_pushes_total{result="committed"}': "0+1x20"},
        5,
    ),
    "PacelineGpuMemoryFull": (
        {
            'paceline_gpu_memory_used_bytes{gpu="0",uuid="a",instance="l"}': "10 79x20",
            'paceline_gpu_memory_total_bytes{gpu="0",uuid="a",instance="l"}': "80x20",
        },
        {
            'paceline_gpu_memory_used_bytes{gpu="0",uuid="a",instance="l"}': "70x20",
            'paceline_gpu_memory_total_bytes{gpu="0",uuid="a",instance="l"}': "80x20",
        },
        5,
    ),
}


def promtool(*arguments: str, cwd: Path = ROOT) -> str:
    command = [program("promtool"), *arguments]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def alerts(file: str) -> list[str]:
    tree = yaml.safe_load((FOLDER / "rules" / file).read_text())
    return [rule["alert"] for group in tree["groups"] for rule in group["rules"] if "alert" in rule]


def assert_alerts(
    folder: Path, file: str, series: dict[str, str], expected: dict[tuple[str, int], bool]
) -> None:
    """By `promtool test rules`: which alerts fire at which minute, and which do not."""
    tests: list[dict[str, Any]] = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            # What fires exactly is not compared: promtool would want every annotation repeated here.
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
                for (alert, minute), fires in expected.items()
            ],
        }
    ]
    path = folder / "test.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(FOLDER / "rules" / file)],
                "evaluation_interval": "10s",
                "tests": tests,
            }
        )
    )
    promtool("test", "rules", str(path))


@pytest.mark.parametrize("name", ["prometheus.yaml", "prometheus-local.yaml"])
def test_prometheus_accepts_the_configuration(name: str, tmp_path: Path) -> None:
    """promtool looks for the files of a certificate, which only the container has."""
    authority = Authority.create(tmp_path, days=1)
    authority.issue(tmp_path / "tls", "client-prometheus", role="client")
    text = (FOLDER / name).read_text().replace("/run/tls", str(tmp_path / "tls"))
    file = tmp_path / name
    file.write_text(text.replace("rules/*.yaml", f"{FOLDER / 'rules'}/*.yaml"))
    assert "2 rule files found" in promtool("check", "config", str(file))


def test_prometheus_accepts_the_expressions_of_the_dashboards(tmp_path: Path) -> None:
    rules = []
    for path in sorted((FOLDER / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            rules += [
                {"record": f"p:{len(rules) + i}", "expr": target["expr"]}
                for i, target in enumerate(panel.get("targets", ()))
            ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))


@pytest.mark.parametrize("alert", CASES)
def test_a_service_alert_fires_on_its_cause_and_not_without(alert: str, tmp_path: Path) -> None:
    cause, quiet, minute = CASES[alert]
    assert_alerts(tmp_path, "services.yaml", cause, {(alert, 0): False, (alert, minute): True})
    assert_alerts(tmp_path, "services.yaml", quiet, {(alert, minute): False})


def test_every_service_alert_has_a_case() -> None:
    assert sorted([*CASES, "PacelineWatchdog"]) == sorted(alerts("services.yaml"))


def test_the_watchdog_always_fires(tmp_path: Path) -> None:
    watchdog = "PacelineWatchdog"
    assert_alerts(tmp_path, "services.yaml", NOTHING, {(watchdog, 0): True, (watchdog, 9): True})


# The stale mark that a target leaves which is not found any more.
GONE = "1x3 stale"


@pytest.mark.parametrize(
    ("last", "fires"),
    [
        # Lost in the middle of a step; the last step done; ended before that, as after `paceline stop`.
        ({f"paceline_training_step{{{WHO}}}": "1x3 stale"}, True),
        ({f"paceline_training_step{{{WHO}}}": "1 1 2 2 stale"}, False),
        ({f'paceline_run_phase_seconds{{{WHO},phase="ended"}}': "_ _ _ 5 stale"}, False),
        ({f'paceline_run_phase_seconds{{{WHO},phase="failed"}}': "_ _ _ 5 stale"}, True),
        # Ended, and begun again.
        ({f'paceline_run_phase_seconds{{{WHO},phase="ended"}}': "_ 5 stale"}, True),
    ],
)
def test_a_run_that_has_ended_is_missed_by_nobody(last: dict[str, str], fires: bool, tmp_path: Path) -> None:
    series = {
        f"paceline_run_step{{{WHO}}}": GONE,
        f"paceline_run_total_steps{{{WHO}}}": GONE.replace("1", "2"),
        'up{job="paceline-controller"}': GONE,
        **last,
    }
    nothing = "PacelineNothingAnswers"
    assert_alerts(tmp_path, "services.yaml", series, {(nothing, 3): False, (nothing, 6): fires})


def test_an_outage_of_redis_is_no_error_of_the_reward_function(tmp_path: Path) -> None:
    """Redis that comes back empty has lost the responses that were being scored."""
    series = {
        f'paceline_trajectories_total{{{WHO},verdict="reward_error"}}': "0 0 0 4x30",
        f"paceline_broker_outage_seconds_total{{{WHO}}}": "0 0 6x30",
    }
    expected = {("PacelineRewardErrors", minute): False for minute in range(16)}
    assert_alerts(tmp_path, "services.yaml", series, expected)


def test_ports_of_ranks_that_a_learner_does_not_have_raise_no_alert(tmp_path: Path) -> None:
    series = {**RUN, 'up{job="paceline-learner-ranks"}': "0x20"}
    assert_alerts(tmp_path, "services.yaml", series, {("PacelineTargetDown", 9): False})


@pytest.mark.parametrize("rule", RULES)
def test_a_guard_alert_fires_beyond_the_bound_of_the_configuration(rule: str, tmp_path: Path) -> None:
    """With the default bounds, or one of the test's own where the rule has none."""
    bounds = dict(getattr(GuardConfig(), rule).limits.bounds) or {Action.WARN: 1.0}
    is_above = RULES[rule].sense is Sense.ABOVE
    name = "PacelineGuard" + "".join(part.capitalize() for part in rule.split("_"))
    exported = {
        f'paceline_guard_bound{{{WHO},rule="{rule}",action="{action.value}"}}': f"{bound}x9"
        for action, bound in bounds.items()
    }
    for alert, concerned in (
        (name, [b for a, b in bounds.items() if a is Action.WARN]),
        (f"{name}Acts", [b for a, b in bounds.items() if a is not Action.WARN]),
    ):
        if not concerned:
            assert_alerts(tmp_path, "guard.yaml", {**exported, _value(rule): "1e9x9"}, {(alert, 2): False})
            continue
        bound = min(concerned) if is_above else max(concerned)
        within, beyond = (bound, bound + 1e-3) if is_above else (bound + 1e-3, bound)
        assert_alerts(tmp_path, "guard.yaml", {**exported, _value(rule): f"{within}x9"}, {(alert, 2): False})
        assert_alerts(tmp_path, "guard.yaml", {**exported, _value(rule): f"{beyond}x9"}, {(alert, 2): True})


def _value(rule: str) -> str:
    return f'paceline_guard_value{{{WHO},rule="{rule}",network="actor"}}'
