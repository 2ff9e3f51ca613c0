"""The chart: linted and rendered by helm, checked against Kubernetes' schemas and what the services read."""

from __future__ import annotations

import base64
import copy
import json
import os
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
from cryptography import x509
from redis.connection import parse_url

from paceline.broker import names
from paceline.broker.address import tls_options, with_password
from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.core.errors import EXIT_FAILED, EXIT_FINAL, EXIT_GIVEN, ConfigError
from paceline.launch import container
from paceline.reward.models import __main__ as reward_models
from paceline.reward.models.model import ModelOptions
from paceline.service.member.runtime import STOP_GRACE
from paceline.service.observability.metrics import MAILBOX_ENTRIES
from support import source
from support.kubernetes_server import KubernetesServer, kubernetes_server

pytestmark = pytest.mark.timeout(900)

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


@pytest.fixture(scope="module", params=sorted(VALUES))
def values(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of values."""
    wanted = VALUES[request.param]
    return wanted if isinstance(wanted, Path) else write(wanted, tmp_path_factory.mktemp("values"))


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


@pytest.fixture(scope="module")
def manifests(values: Path) -> dict[tuple[str, str], Manifest]:
    return render(values)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Manifest]:
    return render(write(EVERY, tmp_path_factory.mktemp("every")))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Manifest]:
    return render(write(MANY, tmp_path_factory.mktemp("many")))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Manifest]:
    return render(write(MODELS, tmp_path_factory.mktemp("models")))


def pods(manifests: dict[tuple[str, str], Manifest]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Component and specification of each pod."""
    for (kind, component), manifest in manifests.items():
        if kind in ("Job", "Deployment", "StatefulSet"):
            yield component, manifest["spec"]["template"]["spec"]


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}


def test_helm_has_nothing_to_say_against_the_chart(values: Path) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", FOLDER / "paceline", "--values", values)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_schemas_allow_every_manifest(
    manifests: dict[tuple[str, str], Manifest], version: str
) -> None:
    for (kind, _), manifest in manifests.items():
        if kind in EXTENSIONS:
            continue
        kubernetes_validate.validate(manifest, version, strict=True)
    misspelt = copy.deepcopy(manifests["Job", "learner"])
    misspelt["spec"]["template"]["spec"]["subDomain"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelt, version, strict=True)


def test_what_the_chart_is_made_of(manifests: dict[tuple[str, str], Manifest]) -> None:
    workloads = {(kind, name) for kind, name in manifests if kind in ("Job", "Deployment", "StatefulSet")}
    config = yaml.safe_load(manifests["ConfigMap", "controller"]["data"]["run.yaml"])
    named = [model["name"] for model in config["reward"].get("models", ())]
    assert workloads == {
        ("Job", "controller"),
        ("Job", "learner"),
        ("Deployment", "rollout"),
        ("Deployment", "reward"),
        *([("StatefulSet", "redis")] if ("Service", "redis") in manifests else []),
        *(("Deployment", f"reward-model-{name}") for name in named),
    }
    assert {kind for kind, _ in manifests} >= {"NetworkPolicy", "ConfigMap", "Service"}
    assert "Secret" not in {kind for kind, _ in manifests}


def test_the_controller_reads_its_configuration(
    manifests: dict[tuple[str, str], Manifest], tmp_path: Path
) -> None:
    """With as many ranks and servers as there are pods for."""
    path = tmp_path / "run.yaml"
    path.write_text(manifests["ConfigMap", "controller"]["data"]["run.yaml"])
    (controller,) = (pod for name, pod in pods(manifests) if name == "controller")
    arguments: list[str] = controller["containers"][0]["args"]
    # As the kubelet replaces it.
    number = manifests["ConfigMap", "controller"]["data"]["rollout_replicas"]
    words = [word.replace("$(PACELINE_ROLLOUT_REPLICAS)", number) for word in arguments if "=" in word]
    config = load(RunConfig, path, words)
    assert config.rollout.n > 1
    learner = manifests["Job", "learner"]["spec"]
    (container_,) = learner["template"]["spec"]["containers"]
    ranks = int(environment(learner["template"]["spec"])["PET_NPROC_PER_NODE"])
    assert config.learner.world_size == learner["completions"] * ranks == learner["parallelism"] * ranks
    assert config.rollout.replicas == manifests["Deployment", "rollout"]["spec"]["replicas"]
    gpus = container_["resources"]["limits"].get("nvidia.com/gpu")
    assert gpus == (ranks if config.learner.device == "cuda" else None)
    (rollout,) = manifests["Deployment", "rollout"]["spec"]["template"]["spec"]["containers"]
    gpus = rollout["resources"]["limits"].get("nvidia.com/gpu")
    assert gpus in (None, config.rollout.tensor_model_parallel_size)
    mounts = {mount["mountPath"] for mount in container_["volumeMounts"]}
    url = config.trainer.checkpoint_url
    assert url is None or url.startswith("s3://") or url in mounts


