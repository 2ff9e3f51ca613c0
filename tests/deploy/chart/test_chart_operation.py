"""The chart in operation: upgrades, another Redis, claims, budgets, monitors, scaling."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from redis.connection import parse_url

from paceline.broker import names
from paceline.broker.address import tls_options, with_password
from paceline.service.observability.metrics import MAILBOX_ENTRIES
from support import source
from support.chart import (
    CONFIG,
    EVERY,
    FOLDER,
    MANY,
    MODELS,
    Manifest,
    environment,
    helm,
    pods,
    render,
    secrets_of,
    write,
)
from support.kubernetes_server import KubernetesServer, kubernetes_server

pytestmark = pytest.mark.timeout(900)


def test_a_job_with_other_contents_is_another_that_waits_for_the_former(tmp_path: Path) -> None:
    """Kubernetes allows no change of a Job's template."""
    before = render(write(MANY, tmp_path))
    same = render(write(MANY, tmp_path), "--set", "rollout.replicas=3", "--set", "reward.replicas=3")
    after = render(write(MANY, tmp_path), "--set", "stopGraceSeconds=60")
    for name in ("controller", "learner"):
        jobs = [made["Job", name] for made in (before, same, after)]
        assert jobs[0] == jobs[1]
        assert jobs[0]["metadata"]["name"] != jobs[2]["metadata"]["name"]
        for job in jobs:
            generation = job["metadata"]["name"].rpartition("-")[2]
            labels = job["spec"]["template"]["metadata"]["labels"]
            assert labels["paceline/generation"] == generation
            affinity = job["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
            (rule,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
            selector = rule["labelSelector"]
            assert selector["matchLabels"].items() <= labels.items()
            assert selector["matchExpressions"] == [
                {"key": "paceline/generation", "operator": "NotIn", "values": [generation]}
            ]
            # The same for every node that a pod of Linux can be on.
            assert rule["topologyKey"] == "kubernetes.io/os"
    config = render(write(MANY | {"config": CONFIG + "# another\n"}, tmp_path))
    assert config["Job", "controller"]["metadata"]["name"] != before["Job", "controller"]["metadata"]["name"]
    assert config["Job", "learner"] == before["Job", "learner"]


def test_helm_installs_upgrades_and_removes_a_run(tmp_path: Path) -> None:
    """On a stand-in for the API server, which refuses changes of Jobs as Kubernetes does."""
    values = write(MODELS, tmp_path)

    def upgrade(*words: str | Path, server: KubernetesServer) -> None:
        where = ["--kube-apiserver", server.url, "--namespace", "ml", "--disable-openapi-validation"]
        helm(*words[:1], "run", FOLDER / "paceline", "--values", values, *words[1:], *where)

    with kubernetes_server() as server:
        upgrade("install", server=server)
        first = set(server.of("Job"))
        assert len(first) == 2
        for name in ("run-rollout", "run-reward-model-rm"):  # kubectl scale
            server.of("Deployment")[name]["spec"]["replicas"] = 5
        upgrade("upgrade", "--set", "stopGraceSeconds=60", server=server)
        assert {name for kind, name in server.removed if kind == "jobs"} == first
        assert len(server.of("Job")) == 2
        replicas = {name: each["spec"]["replicas"] for name, each in server.of("Deployment").items()}
        assert replicas["run-rollout"] == replicas["run-reward-model-rm"] == 5
        upgrade("upgrade", "--set", "stopGraceSeconds=60", "--set", "rollout.replicas=2", server=server)
        assert server.of("Deployment")["run-rollout"]["spec"]["replicas"] == 2
        helm("uninstall", "run", "--kube-apiserver", server.url, "--namespace", "ml")
        assert set(server.objects) == {("persistentvolumeclaims", "run-controller")}


# The stand-in has no schemas, by which helm and kubectl would validate.
_PROGRAM = """#!/bin/sh
case "$1 $3" in
  apply*) exec {program} "$@" --validate=false ;;
  "install "*|*" upgrade") exec {program} "$@" --disable-openapi-validation ;;
esac
exec {program} "$@"
"""


def test_the_commands_of_the_operators_page_do_what_it_says(tmp_path: Path) -> None:
    """The block of docs/operate.md, line by line, from an empty namespace to its end."""
    page = (source.ROOT / "docs" / "operate.md").read_text()
    _, _, chapter = page.partition("\n## Kubernetes\n")
    lines = chapter.split("```\n")[1].splitlines()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("kubectl", "helm"):
        path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if path is None:
            pytest.skip(f"there is no {name}: apt install kubernetes-client, python tools/get_helm.py")
        (programs / name).write_text(_PROGRAM.format(program=path))
    (programs / "paceline").write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline.cli.main "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    (tmp_path / "deploy").symlink_to(source.ROOT / "deploy")
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "values.yaml").write_text("overrides: []\n")
    with kubernetes_server() as server:
        cluster = {"name": "stand-in", "cluster": {"server": server.url}}
        context = {"name": "stand-in", "context": {"cluster": "stand-in", "user": "me"}}
        kubeconfig = {"clusters": [cluster], "contexts": [context], "current-context": "stand-in"}
        (tmp_path / "kubeconfig").write_text(
            yaml.safe_dump({"apiVersion": "v1", "kind": "Config"} | kubeconfig)
        )
        env = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "KUBECONFIG": str(tmp_path / "kubeconfig"),
        }

        def type_in(*typed: str) -> None:
            script = "set -euo pipefail\n" + "\n".join(typed)
            done = subprocess.run(
                ["bash", "-c", script],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr

        secrets_line, install, selector, logs, wait, scale, upgrade, uninstall = lines
        type_in(secrets_line)
        assert len(server.of("Secret")) == 7
        type_in(install)
        jobs = set(server.of("Job"))
        assert len(jobs) == 2
        type_in(selector, logs, wait)
        type_in(scale)
        assert server.of("Deployment")["run-rollout"]["spec"]["replicas"] == 3
        type_in(upgrade)
        assert set(server.of("Job")) == jobs
        assert server.of("Deployment")["run-rollout"]["spec"]["replicas"] == 3
        type_in(uninstall)
        left = {kind for kind, _ in server.objects}
        assert left == {"persistentvolumeclaims", "secrets"}


def test_blob_stores_have_a_name_each_and_keep_nothing(tmp_path: Path) -> None:
    rendered = render(write(MANY, tmp_path))
    stores, redis = (rendered["StatefulSet", name]["spec"] for name in ("blobs", "redis"))
    assert (stores["replicas"], stores["serviceName"]) == (2, "run-blobs")
    assert rendered["Service", "blobs"]["spec"]["clusterIP"] == "None"
    pods_ = {"blobs": stores["template"]["spec"], "redis": redis["template"]["spec"]}
    durable = {name: environment(pod)["REDIS_APPEND_ONLY"] for name, pod in pods_.items()}
    assert durable == {"blobs": "no", "redis": "yes"}
    assert {"name": "data", "emptyDir": {}} in pods_["blobs"]["volumes"]
    assert "volumeClaimTemplates" not in stores
    assert "volumeClaimTemplates" in redis
    (controller,) = (pod for name, pod in pods(rendered) if name == "controller")
    assert environment(controller)["PACELINE_BLOB_STORES"].split() == [
        f"rediss://paceline@run-blobs-{number}.run-blobs:6379/0" for number in range(2)
    ]
    none = render(write(MANY | {"blobs": {"stores": 0}}, tmp_path))
    (controller,) = (pod for name, pod in pods(none) if name == "controller")
    assert "PACELINE_BLOB_STORES" not in environment(controller)
    assert not [key for key in none if key[1] == "blobs"]


def test_another_redis_takes_the_place_of_the_charts(
    every: dict[tuple[str, str], Manifest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not [key for key in every if key[1] == "redis"]
    folders, paths = {}, {}
    for name, pod in pods(every):
        volumes = {each["name"]: each for each in pod["volumes"]}
        mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        if "redis-ca" in volumes:
            folders[name] = mounts["redis-ca"]
            assert volumes["redis-ca"]["secret"]["secretName"] == "redis-ca"
        keys = {key: secret for secret, wanted in secrets_of(pod) for key in wanted}
        if "redis_password" in keys:
            paths[name] = (keys["redis_password"], f"{mounts['token']}/redis_password")
    assert set(folders) == {"controller", "learner", "rollout", "reward"}
    (controller,) = (pod for name, pod in pods(every) if name == "controller")
    told = environment(controller)
    assert paths == {"controller": ("redis-password", told["PACELINE_REDIS_PASSWORD_FILE"])}
    # What the broker's client makes of the address.
    (tmp_path / "password").write_text("s3cret")
    url = with_password(
        told["PACELINE_BROKER_URL"], {"PACELINE_REDIS_PASSWORD_FILE": str(tmp_path / "password")}
    )
    options = parse_url(url)
    assert (options["host"], options["port"], options["password"]) == ("redis.example.org", 6380, "s3cret")
    assert options["ssl_ca_certs"] == f"{folders['learner']}/ca.pem"
    assert "ssl_ca_certs" not in tls_options(url, {"PACELINE_TLS_DIR": "/run/tls"})
    for name in folders:
        egress = every["NetworkPolicy", name]["spec"]["egress"]
        assert {"to": EVERY["redis"]["external"]["to"], "ports": [{"port": 6380}]} in egress
    assert EVERY["redis"]["external"]["to"] not in [
        each["to"] for each in every["NetworkPolicy", "reward-model"]["spec"]["egress"]
    ]


def test_claims_that_exist_are_used(every: dict[tuple[str, str], Manifest], tmp_path: Path) -> None:
    assert "PersistentVolumeClaim" not in {kind for kind, _ in every}
    pod = every["Job", "controller"]["spec"]["template"]["spec"]
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]
    redis = render(write(MANY | {"redis": {"storage": {"existingClaim": "mine"}}}, tmp_path))
    redis_spec = redis["StatefulSet", "redis"]["spec"]
    assert "volumeClaimTemplates" not in redis_spec
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "mine"}}
    assert claim in redis_spec["template"]["spec"]["volumes"]


