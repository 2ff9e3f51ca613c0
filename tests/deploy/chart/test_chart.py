"""The chart: linted and rendered by helm, checked against Kubernetes' schemas, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from paceline.config.load import load
from paceline.config.run import RunConfig
from support.chart import CONFIG, EXTENSIONS, FOLDER, VERSIONS, Manifest, environment, helm, pods, write

pytestmark = pytest.mark.timeout(900)


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
        *(("StatefulSet", name) for name in ("redis", "blobs") if ("Service", name) in manifests),
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


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"metrics": {"podMonitors": {"enabled": True}}}, "metrics.podMonitors needs metrics.scrapers"),
        (
            {"rollout": {"replicas": 9, "autoscale": {"enabled": True, "prometheus": "http://p"}}},
            "the run begins with rollout.replicas = 9",
        ),
        ({"rollout": {"autoscale": {"enabled": True}}}, "rollout.autoscale.prometheus: give the URL"),
        ({"redis": {"external": {"url": "rediss://me@redis:6379/0"}}}, "redis.external.to"),
        (
            {"redis": {"external": {"url": "rediss://me@redis:6379/0"}}, "blobs": {"stores": 1}},
            "broker.blob_stores",
        ),
        ({"blobs": {"stores": 9}}, "/blobs/stores"),
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