def test_every_rank_of_the_learner_has_its_number(many: dict[tuple[str, str], Manifest]) -> None:
    job = many["Job", "learner"]["spec"]
    # Only an indexed job numbers its pods.
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    pod = job["template"]["spec"]
    (number,) = (each for each in pod["containers"][0]["env"] if each["name"] == "PET_NODE_RANK")
    path = number["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    places = [
        place
        for node in range(3)
        for place in container.ranks(environment(pod) | {"PET_NODE_RANK": str(node)})
    ]
    assert [place["RANK"] for place in places] == [str(rank) for rank in range(6)]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1"] * 3
    # The name that a pod of an indexed job has under its headless service.
    name = many["Job", "learner"]["metadata"]["name"]
    assert {place["MASTER_ADDR"] for place in places} == {f"{name}-0.{pod['subdomain']}"}
    service = many["Service", "learner"]
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_every_pod_knows_how_long_kubernetes_waits_for_its_end(tmp_path: Path) -> None:
    """One that believed in more would be killed before it has saved."""
    pods = [
        manifest["spec"]["template"]["spec"]
        for manifest in render(write(MODELS | {"stopGraceSeconds": 1234}, tmp_path)).values()
        if "template" in manifest.get("spec", ())
    ]
    assert len(pods) == 7
    for pod in pods:
        (container,) = pod["containers"]
        (told,) = [each["value"] for each in container["env"] if each["name"] == STOP_GRACE]
        assert (told, pod["terminationGracePeriodSeconds"]) == ("1234", 1234)


def test_jobs_end_where_a_new_pod_would_not_mend_the_end(many: dict[tuple[str, str], Manifest]) -> None:
    final = {
        name: next(
            rule["onExitCodes"]["values"]
            for rule in many["Job", name]["spec"]["podFailurePolicy"]["rules"]
            if rule["action"] == "FailJob"
        )
        for name in ("controller", "learner")
    }
    assert final == {
        "controller": sorted([EXIT_FAILED, EXIT_GIVEN, EXIT_FINAL]),
        "learner": sorted([EXIT_GIVEN, EXIT_FINAL]),
    }


def test_a_pod_has_no_more_rights_than_it_needs(many: dict[tuple[str, str], Manifest]) -> None:
    for name, pod in pods(many):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (only,) = pod["containers"]
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert set(only["resources"]) == {"requests", "limits"}
        assert "readinessProbe" in only
        assert "PACELINE_INSECURE" not in environment(pod)