def test_budgets_hold_for_the_pods_of_their_component(every: dict[tuple[str, str], Manifest]) -> None:
    budgets = {name: each["spec"] for (kind, name), each in every.items() if kind == "PodDisruptionBudget"}
    assert {name: set(each) - {"selector"} for name, each in budgets.items()} == {
        "controller": {"minAvailable"},
        "learner": {"minAvailable"},
        "rollout": {"maxUnavailable"},
    }
    for name, budget in budgets.items():
        (labels,) = (
            each["spec"]["template"]["metadata"]["labels"]
            for (kind, other), each in every.items()
            if other == name and kind in ("Job", "Deployment")
        )
        assert budget["selector"]["matchLabels"].items() <= labels.items()


def test_prometheus_finds_every_process_as_the_alerts_know_it(
    every: dict[tuple[str, str], Manifest], secrets: dict[str, dict[str, bytes]]
) -> None:
    monitors = {name: each for (kind, name), each in every.items() if kind == "PodMonitor"}
    assert set(monitors) == {"controller", "learner", "rollout", "reward"}
    local = yaml.safe_load((source.ROOT / "deploy/observability/prometheus.yaml").read_text())
    known = {each["job_name"]: each["tls_config"]["server_name"] for each in local["scrape_configs"]}
    scraped = {}
    for name, monitor in monitors.items():
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        ((_, pod),) = [(other, each) for other, each in pods(every) if other == name]
        ports = {each["name"]: each["containerPort"] for each in pod["containers"][0]["ports"]}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            (relabeling,) = endpoint["relabelings"]
            assert relabeling["targetLabel"] == "job"
            scraped.setdefault(relabeling["replacement"], []).append(ports[endpoint["port"]])
            tls = endpoint["tlsConfig"]
            assert tls["serverName"] == known[relabeling["replacement"]]
            for file in (tls["ca"]["secret"], tls["cert"]["secret"], tls["keySecret"]):
                assert file["key"] in secrets[file["name"]]
    assert scraped == {
        "paceline-controller": [9464],
        "paceline-learner": [9464],
        "paceline-learner-ranks": [9465],
        "paceline-rollout": [9464],
        "paceline-reward": [9464],
    }
    assert set(scraped) == set(known)


