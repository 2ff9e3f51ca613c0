"""deploy/observability: generated files are fresh, and nothing asks for a metric that no run exports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from paceline.config.services import ServiceConfig, WeightsConfig
from paceline.core.guard import RULES
from paceline.service.observability import metrics
from paceline.service.observability.metrics import Metric
from support.training_run import ROOT

FOLDER = ROOT / "deploy" / "observability"
DASHBOARDS = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
RULE_FILES = sorted((FOLDER / "rules").glob("*.yaml"))
EXPORTED = set((FOLDER / "exported-metrics.txt").read_text().split())

# What Grafana needs of a dashboard that it loads from a file, as far as ours use it (schemaVersion 39).
_TARGET = {
    "type": "object",
    "required": ["refId", "expr", "datasource", "legendFormat"],
    "properties": {
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
        "expr": {"type": "string", "minLength": 1},
        "datasource": {
            "type": "object",
            "required": ["type", "uid"],
            "properties": {"type": {"const": "prometheus"}, "uid": {"const": "paceline-prometheus"}},
        },
    },
}
_PLACE = {
    "type": "object",
    "required": ["h", "w", "x", "y"],
    "properties": {
        "h": {"type": "integer", "minimum": 1},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
    },
}
_SCHEMA = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "time", "templating", "annotations"],
    "properties": {
        "uid": {"type": "string", "maxLength": 40, "pattern": "^[a-zA-Z0-9_-]+$"},
        "title": {"type": "string", "minLength": 1},
        "schemaVersion": {"const": 39},
        "panels": {
            "type": "array",
            "minItems": 3,
            "items": {
                "type": "object",
                "required": ["id", "type", "title", "gridPos"],
                "properties": {"gridPos": _PLACE, "type": {"enum": ["row", "timeseries"]}},
                "if": {"properties": {"type": {"const": "timeseries"}}},
                "then": {
                    "required": ["targets", "fieldConfig", "options", "description"],
                    "properties": {"targets": {"type": "array", "minItems": 1, "items": _TARGET}},
                },
            },
        },
    },
}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def expressions(path: Path) -> list[str]:
    tree = load(path)
    if path.suffix == ".json":
        return [target["expr"] for panel in tree["panels"] for target in panel.get("targets", ())]
    return [rule["expr"] for group in tree["groups"] for rule in group["rules"]]


def test_generated_files_are_fresh() -> None:
    tool = ROOT / "tools" / "generate_observability.py"
    command = [sys.executable, str(tool), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout + result.stderr == ""
    assert result.returncode == 0


@pytest.mark.parametrize("path", [*DASHBOARDS, *RULE_FILES], ids=lambda path: path.name)
def test_expressions_use_only_what_a_run_exports(path: Path) -> None:
    used = {name for text in expressions(path) for name in re.findall(r"\bpaceline_\w+", text)}
    assert len(used) >= 2
    assert sorted(used - EXPORTED) == []


def test_a_run_exports_the_catalogue_and_numbers_of_the_step() -> None:
    catalogue = {entry.name for entry in vars(metrics).values() if isinstance(entry, Metric)}
    assert sorted(catalogue - EXPORTED) == []
    assert all(name in catalogue or name.startswith("paceline_training_") for name in EXPORTED)
    assert "paceline_training_actor_grad_norm" in EXPORTED


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_have_the_form_that_grafana_reads(path: Path) -> None:
    tree = load(path)
    jsonschema.validate(tree, _SCHEMA)
    assert len({panel["id"] for panel in tree["panels"]}) == len(tree["panels"])
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in tree["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24


def test_the_data_sources_of_the_dashboards_are_provisioned() -> None:
    sources = load(FOLDER / "grafana/provisioning/datasources/paceline.yaml")["datasources"]
    assert {source["uid"]: source["type"] for source in sources} == {
        "paceline-prometheus": "prometheus",
        "paceline-tempo": "tempo",
    }
    assert len(DASHBOARDS) == 2


def test_each_guard_rule_has_its_alerts() -> None:
    rules = [rule for group in load(FOLDER / "rules/guard.yaml")["groups"] for rule in group["rules"]]
    assert len(rules) == 2 * len(RULES)
    for name in RULES:
        severities = [r["labels"]["severity"] for r in rules if f'rule="{name}"' in r["expr"]]
        assert severities == ["warning", "critical"]


def test_thresholds_of_service_alerts_follow_the_defaults() -> None:
    rules = {
        rule["alert"]: rule["expr"]
        for group in load(FOLDER / "rules/services.yaml")["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    silent, push = ServiceConfig().suspect_after_s, WeightsConfig().push_timeout_s / 2
    assert rules["PacelineMemberSilent"] == f"paceline_member_silence_seconds > {silent:g}"
    assert rules["PacelineSlowPush"] == f"paceline_push_seconds > {push:g}"


def test_the_collectors_pipelines_use_parts_that_are_configured() -> None:
    tree = load(FOLDER / "collector.yaml")
    for pipeline in tree["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(tree[kind])
    sent_to = tree["exporters"]["otlp/tempo"]["endpoint"].rpartition(":")[2]
    received_at = load(FOLDER / "tempo.yaml")["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]
    assert received_at["endpoint"].rpartition(":")[2] == sent_to


def test_every_rank_of_a_learners_container_is_scraped() -> None:
    """Rank N serves on the port behind rank 0's, plus N."""
    services = load(ROOT / "deploy" / "compose" / "compose.yaml")["services"]
    jobs = {
        job["job_name"]: job["dns_sd_configs"] for job in load(FOLDER / "prometheus.yaml")["scrape_configs"]
    }
    (first,) = jobs["paceline-learner"]
    numbers = {
        name: re.sub(r"\$\{\w+:-(\d+)\}", r"\1", tree["environment"]["PET_NPROC_PER_NODE"])
        for name, tree in services.items()
        if "PET_NPROC_PER_NODE" in tree.get("environment", {})
    }
    assert numbers == {"learner": "2", "learner-gpu": "4", "learner-colocated": "8"}
    for name, number in numbers.items():
        ports = [d["port"] for d in (first, *jobs["paceline-learner-ranks"]) if name in d["names"]]
        assert ports[: int(number)] == [first["port"] + rank for rank in range(int(number))]