def secrets_of(pod: dict[str, Any]) -> list[tuple[str, set[str]]]:
    """The names of a pod's Secrets, and the keys that it names of each."""
    sources = [(each["secret"]["secretName"], each["secret"]) for each in pod["volumes"] if "secret" in each]
    projected = [each["projected"]["sources"] for each in pod["volumes"] if "projected" in each]
    sources += [(each["secret"]["name"], each["secret"]) for sources_ in projected for each in sources_]
    return [(name, {item["key"] for item in secret.get("items", ())}) for name, secret in sources]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What deploy/helm/secrets.sh prints: files by the names of Secrets."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "paceline").write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline.cli.main "$@"\n')
    (folder / "paceline").chmod(0o755)
    env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = ["sh", str(FOLDER / "secrets.sh"), str(folder / "run"), "run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    made = [each for each in yaml.safe_load_all(done.stdout) if each]
    for secret in made:
        kubernetes_validate.validate(secret, VERSIONS[-1], strict=True)
    return {
        secret["metadata"]["name"]: {
            name: base64.b64decode(text, validate=True) for name, text in secret["data"].items()
        }
        for secret in made
    }


def test_the_script_prints_every_secret_that_a_pod_mounts(
    many: dict[tuple[str, str], Manifest], secrets: dict[str, dict[str, bytes]]
) -> None:
    mounted = set()
    for _, pod in pods(many):
        for name, wanted in secrets_of(pod):
            mounted.add(name)
            assert (wanted or {"ca.pem", "key.pem"}) <= secrets[name].keys()
    assert mounted == secrets.keys() - {"paceline-tls-client"}
    # Redis' clients check the name by which they reach it.
    url = environment(next(pod for name, pod in pods(many) if name == "controller"))["PACELINE_BROKER_URL"]
    certificate = x509.load_pem_x509_certificate(secrets["paceline-tls-redis"]["cert.pem"])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    host = url.partition("@")[2].partition(":")[0]
    assert host in names.get_values_for_type(x509.DNSName)
    assert ("Service", host.removeprefix("run-")) in many
    assert secrets["paceline-tls-redis"]["users.acl"].startswith(b"user default off ")
    assert secrets["paceline-tls-redis"]["users.acl"].splitlines()[1].startswith(b"user paceline on #")


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


def test_services_reach_whom_they_must_and_nobody_else(many: dict[tuple[str, str], Manifest]) -> None:
    """docs/several-hosts.md, "Ports"."""
    members = ("learner", "reward", "rollout")
    # Weights and the ranks' stores take any port.
    weights: dict[tuple[str, str], set[int | None]] = {
        ("learner", "learner"): {None},
        ("learner", "rollout"): {None},
        ("rollout", "learner"): {None},
        ("rollout", "rollout"): {None},
    }
    assert ways(many) == {
        **{("controller", member): {7000} for member in members},
        **{(member, "controller"): {7000} for member in members},
        **{(service, "redis"): {6379} for service in ("controller", *members)},
        **weights,
    }
    policies = {name: each["spec"] for (kind, name), each in many.items() if kind == "NetworkPolicy"}
    outside = [rule for rule in policies["reward"]["ingress"] if rule["from"] == MANY["reward"]["callers"]]
    assert outside == [{"from": MANY["reward"]["callers"], "ports": [{"port": 7000}]}]
    for name, policy in policies.items():
        assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == name
        assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "run"


def test_every_rank_can_be_scraped(models: dict[tuple[str, str], Manifest]) -> None:
    for component, last in (("controller", 9464), ("learner", 9465), ("rollout", 9464), ("reward", 9464)):
        ingress = models["NetworkPolicy", component]["spec"]["ingress"]
        (ports,) = [way["ports"] for way in ingress if way["from"] == [{"namespaceSelector": {}}]]
        assert ports == [{"port": 9464, "endPort": last}]


def test_each_reward_model_has_its_replicas_and_what_it_needs(
    models: dict[tuple[str, str], Manifest],
    secrets: dict[str, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "run.yaml").write_text(models["ConfigMap", "controller"]["data"]["run.yaml"])
    loaded: list[ModelOptions] = []

    def load_model(options: ModelOptions) -> None:
        loaded.append(options)
        raise ConfigError("a test has no model")

    for kind in ("sequence_classification", "process"):
        monkeypatch.setitem(reward_models._ENGINES["transformers"], kind, load_model)  # type: ignore[misc]
    replicas, selectors, pods_of = {}, [], {}
    for name in ("rm", "steps"):
        spec = models["Deployment", f"reward-model-{name}"]["spec"]
        replicas[name], pod = spec["replicas"], spec["template"]["spec"]
        selectors.append(spec["selector"]["matchLabels"])
        assert selectors[-1] == spec["template"]["metadata"]["labels"]
        pods_of[name], container_ = pod, pod["containers"][0]
        arguments: list[str] = container_["args"]
        assert arguments[arguments.index("--attach") + 1] == "run-reward-members:7000"
        assert "--every-address" in arguments
        ready = tmp_path / "ready"
        words = [
            {"/etc/paceline/run.yaml": str(tmp_path / "run.yaml"), "/tmp/attached": str(ready)}.get(
                word, word
            )
            for word in arguments
        ]
        ready.touch()  # of a process that was killed
        assert reward_models.main(words) == EXIT_GIVEN
        assert not ready.exists()
        mounts = {mount["name"]: mount["mountPath"] for mount in container_["volumeMounts"]}
        folders = {environment(pod)["PACELINE_TLS_DIR"]: "tls", "/etc/paceline": "config"}
        assert folders.items() <= {path: name for name, path in mounts.items()}.items()
        for made, keys in secrets_of(pod):
            assert keys <= secrets[made].keys()
    assert [options.path for options in loaded] == ["models/rm", "models/steps"]
    assert replicas == {"rm": 2, "steps": 1}
    assert selectors[0] != selectors[1]
    rm, steps = (pods_of[name]["containers"][0]["resources"] for name in ("rm", "steps"))
    assert rm["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1}
    assert steps["limits"] == {"memory": "8Gi"}
    assert [pods_of[name].get("nodeSelector") for name in ("rm", "steps")] == [{"gpu": "h100"}, None]
    assert all(pod["tolerations"] for pod in pods_of.values())
    assert environment(pods_of["steps"])["OMP_NUM_THREADS"] == "4"
    probe = pods_of["rm"]["containers"][0]["startupProbe"]
    # It may load for wait_for_s, and wait five minutes for the reward service.
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 900 + 300


def test_a_reward_models_probes_look_at_the_file_that_it_writes(
    models: dict[tuple[str, str], Manifest], tmp_path: Path
) -> None:
    container_ = models["Deployment", "reward-model-rm"]["spec"]["template"]["spec"]["containers"][0]
    file = tmp_path / "attached"
    path = container_["args"][container_["args"].index("--ready-file") + 1]

    def passes() -> dict[str, bool]:
        said = {}
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = [word.replace(path, str(file)) for word in container_[name]["exec"]["command"]]
            assert str(file) in " ".join(command)
            said[name] = subprocess.run(command, timeout=30, check=False).returncode == 0
        return said

    assert passes() == {"startupProbe": False, "readinessProbe": False, "livenessProbe": True}
    file.touch()
    assert passes() == {"startupProbe": True, "readinessProbe": True, "livenessProbe": True}
    os.utime(file, (0, 0))  # a process that is stuck
    assert passes()["livenessProbe"] is False


def test_the_name_that_reward_models_attach_to_stands_for_every_reward_service(
    models: dict[tuple[str, str], Manifest],
) -> None:
    service, reward = (
        models[key]["spec"] for key in (("Service", "reward-members"), ("Deployment", "reward"))
    )
    assert reward["replicas"] == 2
    # Without an address of its own its name stands for those of the pods.
    assert service["clusterIP"] == "None"
    assert service["selector"] == reward["template"]["metadata"]["labels"]
    assert service["ports"] == [{"name": "grpc", "port": 7000}]


def test_reward_models_reach_the_reward_service_alone(models: dict[tuple[str, str], Manifest]) -> None:
    peers = {pair: ports for pair, ports in ways(models).items() if "reward-model" in pair}
    assert peers == {("reward-model", "reward"): {7000}}
    policy = models["NetworkPolicy", "reward-model"]["spec"]
    assert policy["ingress"] == []
    labels = models["Deployment", "reward-model-rm"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"config": MODELS["config"].replace("name: rm", "name: my_rm")}, "lower-case letters, digits and"),
        ({"overrides": ["reward.models=[]"]}, "name reward models in config, not in overrides"),
        (
            {"rewardModels": {"named": {"mr": {}}}},
            "rewardModels.named has mr, which reward.models of config does not name",
        ),
        ({"config": "reward: [}"}, "config is no YAML"),
    ],
)
def test_reward_models_that_the_chart_cannot_run_are_refused(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    said = helm("template", "run", FOLDER / "paceline", "--values", write(MODELS | change, tmp_path), code=1)
    assert sentence in said


@pytest.mark.parametrize(
    "wrong",
    [
        "config=",
        "learner.nodes=0",
        "learner.node=2",
        "rollout.replicas=0",
        "images.redis=",
        "rewardModels.replicas=2",
    ],
)
def test_values_that_the_chart_cannot_use_are_refused(wrong: str, tmp_path: Path) -> None:
    path = write({"config": CONFIG}, tmp_path)
    said = helm("template", "run", FOLDER / "paceline", "--values", path, "--set", wrong, code=1)
    assert "values don't meet the specifications of the schema" in said
    assert wrong.partition("=")[0].split(".")[-1] in said


def test_every_pod_has_what_the_values_give_it(
    every: dict[tuple[str, str], Manifest], tmp_path: Path
) -> None:
    """In `pods`, or in the component's own `pod`; Redis, which `every` has elsewhere, only the latter."""
    own = render(write(MODELS | {"redis": {"pod": POD}, "metrics": {}}, tmp_path))
    workloads = [(key, each) for key, each in every.items() if "template" in each.get("spec", ())]
    assert len(workloads) == 6
    for (_, name), manifest in [*workloads, (("StatefulSet", "redis"), own["StatefulSet", "redis"])]:
        template, pod = manifest["spec"]["template"], manifest["spec"]["template"]["spec"]
        (container_,) = pod["containers"]
        for metadata in (manifest["metadata"], template["metadata"]):
            assert POD["labels"].items() <= metadata["labels"].items(), name
            assert POD["annotations"].items() <= metadata["annotations"].items(), name
        for key in ("serviceAccountName", "priorityClassName", "runtimeClassName", "schedulerName"):
            assert pod[key] == POD[key], (name, key)
        assert POD["nodeSelector"].items() <= pod["nodeSelector"].items()
        assert pod["topologySpreadConstraints"] == POD["topologySpreadConstraints"]
        assert pod["tolerations"][-1:] == POD["tolerations"]
        wanted = POD["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        required = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert required[-1:] == wanted
        assert {"name": "HTTPS_PROXY", "value": "http://proxy"} in container_["env"]
        assert {"name": "PART"} | POD["env"]["PART"] in container_["env"]
        assert container_["envFrom"] == POD["envFrom"]
        assert POD["volumes"][0] in pod["volumes"]
        assert POD["volumeMounts"][0] in container_["volumeMounts"]
        assert pod["securityContext"]["fsGroup"] == 1000650000
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container_["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    for (kind, name), manifest in own.items():
        if kind in ("Job", "Deployment"):
            assert "HTTPS_PROXY" not in environment(manifest["spec"]["template"]["spec"]), name
    (redis,) = (pod for name, pod in pods(render(write(MODELS | {"pods": POD}, tmp_path))) if name == "redis")
    assert "envFrom" not in redis["containers"][0]
    assert "HTTPS_PROXY" not in environment(redis)
    assert POD["volumes"][0] not in redis["volumes"]


def test_a_components_own_settings_come_on_top_of_those_of_all(tmp_path: Path) -> None:
    values = MANY | {"pods": {"nodeSelector": {"pool": "any", "zone": "a"}, "tolerations": [{"key": "a"}]}}
    made = render(write(values, tmp_path))
    controller, learner, reward = (
        made[key]["spec"]["template"]["spec"]
        for key in (("Job", "controller"), ("Job", "learner"), ("Deployment", "reward"))
    )
    assert controller["nodeSelector"] == {"pool": "cpu", "zone": "a"}
    assert reward["nodeSelector"] == {"pool": "any", "zone": "a"}
    assert learner["tolerations"][2:] == [{"key": "a"}, *MANY["learner"]["pod"]["tolerations"]]


def test_a_pod_of_a_lost_node_is_given_up_after_a_minute(many: dict[tuple[str, str], Manifest]) -> None:
    for name, pod in pods(many):
        seconds = {each["key"]: each.get("tolerationSeconds") for each in pod["tolerations"][:2]}
        assert seconds == {"node.kubernetes.io/not-ready": 60, "node.kubernetes.io/unreachable": 60}, name


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


def test_pods_may_ask_the_name_server_of_their_node(many: dict[tuple[str, str], Manifest]) -> None:
    for (kind, name), policy in many.items():
        if kind == "NetworkPolicy":
            ways_ = [
                each
                for each in policy["spec"]["egress"]
                if {"port": 53, "protocol": "UDP"} in each.get("ports", ())
            ]
            (way,) = ways_
            assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in way["to"], name


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"metrics": {"podMonitors": {"enabled": True}}}, "metrics.podMonitors needs metrics.scrapers"),
        (
            {"rollout": {"replicas": 9, "autoscale": {"enabled": True, "prometheus": "http://p"}}},
            "rollout.replicas is 9, with which the run begins",
        ),
        ({"rollout": {"autoscale": {"enabled": True}}}, "rollout.autoscale.prometheus: give the URL"),
        ({"redis": {"external": {"url": "rediss://me@redis:6379/0"}}}, "redis.external.to"),
        ({"redis": {"external": {"url": "rediss://me:pass@redis:6379/0"}}}, "does not match pattern"),
        ({"pods": {"labels": {"app.kubernetes.io/name": "x"}}}, "app.kubernetes.io/name"),
        ({"pods": {"env": {"PACELINE_TLS_DIR": "/x"}}}, "PACELINE_TLS_DIR"),
        ({"learner": {"pod": {"hostNetwork": True}}}, "additional properties 'hostNetwork' not allowed"),
        ({"learner": {"disruptionBudget": {"maxUnavailable": 1}}}, "maxUnavailable"),
    ],
)
def test_values_that_do_not_go_together_are_refused(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    values = write({"config": CONFIG} | change, tmp_path)
    assert sentence in helm("template", "run", FOLDER / "paceline", "--values", values, code=1)


def test_a_releases_name_leaves_room_for_those_of_its_objects(tmp_path: Path) -> None:
    values = write({"config": CONFIG}, tmp_path)
    said = helm("template", "r" * 41, FOLDER / "paceline", "--values", values, code=1)
    assert "give it at most 40" in said
    text = helm("template", "r" * 40, FOLDER / "paceline", "--values", values)
    names_ = [each["metadata"]["name"] for each in yaml.safe_load_all(text) if each]
    assert max(map(len, names_)) <= 63 - len("-10")