def test_rules_and_dashboards_are_those_of_the_observability_folder(
    every: dict[tuple[str, str], Manifest],
) -> None:
    folder = source.ROOT / "deploy" / "observability"
    files = sorted((folder / "rules").glob("*.yaml"))
    groups = [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    assert every["PrometheusRule", "monitoring"]["spec"]["groups"] == groups
    dashboards = every["ConfigMap", "dashboards"]
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    made = {name: json.loads(text) for name, text in dashboards["data"].items()}
    kept = {}
    for path in (folder / "grafana" / "dashboards").glob("*.json"):
        kept[f"paceline-{path.name}"] = json.loads(
            path.read_text().replace("paceline-prometheus", "prometheus")
        )
    assert made == kept


def test_rollout_servers_follow_the_queue(every: dict[tuple[str, str], Manifest]) -> None:
    scaled = every["ScaledObject", "rollout"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == every["Deployment", "rollout"]["metadata"]["name"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, 8)
    (trigger,) = scaled["triggers"]
    assert (trigger["type"], trigger["metadata"]["threshold"]) == ("prometheus", "32")
    query = trigger["metadata"]["query"]
    metric = re.fullmatch(r"max\((\w+)\{mailbox=\"(\w+)\",namespace=\"default\",pod=~\"([^\"]+)\"\}\)", query)
    assert metric is not None, query
    assert metric[1] == MAILBOX_ENTRIES.name
    assert metric[2] == names.mailbox(names.prompts("run", 3))
    job = every["Job", "controller"]["metadata"]["name"]
    assert re.fullmatch(metric[3], f"{job}-x7k2p")
