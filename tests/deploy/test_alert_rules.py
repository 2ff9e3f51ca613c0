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

# Per alert about the services: series by name and labels, and the minute at which it must fire; at minute 0,
# and for the quiet series, it must not.
CASES: dict[str, tuple[dict[str, str], dict[str, str], int]] = {
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
    return [rule["alert"] for group in tree["groups"] for rule in group["rules"]]


def check_alert(
    folder: Path, file: str, series: dict[str, str], expected: dict[tuple[str, int], bool]
) -> None:
    """Runs `promtool test rules`: which alerts fire at which minute."""
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
    check_alert(tmp_path, "services.yaml", cause, {(alert, 0): False, (alert, minute): True})
    check_alert(tmp_path, "services.yaml", quiet, {(alert, minute): False})


def test_every_service_alert_has_a_case() -> None:
    assert sorted(CASES) == sorted(alerts("services.yaml"))


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
            check_alert(tmp_path, "guard.yaml", {**exported, _value(rule): "1e9x9"}, {(alert, 2): False})
            continue
        bound = min(concerned) if is_above else max(concerned)
        within, beyond = (bound, bound + 1e-3) if is_above else (bound + 1e-3, bound)
        check_alert(tmp_path, "guard.yaml", {**exported, _value(rule): f"{within}x9"}, {(alert, 2): False})
        check_alert(tmp_path, "guard.yaml", {**exported, _value(rule): f"{beyond}x9"}, {(alert, 2): True})


def _value(rule: str) -> str:
    return f'paceline_guard_value{{{WHO},rule="{rule}",network="actor"}}'