def test_the_profile_mounts_the_files_and_scrapes_what_the_services_serve() -> None:
    compose = load(ROOT / "deploy" / "compose" / "compose.yaml")
    services = compose["services"]
    observers = {name for name, tree in services.items() if tree.get("profiles") == ["observability"]}
    assert observers == {"collector", "tempo", "prometheus", "grafana"}
    for name in observers:
        for mount in services[name]["volumes"]:
            source = mount.partition(":")[0]
            assert source in compose["volumes"] or (ROOT / "deploy" / "compose" / source).exists()
        assert all(port.startswith("127.0.0.1:") for port in services[name].get("ports", ()))
    scraped: dict[str, int] = {}
    for job in load(FOLDER / "prometheus.yaml")["scrape_configs"]:
        assert job["scheme"] == "https"
        role = job["job_name"].removeprefix("paceline-").removesuffix("-ranks")
        assert job["tls_config"]["server_name"] == f"{role}.paceline"
        if job["job_name"].endswith("-ranks"):
            continue
        (looked_up,) = job["dns_sd_configs"]
        assert all(name.startswith(role) for name in looked_up["names"])
        scraped |= dict.fromkeys(looked_up["names"], looked_up["port"])
    members = {
        name for name, tree in services.items() if "PACELINE_PROMETHEUS_PORT" in tree.get("environment", {})
    }
    # The network's alias of every profile's controller is `controller`.
    controllers = {"controller", "controller-gpu", "controller-colocated"}
    assert members - (controllers - {"controller"}) == set(scraped)
    for name in members:
        port = services[name]["environment"]["PACELINE_PROMETHEUS_PORT"]
        own = "controller" if name in controllers else name
        assert port == f"${{METRICS_PORT:-{scraped[own]}}}"
