"""The chart rendered by helm, and values for it: small, usual, and every one that it has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from support import source

FOLDER = source.ROOT / "deploy" / "helm"

# The oldest that the chart allows, and the newest that is known.
VERSIONS = ("1.31", "1.34", kubernetes_validate.latest_version())

CONFIG = """\
data: {train_files: data/t.parquet, val_files: data/v.parquet, train_batch_size: 16}
model: {path: models/start}
actor: {ppo_mini_batch_size: 8}
rollout: {n: 4}
reward: {functions: [{name: gsm8k}]}
trainer: {total_steps: 10}
"""

CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}

MANY: dict[str, Any] = {
    "config": CONFIG,
    "volumes": {"models": CLAIM, "data": CLAIM, "checkpoints": CLAIM},
    "images": {"pullSecrets": ["registry"]},
    "controller": {"storage": {"size": "1Gi", "className": "fast"}, "pod": {"nodeSelector": {"pool": "cpu"}}},
    "learner": {"nodes": 3, "pod": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}},
    "reward": {"replicas": 2, "callers": [{"namespaceSelector": {"matchLabels": {"team": "evals"}}}]},
    "metrics": {"port": 0},
    "blobs": {"stores": 2},
}

MODELS: dict[str, Any] = {
    "config": CONFIG.replace(
        "[{name: gsm8k}]",
        "[{name: gsm8k}], models: ["
        "{name: rm, path: models/rm, device: 'cuda:3', replicas: 2, wait_for_s: 900.0}, "
        "{name: steps, path: models/steps, kind: process, threads: 4}]",
    ),
    "rewardModels": {
        "pod": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
        "named": {
            "rm": {"resources": {"limits": {"memory": "64Gi"}}, "pod": {"nodeSelector": {"gpu": "h100"}}}
        },
    },
    "reward": {"replicas": 2},
    "pods": {"envFrom": [{"secretRef": {"name": "object-store"}}]},
    "metrics": {"scrapers": [{"namespaceSelector": {}}]},
}

# What a pod may have, each with a value that nothing else gives it.
POD: dict[str, Any] = {
    "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
    "annotations": {"example.org/owner": "me"},
    "env": {
        "HTTPS_PROXY": "http://proxy",
        "PART": {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    },
    "envFrom": [{"secretRef": {"name": "object-store"}}],
    "nodeSelector": {"pool": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"noisy": "yes"}}}
            ]
        }
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "serviceAccountName": "trainer",
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "schedulerName": "volcano",
    "volumes": [{"name": "scratch", "emptyDir": {}}],
    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "podSecurityContext": {"fsGroup": 1000650000},
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
}

# Every value that is off by default.
EVERY: dict[str, Any] = MODELS | {
    "pods": POD,
    "redis": {
        "external": {
            "url": "rediss://paceline@redis.example.org:6380/0",
            "passwordSecret": "redis-password",
            "caSecret": "redis-ca",
            "to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}],
        }
    },
    "controller": {"storage": {"existingClaim": "runs"}, "disruptionBudget": {"minAvailable": 1}},
    "learner": {"nodes": 3, "disruptionBudget": {"minAvailable": 3}},
    "rollout": {
        "replicas": 2,
        "disruptionBudget": {"maxUnavailable": 1},
        "autoscale": {"enabled": True, "max": 8, "prompts": 32, "prometheus": "http://prometheus:9090"},
    },
    "metrics": MODELS["metrics"]
    | {
        "podMonitors": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    },
}

# What extensions of Kubernetes define; kubernetes_validate does not know it.
EXTENSIONS = ("PodMonitor", "PrometheusRule", "ScaledObject")

VALUES = {
    "every": EVERY,
    "small": {"config": CONFIG},
    "many": MANY,
    "models": MODELS,
    "example": FOLDER / "example.yaml",
}

Manifest = dict[str, Any]


def helm(*words: str | Path, code: int = 0) -> str:
    """Runs helm; returns what it printed."""
    program = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("there is no helm: python tools/get_helm.py FOLDER puts it into a folder of the PATH")
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + (done.stderr if code else "")


def write(wanted: dict[str, Any], folder: Path) -> Path:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(wanted))
    return path


def render(values: Path, *words: str) -> dict[tuple[str, str], Manifest]:
    """The manifests of a release `run`, by kind and component."""
    text = helm("template", "run", FOLDER / "paceline", "--values", values, *words)
    manifests = [each for each in yaml.safe_load_all(text) if each]
    by_name = {
        (each["kind"], re.sub("-[0-9a-f]{8}$", "", each["metadata"]["name"].removeprefix("run-"))): each
        for each in manifests
    }
    assert len(by_name) == len(manifests)
    return by_name


def pods(manifests: dict[tuple[str, str], Manifest]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Component and specification of each pod."""
    for (kind, component), manifest in manifests.items():
        if kind in ("Job", "Deployment", "StatefulSet"):
            yield component, manifest["spec"]["template"]["spec"]


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}


def secrets_of(pod: dict[str, Any]) -> list[tuple[str, set[str]]]:
    """The names of a pod's Secrets, and the keys that it names of each."""
    sources = [(each["secret"]["secretName"], each["secret"]) for each in pod["volumes"] if "secret" in each]
    projected = [each["projected"]["sources"] for each in pod["volumes"] if "projected" in each]
    sources += [(each["secret"]["name"], each["secret"]) for sources_ in projected for each in sources_]
    return [(name, {item["key"] for item in secret.get("items", ())}) for name, secret in sources]


def ways(manifests: dict[tuple[str, str], Manifest]) -> dict[tuple[str, str], set[int | None]]:
    """Ports that one component may reach on another, None for all: both sides' policies must allow it."""

    def peers(rules: list[dict[str, Any]], side: str) -> dict[str, set[int | None]]:
        ports_of: dict[str, set[int | None]] = {}
        for rule in rules:
            for peer in rule[side]:
                labels = peer.get("podSelector", {}).get("matchLabels", {})
                name = labels.get("app.kubernetes.io/component", json.dumps(peer, sort_keys=True))
                ports = {port["port"] for port in rule.get("ports", ())} or {None}
                ports_of.setdefault(name, set()).update(ports)
        return ports_of

    policies = {name: each["spec"] for (kind, name), each in manifests.items() if kind == "NetworkPolicy"}
    assert all(policy["policyTypes"] == ["Ingress", "Egress"] for policy in policies.values())
    into = {name: peers(policy["ingress"], "from") for name, policy in policies.items()}
    out = {name: peers(policy["egress"], "to") for name, policy in policies.items()}
    return {
        (one, other): into[other][one] & out[one][other]
        for other in policies
        for one in policies
        if one in into[other] and other in out[one]
    }
